"""Pictures in files, as numbers: [channels, side, side] of bytes, 0 to 255.

A picture is turned as its camera says (EXIF), laid on white where it is transparent, and resized by bilinear
averaging to the square that a model reads, as the processors of published ViTs do it. What has no one right reading is
refused with its remedy: several frames (which one?), CMYK (whose inks?), a single pixel (of what?), numbers without a
known range.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import MissingExtra, UserError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
LEAST = 2  # pixels a side


def open_pixels(path: str | Path, channels: int, side: int) -> tuple[Tensor, tuple[int, int]]:
    """The bytes [channels, side, side] of a picture, and the (width, height) that it has in its file."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("images", "pillow", f"{path}: reading a picture") from None
    if channels not in MODES:
        raise UserError(f"channels = {channels}: a picture file has 1, 3 or 4; give the numbers instead")
    if not Path(path).is_file():
        folder = Path(path).is_dir()
        raise UserError(f"{path}: {'is a folder; name a file in it' if folder else 'no such file'}")
    try:
        with Image.open(path) as image:
            _refuse(path, image)
            size = image.size
            if image.mode.startswith("I;16"):  # 16 bits of grey: convert would cut them off at 255
                grey = np.asarray(image, dtype=np.float32) / 257
                image = Image.fromarray(np.rint(grey).astype(np.uint8))
            image = ImageOps.exif_transpose(image)
            if channels != 4 and ("A" in image.getbands() or "transparency" in image.info):
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            image = image.convert(MODES[channels])
            if image.size != (side, side):
                image = image.resize((side, side), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, dtype=np.uint8)
    except UserError:
        raise
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).replace(str(path), "").replace("''", "").strip() or type(error).__name__
        raise UserError(f"{path}: cannot be read as a picture ({reason}); save it again as PNG or JPEG") from None
    return torch.from_numpy(pixels.reshape(side, side, channels).copy()).permute(2, 0, 1).contiguous(), size


def _refuse(path: str | Path, image: Any) -> None:
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise UserError(f"{path}: has {frames} frames; save the one that is meant as a picture of its own")
    if image.mode == "CMYK":
        raise UserError(f"{path}: is in CMYK, colours for print; save it as RGB")
    if image.mode in ("I", "F"):
        raise UserError(f"{path}: holds numbers of mode {image.mode!r} without a known range; save it as 8 or 16 bits")
    width, height = image.size
    if min(width, height) < LEAST:
        raise UserError(f"{path}: has {width} x {height} pixels, too few to show anything; take it out or replace it")
