"""Examples: the data on which heads are judged, batch by batch, with the loss of each one.

    encoder-decoder   sentence pairs (two aligned files, or a table)       loss of each target token
    decoder           text, cut into pieces of equal length                loss of each next token
    encoder, tokens   a text a line, 15 % of it masked (Devlin 2018)       loss of each masked token
    encoder, classes  a table with columns text and label (or the recipe's) loss of the class
    encoder, vectors  a text a line                                        none; outputs are compared instead

For a model that reads pictures the table's first column names their files, beside the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.config import DataConfig, find
from regard.data.documents import pieces
from regard.data.labels import LabelData, examples
from regard.data.read import pairs
from regard.data.text import TextData
from regard.errors import UserError
from regard.explore.inside import Inside
from regard.explore.reading import Readings
from regard.settings import from_dict

IGNORE = -100
TOKENS = 4096  # of a batch, filler included
MASKED = 0.15
LENGTH = 128  # tokens of a piece of text


@dataclass(frozen=True)
class Batch:
    """Rows that are computed together; `*_valid` is None where there is no filler."""

    source: Tensor  # [B, S] ids, or pictures [B, C, H, W], or features [B, R, F]
    source_is_real: Tensor | None
    target: Tensor | None  # [B, T] what is read, of an encoder-decoder
    target_is_real: Tensor | None  # [B, T]
    expected: Tensor | None  # [B, N] ids or IGNORE, or classes [B]; None: no loss

    def output(self, model: Any) -> Tensor:
        given = (self.source,) if self.target is None else (self.source, self.target)
        is_real = (self.source_is_real,) if self.target is None else (self.source_is_real, self.target_is_real)
        if self.source.dim() > 2:  # pictures have no filler
            return model(*given) if self.target is None else model(*given, None, self.target_is_real)
        out: Tensor = model(*given, *is_real)
        return out

    def losses(self, model: Any) -> tuple[Tensor, Tensor]:
        """For each row the summed loss and the number of tokens that it sums, [B] each."""
        assert self.expected is not None
        logits = self.output(model).float()
        loss = F.cross_entropy(logits.flatten(0, -2), self.expected.flatten(), ignore_index=IGNORE, reduction="none")
        counted = self.expected != IGNORE
        if self.expected.dim() == 1:
            return loss, counted.float()
        return loss.view(self.expected.shape).sum(dim=1), counted.sum(dim=1).float()


@dataclass(frozen=True)
class Example:
    """One row before it is padded."""

    source: Tensor  # [S], or a picture
    target: Tensor | None = None  # [T]
    expected: Tensor | None = None  # [N], or a class []


def read_examples(inside: Inside, files: Sequence[str], limit: int, seed: int = 1) -> list[Example]:
    """The first `limit` examples in `files`."""
    if limit < 1:
        raise UserError(f"limit = {limit}: must be 1 or more")
    found = list(islice(_examples(inside, files, limit, seed), limit))
    if not found:
        raise UserError(f"{', '.join(files)}: holds nothing that the model could read")
    return found


def _examples(inside: Inside, files: Sequence[str], limit: int, seed: int) -> Iterator[Example]:
    config, readings = inside.config, inside.readings
    if config.input == "tokens" and config.output_head == "classes":
        for row in examples(files, _columns(inside, files)):
            yield _of_text(inside, row.text, row.label, f"{row.file}, row {row.row}")
        return
    if config.input != "tokens" or readings.writes:
        data = DataConfig(train=tuple(files))
        folder = find(files, data.folder)[0][0].parent
        for pair in pairs(files, data):
            yield _of_pair(inside, readings, pair.source, pair.target, folder, f"{pair.file}, line {pair.line}")
        return
    texts = pieces(files, TextData(train=tuple(files)))
    if config.architecture == "decoder":
        yield from _pieces(inside, (piece.text for piece in texts))
        return
    generator = torch.Generator().manual_seed(seed)
    for line in "".join(piece.text + "\n" * piece.ends for piece in islice(texts, limit)).splitlines():
        if line.strip():
            yield _of_line(inside, readings, line, generator)


def _columns(inside: Inside, files: Sequence[str]) -> LabelData:
    """Which columns hold text and label: those of the model's recipe, or the usual ones."""
    table = inside.tables.get("data")
    known = ("text", "label", "header", "names", "skip_bad")
    own = {name: table[name] for name in known if name in table} if isinstance(table, dict) else {}
    return from_dict(LabelData, {**own, "train": list(files)}, "data.")


def _of_text(inside: Inside, text: str, label: str, where: str) -> Example:
    try:
        reading = inside.readings.read(text, cut=True)
        return Example(reading.source[0], expected=torch.tensor(_class(inside, label)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _of_pair(inside: Inside, readings: Readings, source: str, target: str, folder: Path, where: str) -> Example:
    """A sentence and its translation, a picture and its caption or class."""
    picture = folder / source if inside.config.input != "tokens" else None
    try:
        reading = readings.read(None if picture is not None else source, picture)
        if not readings.writes:
            return Example(reading.source[0], expected=torch.tensor(_class(inside, target)))
        reading = readings.with_target(reading, readings.target_ids(target))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    assert reading.target is not None
    expected = torch.tensor([IGNORE if id is None else id for id in reading.expected])
    return Example(reading.source[0], reading.target[0], expected)


def _class(inside: Inside, name: str) -> int:
    names = [inside.readings.class_name(index) for index in range(inside.config.classes or 0)]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise UserError(f"{name!r} is no class of this model; it has {', '.join(names[:20])}")


def _pieces(inside: Inside, texts: Iterable[str]) -> Iterator[Example]:
    """Pieces of one long text: `length` tokens are read, each expects the next."""
    tokenizer = inside.readings.source
    if tokenizer is None:
        raise UserError("the folder has no tokenizer: add tokenizer.json to it")
    length = min(LENGTH, inside.config.max_length)
    ids: list[int] = []
    enough = False
    for text in texts:
        ids += tokenizer.encode(text)
        while len(ids) > length:
            enough = True
            row, ids = ids[: length + 1], ids[length:]
            yield Example(torch.tensor(row[:-1]), expected=torch.tensor(row[1:]))
    if not enough and len(ids) > 1:
        yield Example(torch.tensor(ids[:-1]), expected=torch.tensor(ids[1:]))


def _of_line(inside: Inside, readings: Readings, line: str, generator: torch.Generator) -> Example:
    reading = readings.read(line, cut=True)
    ids = reading.source[0]
    if inside.config.output_head != "tokens":
        return Example(ids)
    tokenizer = readings.source
    mask = None if tokenizer is None else tokenizer.mask
    if mask is None:
        raise UserError("the tokenizer has no [MASK] or <mask>, which the loss of masked tokens needs")
    special = torch.tensor([tokenizer is not None and int(id) in (tokenizer.bos, tokenizer.eos, mask) for id in ids])
    chosen = (torch.rand(len(ids), generator=generator) < MASKED) & ~special
    if not chosen.any() and bool((~special).any()):  # a short line gives one
        chosen[int((~special).nonzero()[0])] = True
    hidden = torch.where(chosen, torch.tensor(mask), ids.cpu())
    return Example(hidden, expected=torch.where(chosen, ids.cpu(), torch.tensor(IGNORE)))


def in_batches(found: Sequence[Example], device: torch.device) -> list[Batch]:
    """Rows of similar length together, as many as TOKENS allow."""

    def size(example: Example) -> int:
        target = 0 if example.target is None else len(example.target)
        return max(len(example.source) if example.source.dim() == 1 else 64, target)

    batches: list[list[Example]] = [[]]
    for example in sorted(found, key=size):
        if batches[-1] and (len(batches[-1]) + 1) * size(example) > TOKENS:
            batches.append([])
        batches[-1].append(example)
    return [_pad(rows, device) for rows in batches if rows]


def _pad(rows: Sequence[Example], device: torch.device) -> Batch:
    def side(sequences: Sequence[Tensor], filler: int = 0) -> tuple[Tensor, Tensor | None]:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        table = pad_sequence(list(sequences), batch_first=True, padding_value=filler)
        is_real = torch.arange(table.shape[1]) < lengths[:, None]
        return table.to(device), None if bool(is_real.all()) else is_real.to(device)

    sources = [row.source.cpu() for row in rows]
    source, is_real = side(sources) if sources[0].dim() == 1 else (torch.stack(sources).to(device), None)
    target, target_is_real, expected = None, None, None
    if rows[0].target is not None:
        target, target_is_real = side([row.target.cpu() for row in rows if row.target is not None])
    labels = [row.expected.cpu() for row in rows if row.expected is not None]
    if labels:
        expected = torch.stack(labels).to(device) if labels[0].dim() == 0 else side(labels, IGNORE)[0]
    return Batch(source, is_real, target, target_is_real, expected)
