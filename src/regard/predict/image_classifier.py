"""Image classification: images in, a probability for every class out.

p = softmax(W · pool(encoder(patches)) + b)         [N, classes]          Dosovitskiy et al. 2021
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.images import open_pixels
from regard.models import Encoder
from regard.predict.bundle import Bundle, Predictor
from regard.predict.text_classifier import ClassPrediction, class_prediction


class ImageClassifier(Predictor["str | Path", ClassPrediction]):
    """An encoder over patches with an output head over classes."""

    NEEDS = "an encoder of image patches with output_head = 'classes'"
    COMMAND = "classify"
    BATCH = 500

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.model: Encoder = bundle.model  # type: ignore[assignment]
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
