"""Classification: texts or images in, a probability for every class out.

    p = softmax(W · pool(encoder(<s> text </s>)) + b)         [N, classes]
    p = softmax(W · pool(encoder(patches)) + b)               [N, classes]          Dosovitskiy et al. 2021

Texts of similar length are computed together; the predictions are returned in the order of the inputs. A text longer
than the model was trained on is truncated, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Ragged
from regard.data.images import open_pixels
from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle, Prediction, Predictor

TOKENS = 2**14  # of a batch, padding included


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """The most probable class, and the probability of each."""

    label: str
    probabilities: dict[str, float]
    note: str | None = None  # what was changed about the input


class TextClassifier(Predictor[str, ClassPrediction]):
    """An encoder with an output head over classes, and its tokenizer."""

    NEEDS = "an encoder of text with output_head = 'classes', with its tokenizer"
    model: Encoder
    COMMAND = "classify"
    BATCH = 4096

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.tokenizer, self.classes = bundle.tokenizer, bundle.classes
        self.max_length = bundle.limits.source or bundle.limits.context

    @staticmethod
    def accepts(bundle: Bundle) -> bool:
        config = bundle.config
        return (config.architecture, config.input, config.output_head) == ("encoder", "tokens", "classes")

    def predict(self, inputs: Sequence[str], *, tokens: int = TOKENS, **options: Any) -> list[ClassPrediction]:
        """The class of each text; batches have about `tokens` tokens."""
        ids = self.encode(inputs)
        note = f"truncated to the model's {self.max_length} tokens"
        return [
            class_prediction(self.classes, row, note if len(text) > self.max_length else None)
            for row, text in zip(self._probabilities(ids, tokens).tolist(), ids, strict=True)
        ]

    def probabilities(self, texts: Sequence[str], tokens: int = TOKENS) -> Tensor:
        """[texts, classes], in float32 on the CPU."""
        return self._probabilities(self.encode(texts), tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """<s> … </s> of each text, not truncated."""
        return self.tokenizer.encode_batch(texts, add_bos=True, add_eos=True)

    @torch.inference_mode()
    def _probabilities(self, ids: list[list[int]], tokens: int) -> Tensor:
        most = self.max_length  # of a longer text the first tokens and </s>
        table = Ragged.of([text if len(text) <= most else [*text[: most - 1], text[-1]] for text in ids])
        results = torch.empty(len(ids), len(self.classes))
        for rows in _batches(table.lengths, tokens):
            text, is_real = table.pad(rows)
            real = None if bool(is_real.all()) else is_real.to(self.device)
            results[rows] = self.model(text.to(self.device), real).float().softmax(dim=-1).cpu()
        return results


class ImageClassifier(Predictor["str | Path", ClassPrediction]):
    """An encoder over patches with an output head over classes."""

    NEEDS = "an encoder of image patches with output_head = 'classes'"
    model: Encoder
    COMMAND = "classify"
    BATCH = 500

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.classes = bundle.classes

    @staticmethod
    def accepts(bundle: Bundle) -> bool:
        config = bundle.config
        return (config.architecture, config.input, config.output_head) == ("encoder", "patches", "classes")

    def predict(self, inputs: Sequence[str | Path], **options: Any) -> list[ClassPrediction]:
        """The class of each image file."""
        config = self.model.config
        opened = [open_pixels(path, config.channels, config.image_size) for path in inputs]
        if not opened:
            return []
        pixels, side = torch.stack([one for one, _ in opened]), config.image_size
        rows = self.probabilities(lambda begin, end: pixels[begin:end], len(inputs)).tolist()
        return [
            class_prediction(
                self.classes, row,
                None if size == (side, side) else f"{size[0]} x {size[1]} pixels are resized to {side} x {side}",
            )
            for row, (_, size) in zip(rows, opened, strict=True)
        ]  # fmt: skip

    @torch.inference_mode()
    def probabilities(self, pixels: Callable[[int, int], Tensor], count: int) -> Tensor:
        """[count, classes] in float32 on the CPU; `pixels(begin, end)` gives bytes [n, channels, side, side]."""
        results = []
        for at in range(0, count, self.BATCH):
            part = pixels(at, min(at + self.BATCH, count)).to(self.device)
            results.append(self.model(part.float() / 255).float().softmax(dim=-1).cpu())
        return torch.cat(results)


def class_prediction(classes: Sequence[str], probabilities: Sequence[float], note: str | None) -> ClassPrediction:
    best = max(range(len(classes)), key=probabilities.__getitem__)
    return ClassPrediction(classes[best], dict(zip(classes, probabilities, strict=True)), note)


def _batches(lengths: Tensor, tokens: int) -> Iterator[Tensor]:
    """Rows that are computed together, shortest first."""
    order = lengths.argsort(stable=True)
    sizes, at = lengths[order].tolist(), 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or (end + 1 - at) * sizes[end] > tokens:
            yield order[at:end]
            at = end
