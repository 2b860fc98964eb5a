"""The report of a classifier of pictures: how it learned, what it takes for what, what it saw, where it looks.

Where it looks: of a model with [CLS], the weights of that place's query in the last layer (Dosovitskiy et al. 2021,
figure 6); else the mean over all queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard
from regard.data.images import Images
from regard.explore.classes import class_sections
from regard.explore.html import Section, attention_note, figure, page, paragraph, token_label, write_page
from regard.explore.images import image_panels
from regard.explore.inputs import grid_of
from regard.explore.svg import png_uri, svg_frame, svg_text
from regard.explore.translation import curves
from regard.nn.trace import trace
from regard.predict.image_classifier import ImageClassifier

MISTAKES = 12
LOOKED_AT = 3
SIDE = 96  # pixels of a picture in a gallery
ACROSS = 6


@dataclass(frozen=True)
class Tried:
    """A set and what the model says about it, [N, classes]."""

    name: str
    pictures: Images
    probabilities: Tensor


def write_report(
    path: Path,
    title: str,
    recogniser: ImageClassifier,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    tried: Tried,
    seen: Tensor,
) -> Path:
    """`seen` are augmented training pictures [n, channels, side, side] between 0 and 1."""
    parameters = sum(parameter.numel() for parameter in recogniser.model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"accuracy on {name}", f"{found['accuracy']:.2%}") for name, found in scores.items()][:2]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [
        curves(metrics, unit="nats per picture"),
        *class_sections(scores),
        _mistakes(recogniser, tried),
        Section(
            "What it saw in training", figure(gallery(seen, [""] * len(seen)), "Pictures as [augment] makes them.")
        ),
        _looks(recogniser, tried),
    ]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def gallery(pictures: Tensor, captions: Sequence[str], *, title: str = "Pictures") -> str:
    """Pictures [n, channels, side, side] between 0 and 1 in rows, with the lines of a text below each."""
    lines = max((caption.count("\n") + bool(caption) for caption in captions), default=0)
    step, tall, parts = SIDE + 40, SIDE + 18 + 17 * lines, []
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = 16 + number % ACROSS * step, 16 + number // ACROSS * tall
        place = f'x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"'
        parts.append(f'<image {place} preserveAspectRatio="none" href="{png_uri(as_rgb(picture))}"/>')
        for line, text in enumerate(caption.split("\n") if caption else ()):
            parts.append(svg_text(x, y + SIDE + 16 + 17 * line, token_label(text, SIDE + 34), "mute" * (line > 0)))
    rows = math.ceil(len(pictures) / ACROSS)
    about = f"{len(pictures)} pictures. {'; '.join(caption.replace(chr(10), ' ') for caption in captions if caption)}"
    return svg_frame(16 + min(len(pictures), ACROSS) * step, 16 + rows * tall, title, about, "".join(parts))


def as_rgb(picture: Tensor) -> np.ndarray:
    """[channels, side, side] between 0 and 1 as bytes [side, side, 3]; grey becomes three equal channels."""
    shown = picture[:3] if picture.shape[0] >= 3 else picture[:1].expand(3, -1, -1)
    return np.rint(shown.clamp(0, 1).numpy() * 255).astype(np.uint8).transpose(1, 2, 0)


def _mistakes(recogniser: ImageClassifier, tried: Tried) -> Section:
    """Those it was most certain of."""
    best, given = tried.probabilities.max(dim=1)
    wrong = (given != tried.pictures.labels).nonzero()[:, 0]
    if not len(wrong):
        return Section("Mistakes", paragraph(f"None: all {len(given):,} pictures of {tried.name} are named right."))
    worst = wrong[best[wrong].argsort(descending=True)][:MISTAKES]
    names = recogniser.classes
    captions = [
        f"{names[int(tried.pictures.labels[row])]}\n{names[int(given[row])]} {float(best[row]):.2f}" for row in worst
    ]
    told = (
        f"The right class, and below it the one given with its probability: of {len(wrong):,} mistakes in {tried.name} "
        "those it was most certain of."
    )
    shown = gallery(tried.pictures.pixels[worst].float() / 255, captions, title="Mistakes")
    return Section("Mistakes", figure(shown, told))


@torch.inference_mode()
def _looks(recogniser: ImageClassifier, tried: Tried) -> Section:
    """The heads of the last layer over pictures of different classes."""
    model, grid = recogniser.model, grid_of(recogniser.model.config)
    labels = tried.pictures.labels
    rows = [int((labels == label).nonzero()[0]) for label in labels.unique()[:LOOKED_AT]]
    pixels = tried.pictures.pixels[torch.tensor(rows)].to(recogniser.device).float() / 255
    with trace(model, only="*.attention.weights") as seen:
        model(pixels)
    weights = seen.stack("encoder.*.attention.weights")[-1].float().cpu()  # [B, heads, N, N]
    looked = weights[:, :, 0] if grid.first else weights.mean(dim=2)
    body = ""
    for row, picture, maps in zip(rows, pixels.cpu(), looked, strict=True):
        names = [f"head {head}" for head in range(len(maps))]
        title = recogniser.classes[int(labels[row])]
        body += figure(
            image_panels(picture, grid.down, grid.across, maps[:, grid.first :], names, title=title),
            "Where the heads of the last layer look" + (", from [CLS]." if grid.first else ", mean of all patches."),
        )
    return Section("Where it looks", body + attention_note())
