"""Models: the runs that the page shows, those in memory, and the latest looks.

A run is known by its name, never by a path, so a request cannot reach a file outside of it. The list is made from the
recipes alone, in milliseconds, and each recipe is parsed once; a model is loaded when it is first needed, and the least
recently used one beyond two is released. A look holds every attention weight of one pass (12 layers of 12 heads with
512 tokens: 150 MB), so only the latest few are kept, by their size.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from regard.errors import UserError
from regard.models.recipe import RECIPE
from regard.settings import from_dict, read_toml
from regard.tasks.registry import NOT_A_RUN, VERIFICATION

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Inside, Look

OPEN = 2  # models in memory at a time
KEPT = 400_000_000  # bytes of weights kept in memory beside the latest two looks
IMAGES = 16  # images kept in memory
HF_CONFIG = "config.json"
FIELDS = ("architecture", "input", "layers", "heads", "dim")  # of [model], for the page

EXAMPLES = (
    "The animal didn't cross the street because it was too tired.",
    "The keys that the man lost are in the kitchen.",
)
Question = tuple[str, str | None, str | None, str | None]  # run, text, target, image; equal ones share one look


@dataclass
class Models:
    """The state of the server. Its methods may be called from several threads."""

    folders: dict[str, Path]
    device: str | None = "cpu"
    text: str | None = None  # the first input
    images: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _recipes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _open: OrderedDict[str, Inside] = field(default_factory=OrderedDict)
    _looks: OrderedDict[tuple[Question, Changes], Look] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _reading: threading.Lock = field(default_factory=threading.Lock)  # the list does not wait for a model

    def recipe(self, name: str) -> dict[str, Any] | None:
        """The tables of a run's recipe; None for a Hugging Face folder."""
        if name not in self.folders:
            raise HTTPException(404, f"run = {name[:100]!r}: is not one of the runs that this page shows")
        path = self.folders[name] / RECIPE
        with self._reading:
            if name not in self._recipes:
                self._recipes[name] = read_toml(path) if path.is_file() else None
            return self._recipes[name]

    def describe(self, name: str) -> dict[str, Any]:
        """What the recipe says about a run, without loading the model; `error` says why it cannot be loaded."""
        folder = self.folders[name]
        facts: dict[str, Any] = {"name": name, "title": str(folder), "error": None, "examples": list(EXAMPLES)}
        facts.update(dict.fromkeys((*FIELDS, "size")))
        try:
            tables = self.recipe(name)
        except UserError as error:
            return {**facts, "error": str(error)}
        if tables is None:
            facts.update(hf_image_size(folder))  # the rest of a Hugging Face folder is known once it is loaded
        else:
            model, data = (table if isinstance(table := tables.get(name), dict) else {} for name in ("model", "data"))
            facts.update({field: model.get(field) for field in FIELDS})
            facts["size"] = model.get("image_size") if model.get("input") == "patches" else None
            if isinstance(data.get("generator"), dict):
                from regard.data.pairs import Generator

                with suppress(UserError):
                    generator = from_dict(Generator, {**data["generator"], "test": 3}, "data.generator.")
                    facts["examples"] = [pair.source for pair in generator.pairs("test")]
        if self.text is not None:
            facts["examples"].insert(0, self.text)
        return facts

    def open(self, name: str) -> Inside:
        from regard.explore.inside import Inside

        recipe = self.recipe(name)
        with self._lock:
            if name not in self._open:
                self._open[name] = Inside.open(self.folders[name], self.device, recipe)
            self._open.move_to_end(name)
            while len(self._open) > OPEN:
                gone, _ = self._open.popitem(last=False)
                for key in [key for key in self._looks if key[0][0] == gone]:
                    del self._looks[key]
            return self._open[name]

    def look(self, question: Question, changes: Changes) -> Look:
        """The look of a question, from memory if it is still there. One is computed at a time."""
        from regard.explore.changes import Changes

        with self._lock:
            key = (question, changes)
            if key in self._looks:
                self._looks.move_to_end(key)
            elif changes:
                plain = self.look(question, Changes())
                self._looks[key] = plain.inside.change(plain, changes)
            else:
                run, text, target, image = question
                inside = self.open(run)
                pixels = None if image is None else self._pixels(image, inside)
                self._looks[key] = inside.look(text if image is None else None, image=pixels, target=target)
            while len(self._looks) > 2 and sum(look.nbytes for look in self._looks.values()) > KEPT:
                self._looks.popitem(last=False)
            return self._looks[key]

    def keep_image(self, content: bytes) -> str:
        """The name of a square image of RGB bytes; a question that refers to it checks its size against the model."""
        if not content or 3 * math.isqrt(len(content) // 3) ** 2 != len(content):
            raise UserError(f"image: {len(content):,} bytes are not a square image of 3 bytes per pixel")
        name = hashlib.sha256(content).hexdigest()[:32]
        with self._lock:
            self.images[name] = content
            self.images.move_to_end(name)
            while len(self.images) > IMAGES:
                self.images.popitem(last=False)
        return name

    def _pixels(self, name: str, inside: Inside) -> Any:
        """An image that the page has sent, as [channels, side, side] between 0 and 1."""
        import numpy as np

        if name not in self.images:
            raise UserError("image: the server does not have it any more; choose the image again")
        side, channels = inside.config.image_size, inside.config.channels
        content = np.frombuffer(self.images[name], dtype=np.uint8)
        if content.size != side * side * 3:
            raise UserError(f"image: has {content.size:,} bytes; this model reads {side} x {side} pixels of RGB")
        pixels = content.reshape(side, side, 3).astype(np.float32).transpose(2, 0, 1) / 255
        if channels == 1:  # luma (ITU-R BT.601)
            pixels = (0.299 * pixels[:1] + 0.587 * pixels[1:2] + 0.114 * pixels[2:]).astype(np.float32)
        elif channels != 3:
            raise UserError(f"channels = {channels}: the page supports images with 1 or 3 channels")
        return pixels


def hf_image_size(folder: Path) -> dict[str, Any]:
    """What the page must know of a Hugging Face folder before it is loaded: whether it reads images, and their size."""
    try:
        config = json.loads((folder / HF_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # loading it reports what is wrong
    if not isinstance(config, dict) or config.get("model_type") != "vit":
        return {}
    size = config.get("image_size", 224)  # the default of ViTConfig
    size = size[0] if isinstance(size, list) and size else size
    return {"input": "patches", "size": size if isinstance(size, int) else None}


def find_runs(path: Path) -> dict[str, Path]:
    """The run in a folder, or all runs in the folders below it, by name."""
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; name a run, or a folder that holds runs")
    if (path / VERIFICATION).is_file():
        raise UserError(f"{path}: {NOT_A_RUN}")
    if is_run(path):
        return {path.resolve().name: path}
    runs = {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir() and is_run(folder)}
    if not runs:
        raise UserError(
            f"{path}: contains no run ({RECIPE}) and no Hugging Face model ({HF_CONFIG}), and neither do its folders; "
            "make one with  regard demo"
        )
    return runs


def is_run(folder: Path) -> bool:
    is_export = (folder / VERIFICATION).is_file()
    return not is_export and ((folder / RECIPE).is_file() or (folder / HF_CONFIG).is_file())
