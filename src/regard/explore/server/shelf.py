"""The shelf: the runs that the page may look at, those that are open, and what was looked at last.

A run is known by its name on the shelf, never by a path, so a request cannot reach a file outside of it. The
list is made from the recipes alone, in milliseconds; a model is opened when it is first asked for, and the
one asked for before the last is put back. A look holds every weight of one pass (12 layers of 12 heads with 512
tokens: 150 MB), so only the newest few are kept, by their size.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.models.recipe import RECIPE
from regard.settings import read_toml

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Inside, Look

OPEN = 2  # models in memory at a time
KEPT = 400_000_000  # bytes of weights that stay in memory beside the newest two looks
PICTURES = 16  # pictures that stay in memory
HF_CONFIG = "config.json"
TOLD = ("architecture", "input", "layers", "heads", "dim")  # fields of [model] that the page names

EXAMPLES = (
    "The animal didn't cross the street because it was too tired.",
    "The keys that the man lost are in the kitchen.",
)
DATES = ("March 3rd, 2021", "July 4th, 1976", "four hundred and seven")  # what the demo has learned


class NoSuchRun(UserError):
    """The name is not on the shelf."""


@dataclass(frozen=True)
class Question:
    """What is looked at: one run, one input. Two equal questions have one answer."""

    run: str
    text: str | None = None
    target: str | None = None
    picture: str | None = None


@dataclass
class Shelf:
    """Everything the server knows. Its methods may be called from several threads."""

    folders: dict[str, Path]
    device: str = "cpu"
    text: str | None = None  # what is looked at first
    pictures: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _open: OrderedDict[str, Inside] = field(default_factory=OrderedDict)
    _looks: OrderedDict[tuple[Question, str], Look] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def folder(self, name: str) -> Path:
        if name not in self.folders:
            raise NoSuchRun(f"run = {name[:100]!r}: is not one of those that this page shows")
        return self.folders[name]

    def describe(self, name: str) -> dict[str, Any]:
        """What the recipe says about a run, without opening the model; `error` says why it cannot be opened."""
        folder = self.folder(name)
        told: dict[str, Any] = {"name": name, "title": str(folder), "error": None, "examples": list(EXAMPLES)}
        if self.text is not None:
            told["examples"].insert(0, self.text)
        told.update(dict.fromkeys((*TOLD, "size")))
        if not (folder / RECIPE).is_file():
            return {**told, **reads_pictures(folder)}  # the rest a Hugging Face folder tells when it is open
        try:
            tables = read_toml(folder / RECIPE)
        except (UserError, OSError) as error:
            return {**told, "error": str(error)}
        model, data = tables.get("model"), tables.get("data")
        if isinstance(model, dict):
            told.update({key: model[key] for key in TOLD if key in model})
            told["size"] = model.get("image_size") if model.get("input") == "patches" else None
        if isinstance(data, dict) and str(data.get("task", "")).startswith("English dates"):
            told["examples"] = [*([] if self.text is None else [self.text]), *DATES]
        return told

    def open(self, name: str) -> Inside:
        from regard.explore.inside import Inside

        folder = self.folder(name)
        with self._lock:
            if name not in self._open:
                self._open[name] = Inside.open(folder, self.device)
            self._open.move_to_end(name)
            while len(self._open) > OPEN:
                gone, _ = self._open.popitem(last=False)
                for key in [key for key in self._looks if key[0].run == gone]:
                    del self._looks[key]
            return self._open[name]

    def look(self, question: Question, changes: Changes) -> Look:
        """The look that answers, from memory where it is still there. One is computed at a time."""
        from regard.explore.changes import Changes

        with self._lock:
            plain = self._remember(question, Changes(), lambda: self._first(question))
            if not changes:
                return plain
            return self._remember(question, changes, lambda: plain.inside.change(plain, changes))

    def _first(self, question: Question) -> Look:
        inside = self.open(question.run)
        picture = None if question.picture is None else self._picture(question.picture, inside)
        return inside.look(question.text if picture is None else None, picture=picture, target=question.target)

    def _remember(self, question: Question, changes: Changes, compute: Callable[[], Look]) -> Look:
        key = (question, json.dumps(changes.to_dict(), sort_keys=True))
        if key not in self._looks:
            self._looks[key] = compute()
        self._looks.move_to_end(key)
        sizes = {key: size_of(look) for key, look in self._looks.items()}
        for old in list(self._looks)[:-2]:
            if sum(sizes.values()) > KEPT:
                del self._looks[old], sizes[old]
        return self._looks[key]

    def keep_picture(self, name: str, content: bytes) -> None:
        """RGB, a byte a colour, of a square picture; whether the side is the model's is seen when it is asked about."""
        if not content or 3 * math.isqrt(len(content) // 3) ** 2 != len(content):
            raise UserError(f"picture: {len(content):,} bytes are no square picture of 3 bytes a pixel")
        with self._lock:
            self.pictures[name] = content
            self.pictures.move_to_end(name)
            while len(self.pictures) > PICTURES:
                self.pictures.popitem(last=False)

    def _picture(self, name: str, inside: Inside) -> Any:
        """A picture that the page has sent, as [channels, side, side] between 0 and 1."""
        import numpy as np

        if name not in self.pictures:
            raise UserError("picture: the server does not have it any more; choose the picture again")
        side, channels = inside.config.image_size, inside.config.channels
        content = np.frombuffer(self.pictures[name], dtype=np.uint8)
        if content.size != side * side * 3:
            raise UserError(f"picture: has {content.size:,} bytes; this model wants {side} x {side} pixels of RGB")
        pixels = content.reshape(side, side, 3).astype(np.float32).transpose(2, 0, 1) / 255
        if channels == 1:  # brightness as the eye weighs it (ITU-R BT.601)
            pixels = (0.299 * pixels[:1] + 0.587 * pixels[1:2] + 0.114 * pixels[2:]).astype(np.float32)
        elif channels != 3:
            raise UserError(f"channels = {channels}: the page can show a model pictures with 1 or 3 channels")
        return pixels


def reads_pictures(folder: Path) -> dict[str, Any]:
    """What the page must know of a Hugging Face folder before it asks: that it wants a picture, and how large."""
    try:
        config = json.loads((folder / HF_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # opening it says what is wrong
    if not isinstance(config, dict) or config.get("model_type") != "vit":
        return {}
    size = config.get("image_size", 224)  # the default of ViTConfig
    size = size[0] if isinstance(size, list) and size else size
    return {"input": "patches", "size": size if isinstance(size, int) else None}


def size_of(look: Look) -> int:
    """Bytes of the weights and logits of a look."""
    weights = (layer.numel() for part in look.parts.values() for layer in part.weights)
    return 4 * (sum(weights) + look.output.logits.numel())


def find_runs(given: Path) -> dict[str, Path]:
    """The run in a folder, or all runs in the folders below it, by name."""
    if not given.is_dir():
        raise UserError(f"{given}: there is no such folder; name a run, or a folder that holds runs")
    if is_run(given):
        return {given.resolve().name: given}
    found = {folder.name: folder for folder in sorted(given.iterdir()) if folder.is_dir() and is_run(folder)}
    if not found:
        raise UserError(
            f"{given}: holds no run ({RECIPE}) and no Hugging Face model ({HF_CONFIG}), and neither do its folders; "
            "make one with  regard demo"
        )
    return found


def is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() or (folder / HF_CONFIG).is_file()
