"""Recognising: pictures in, a probability for every class out.

p = softmax(W · pool(encoder(patches)) + b)         [N, classes]          Dosovitskiy et al. 2021
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.data.pixels import open_pixels
from regard.errors import UserError
from regard.models import Encoder
from regard.models.folder import load, load_recipe
from regard.models.recipe import RECIPE
from regard.predict.text_classifier import class_names

TOGETHER = 500  # pictures


class ImageClassifier:
    """An encoder over patches with a head of classes, and what the classes are called."""

    def __init__(self, model: Encoder, classes: Sequence[str]) -> None:
        self.model, self.classes = model.eval(), tuple(classes)
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> ImageClassifier:
        """The model in `folder`."""
        model, data = load(folder, device), load_recipe(folder).get("data")
        if not isinstance(model, Encoder) or model.classifier is None or model.config.input != "patches":
            raise UserError(
                f"{folder}: architecture = {model.config.architecture!r}, output_head = "
                f"{model.config.output_head!r}, source = "
                f'{model.config.input!r}: is no classifier of pictures; train one with  task = "image-classification"'
            )
        return cls(model, class_names(model, data if isinstance(data, dict) else {}, Path(folder) / RECIPE))

    @torch.inference_mode()
    def probabilities(self, pixels: Callable[[int, int], Tensor], count: int) -> Tensor:
        """[count, classes] in float32 on the CPU; `pixels(begin, end)` gives bytes [n, channels, side, side]."""
        found = []
        for at in range(0, count, TOGETHER):
            part = pixels(at, min(at + TOGETHER, count)).to(self.device)
            found.append(self.model(part.float() / 255).float().softmax(dim=-1).cpu())
        return torch.cat(found)

    def classify(self, paths: Sequence[str | Path]) -> list[tuple[str, dict[str, float], tuple[int, int]]]:
        """(likeliest class, probability of each, width and height in the file) of each picture."""
        config = self.model.config
        read = [open_pixels(path, config.channels, config.image_size) for path in paths]
        pixels = torch.stack([one for one, _ in read])
        rows = self.probabilities(lambda begin, end: pixels[begin:end], len(paths)).tolist()
        return [
            (self.classes[max(range(len(row)), key=row.__getitem__)], dict(zip(self.classes, row, strict=True)), size)
            for row, (_, size) in zip(rows, read, strict=True)
        ]
