"""Packing: several sequences in one row, so that every batch has the same shape and almost no padding.

    source    a a a </s> b b </s> c c c c </s> · ·        document   1 1 1 1 2 2 2 3 3 3 3 3 0 0
    target    <s> A A <s> B B B <s> C C C · · ·            document   1 1 1 2 2 2 2 3 3 3 3 0 0 0

Pair number d of a row is document d on both sides; attention, within a side and across, is restricted to equal
documents (`regard.nn.mask.same_document`), and positions restart with each, so the results are those of the
sentences alone. Padding is document 0: it attends only to itself and has no labels. Compiled code and CUDA graphs need
fixed shapes; rows are filled to 95 % and more, while padded batches of similar length waste a tenth to a third
(Krell et al. 2021, "Efficient sequence packing without cross-contamination").

Single texts (classification, tagging, masked language modeling) are packed in the same way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.batch import Labels, Pairs, Ragged, Sequences, Tensors, steps
from regard.data.columns import Store
from regard.data.streams import ChunkedStream, epoch_generator, epoch_seed, shuffled_rows
from regard.errors import UserError
from regard.settings import check_fields
from regard.text.tokenizer import Tokenizer
from regard.text.words import WordBoundaries

CHUNK = 1 << 22  # tokens of the rows that are filled at once


@dataclass(frozen=True)
class PackedBatch(Labels):
    """Rows of packed pairs; all [R, L]."""

    source: Tensor
    source_document: Tensor
    target: Tensor
    target_document: Tensor
    labels: Tensor  # IGNORE on padding


def assign(sources: list[int], targets: list[int], length: int) -> list[int]:
    """The row of each pair: best fit, the fullest row whose two sides both have space for the pair's longer side."""
    rows: list[int] = []
    left: list[list[int]] = []  # space of each row: [source, target]
    ready: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the smaller of the two
    some = 0  # bit r: ready[r] is not empty, so that the best fit is the lowest bit from `need` on
    for source, target in zip(sources, targets, strict=True):
        need = max(source, target)
        if fits := some >> need:
            space = need + (fits & -fits).bit_length() - 1
            row = ready[space].pop()
            some ^= (not ready[space]) << space
        else:
            row = len(left)
            left.append([length, length])
        sides = left[row]
        sides[0] -= source
        sides[1] -= target
        space = min(sides)
        ready[space].append(row)
        some |= 1 << space
        rows.append(row)
    return rows


class Plan(NamedTuple):
    """Which pair (or text) goes where, ordered by row."""

    order: Tensor  # [pairs] number of the pair in the data
    row: Tensor  # [pairs] the row it goes to
    document: Tensor  # [pairs] its number within the row, from 1
    rows: int  # of the whole epoch

    def part(self, begin: int, end: int) -> Plan:
        """The same for the rows from `begin` to before `end`, which become row 0 and on."""
        a, b = torch.searchsorted(self.row, torch.tensor([begin, end])).tolist()
        return Plan(self.order[a:b], self.row[a:b] - begin, self.document[a:b], end - begin)


class PackedRows(ChunkedStream):
    """Batches of `rows` rows of `length` tokens; subclasses fill them and, if need be, add labels on the device.

    `sizes` are the tokens of each sequence, or of the two sides of a pair. Rows are filled a chunk of some million
    tokens at a time, so an epoch may be larger than memory, and a batch is a slice of a chunk: no work per step.
    """

    def __init__(
        self, sizes: Sequence[Tensor], rows: int, length: int, seed: int, device: torch.device | None = None,
        weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        if (longest := max(int(side.max()) for side in sizes)) > length:
            raise UserError(
                f"train.pack = {length} is too short for a sequence of {longest} tokens: raise it, or limit the "
                f"sequences with data.max_length = {length}"
            )
        super().__init__(max(1, CHUNK // (rows * length)))
        self.sizes, self.rows, self.length, self.seed, self.weights = sizes, rows, length, seed, weights
        self.device = device or torch.device("cpu")
        self.planned: tuple[int, Plan] | None = None  # the epoch that the thread is in

    @property
    def size(self) -> dict[str, int]:
        return {"examples": len(self.sizes[0]), "tokens": sum(int(side.sum()) for side in self.sizes)}

    def plan(self, epoch: int) -> Plan:
        """An epoch of sequences in random order, in as many rows as make whole batches."""
        generator = epoch_generator(self.seed, epoch)
        order = shuffled_rows(len(self.sizes[0]), self.weights, generator)
        row = torch.tensor(assign(self.sizes[0][order].tolist(), self.sizes[-1][order].tolist(), self.length))
        count = -(-(int(row.max()) + 1) // self.rows) * self.rows
        row = torch.randperm(count, generator=generator)[row]
        by_row = row.argsort(stable=True)
        order, row = order[by_row], row[by_row]
        first = torch.ones_like(row, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        return Plan(order, row, _within(torch.ones_like(row), first) + 1, count)

    @abstractmethod
    def fill(self, epoch: int, plan: Plan) -> Tensors:
        """Rows of a plan, on the CPU."""

    def fill_side(self, data: Ragged, plan: Plan, side: int = 0, shift: int = 0) -> tuple[Tensor, Tensor]:
        """ids and documents [rows, length]; the first `shift` tokens of every sequence are skipped."""
        sizes = self.sizes[side][plan.order]
        start = plan.row * self.length + _within(sizes, plan.document == 1)  # where each begins in the flat rows
        step = steps(sizes)
        to = start.repeat_interleave(sizes) + step
        ids, documents = torch.zeros(2, plan.rows * self.length, dtype=torch.long)
        ids[to] = data.flat[data.starts[plan.order].repeat_interleave(sizes) + step + shift].long()
        documents[to] = plan.document.repeat_interleave(sizes)
        return ids.view(plan.rows, self.length), documents.view(plan.rows, self.length)

    def label(self, rows: Any, generator: torch.Generator) -> Tensors:
        """The batch of rows on the device; random numbers follow from (seed, epoch, chunk)."""
        batch: Tensors = rows
        return batch

    def prepare(self, epoch: int, chunk: int) -> tuple[int, Tensors]:
        if self.planned is None or self.planned[0] != epoch:
            self.planned = epoch, self.plan(epoch)
        plan, size = self.planned[1], self.chunk * self.rows
        return plan.rows // self.rows, self.fill(epoch, plan.part(chunk * size, min((chunk + 1) * size, plan.rows)))

    def finish(self, epoch: int, chunk: int, prepared: Tensors) -> Callable[[int], Tensors]:
        generator = torch.Generator(self.device).manual_seed(epoch_seed(self.seed, epoch) * 65_537 + chunk)
        batches = self.label(prepared.to(self.device), generator)
        return lambda number: batches.rows(slice(number * self.rows, (number + 1) * self.rows))


class Packs(PackedRows):
    """Packed sentence pairs."""

    def __init__(self, data: Pairs, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        sizes = data.sources.lengths, data.targets.lengths - 1  # <s> … is read
        super().__init__(sizes, rows, length, seed, device, data.weights)
        self.data = data

    def fill(self, epoch: int, plan: Plan) -> PackedBatch:
        data = self.data.at(epoch)
        source = self.fill_side(data.sources, plan)
        target, document = self.fill_side(data.targets, plan, side=1)
        labels, _ = self.fill_side(data.targets, plan, side=1, shift=1)
        return PackedBatch(*source, target, document, torch.where(document > 0, labels, Labels.IGNORE))


@dataclass(frozen=True)
class ClassBatch(Labels):
    """Texts, padded (one per row, D = 1) or packed (at most D per row), and their classes, or those of their tokens."""

    text: Tensor  # [R, N]
    labels: Tensor  # [R, D], IGNORE where a packed row has fewer texts; of tokens [R, N], IGNORE where one has no class
    is_real: Tensor | None = None  # [R, N] of padded texts; None: no padding
    document: Tensor | None = None  # [R, N] of packed ones, from 1; 0: padding


class Labelled(Sequences):
    """Texts  <s> … </s>  with the numbers of their classes [N]; the first token is what BERT calls [CLS]."""

    def __init__(self, texts: Ragged, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    @classmethod
    def of(cls, store: Store) -> Labelled:
        return cls(store.columns["text"], store.columns["label"].long())

    def choose(self, rows: Tensor) -> Labelled:
        chosen = Labelled(self.texts.choose(rows), self.labels[rows])
        chosen.weights = None if self.weights is None else self.weights[rows]
        return chosen

    @property
    def sizes(self) -> Tensor:
        return self.texts.lengths

    def batch(self, rows: Tensor, width: Callable[[int], int] = int) -> ClassBatch:
        text, is_real = self.texts.pad(rows, width)
        return ClassBatch(text, self.labels[rows][:, None], None if bool(is_real.all()) else is_real)


class ClassPacks(PackedRows):
    """Packed batches of labelled texts."""

    def __init__(self, data: Labelled, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        super().__init__([data.sizes], rows, length, seed, device, data.weights)
        self.data = data
        self.most = length // int(data.sizes.min())  # texts that a row can hold

    def fill(self, epoch: int, plan: Plan) -> ClassBatch:
        text, document = self.fill_side(self.data.texts, plan)
        labels = torch.full((plan.rows, self.most), Labels.IGNORE)
        labels[plan.row, plan.document - 1] = self.data.labels[plan.order]
        return ClassBatch(text, labels, document=document)


class Tagged(Sequences):
    """Texts  <s> … </s>  with the class of each token, or IGNORE."""

    def __init__(self, texts: Ragged, labels: Ragged) -> None:
        self.texts, self.labels = texts, labels

    @classmethod
    def of(cls, store: Store) -> Tagged:
        return cls(store.columns["text"], store.columns["labels"])

    @property
    def sizes(self) -> Tensor:
        return self.texts.lengths

    def batch(self, rows: Tensor, width: Callable[[int], int] = int) -> ClassBatch:
        text, is_real = self.texts.pad(rows, width)
        labels = torch.where(is_real, self.labels.pad(rows, width)[0], Labels.IGNORE)
        return ClassBatch(text, labels, None if bool(is_real.all()) else is_real)


class TagPacks(PackedRows):
    """Packed batches of texts whose tokens have classes."""

    def __init__(self, data: Tagged, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        super().__init__([data.sizes], rows, length, seed, device, data.weights)
        self.data = data

    def fill(self, epoch: int, plan: Plan) -> ClassBatch:
        text, document = self.fill_side(self.data.texts, plan)
        labels, _ = self.fill_side(self.data.labels, plan)
        return ClassBatch(text, torch.where(document > 0, labels, Labels.IGNORE), document=document)


@dataclass(frozen=True)
class MaskConfig:
    """The [mask] table of a recipe."""

    fraction: float = 0.15  # fraction of the tokens that is to be predicted
    whole_words: bool = False  # choose all tokens of a word or none
    mask: float = 0.8  # fraction of the chosen tokens that is replaced by `<mask>`
    random: float = 0.1  # fraction of the chosen tokens that is replaced by a random token; the rest stays

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.fraction < 1:
            raise UserError(f"fraction = {self.fraction}: must be above 0 and below 1, such as 0.15")
        if self.mask < 0 or self.random < 0 or self.mask + self.random > 1:
            raise UserError(f"mask = {self.mask}, random = {self.random}: are fractions, together at most 1")

    def most(self, length: int) -> int:
        """The most positions of a row that are chosen."""
        return max(1, round(self.fraction * length))


@dataclass(frozen=True)
class MaskedBatch(Labels):
    """Packed rows with masked tokens."""

    ids: Tensor  # [R, L]
    document: Tensor  # [R, L], from 1; 0: padding
    positions: Tensor  # [R, M] of the masked tokens
    labels: Tensor  # [R, M] the original tokens; IGNORE where fewer were chosen


@dataclass(frozen=True)
class TextRows(Tensors):
    """Rows of packed texts before tokens are masked; [R, L] each."""

    ids: Tensor
    document: Tensor


class MaskedPacks(PackedRows):
    """Packed texts of which some tokens are masked, and the model predicts them from both sides.

        text       <s> 이 영화 정말 재밌다 </s>
        read       <s> 이 영화 <mask> 재밌다 </s>
        labels               정말

    A `fraction` of the tokens of a row is chosen (or whole words up to as many); of these 80 % become <mask>, 10 % a
    random token and 10 % stay as they are, so the model must encode every position well (Devlin et al. 2018, section
    3.1). Each epoch samples another choice (Liu et al. 2019), which follows from the seed and the epoch. Only the
    chosen positions are scored: at most M = fraction · L per row, so the output matmul over the vocabulary is 1/7 of
    what all positions would take. Documents longer than a row are split; each part is  <s> … </s>.
    """

    def __init__(
        self,
        texts: Ragged,
        tokenizer: Tokenizer,
        config: MaskConfig,
        rows: int,
        length: int,
        seed: int,
        device: torch.device | None = None,
        weights: Tensor | None = None,
    ) -> None:
        super().__init__([texts.lengths], rows, length, seed, device, weights)
        assert tokenizer.mask is not None
        self.texts = texts
        self.mask, self.config, self.words = tokenizer.mask, config, WordBoundaries(tokenizer).to(self.device)
        self.ordinary = (~self.words.special).nonzero()[:, 0]  # what a random token may be

    def fill(self, epoch: int, plan: Plan) -> TextRows:
        return TextRows(*self.fill_side(self.texts, plan))

    def label(self, rows: TextRows, generator: torch.Generator) -> MaskedBatch:
        ids, document = rows.ids, rows.document
        alone = torch.arange(1, ids.shape[1] + 1, device=ids.device).expand_as(ids)
        words = self.words.word_ids(ids) if self.config.whole_words else alone
        words = torch.where((document > 0) & ~self.words.special[ids], words, 0)
        chosen = choose(words, self.config.fraction, generator)
        most = self.config.most(self.length)
        positions = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        labels = torch.where(chosen, ids, Labels.IGNORE).gather(1, positions)
        return MaskedBatch(self._replace(ids, chosen, generator), document, positions, labels)

    def _replace(self, ids: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = self.ordinary[torch.randint(len(self.ordinary), ids.shape, generator=generator, device=ids.device)]
        masked, moved = uniform < self.config.mask, uniform < self.config.mask + self.config.random
        return torch.where(chosen, torch.where(masked, self.mask, torch.where(moved, other, ids)), ids)


def choose(words: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Which tokens are chosen, of rows [n, L] that say to which word a token belongs, 0: to none.

    Words come in random order until the next would exceed round(fraction · tokens), at least 1.
    """
    n, length = words.shape
    keys = torch.rand(n, length + 1, generator=generator, device=words.device).gather(1, words)  # one for each word
    rank = torch.where(words > 0, keys, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    last = words.new_zeros(n, length + 1).scatter_reduce_(1, words, rank, "amax").gather(1, words)
    quota = ((words > 0).sum(dim=1, keepdim=True) * fraction).round().clamp_min(1)
    return (words > 0) & (last < quota)


def _within(sizes: Tensor, first: Tensor) -> Tensor:
    """Running sum of `sizes` before each entry, restarting where `first`."""
    before = sizes.cumsum(0) - sizes
    return before - torch.where(first, before, 0).cummax(0).values
