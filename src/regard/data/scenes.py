"""Scenes: real Fashion-MNIST items on a canvas, and what a grammar says about them.

    two groups of equal items in two quadrants of the canvas, side by side or one above the other; 2 to 4 items in all;
    three sizes

    en   a sneaker left of two coats              [size] noun of the first group, relation, the second group
    ko   코트 두 벌 왼쪽에 운동화 하나               the second group, relation, the first

Every scene has one correct caption: named first (in English) is the group with fewer items; of equal ones the left or
upper one. So exact match can be measured. Whether a model recognises items anywhere, or has memorised scenes, shows in
combinations that it has never seen: some pairs of noun and position are held out of training and tested separately
(compositional generalisation: Lake & Baroni 2018, arXiv 1711.00350). A position is one of 4 x 4 grid cells ("bag
2 3": row 2, column 3) or a whole quadrant ("bag top left"), which is much harder: see docs/images.md. In HELD_OUT each
noun lacks two cells, all of them white if the grid is a chessboard; black ones have seen every noun. What is new in a
test is the image, never the sentence.

Three of the ten classes are not used: pullover, shirt (with sleeves) and dress are so easily confused with coats and
T-shirts (people classify 83.5 % of the images correctly: Xiao et al. 2017, arXiv 1708.07747) that even the
best captions would be counted as wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.images import resize
from regard.data.sets import Files
from regard.errors import UserError, suggest
from regard.settings import check_fields

QUADRANTS = ("top left", "top right", "bottom left", "bottom right")  # number: 2 · row + column
GRID = 4  # cells in a row of the canvas, each with space for one item; number: GRID · row + column
SIZES = {"small": 0.14, "normal": 0.195, "large": 0.242}  # of the canvas: 18, 25 and 31 of 128 pixels
COUNTS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1))  # of the two groups
MOST = 4  # items of a scene


class Noun(NamedTuple):
    """One kind of item: its number in Fashion-MNIST, its words, and whether Korean counts it as clothing."""

    label: int
    one: str
    several: str
    korean: str
    clothing: bool


NOUNS = {
    "shirt": Noun(0, "shirt", "shirts", "티셔츠", True),
    "trousers": Noun(1, "pair of trousers", "pairs of trousers", "바지", True),
    "coat": Noun(4, "coat", "coats", "코트", True),
    "sandal": Noun(5, "sandal", "sandals", "샌들", False),
    "sneaker": Noun(7, "sneaker", "sneakers", "운동화", False),
    "bag": Noun(8, "bag", "bags", "가방", False),
    "boot": Noun(9, "boot", "boots", "부츠", False),
}
CELLS = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])  # of each quadrant
POSITIONS = {f"{1 + cell // GRID} {1 + cell % GRID}": [cell] for cell in range(GRID**2)}
POSITIONS |= {name: CELLS[number].tolist() for number, name in enumerate(QUADRANTS)}
WHITE = [name for name, (cell, *more) in POSITIONS.items() if not more and (cell // GRID + cell % GRID) % 2]
HELD_OUT = tuple(f"{noun} {WHITE[(at + half) % 8]}" for at, noun in enumerate(NOUNS) for half in (0, 4))


@dataclass(frozen=True, kw_only=True)
class ScenesData:
    """Generated scenes: of which items, how many, and how they are described."""

    items: Files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")  # images and labels of the training items
    test_items: Files = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # those of the test items
    language: Literal["en", "ko"] = "en"  # language of the captions
    train: int = 50_000  # number of scenes per epoch; every epoch has new ones
    valid: int = 500  # number of scenes for evaluation during training
    test: int = 2_000  # number of test scenes: combinations that occur in training, and as many held-out ones
    held_out: Files = HELD_OUT  # pairs of noun and position that do not occur in training
    common: int = 0  # epochs at the start in which items are only in cells where every noun may be
    nouns: Files = tuple(NOUNS)  # items that occur
    sizes: Files = tuple(SIZES)  # sizes that occur

    def __post_init__(self) -> None:
        check_fields(self, train=1, valid=1, test=1, common=0)
        for name, words, known, least in (("nouns", self.nouns, NOUNS, 2), ("sizes", self.sizes, SIZES, 1)):
            if unknown := [word for word in words if word not in known]:
                raise UserError(f"{name}: {unknown[0]!r} is not known; {suggest(unknown[0], known)}")
            if len(set(words)) < len(words) or len(words) < least:
                raise UserError(f"{name} = {list(words)}: give {least} or more, each once")
        for pair, (noun, position) in zip(self.held_out, self.held_out_pairs, strict=True):
            if noun not in NOUNS or position not in POSITIONS:
                raise UserError(
                    f'held_out: {pair!r} is not a noun and a position; write  "bag 2 3": a noun of {", ".join(NOUNS)}, '
                    f"row and column of 1 to {GRID}; or a quadrant of {', '.join(QUADRANTS)}"
                )
        if self.held_out and not any(noun in self.nouns for noun, _ in self.held_out_pairs):
            raise UserError(
                f"held_out = {list(self.held_out)}: none of its nouns is in nouns = {list(self.nouns)}; name "
                "others, or set held_out = []"
            )

    @property
    def held_out_pairs(self) -> list[tuple[str, str]]:
        """ "bag 2 3" -> the noun and its position."""
        return [(noun, position) for noun, _, position in (pair.partition(" ") for pair in self.held_out)]


@dataclass(frozen=True)
class Group:
    """So many items of one kind and size."""

    noun: str
    count: int
    size: str


class Phrase(NamedTuple):
    """A caption in parts: texts, and which group (0 or 1) a text names; None: it names none."""

    parts: tuple[tuple[str, int | None], ...]

    @property
    def text(self) -> str:
        return " ".join(text for text, _ in self.parts)

    def nouns(self) -> list[tuple[str, str, int]]:
        """(the text before, the noun's last word, its group) of both nouns."""
        nouns, words = [], list[str]()
        for text, group in self.parts:
            words += text.split()
            if group is not None:
                nouns.append((" ".join(words[:-1]), words[-1], group))
        return nouns


def describe(first: Group, second: Group, vertical: bool, language: str) -> Phrase:
    """The caption of a scene whose `first` group is on the left, or on top if `vertical`."""
    leads = first.count <= second.count  # the first group is named first in English
    subject, other = ((first, 0), (second, 1)) if leads else ((second, 1), (first, 0))
    if language == "en":
        relation = ("above" if vertical else "left of") if leads else ("below" if vertical else "right of")
        return Phrase((*_english(*subject), (relation, None), *_english(*other)))
    relation = ("위에" if vertical else "왼쪽에") if leads else ("아래에" if vertical else "오른쪽에")
    return Phrase((*_korean(*other), (relation, None), *_korean(*subject)))


def _english(group: Group, number: int) -> list[tuple[str, int | None]]:
    noun = NOUNS[group.noun]
    article = ("a", "two", "three")[group.count - 1]
    size = "" if group.size == "normal" else f" {group.size}"
    return [(article + size, None), (noun.one if group.count == 1 else noun.several, number)]


def _korean(group: Group, number: int) -> list[tuple[str, int | None]]:
    noun = NOUNS[group.noun]
    count = ("한 벌", "두 벌", "세 벌") if noun.clothing else ("하나", "둘", "셋")
    size = {"small": "작은", "normal": "", "large": "큰"}[group.size]
    return [*([(size, None)] if size else []), (noun.korean, number), (count[group.count - 1], None)]


@dataclass(frozen=True)
class Scenes(Tensors):
    """N scenes as numbers; nouns and sizes are indices into the lists of `ScenesData`."""

    noun: Tensor  # [N, 2]
    count: Tensor  # [N, 2]
    size: Tensor  # [N, 2]
    vertical: Tensor  # [N] bool: one group above the other
    quadrant: Tensor  # [N, 2]
    group: Tensor  # [N, MOST] 0 or 1
    cell: Tensor  # [N, MOST] of the grid
    item: Tensor  # [N, MOST] index of the item's image; -1: none
    box: Tensor  # [N, MOST, 3] top, left and side in pixels

    def __len__(self) -> int:
        return len(self.noun)


class SceneGenerator:
    """Samples scenes and renders them on a square of `canvas` pixels."""

    def __init__(self, pixels: Tensor, labels: Tensor, canvas: int, config: ScenesData) -> None:
        """pixels [n, 28, 28] of bytes with their labels [n] in Fashion-MNIST."""
        self.canvas, self.config, nouns = canvas, config, config.nouns
        self.rows = [(labels == NOUNS[noun].label).nonzero()[:, 0].numpy() for noun in nouns]
        for noun, rows in zip(nouns, self.rows, strict=True):
            if not len(rows):
                raise UserError(f"data.scenes.nouns: the items have no image of {noun!r} (label {NOUNS[noun].label})")
        self.held_out: Any = np.zeros((len(nouns), GRID**2), bool)
        for noun, position in config.held_out_pairs:
            if noun in nouns:
                self.held_out[nouns.index(noun), POSITIONS[position]] = True
        self.sides = [round(SIZES[size] * canvas) for size in config.sizes]
        largest = max(self.sides)
        resized = ((largest - side, resize(pixels[:, None], side)[:, 0]) for side in self.sides)
        self.items = torch.stack([F.pad(small, (0, space, 0, space)) for space, small in resized])  # [sizes, n, …]

    def to(self, device: torch.device) -> SceneGenerator:
        self.items = self.items.to(device)
        return self

    def sample(self, count: int, held_out: bool, *seed: int, common: bool = False) -> Scenes:
        """Scenes in which no pair is held out, or (`held_out`) at least one is.

        In a `common` scene items are only where every noun may be, so a position says nothing about the noun.
        """
        random, have = np.random.default_rng(seed), 0
        accepted: list[dict[str, np.ndarray]] = []
        excluded = np.broadcast_to(self.held_out.any(axis=0), self.held_out.shape) if common else self.held_out
        while have < count:
            some = self._combinations(random, max(64, 2 * (count - have)), common)
            noun = np.take_along_axis(some["noun"], some["group"], axis=1)
            hit = (excluded[noun, some["cell"]] & _used(some["count"])).any(axis=1)
            kept = (hit == held_out).nonzero()[0]
            if not len(kept) and len(accepted) > 200:
                remedy = "set common = 0" if common else "use more nouns"
                raise UserError(f"data.scenes.held_out: no scene is left; hold out fewer pairs, or {remedy}")
            accepted.append({name: value[kept] for name, value in some.items()})
            have += len(kept)
        scenes = {name: np.concatenate([part[name] for part in accepted])[:count] for name in accepted[0]}
        scenes |= self._placed(random, scenes)
        return Scenes(**{name: torch.from_numpy(part) for name, part in scenes.items()})

    def _combinations(self, random: np.random.Generator, count: int, common: bool) -> dict[str, np.ndarray]:
        first = random.integers(len(self.rows), size=count)
        second = (first + random.integers(1, len(self.rows), size=count)) % len(self.rows)  # never the same
        counts = np.array(COUNTS)[random.integers(len(COUNTS), size=count)]
        sizes = random.integers(len(self.sides), size=(count, 2))
        vertical = random.random(count) < 0.5
        half = random.integers(2, size=(count, 1))  # of the canvas: both groups are in this column, or row
        quadrant = np.where(vertical[:, None], half + np.array((0, 2)), 2 * half + np.array((0, 1)))
        number = np.arange(MOST)
        group = (number >= counts[:, :1]).astype(np.int64)
        within = np.where(group == 0, number, number - counts[:, :1])
        cells = CELLS[quadrant]  # [N, 2, 4]
        order = random.random(cells.shape)
        if common:
            order += self.held_out.any(axis=0)[cells]  # cells that lack a noun come last
        cells = np.take_along_axis(cells, np.argsort(order, axis=2), axis=2)
        return {
            "noun": np.stack((first, second), axis=1), "count": counts, "size": sizes, "vertical": vertical,
            "quadrant": quadrant, "group": group, "cell": cells[np.arange(count)[:, None], group, within],
        }  # fmt: skip

    def _placed(self, random: np.random.Generator, scenes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Which items, and where in their cells."""
        noun, size = (np.take_along_axis(scenes[name], scenes["group"], axis=1) for name in ("noun", "size"))
        used, cell, width = _used(scenes["count"]), scenes["cell"], self.canvas / GRID
        side = np.array(self.sides)[size]
        down, right = random.random((2, *cell.shape)) * (width - side)
        top, left = np.floor(cell // GRID * width + down), np.floor(cell % GRID * width + right)
        box = np.stack((top, left, side), axis=2).astype(np.int64) * used[..., None]
        item = np.full(cell.shape, -1)
        for at, images in enumerate(self.rows):
            here = (noun == at) & used
            item[here] = images[random.integers(len(images), size=int(here.sum()))]
        return {"item": item, "box": box}

    def render(self, scenes: Scenes) -> Tensor:
        """[N, 1, canvas, canvas] of bytes, where the items are."""
        scenes = scenes.to(self.items.device)
        position = torch.arange(self.canvas, device=self.items.device)
        most = self.items.shape[-1]
        canvas = torch.zeros(len(scenes), self.canvas, self.canvas, dtype=torch.uint8, device=self.items.device)
        size = scenes.size.gather(1, scenes.group)  # [N, MOST]
        for at in range(MOST):
            top, left, side = (part[:, None] for part in scenes.box[:, at].T)
            down, across = position - top, position - left  # [N, canvas]: the item's own row and column
            inside = ((down >= 0) & (down < side))[:, :, None] & ((across >= 0) & (across < side))[:, None, :]
            values = self.items[
                size[:, at, None, None],
                scenes.item[:, at, None, None].clamp_min(0),
                down.clamp(0, most - 1)[:, :, None],
                across.clamp(0, most - 1)[:, None, :],
            ]
            canvas = torch.maximum(canvas, torch.where(inside, values, 0))
        return canvas[:, None]

    def phrases(self, scenes: Scenes) -> list[Phrase]:
        nouns, sizes, language = self.config.nouns, self.config.sizes, self.config.language
        numbers = torch.stack((scenes.noun, scenes.count, scenes.size), dim=2).tolist()  # [N, 2, 3]
        groups = ([Group(nouns[noun], count, sizes[size]) for noun, count, size in two] for two in numbers)
        return [describe(a, b, above, language) for (a, b), above in zip(groups, scenes.vertical.tolist(), strict=True)]

    def caption_ids(self, scenes: Scenes) -> Tensor:
        """The index of each scene's caption in `all_captions`, [N]."""
        count = (scenes.count[:, None] == torch.tensor(COUNTS)).all(dim=2).long().argmax(dim=1)
        parts = (*scenes.noun.T, count, *scenes.size.T, scenes.vertical.long())
        nouns, sizes = len(self.rows), len(self.sides)
        shape = (nouns, nouns, len(COUNTS), sizes, sizes, 2)
        return torch.from_numpy(np.ravel_multi_index([part.numpy() for part in parts], shape))

    def all_captions(self) -> list[str]:
        """Every caption that the grammar can make, by `caption_ids`; "" where both groups would be of one kind."""
        nouns, sizes, language = self.config.nouns, self.config.sizes, self.config.language
        every = itertools.product(nouns, nouns, COUNTS, sizes, sizes, (False, True))
        return [
            describe(Group(a, count[0], first), Group(b, count[1], second), vertical, language).text if a != b else ""
            for a, b, count, first, second, vertical in every
        ]


def _used(count: np.ndarray) -> np.ndarray:
    """Which of the MOST items of a scene there are. [N, MOST]"""
    used: np.ndarray = np.arange(MOST) < count.sum(axis=1, keepdims=True)
    return used


def coverage(scenes: Scenes, group: int, canvas: int, across: int) -> Tensor:
    """How much of each patch the boxes of one group cover, [N, across · across] from 0 to 1."""
    size = canvas / across
    begin = torch.arange(across) * size
    top, left, side = scenes.box.unbind(dim=2)  # [N, MOST]

    def along(start: Tensor) -> Tensor:  # [N, MOST, across]
        high = torch.minimum((start + side)[..., None], begin + size)
        return (high - torch.maximum(start[..., None], begin)).clamp_min(0) / size

    boxes = along(top)[..., :, None] * along(left)[..., None, :]  # [N, MOST, across, across]
    own = ((scenes.group == group) & (scenes.item >= 0))[..., None, None]
    return (boxes * own).sum(dim=1).flatten(1)
