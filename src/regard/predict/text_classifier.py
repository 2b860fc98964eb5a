"""Classifying: texts in, a probability for every class out.

    p = softmax(W · pool(encoder(<s> text </s>)) + b)         [N, classes]

Texts of similar length are read together; the answers come back in the order of the questions. A text that is longer
than the model was trained on is cut, as it was in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Ragged
from regard.data.labels import LabelData
from regard.errors import UserError
from regard.models import Encoder
from regard.models.folder import load, load_recipe, load_tokenizers
from regard.models.recipe import RECIPE
from regard.text.tokenizer import Tokenizer

TOKENS = 2**14  # of a batch, filler included


class TextClassifier:
    """An encoder with a head of classes, its tokenizer, and what the classes are called."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer, classes: Sequence[str], max_length: int) -> None:
        self.model, self.tokenizer, self.classes = model.eval(), tokenizer, tuple(classes)
        self.max_length = min(max_length, model.config.max_length) if model.config.position == "learned" else max_length
        self.device = next(model.parameters()).device
        self.cut = 0  # texts so far that were longer

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> TextClassifier:
        """The model in `folder`."""
        model, tokenizers, data = load(folder, device), load_tokenizers(folder), load_recipe(folder).get("data")
        if not isinstance(model, Encoder) or model.classifier is None or "tokenizer" not in tokenizers:
            raise UserError(
                f"{folder}: architecture = {model.config.architecture!r}, output_head = "
                f"{model.config.output_head!r}: is no classifier of texts; "
                'train one with  task = "classification"'
            )
        data = data if isinstance(data, dict) else {}
        return cls(model, tokenizers["tokenizer"], class_names(model, data, Path(folder) / RECIPE), _longest(data))

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], tokens: int = TOKENS) -> Tensor:
        """[texts, classes], in float32 on the CPU; batches of about `tokens` tokens."""
        ids = [self._within(row) for row in self.tokenizer.encode_batch(texts, add_bos=True, add_eos=True)]
        table, found = Ragged.of(ids), torch.empty(len(ids), len(self.classes))
        for rows in _batches(table.lengths, tokens):
            text, is_real = table.pad(rows)
            real = None if bool(is_real.all()) else is_real.to(self.device)
            found[rows] = self.model(text.to(self.device), real).float().softmax(dim=-1).cpu()
        return found

    def classify(self, texts: Sequence[str]) -> list[tuple[str, dict[str, float]]]:
        """(the likeliest class, the probability of every one) of each text."""
        return [
            (self.classes[max(range(len(row)), key=row.__getitem__)], dict(zip(self.classes, row, strict=True)))
            for row in self.probabilities(texts).tolist()
        ]

    def _within(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.max_length:
            return ids
        self.cut += 1
        return [*ids[: self.max_length - 1], ids[-1]]


def class_names(model: Encoder, data: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """What the recipe calls the classes; numbers where it does not say, as for an imported model."""
    count = model.config.classes or 0
    names = data.get("classes") or [str(number) for number in range(count)]
    if not isinstance(names, list) or len(names) != count:
        raise UserError(f"{where}: data.classes names {len(names)} classes, but the model has {count}; mend the recipe")
    return tuple(map(str, names))


def _longest(data: Mapping[str, Any]) -> int:
    found = data.get("max_length")
    return found if isinstance(found, int) and found > 2 else LabelData.max_length


def _batches(lengths: Tensor, tokens: int) -> Iterator[Tensor]:
    """Rows that are read together, shortest first."""
    order = lengths.argsort(stable=True)
    sizes, at = lengths[order].tolist(), 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or (end + 1 - at) * sizes[end] > tokens:
            yield order[at:end]
            at = end
