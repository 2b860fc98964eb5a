"""Models: the runs that the page shows, those in memory, and the latest looks.

A run is known by its name, never by a path, so a request cannot reach a file outside of it. The list is made from the
recipes alone, in milliseconds, and each recipe is parsed once; a model is loaded when it is first needed, and the least
recently used one beyond three is released. A look holds every attention weight of one pass (12 layers of 12 heads with
512 tokens: 150 MB), so only the latest few are kept, by their number and size.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from regard.errors import UserError
from regard.explore.server.inputs import COUNT, covered, decode_pixels, read_examples
from regard.explore.server.work import interruptible
from regard.files import read_json
from regard.models.folder import WEIGHTS
from regard.models.recipe import RECIPE
from regard.settings import from_dict, read_toml
from regard.tasks.registry import NOT_A_RUN, VERIFICATION
from regard.training.snapshots import fill_snapshot, saved_steps

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Inside, Look

OPEN = 3  # models in memory at a time, snapshots included
PAIRS = 32  # examples of a run, on which its heads are measured
LOOKS = 24  # kept in memory at a time: each has thousands of small objects beside its weights
KEPT = 400_000_000  # bytes of weights kept in memory beside the latest two looks
IMAGES = 16  # images kept in memory
HF_CONFIG = "config.json"
FIELDS = ("architecture", "input", "layers", "heads", "dim")  # of [model], for the page

# run, text, target, image, step of a snapshot; equal ones share one look
Question = tuple[str, str | None, str | None, str | None, int | None]


@dataclass
class Models:
    """The state of the server. Its methods may be called from several threads."""

    folders: dict[str, Path]
    device: str | None = "cpu"
    text: str | None = None  # the first input
    path: Path | None = None  # what the user named: a run, or the folder of several
    images: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _recipes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    _open: OrderedDict[tuple[str, int | None], Inside] = field(default_factory=OrderedDict)
    _looks: OrderedDict[tuple[Question, Changes], Look] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    interrupt: Callable[[], None] = lambda: None  # called during a pass; it may raise an exception
    _keeping: threading.Lock = field(default_factory=threading.Lock)  # the images do not wait for a pass
    _reading: threading.Lock = field(default_factory=threading.Lock)  # the list does not wait for a model

    @property
    def command(self) -> str:
        """The command that starts this server again."""
        words = ["regard", "explore", str(self.path or next(iter(self.folders.values())))]
        return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)

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
        facts: dict[str, Any] = {"name": name, "title": str(folder), "error": None}
        facts.update(dict.fromkeys((*FIELDS, "size")))
        facts |= {"snapshots": saved_steps(folder), "generator": None}
        try:
            tables = self.recipe(name)
        except UserError as error:
            return {**facts, "examples": [], "error": str(error)}
        if tables is None:
            facts.update(hf_image_size(folder))  # the rest of a Hugging Face folder is known once it is loaded
        else:
            model = table if isinstance(table := tables.get("model"), dict) else {}
            facts.update({field: model.get(field) for field in FIELDS})
            facts["size"] = model.get("image_size") if model.get("input") == "patches" else None
            if isinstance(data := tables.get("data"), dict) and isinstance(data.get("generator"), dict):
                facts["generator"] = data["generator"].get("name")
        facts["examples"] = self._examples(name, tables)
        if self.text is not None:
            facts["examples"] = [{"text": self.text, "target": None}, *(facts["examples"] or [])]
        return facts

    def _examples(self, name: str, tables: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """Inputs of a run's own test data, with targets; None if they are known only once the model is loaded."""
        kept: list[dict[str, Any]] = []
        model, data = (table if isinstance(table := (tables or {}).get(key), dict) else {} for key in ("model", "data"))
        for example in read_examples(self.folders[name]).get("inputs", []):
            if "pixels" in example:
                if (image := decode_pixels(example)) is not None:
                    kept.append({"image": self.keep_image(image[0]), "target": example.get("target")})
            elif isinstance(example.get("text"), str):
                kept.append({"text": example["text"], "target": example.get("target")})
        if not kept and (pairs := self.pairs(name, COUNT)):
            kept = [{"text": text, "target": target} for text, target in pairs]
        if not kept and model.get("output_head") == "values":
            kept = [{"text": text, "target": None} for text in number_examples(data)]
        return kept or None

    def examples(self, name: str) -> list[dict[str, Any]]:
        """What the page begins with, for a model without examples of its own."""
        return [{"text": text, "target": None} for text in covered(self.open(name))]

    def open(self, name: str, step: int | None = None) -> Inside:
        """The model of a run, or a copy with the weights of the snapshot of `step`."""
        from regard.explore.inside import Inside

        recipe, key = self.recipe(name), (name, step)
        with self._lock:
            if key not in self._open:
                inside = Inside.open(self.folders[name], self.device, recipe)
                if step is not None:
                    fill_snapshot(inside.model, self.folders[name], step)
                interruptible(inside.model, lambda: self.interrupt())
                self._open[key] = inside
            self._open.move_to_end(key)
            while len(self._open) > OPEN:
                gone, _ = self._open.popitem(last=False)
                for question in [one for one in self._looks if (one[0][0], one[0][-1]) == gone]:
                    del self._looks[question]
            return self._open[key]

    def pairs(self, name: str, count: int = PAIRS) -> list[tuple[str, str | None]]:
        """Inputs of the run's own generated test set, with their targets; none if the run has no such set."""
        data = (self.recipe(name) or {}).get("data")
        generator = data.get("generator") if isinstance(data, dict) else None
        if not isinstance(generator, dict):
            return []
        from regard.data.pairs import Generator

        with suppress(UserError):
            settings = from_dict(Generator, {**generator, "test": count}, "data.generator.")
            return [(pair.source, pair.target) for pair in settings.pairs("test")]
        return []

    def first_look(self) -> None:
        """Load the first model and compute what the page asks for first."""
        from regard.explore.changes import Changes

        name = next(iter(self.folders))
        examples = self.describe(name)["examples"] or self.examples(name)
        first = examples[0] if examples else {}
        if "text" in first or "image" in first:
            self.look((name, first.get("text"), None, first.get("image"), None), Changes())

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
                run, text, target, image, step = question
                inside = self.open(run, step)
                pixels = None if image is None else self._pixels(image, inside)
                self._looks[key] = inside.look(text if image is None else None, image=pixels, target=target)
            look = self._looks[key]
            while len(self._looks) > LOOKS or (len(self._looks) > 2 and self._size() > KEPT):
                self._looks.popitem(last=False)
            return look

    def _size(self) -> int:
        return sum(look.nbytes for look in self._looks.values())

    def keep_image(self, content: bytes) -> str:
        """The name of a square image of RGB bytes; a question that refers to it checks its size against the model."""
        if not content or 3 * math.isqrt(len(content) // 3) ** 2 != len(content):
            raise UserError(f"image: {len(content):,} bytes are not a square image of 3 bytes per pixel")
        name = hashlib.sha256(content).hexdigest()[:32]
        with self._keeping:
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


def number_examples(data: Mapping[str, Any]) -> list[str]:
    """Inputs for a model of numbers in the range of its training data: sequences, or one wave for a time series."""
    rule = data.get("rule")
    mean, std = data.get("mean") or [0.0], data.get("std") or [1.0]
    if isinstance(rule, dict):
        low, high = float(rule.get("low", 0)), float(rule.get("high", 1))
        mean, std = [(low + high) / 2], [(high - low) / 4]
    if steps := data.get("context"):
        period = data.get("period") or steps
        waves = (
            [m + s * math.sin(2 * math.pi * t / period) for m, s in zip(mean, std, strict=True)] for t in range(steps)
        )
        return [", ".join(" ".join(f"{value:.4g}" for value in step) for step in waves)]
    places = ((-1.6, -1.2, -0.8, -0.4, 0.0), (1.0, -1.0, 0.5))  # in standard deviations
    return [" ".join(f"{mean[0] + std[0] * place:.4g}" for place in some for _ in mean) for some in places]


def hf_image_size(folder: Path) -> dict[str, Any]:
    """What the page must know of a Hugging Face folder before it is loaded: whether it reads images, and their size."""
    config = read_json(folder / HF_CONFIG)  # loading it reports what is wrong
    if config.get("model_type") != "vit":
        return {}
    size = config.get("image_size", 224)  # the default of ViTConfig
    size = size[0] if isinstance(size, list) and size else size
    return {"input": "patches", "size": size if isinstance(size, int) else None}


def find_runs(path: Path) -> dict[str, Path]:
    """The run in a folder, or all runs in the folders below it, by name."""
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; name a run, or a folder that holds runs")
    if is_export(path):
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
    return not is_export(folder) and ((folder / RECIPE).is_file() or (folder / HF_CONFIG).is_file())


def is_export(folder: Path) -> bool:
    """Whether it holds graphs that compute outputs only; an export for transformers has the weights."""
    return (folder / VERIFICATION).is_file() and not (folder / WEIGHTS).is_file()
