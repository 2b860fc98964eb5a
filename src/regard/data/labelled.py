"""Labelled texts as ids: stored once, then drawn, padded or packed into batches.

A text is framed  <s> … </s>  and cut to `data.max_length` tokens; the first token is what BERT calls [CLS], where a
classifier may gather what it has read. On disk they are pairs of a text and the number of its class
(`regard.data.store`).

    padded   text [B, N], is_real [B, N],  labels [B, 1]      texts of similar length side by side
    packed   text [R, L], document [R, L], labels [R, D]      D texts a row at most, IGNORE where there are fewer
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from regard.data.batch import PairBatch, Ragged, Tensors
from regard.data.labels import LabelData, read_labelled
from regard.data.pack import Plan
from regard.data.sets import find_files
from regard.data.store import CHUNK, VERSION, Ids, Store, digest_of, is_whole
from regard.data.textpack import TextPacks
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ClassBatch(Tensors):
    """Texts, one a row or packed, and their classes."""

    text: Tensor  # [R, N]
    labels: Tensor  # [R, D], IGNORE where a packed row has fewer texts
    is_real: Tensor | None = None  # [R, N] of padded texts; None: no filler
    document: Tensor | None = None  # [R, N] of packed ones, from 1; 0: filler

    @property
    def tokens(self) -> Tensor:
        """How many texts are learned from."""
        return (self.labels != PairBatch.IGNORE).sum()


class Labelled:
    """Texts with the numbers of their classes [N]."""

    def __init__(self, texts: Ragged, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    @classmethod
    def of(cls, store: Store) -> Labelled:
        return cls(store.sources, store.targets.flat.long())

    def __len__(self) -> int:
        return len(self.labels)

    def choose(self, rows: Tensor) -> Labelled:
        return Labelled(self.texts.choose(rows), self.labels[rows])

    def at(self, epoch: int) -> Labelled:
        return self

    @property
    def longest_row(self) -> int:
        return int(self.texts.lengths.max())

    @property
    def sizes(self) -> Tensor:
        return self.texts.lengths

    def batch(self, rows: Tensor) -> ClassBatch:
        text, is_real = self.texts.pad(rows)
        return ClassBatch(text, self.labels[rows][:, None], None if bool(is_real.all()) else is_real)


class ClassPacks(TextPacks):
    """Packed batches of labelled texts."""

    def __init__(self, data: Labelled, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        super().__init__(data.texts, rows, length, seed, device)
        self.labels = data.labels
        self.most = length // int(data.texts.lengths.min())  # texts that a row can hold

    def finish(self, ids: Tensor, document: Tensor, plan: Plan, generator: torch.Generator) -> ClassBatch:
        labels = torch.full((len(ids), self.most), PairBatch.IGNORE)
        labels[plan.row, plan.document - 1] = self.labels[plan.order]
        return ClassBatch(ids, labels.to(ids.device), document=document)


def draw(labels: Tensor, share: float, seed: int, *, keep: bool) -> Tensor:
    """Which rows [N] are drawn: the same share of every class, and of each at least one; a smaller share of the same
    seed is part of a larger one. With `keep` at least one of a class stays behind instead.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        count = round(share * len(members))
        drawn[members[: min(count, len(members) - 1) if keep else max(count, 1)]] = True
    return drawn


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """w_c = N / (C n_c): every class counts as much as the others, and the mean over the examples is 1."""
    return [sum(counts) / (len(counts) * count) for count in counts]


def prepare_labelled(
    files: Sequence[str],
    config: LabelData,
    folder: str | Path,
    tokenizer: Tokenizer,
    classes: Sequence[str],
) -> Store:
    """The texts of `files` as a store in `folder`, made now unless the one there is of the same making.

    `index["cut"]` is how many were longer than `data.max_length`.
    """
    before = _fingerprint(files, config, tokenizer, classes)
    if is_whole(Path(folder), before):
        return Store.open(folder)
    notes = {"cut": 0}
    numbers = {name: number for number, name in enumerate(classes)}

    def rows() -> Iterator[tuple[Ids, ...]]:
        stream = iter(read_labelled(files, config, classes))
        with tqdm(desc="tokenising", unit="text", disable=not sys.stderr.isatty(), leave=False) as bar:
            while chunk := list(islice(stream, CHUNK)):
                texts = tokenizer.encode_batch([one.text for one in chunk], add_bos=True, add_eos=True)
                notes["cut"] += sum(len(ids) > config.max_length for ids in texts)
                for one, ids in zip(chunk, texts, strict=True):
                    yield _shortened(ids, config.max_length), [numbers[one.label]]
                bar.update(len(chunk))
        if _fingerprint(files, config, tokenizer, classes) != before:
            raise UserError(f"{', '.join(files)}: changed while being read; start again when they are complete")

    return Store.write(folder, rows(), vocab_size=(len(tokenizer), len(classes)), fingerprint=before, notes=notes)


def _shortened(ids: Ids, length: int) -> Ids:
    """The first tokens of a text that is too long, and its end."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def _fingerprint(files: Sequence[str], config: LabelData, tokenizer: Tokenizer, classes: Sequence[str]) -> str:
    """A digest of everything that decides what a store holds."""
    paths = [path.resolve() for path in find_files(files, config.folder)]
    parts = {
        "version": VERSION,
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths],
        "reading": (config.columns, config.header, config.names, config.skip_bad, config.max_length, list(classes)),
        "tokenizer": digest_of(tokenizer),
        "framing": (tokenizer.special_id("bos"), tokenizer.special_id("eos")),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
