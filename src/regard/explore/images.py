"""Images in figures: attention over an image, and a gallery.

    image_panels   [panels, patches]   an image per word (or head), its patches coloured by their attention weight
    gallery        [n, channels, height, width]   images with captions

Under attention, the image is grey and attention is orange, with an opacity proportional to the weight over the
panel's largest: no colour of the image can be mistaken for attention. Dosovitskiy et al. 2021, figure 6, show the same
by brightness, which a dark image hides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore.html import escape, token_label
from regard.explore.svg import (
    LEVELS,
    Tokens,
    as_array,
    empty_figure,
    notes_on,
    pair_tip,
    png_uri,
    svg_frame,
    svg_text,
    weight_range,
)

PANEL = 148  # side of an image under attention, in pixels
THUMBNAIL = 96  # side of an image in a gallery
ACROSS = 6  # images per row
ORANGE = "#e8590c"


def image_panels(
    image: Any, down: int, across: int, weights: Any, names: Tokens, *, title: str = "", columns: int | None = None
) -> str:
    """One panel for each row of weights [len(names), down · across] over an image [channels, height, width], 0 to 1."""
    pixels = np.clip(np.nan_to_num(np.asarray(image, dtype=np.float64)), 0, 1)
    stack, name = as_array(weights, (len(names), down * across)), "Attention over the image"
    if not stack.size:
        return empty_figure(title or name, "There is nothing to show.")
    per_row = columns or min(len(names) + 1, ACROSS)
    top, step, tall = 24 + 26 * bool(title), PANEL + 14, PANEL + 44
    size = f'width="{PANEL}" height="{PANEL}"'
    grey = _element(_grey(pixels), size)
    mark = f"image-{zlib.crc32(grey.encode()):08x}"  # a page may hold several figures, each with its image
    parts = [f'<defs><g id="{mark}">{grey}</g></defs>']
    panels = [] if columns else [("the image", "", _element(_rgb(pixels), size))]
    for label, row in zip(names, stack, strict=True):
        overlay = f'<use href="#{mark}"/>{_overlay(row, down, across, label)}'
        panels.append((token_label(label, PANEL), f"max {np.fmax.reduce(row, None):.2f}", overlay))
    for index, (caption, peak, content) in enumerate(panels):
        x, y = 16 + index % per_row * step, top + index // per_row * tall
        frame = f'<path class="rule" d="M0 0h{PANEL}v{PANEL}H0z"/>'
        parts.append(f'<g transform="translate({x} {y})">{content}{frame}</g>')
        parts.append(svg_text(x, y + PANEL + 17, caption) + svg_text(x, y + PANEL + 32, peak, "mute small"))
    bottom = top + math.ceil(len(panels) / per_row) * tall
    notes = notes_on(stack, "Orange: attention, each panel up to its own largest weight.")
    parts += [svg_text(16, bottom + 18 + 20 * i, note, "mute") for i, note in enumerate(notes)]
    width = max(32 + min(len(panels), per_row) * step, 440)
    about = f"{len(names)} panels over an image of {down} by {across} patches. {' '.join(notes)}"
    return svg_frame(width, bottom + 10 + 20 * len(notes), title, about, "".join(parts), name=name)


def _overlay(row: np.ndarray, down: int, across: int, name: str) -> str:
    """The patches of one panel; a weight that is not finite is drawn in sand."""
    high, wide, tall, parts = weight_range(row)[1], PANEL / across, PANEL / down, []
    for patch, value in enumerate(row):
        i, j = divmod(patch, across)
        fill = f'fill="{ORANGE}" fill-opacity="{0.8 * max(value, 0.0) / high:.3f}"'
        fill = f'class="k{LEVELS}"' if math.isnan(value) else fill
        tip = escape(pair_tip(token_label(name), f"{i},{j}", value))
        box = f'x="{j * wide:.2f}" y="{i * tall:.2f}" width="{wide:.2f}" height="{tall:.2f}"'
        parts.append(f"<rect {box} {fill}><title>{tip}</title></rect>")
    return "".join(parts)


def _grey(pixels: np.ndarray) -> np.ndarray:
    """Luminance by Rec. 709 of 3 or 4 channels, else the mean, [3, height, width]."""
    mix = (0.2126, 0.7152, 0.0722)
    grey = np.tensordot(mix, pixels[:3], 1) if pixels.shape[0] in (3, 4) else pixels.mean(axis=0)
    return np.repeat(grey[None], 3, axis=0)


def _rgb(pixels: np.ndarray) -> np.ndarray:
    return pixels[:3] if pixels.shape[0] in (3, 4) else _grey(pixels)


def _element(rgb: np.ndarray, box: str) -> str:
    """[3, height, width] between 0 and 1 as an <image>."""
    data = png_uri(np.rint(rgb * 255).astype(np.uint8).transpose(1, 2, 0))
    return f'<image {box} preserveAspectRatio="none" href="{data}"/>'


def gallery(images: Any, captions: Sequence[str], *, title: str = "Images") -> str:
    """Images [n, channels, height, width] between 0 and 1 in rows, with the lines of its caption below each."""
    lines = max((caption.count("\n") + bool(caption) for caption in captions), default=0)
    step, tall, parts = THUMBNAIL + 40, THUMBNAIL + 18 + 17 * lines, []
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = 16 + index % ACROSS * step, 16 + index // ACROSS * tall
        pixels = np.clip(np.asarray(image, dtype=np.float64), 0, 1)
        parts.append(_element(_rgb(pixels), f'x="{x}" y="{y}" width="{THUMBNAIL}" height="{THUMBNAIL}"'))
        for line, text in enumerate(caption.split("\n") if caption else ()):
            label = token_label(text, THUMBNAIL + 34)
            parts.append(svg_text(x, y + THUMBNAIL + 16 + 17 * line, label, "mute" * (line > 0)))
    rows = math.ceil(len(captions) / ACROSS)
    about = f"{len(captions)} images. {'; '.join(caption.replace(chr(10), ' ') for caption in captions if caption)}"
    return svg_frame(16 + min(len(captions), ACROSS) * step, 16 + rows * tall, "", about, "".join(parts), name=title)
