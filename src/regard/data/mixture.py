"""A mixture of tasks: each maps a text to a text, and a prefix says which is meant (Raffel et al. 2020).

    [data.tasks.german]
    prefix = "translate English to German: "
    train = ["train.en", "train.de"]          sentence pairs, as `regard.data.pairs` reads them

    [data.tasks.sentiment]
    kind = "labels"                           labelled texts, as `regard.data.labels` reads them: the label is generated
    prefix = "sentiment: "
    train = ["train.tsv"]

    [data.tasks.reviews]
    kind = "denoise"                          plain text, as `regard.data.documents` reads it, with spans to restore
    train = ["train.tsv"]

All pairs of all tasks make an epoch, those of a task `weight` times (`regard.data.streams.weighted_rows`): so tasks
occur in proportion to their sizes. Groups of files in `train` have weights of their own, and both are multiplied.

Span corruption (section 3.1.4) replaces spans of a text by sentinels, and the model restores them:

    text     Thank you for inviting me to your party last week .
    source   Thank you <extra_id_0> me to your party <extra_id_1> week . </s>
    target   <s> <extra_id_0> for inviting <extra_id_1> last </s>

Of a text of n tokens, round(density · n) are noise, in round(noise / span) spans. Noise and rest are split at random
positions, and their parts alternate: rest, span, rest, …, span, rest. No span is empty, nor the rest between two; all
such partitions are equally probable. (In T5's own code every text ends with a span. In texts of 512 tokens that is one
of 26; in a review of 20 it would be the only one, always at the end.) The lengths of source and target follow from n
alone. Each epoch samples other spans, by the seed and the epoch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regard.data.batch import Pairs, Ragged, steps
from regard.data.documents import Piece, TextData
from regard.data.labels import LabelData
from regard.data.pairs import Pair, PairData
from regard.data.sets import Sources, file_groups, fingerprint, home
from regard.data.streams import epoch_generator, sample_rows
from regard.errors import UserError
from regard.samples import sample_folder
from regard.settings import check_fields, from_dict, to_dict
from regard.text.tokenizer import Tokenizer

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))
HOLD_OUT = 0  # seed of what `valid_fraction` holds out of labelled texts
NOISE = ("density", "span")
KINDS = {  # of tasks: the class of their data, and keys that they do not have
    "pairs": (PairData, ("max_length", *NOISE)),
    "labels": (
        LabelData,
        (
            "classes", "class_weights", "fraction", "max_length", "word_dropout", "header", "join", "listops", *NOISE
        ),
    ),
    "denoise": (TextData, ()),
}  # fmt: skip


@dataclass(frozen=True)
class Noise:
    """Fraction of the tokens that is removed, and mean length of a span."""

    density: float = 0.15  # kind = "denoise": fraction of the tokens that is removed
    span: float = 3.0  # kind = "denoise": mean length of a removed span


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Noise):
    """The keys of a task besides its data."""

    kind: Literal["pairs", "labels", "denoise"] = "pairs"  # data: sentence pairs, labelled texts or plain text
    prefix: str = ""  # text in front of every source
    weight: float = 1.0  # times that each of its pairs occurs in an epoch, on average
    folder: str = "."  # folder of its files, relative to that of [data]

    def __post_init__(self) -> None:
        check_fields(self, span=1)
        if not 0 < self.weight <= 1000:
            raise UserError(f"weight = {self.weight:g}: must be above 0 and at most 1000")
        if not 0 < self.density < 1:
            raise UserError(f"density = {self.density}: must be above 0 and below 1, such as 0.15")


@dataclass(frozen=True)
class TextTask:
    """One task: its options, and its data by kind."""

    name: str
    options: TaskOptions
    data: PairData | LabelData | TextData

    @property
    def sets(self) -> dict[str, Sources]:
        """The sets that are evaluated; what `valid_fraction` holds out is part of the training files."""
        if getattr(self.data, "generator", None) is not None:
            return {"test": ()}
        held_out = {"valid": self.data.train} if getattr(self.data, "valid_fraction", 0) else {}
        return {**held_out, **self.data.sets}

    @property
    def files(self) -> list[Sources]:
        """Those of every set."""
        return [files for files in (self.data.train, *self.data.sets.values()) if files]

    @property
    def weights(self) -> list[float]:
        """Those of the groups of its training data."""
        return [self.options.weight * weight for weight in self.data.weights]

    def paths(self) -> list[Path]:
        """All files on disk."""
        return [path for files in self.files for path in self.data.find(files)]

    def check(self) -> None:
        """Read everything once; a label that is not in the training data is a problem elsewhere."""
        data = self.data
        for files in self.files:
            report = data.read(files).check()
            report.print()
            data = data.with_classes(report) if isinstance(data, LabelData) else data

    def groups(self, name: str) -> Iterator[Iterator[Pair]]:
        """The pairs of a set, "train" or one of `sets`, by groups of files, to be read in this order."""
        if isinstance(self.data, PairData):
            yield from map(self._prefixed, self.data.groups(name))
        elif isinstance(self.data, LabelData):
            chosen = iter(_chosen(self.data, name) or repeat(True))
            for group in file_groups({"train": self.data.train, **self.sets}[name]):
                rows = compress(self.data.read(group.files), chosen)
                yield self._prefixed(Pair(one.text, one.label, one.file, one.row) for one in rows)

    def _prefixed(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        return (pair._replace(source=self.options.prefix + pair.source) for pair in pairs)

    def texts(self, name: str) -> list[Iterable[Piece]]:
        """The text to be denoised, "train" or one of `sets`, by groups of files."""
        assert isinstance(self.data, TextData)
        files, characters = {"train": self.data.train, **self.sets}[name], sys.maxsize
        if self.data.valid_fraction and name not in self.data.test:
            characters = self.data.read(files).check().totals["characters"]
        return self.data.groups(name, files, characters)

    def table(self) -> dict[str, Any]:
        """The complete table for a recipe."""
        unused = (*KINDS[self.options.kind][1], "skip_bad")
        every = {**to_dict(self.data), **to_dict(self.options)}
        return {name: value for name, value in every.items() if name not in unused}


def _chosen(data: LabelData, name: str) -> list[bool] | None:
    """Which rows of labelled training data a set has, where some are held out."""
    if not data.valid_fraction or name not in ("train", "valid"):
        return None
    labels: dict[str, int] = {}
    numbers = [labels.setdefault(one.label, len(labels)) for one in data.read(data.train)]
    held = sample_rows(torch.tensor(numbers), data.valid_fraction, HOLD_OUT, keep=True)
    chosen: list[bool] = (held if name == "valid" else ~held).tolist()
    return chosen


@dataclass(frozen=True)
class TasksData:
    """The [data] table but for its tasks."""

    max_length: int = 256  # longest training sequence, in tokens
    skip_bad: bool = False  # leave out rows that cannot be used, instead of stopping
    folder: str = "."  # folder that relative file names start from

    def __post_init__(self) -> None:
        check_fields(self, max_length=8)


def read_tasks(table: Mapping[str, Any]) -> tuple[TasksData, dict[str, TextTask]]:
    """[data] of a recipe: what holds for all tasks, and the tasks."""
    common = from_dict(TasksData, {name: value for name, value in table.items() if name != "tasks"}, "data.")
    tasks = table.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not all(isinstance(one, dict) for one in tasks.values()):
        raise UserError(
            'data.tasks: no task; write tables such as  [data.tasks.german]  with  prefix = "to German: "  and '
            'train = ["train.en", "train.de"]'
        )
    return common, {name: _read_task(name, one, common) for name, one in tasks.items()}


def _read_task(name: str, table: Mapping[str, Any], common: TasksData) -> TextTask:
    where = f"data.tasks.{name}."
    if not name or "." in name or "/" in name:
        raise UserError(f"data.tasks.{name!r}: is not a task name; use letters, digits and -")
    known = {field.name for field in dataclasses.fields(TaskOptions)}
    options = from_dict(TaskOptions, {key: value for key, value in table.items() if key in known}, where)
    kind, refused = KINDS[options.kind]
    for key in (*refused, "skip_bad"):
        if key in table:
            raise UserError(f"{where}{key} = {table[key]!r}: not for a task of kind = {options.kind!r}; remove it")
    data = {key: value for key, value in table.items() if key not in known} | {"skip_bad": common.skip_bad}
    data["folder"] = str(sample_folder(options.folder) or home(common.folder) / home(options.folder))
    if options.kind == "pairs":
        data["max_length"] = common.max_length
    return TextTask(name, options, from_dict(kind, data, where))


def tasks_fingerprint(tasks: Collection[TextTask], name: str) -> str:
    """A digest of a set of these tasks: their tables and files (names, sizes, times)."""
    paths = (path for one in tasks for path in one.paths())
    return fingerprint(paths, [(one.name, one.table()) for one in tasks], name)


def find_sentinels(tokenizer: Tokenizer) -> Tensor:
    """The ids of the sentinels, in their order."""
    ids = [tokenizer.token_to_id(name) for name in SENTINELS]
    if any(id is None for id in ids):
        raise UserError(
            f"the tokenizer has no {SENTINELS[0]} … {SENTINELS[-1]}, which replace spans of a text: "
            "let the run train its own, or start from a model that was trained by denoising"
        )
    return torch.tensor(ids)


def counts(lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Noise tokens and spans of texts of these lengths, of 2 tokens or more."""
    noisy = (lengths * noise.density).round().long().clamp_min(1).minimum(lengths - 1)
    spans = (noisy / noise.span).round().long().clamp_min(1)
    return noisy, spans.minimum(noisy).minimum(lengths - noisy + 1)


def segments(sizes: Tensor, parts: Tensor, generator: torch.Generator) -> Tensor:
    """Texts of `sizes` items split into `parts` parts each, none empty: the lengths of all parts. [Σ parts]"""
    text = torch.arange(len(sizes)).repeat_interleave(sizes)
    starts = sizes.cumsum(0) - sizes
    keys = torch.rand(len(text), generator=generator)
    keys[starts] = -1.0  # the first item always begins a part
    order = keys.argsort(stable=True)
    order = order[text[order].argsort(stable=True)]  # by text, then by key
    rank = torch.arange(len(text)) - starts[text]
    begins = torch.zeros(len(text), dtype=torch.bool)
    begins[order] = rank < parts[text]
    starts = begins.nonzero()[:, 0]
    return torch.cat((starts, torch.tensor([len(text)]))).diff()


def corrupt(texts: Ragged, sentinels: Tensor, noise: Noise, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """(texts with sentinels, the removed spans), both without prefix and special tokens."""
    lengths = texts.lengths
    noisy, spans = counts(lengths, noise)
    if int(spans.max()) > len(sentinels):
        raise UserError(
            f"a text of {int(lengths.max())} tokens would have {int(spans.max())} spans, and there are "
            f"{len(sentinels)} sentinels: lower max_length or density, or raise span"
        )
    part = steps(2 * spans + 1)  # rest 0, span 1, rest 2, …, span, rest of each text
    is_span = part % 2 == 1
    rest = segments(lengths - noisy + 2, spans + 1, generator)  # one more at either end, where the rest may be empty
    rest -= ((part == 0) | (part == 2 * spans.repeat_interleave(2 * spans + 1)))[~is_span].long()
    parts = torch.empty_like(part)
    parts[is_span], parts[~is_span] = segments(noisy, spans, generator), rest
    removed = is_span.repeat_interleave(parts)
    sentinel = sentinels[part // 2 % len(sentinels)].repeat_interleave(parts)
    begins = torch.zeros(len(removed), dtype=torch.bool)  # the first token of a span
    begins[(parts.cumsum(0) - parts)[is_span]] = True
    ids = texts.joined().long()
    source = torch.where(removed, sentinel, ids)[~removed | begins]
    copies = removed.long() + begins  # the sentinel comes before the first token of its span
    target, first = ids.repeat_interleave(copies), (copies.cumsum(0) - copies)[begins]
    target[first] = sentinel[begins]
    return Ragged(source, lengths - noisy + spans), Ragged(target, noisy + spans)


def surround(texts: Ragged, before: Sequence[int], after: Sequence[int]) -> Ragged:
    """The same texts, each between these tokens, concatenated."""
    lengths = texts.lengths + len(before) + len(after)
    end = lengths.cumsum(0)
    start, flat = end - lengths, torch.empty(int(lengths.sum()), dtype=torch.long)
    flat[(start + len(before)).repeat_interleave(texts.lengths) + steps(texts.lengths)] = texts.joined().long()
    flat[start[:, None] + torch.arange(len(before))] = torch.tensor(before, dtype=torch.long)
    flat[end[:, None] - torch.arange(len(after), 0, -1)] = torch.tensor(after, dtype=torch.long)
    return Ragged(flat, lengths)


class Denoised:
    """Texts, as `store_documents` stores them (<s> … </s>), that are corrupted differently in every epoch."""

    def __init__(
        self, texts: Ragged, tokenizer: Tokenizer, noise: Noise, prefix: Sequence[int], seed: int,
        weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        chosen = (texts.lengths >= 4).nonzero()[:, 0]  # 2 tokens and the frame
        inner, self.weights = texts.choose(chosen), None if weights is None else weights[chosen]
        inner.starts, inner.lengths = inner.starts + 1, inner.lengths - 2
        if not len(inner):
            raise UserError("no text of 2 tokens or more: there is nothing to remove")
        self.texts, self.noise, self.prefix, self.seed = inner, noise, list(prefix), seed
        self.sentinels = find_sentinels(tokenizer)
        self.bos, self.eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")

    def at(self, epoch: int) -> Pairs:
        generator = epoch_generator(self.seed, epoch)
        sources, targets = corrupt(self.texts, self.sentinels, self.noise, generator)
        return Pairs(surround(sources, self.prefix, [self.eos]), surround(targets, [self.bos], [self.eos]))


class Mixture(Pairs):
    """Fixed pairs and texts to be denoised, side by side: the pairs of epoch 0, and others at another epoch.

    Their lengths are the same in every epoch.
    """

    def __init__(self, fixed: Pairs | None, denoised: Sequence[Denoised]) -> None:
        self.fixed, self.denoised = fixed, denoised
        self.made = 0, self._make(0)  # the last epoch
        super().__init__(self.made[1].sources, self.made[1].targets)
        parts = [(one.weights, len(one.texts)) for one in denoised]
        parts += [(fixed.weights, len(fixed))] if fixed is not None else []
        if any(weights is not None for weights, _ in parts):
            self.weights = torch.cat([torch.ones(count) if w is None else w for w, count in parts])

    def at(self, epoch: int) -> Pairs:  # type: ignore[override]  # other pairs, not another mixture
        if self.made[0] != epoch:
            self.made = epoch, self._make(epoch)
        return self.made[1]

    def _make(self, epoch: int) -> Pairs:
        parts = [*(one.at(epoch) for one in self.denoised), *([self.fixed] if self.fixed else [])]
        if len(parts) == 1:
            return parts[0]
        return Pairs(_join([pairs.sources for pairs in parts]), _join([pairs.targets for pairs in parts]))


def _join(parts: Sequence[Ragged]) -> Ragged:
    return Ragged(torch.cat([part.joined().int() for part in parts]), torch.cat([part.lengths for part in parts]))
