"""Scenes: real Fashion-MNIST items on a canvas, and what a grammar says about them.

    two groups of equal items in two quarters of the canvas, side by side or one above the other; 2 to 4 items in all;
    three sizes

    en   a sneaker left of two coats              [size] noun of the first group, relation, the second group
    ko   코트 두 벌 왼쪽에 운동화 하나               the second group, relation, the first

Every scene has one right caption: named first (in English) is the group with fewer items; of equal ones the left or
upper one. So exact match can be measured. Whether a model recognises items anywhere, or has memorised scenes, shows in
combinations that it has never seen: some pairs of noun and position are held out of training and tested separately
(compositional generalisation: Lake & Baroni 2018, arXiv 1711.00350). A position is one of 4 x 4 fields ("bag
2 3": row 2, column 3) or a whole quarter ("bag top left"), which is much harder: see docs/images.md. In HELD_OUT each
noun lacks two fields, all of them white if the fields are those of a chessboard; black ones have seen every noun. What
is new in a test is the image, never the sentence.

Three of the ten classes are not used: pullover, shirt (with sleeves) and dress are so easily confused with coats and
T-shirts (people classify 83.5 % of the images correctly: Xiao et al. 2017, arXiv 1708.07747) that even the
best captions would be counted as wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.images import resize
from regard.errors import UserError

QUARTERS = ("top left", "top right", "bottom left", "bottom right")  # quarters; number: 2 · row + column
ACROSS = 4  # fields in a row of the canvas, each with room for one item; number: ACROSS · row + column
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
FIELDS = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])  # of each quarter
WHITE = [at for at in range(ACROSS**2) if (at // ACROSS + at % ACROSS) % 2]  # every second one, as on a chessboard
HELD_OUT = tuple(
    f"{noun} {1 + WHITE[(at + half) % 8] // ACROSS} {1 + WHITE[(at + half) % 8] % ACROSS}"
    for at, noun in enumerate(NOUNS)
    for half in (0, 4)
)


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
    ahead = first.count <= second.count  # who is named first in English
    subject, other = ((first, 0), (second, 1)) if ahead else ((second, 1), (first, 0))
    if language == "en":
        relation = ("above" if vertical else "left of") if ahead else ("below" if vertical else "right of")
        return Phrase((*_english(*subject), (relation, None), *_english(*other)))
    relation = ("위에" if vertical else "왼쪽에") if ahead else ("아래에" if vertical else "오른쪽에")
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
    """N scenes as numbers; nouns and sizes are indices into the lists of a `SceneMaker`."""

    noun: Tensor  # [N, 2]
    count: Tensor  # [N, 2]
    size: Tensor  # [N, 2]
    vertical: Tensor  # [N] bool: one group above the other
    lane: Tensor  # [N] the column, or where not vertical the row, that both are in: 0 or 1
    group: Tensor  # [N, MOST] 0 or 1
    field: Tensor  # [N, MOST] of the canvas
    item: Tensor  # [N, MOST] index of the item's image; -1: none
    box: Tensor  # [N, MOST, 3] top, left and side in pixels

    def __len__(self) -> int:
        return len(self.noun)


class SceneMaker:
    """Samples scenes and paints them; `nouns` and `sizes` are those that occur, `held_out` pairs, "bag 2 3"."""

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        canvas: int,
        nouns: Sequence[str] = tuple(NOUNS),
        sizes: Sequence[str] = tuple(SIZES),
        held_out: Sequence[str] = HELD_OUT,
    ) -> None:
        """pixels [n, 28, 28] of bytes with their labels [n] in Fashion-MNIST."""
        self.canvas, self.nouns, self.sizes = canvas, tuple(nouns), tuple(sizes)
        self.sides = [round(SIZES[size] * canvas) for size in self.sizes]
        self.rows = [(labels == NOUNS[noun].label).nonzero()[:, 0].numpy() for noun in self.nouns]
        for noun, rows in zip(self.nouns, self.rows, strict=True):
            if not len(rows):
                raise UserError(f"data.scenes.nouns: the items have no image of {noun!r} (label {NOUNS[noun].label})")
        self.kept_out = torch.zeros(len(self.nouns), ACROSS**2, dtype=torch.bool)
        for pair in held_out:
            noun, fields = split_pair(pair)
            if noun in self.nouns:
                self.kept_out[self.nouns.index(noun), fields] = True
        rooms = [max(self.sides) - side for side in self.sides]
        resized = [resize(pixels[:, None], side)[:, 0] for side in self.sides]
        padded = [F.pad(small, (0, room, 0, room)) for small, room in zip(resized, rooms, strict=True)]
        self.items = torch.stack(padded)  # [sizes, n, most, most]

    def to(self, device: torch.device) -> SceneMaker:
        self.items = self.items.to(device)
        return self

    def sample(self, count: int, held_out: bool, *seed: int, common: bool = False) -> Scenes:
        """Scenes in which no pair is held out, or (`held_out`) at least one is.

        In a `common` scene items are only where every noun may be, so a position says nothing about the noun.
        """
        random, have = np.random.default_rng(seed), 0
        accepted: list[dict[str, Tensor]] = []
        while have < count:
            some = self._combinations(random, max(64, 2 * (count - have)), common)
            noun, used = some["noun"].gather(1, some["group"]), torch.arange(MOST) < some["count"].sum(dim=1)[:, None]
            kept_out = self.kept_out.any(dim=0).expand_as(self.kept_out) if common else self.kept_out
            hit = (kept_out[noun, some["field"]] & used).any(dim=1)
            kept = (hit == held_out).nonzero()[:, 0]
            if not len(kept) and len(accepted) > 200:
                remedy = "set common = 0" if common else "use more nouns"
                raise UserError(f"data.scenes.held_out: no scene is left; keep fewer pairs out, or {remedy}")
            accepted.append({name: value[kept] for name, value in some.items()})
            have += len(kept)
        chosen = {name: torch.cat([part[name] for part in accepted])[:count] for name in accepted[0]}
        return self._placed(random, **chosen)

    def _combinations(self, random: np.random.Generator, count: int, common: bool) -> dict[str, Tensor]:
        first = random.integers(len(self.nouns), size=count)
        second = (first + random.integers(1, len(self.nouns), size=count)) % len(self.nouns)  # never the same
        counts = np.array(COUNTS)[random.integers(len(COUNTS), size=count)]
        sizes = random.integers(len(self.sizes), size=(count, 2))
        vertical = random.random(count) < 0.5
        parts = {"noun": np.stack((first, second), axis=1), "count": counts, "size": sizes, "vertical": vertical}
        parts["lane"] = random.integers(2, size=count)
        number = np.arange(MOST)
        parts["group"] = group = (number >= counts[:, :1]).astype(np.int64)
        within = np.where(group == 0, number, number - counts[:, :1])
        scenes = {name: torch.from_numpy(part) for name, part in parts.items()}
        fields = FIELDS[quarters_of(scenes["vertical"], scenes["lane"]).numpy()]  # [N, 2, 4]: those of both quarters
        order = random.random(fields.shape)
        if common:
            order += self.kept_out.any(dim=0).numpy()[fields]  # fields that lack a noun come last
        fields = np.take_along_axis(fields, np.argsort(order, axis=2), axis=2)
        return scenes | {"field": torch.from_numpy(fields[np.arange(count)[:, None], group, within])}

    def _placed(self, random: np.random.Generator, **chosen: Tensor) -> Scenes:
        """Which items, and where in their fields."""
        noun, count, size, group, field = (chosen[name].numpy() for name in ("noun", "count", "size", "group", "field"))
        used = np.arange(MOST) < count.sum(axis=1, keepdims=True)
        side = np.array(self.sides)[np.take_along_axis(size, group, axis=1)]
        room, free = self.canvas / ACROSS, random.random((2, len(noun), MOST))
        corners = (field // ACROSS, field % ACROSS)
        top, left = (np.floor(corner * room + some * (room - side)) for corner, some in zip(corners, free, strict=True))
        box = np.stack((top, left, side), axis=2).astype(np.int64) * used[..., None]
        kind = np.take_along_axis(noun, group, axis=1)
        item = np.full(kind.shape, -1)
        for at, images in enumerate(self.rows):
            here = (kind == at) & used
            item[here] = images[random.integers(len(images), size=int(here.sum()))]
        return Scenes(**chosen, item=torch.from_numpy(item), box=torch.from_numpy(box))

    def paint(self, scenes: Scenes) -> Tensor:
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

    def phrases(self, scenes: Scenes, language: str) -> list[Phrase]:
        numbers = torch.stack((scenes.noun, scenes.count, scenes.size), dim=2).tolist()  # [N, 2, 3]
        groups = ([Group(self.nouns[noun], count, self.sizes[size]) for noun, count, size in two] for two in numbers)
        vertical = scenes.vertical.tolist()
        return [describe(a, b, above, language) for (a, b), above in zip(groups, vertical, strict=True)]

    def numbers(self, scenes: Scenes) -> Tensor:
        """The index of each scene's caption in `all_captions`, [N]."""
        counts = torch.tensor(COUNTS, device=scenes.count.device)
        count = (scenes.count[:, None] == counts).all(dim=2).long().argmax(dim=1)
        number, radix = scenes.noun[:, 0], (len(self.nouns), len(COUNTS), len(self.sizes), len(self.sizes), 2)
        digits = (scenes.noun[:, 1], count, scenes.size[:, 0], scenes.size[:, 1], scenes.vertical.long())
        for base, digit in zip(radix, digits, strict=True):
            number = number * base + digit
        return number

    def all_captions(self, language: str) -> list[str]:
        """Every caption that the grammar can make, by `numbers`; "" where both groups would be of one kind."""
        every = itertools.product(self.nouns, self.nouns, COUNTS, self.sizes, self.sizes, (False, True))
        return [
            describe(Group(a, count[0], first), Group(b, count[1], second), vertical, language).text if a != b else ""
            for a, b, count, first, second, vertical in every
        ]


def quarters_of(vertical: Tensor, lane: Tensor) -> Tensor:
    """The quarters [N, 2] of the two groups, as numbers of QUARTERS."""
    column = torch.stack((lane, 2 + lane), dim=1)
    row = torch.stack((2 * lane, 2 * lane + 1), dim=1)
    return torch.where(vertical[:, None], column, row)


def split_pair(pair: str) -> tuple[str, list[int]]:
    """ "bag 2 3" -> the noun, and its field; "bag top left" -> the four fields of that quarter."""
    noun, _, position = pair.partition(" ")
    fields = {f"{1 + at // ACROSS} {1 + at % ACROSS}": [at] for at in range(ACROSS**2)}
    fields |= {name: FIELDS[number].tolist() for number, name in enumerate(QUARTERS)}
    if noun not in NOUNS or position not in fields:
        raise UserError(
            f'held_out: {pair!r} is not a noun and a position; write  "bag 2 3": a noun of {", ".join(NOUNS)}, row and '
            f"column of 1 to {ACROSS}; or a quarter of {', '.join(QUARTERS)}"
        )
    return noun, fields[position]


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
