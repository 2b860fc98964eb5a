"""Classification: texts or images in, a probability for every class out.

    p = softmax(W · pool(encoder(<s> text </s>)) + b)         [N, classes]
    p = softmax(W · pool(encoder(patches)) + b)               [N, classes]          Dosovitskiy et al. 2021

Texts of similar length are computed together; the predictions are returned in the order of the inputs. A text longer
than the model was trained on is truncated, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.images import open_pixels
from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle, Prediction, Predictor, open_each

TOKENS = 2**14  # of a batch, padding included


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """The most probable class, and the probability of each."""

    label: str
    probabilities: dict[str, float]
    note: str | None = None  # what was changed about the input


class TextClassifier(Predictor[str, ClassPrediction]):
    """An encoder with an output head over classes, and its tokenizer."""

    NEEDS = "an encoder of text with output_head = 'classes' and pooling = 'cls' or 'mean', with its tokenizer"
    MODEL: ClassVar = {
        "architecture": ("encoder",), "input": ("tokens",), "output_head": ("classes",), "pooling": ("cls", "mean")
    }  # fmt: skip
    model: Encoder
    COMMAND = "classify"
    BATCH = 4096

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.tokenizer, self.classes = bundle.tokenizer, bundle.classes
        self.max_length = bundle.limits.source or bundle.limits.context

    def predict(
        self,
        inputs: Sequence[str],
        *,
        tokens: int = TOKENS,
        done: Callable[[Sequence[int]], object] = len,
        **options: Any,
    ) -> list[ClassPrediction]:
        """The class of each text; batches have about `tokens` tokens, and `done` is called with the rows of each."""
        probabilities, truncated = self._probabilities(inputs, tokens, done)
        note = f"truncated to the model's {self.max_length} tokens"
        return [
            class_prediction(self.classes, row, note if is_short else None)
            for row, is_short in zip(probabilities.tolist(), truncated, strict=True)
        ]

    def probabilities(self, texts: Sequence[str], tokens: int = TOKENS) -> Tensor:
        """[texts, classes], in float32 on the CPU."""
        return self._probabilities(texts, tokens, len)[0]

    @torch.inference_mode()
    def _probabilities(
        self, texts: Sequence[str], tokens: int, done: Callable[[Sequence[int]], object]
    ) -> tuple[Tensor, list[bool]]:
        """The probabilities, and which texts were truncated: to their first tokens and </s>."""
        ids, most = self.tokenizer.encode_batch(texts, add_bos=True, add_eos=True), self.max_length
        truncated = [len(text) > most for text in ids]
        ids = [text if len(text) <= most else [*text[: most - 1], text[-1]] for text in ids]
        results = torch.empty(len(ids), len(self.classes))
        for rows, source, is_real in self.batches(ids, range(len(ids)), tokens):
            real = None if is_real is None else is_real.to(self.device)
            results[rows] = self.model(source.to(self.device), real).float().softmax(dim=-1).cpu()
            done(rows)
        return results, truncated


class ImageClassifier(Predictor["str | Path", ClassPrediction]):
    """An encoder over patches with an output head over classes."""

    NEEDS = "an encoder of image patches with output_head = 'classes'"
    MODEL: ClassVar = {"architecture": ("encoder",), "input": ("patches",), "output_head": ("classes",)}
    model: Encoder
    COMMAND = "classify"
    BATCH = 500

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.classes = bundle.classes

    def predict(
        self, inputs: Sequence[str | Path], *, failed: dict[int, str] | None = None, **options: Any
    ) -> list[ClassPrediction]:
        """The class of each image file.

        A file that cannot be read is an error, unless there is a dict `failed`, which gets its row and the reason.
        """
        config, side = self.model.config, self.model.config.image_size
        opened = open_each(inputs, lambda path: open_pixels(path, config.channels, side), failed)
        predictions = [ClassPrediction("", {}) for _ in opened]
        pixels = [one[0] for one in opened if one is not None]
        if not pixels:
            return predictions
        images = torch.stack(pixels)
        results = iter(self.probabilities(lambda begin, end: images[begin:end], len(images)).tolist())
        for row, one in enumerate(opened):
            if one is not None:
                width, height = one[1]
                resized = f"{width} x {height} pixels are resized to {side} x {side}"
                note = None if (width, height) == (side, side) else resized
                predictions[row] = class_prediction(self.classes, next(results), note)
        return predictions

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
