"""Examples: the data on which heads are measured, in batches, with the loss of each example.

    encoder-decoder   sentence pairs (two aligned files, or a table)        loss of each target token
    decoder           text, cut into chunks of equal length                 loss of each next token
    encoder, tokens   one text per line, 15 % of it masked (Devlin 2018)    loss of each masked token
    encoder, classes  a table with columns text and label (or the recipe's) loss of the class
    encoder, tags     CoNLL columns, or tables of lists (as the recipe)     loss of each word's tag
    encoder, vectors  one text per line                                     none; outputs are compared instead

For a model that reads images, the first column of the table names their files, relative to the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import Tensors, pad_rows
from regard.data.documents import TextData
from regard.data.labels import LabelData
from regard.data.pairs import PairData
from regard.data.tags import Sentence, TagData
from regard.errors import UserError
from regard.explore.inside import Inside
from regard.settings import from_dict
from regard.text.words import encode_words

IGNORE = -100
TOKENS = 4096  # per batch, padding included
MASKED = 0.15
LENGTH = 128  # tokens of a chunk of text
COLUMNS = ("text", "label", "header", "names", "skip_bad")  # of [data]: how the recipe reads a table
TAG_COLUMNS = ("tokens", "tags", "names", "skip_bad", "max_length")


@dataclass(frozen=True)
class Batch(Tensors):
    """Rows that are computed together; `*_is_real` is None where there is no padding."""

    source: Tensor  # [B, S] ids, or images [B, C, H, W], or features [B, R, F]
    source_is_real: Tensor | None
    target: Tensor | None  # [B, T] decoder input of an encoder-decoder
    target_is_real: Tensor | None  # [B, T]
    expected: Tensor | None  # [B, N] ids or IGNORE, or classes [B], or vectors [B, dim] or [B, N, dim]; None: no loss

    def output(self, model: Any) -> Tensor:
        if self.target is None:
            return cast(Tensor, model(self.source, self.source_is_real))
        return cast(Tensor, model(self.source, self.target, self.source_is_real, self.target_is_real))

    def losses(self, model: Any) -> tuple[Tensor, Tensor]:
        """For each row the summed loss (of vectors: 1 - cosine) and its number of tokens, [B] each."""
        assert self.expected is not None
        output, rows = self.output(model), len(self.expected)
        if self.expected.is_floating_point():
            loss = 1 - torch.cosine_similarity(output.double(), self.expected.double(), dim=-1)  # [B] or [B, N]
            counted = torch.ones_like(loss) if self.source_is_real is None or loss.dim() == 1 else self.source_is_real
            loss = loss * counted
        else:
            logits, labels = output.float().flatten(0, -2), self.expected.flatten()
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
            counted = self.expected != IGNORE
        return loss.view(rows, -1).sum(dim=1), counted.view(rows, -1).sum(dim=1).float()


class Example(NamedTuple):
    """One row before it is padded."""

    source: Tensor  # [S], or an image
    target: Tensor | None = None  # [T]
    expected: Tensor | None = None  # [N], or a class []


def read_examples(inside: Inside, files: Sequence[str], limit: int) -> list[Example]:
    """The first `limit` examples in `files`."""
    if limit < 1:
        raise UserError(f"limit = {limit}: must be 1 or more")
    if inside.numbers is not None:
        raise UserError(
            "output_head = 'values': heads are measured on tokens or classes; inspect this model in the page"
        )
    examples = list(islice(_examples(inside, files, limit), limit))
    if not examples:
        raise UserError(f"{', '.join(files)}: contains no example that the model can read")
    return examples


def _examples(inside: Inside, files: Sequence[str], limit: int) -> Iterator[Example]:
    config = inside.config
    if inside.reader.tags:
        own = {name: value for name, value in inside.bundle.tables["data"].items() if name in TAG_COLUMNS}
        for sentence in from_dict(TagData, {**own, "train": list(files)}, "data.").read(files):
            yield from _of_sentence(inside, sentence)
        return
    if config.input == "tokens" and config.output_head == "classes":
        own = {name: value for name, value in inside.bundle.tables["data"].items() if name in COLUMNS}
        for row in from_dict(LabelData, {**own, "train": list(files)}, "data.").read(files):
            yield _of_pair(inside, row.text, row.label, f"{row.file}, row {row.row}")
        return
    if config.input != "tokens" or inside.reader.writes:
        data = PairData(train=tuple(files))
        folder = data.find(files)[0].parent
        for pair in data.read(files):
            yield _of_pair(inside, pair.source, pair.target, f"{pair.file}, line {pair.line}", folder)
        return
    texts = TextData(train=tuple(files)).read(files)
    if config.architecture == "decoder":
        yield from _chunks(inside, (piece.text for piece in texts))
        return
    generator = torch.Generator().manual_seed(1)
    for line in "".join(piece.text + "\n" * piece.ends for piece in islice(texts, limit)).splitlines():
        if line.strip():
            yield _of_line(inside, line, generator)


def _of_pair(inside: Inside, source: str, target: str, where: str, folder: Path = Path()) -> Example:
    """A text or an image (a file in `folder`), and its translation, caption or class."""
    reader = inside.reader
    text, image = (source, None) if inside.config.input == "tokens" else (None, folder / source)
    try:
        input = reader.read(text, image, truncate=not reader.writes)
        if not reader.writes:
            return Example(input.source[0], expected=torch.tensor(_class(inside, target)))
        input = reader.with_target(input, inside.bundle.target.encode(target))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    assert input.target is not None
    expected = torch.tensor([IGNORE if id is None else id for id in input.expected])
    return Example(input.source[0], input.target[0], expected)


def _of_sentence(inside: Inside, sentence: Sentence) -> Iterator[Example]:
    longest = inside.bundle.limits.source or inside.bundle.limits.context
    for part in encode_words(inside.bundle.source, [sentence.words], longest):
        expected = torch.full((len(part.ids),), IGNORE)
        tags = sentence.tags[part.begin : part.begin + len(part.first)]
        expected[part.first] = torch.tensor([_class(inside, tag) for tag in tags])
        yield Example(torch.tensor(part.ids), expected=expected)


def _class(inside: Inside, name: str) -> int:
    names = inside.bundle.classes
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    raise UserError(f"{name!r} is not a class of this model; its classes are {', '.join(names[:20])}")


def _chunks(inside: Inside, texts: Iterable[str]) -> Iterator[Example]:
    """Chunks of one long text: `length` tokens are read, each predicts the next."""
    length = min(LENGTH, inside.config.max_length)
    ids: list[int] = []
    short = True  # a text shorter than one chunk
    for text in texts:
        ids += inside.bundle.source.encode(text)
        while len(ids) > length:
            row, ids, short = ids[: length + 1], ids[length:], False
            yield Example(torch.tensor(row[:-1]), expected=torch.tensor(row[1:]))
    if short and len(ids) > 1:
        yield Example(torch.tensor(ids[:-1]), expected=torch.tensor(ids[1:]))


def _of_line(inside: Inside, line: str, generator: torch.Generator) -> Example:
    ids = inside.reader.read(line, truncate=True).source[0].cpu()
    if inside.config.output_head != "tokens":
        return Example(ids)
    tokenizer = inside.bundle.source
    mask = tokenizer.mask
    if mask is None:
        raise UserError("the tokenizer has no [MASK] or <mask>, which the loss of masked tokens needs")
    special = torch.tensor([int(id) in (tokenizer.bos, tokenizer.eos, mask) for id in ids])
    chosen = (torch.rand(len(ids), generator=generator) < MASKED) & ~special
    if not chosen.any() and bool((~special).any()):  # a short line gets one mask
        chosen[int((~special).nonzero()[0])] = True
    return Example(ids.masked_fill(chosen, mask), expected=ids.masked_fill(~chosen, IGNORE))


def examples_of(inside: Inside, pairs: Iterable[tuple[str, str | None]]) -> list[Example]:
    """Examples from (text, target) in memory, as `read_examples` makes them of files; the target may be None where the
    loss needs none: the text itself is predicted, or there is no loss."""
    config, generator, examples = inside.config, torch.Generator().manual_seed(1), []
    if config.input != "tokens" or inside.reader.tags:
        raise UserError("the heads of this model are measured on files:  regard heads RUN --data FILE")
    for text, target in pairs:
        if inside.reader.writes or config.output_head == "classes":
            if target is not None:
                examples.append(_of_pair(inside, text, target, "example"))
        elif config.architecture == "decoder":
            examples += _chunks(inside, [text])
        else:
            examples.append(_of_line(inside, text, generator))
    return examples


def in_batches(examples: Sequence[Example], device: torch.device) -> list[Batch]:
    """Rows of similar length together, as many as TOKENS allow."""

    def size(example: Example) -> int:
        target = 0 if example.target is None else len(example.target)
        return max(len(example.source) if example.source.dim() == 1 else 64, target)

    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=size):
        if batches[-1] and (len(batches[-1]) + 1) * size(example) > TOKENS:
            batches.append([])
        batches[-1].append(example)
    return [_pad(rows).to(device) for rows in batches if rows]


def _pad(rows: Sequence[Example]) -> Batch:
    def side(values: Sequence[Tensor | None], padding: int = 0) -> tuple[Any, Tensor | None]:
        """One field of all rows, padded, and where it is real; None where there is no such field, or no padding."""
        rows = [value.cpu() for value in values if value is not None]
        if not rows or rows[0].dim() != 1:  # an image or a class
            return torch.stack(rows) if rows else None, None
        table, is_real = pad_rows(rows)
        return table.masked_fill(~is_real, padding), None if bool(is_real.all()) else is_real

    sources, targets, expected = zip(*rows, strict=True)
    return Batch(*side(sources), *side(targets), side(expected, IGNORE)[0])
