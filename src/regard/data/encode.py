"""From text to token ids on disk: each task's rows, tokenised once before training (`regard.data.columns`).

pairs        source  … </s>        target  <s> … </s>
labelled     text  <s> … </s>, truncated to data.max_length        label, the number of its class
tagged       text  <s> … </s>      labels, the class of each token or IGNORE
documents    text  <s> … </s>, parts of at most so many tokens
stream       ids, all documents as one sequence with </s> between them

Rows come in groups, of which `index["groups"]` has the number of rows, so that each may have a weight in training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Labels
from regard.data.columns import Column, Store, Writer, prepare, token_type
from regard.data.documents import Piece, utf8
from regard.data.labels import Example, LabelData
from regard.data.pairs import Pair
from regard.data.sets import fingerprint
from regard.data.tags import Sentence, TagData
from regard.errors import UserError
from regard.progress import stage
from regard.text.tokenizer import Tokenizer
from regard.text.words import encode_words

T = TypeVar("T")
ROWS = 4096  # rows that are encoded and written at once …
CHARACTERS = 4_000_000  # … or fewer, if they are long
CHECKPOINT = 1 << 26  # tokens of a stream after which a checkpoint is saved


def digest_of(tokenizer: Tokenizer) -> str:
    """A digest of the tokenizer and of its special tokens."""
    return hashlib.sha256(f"{tokenizer.json} {tokenizer.bos} {tokenizer.eos}".encode()).hexdigest()


def _chunks(
    stream: Iterable[T], size: Callable[[T], int], unit: str, total: int = 0, done: int = 0
) -> Iterator[list[T]]:
    """Lists of rows, limited in number and in characters; progress is shown in rows, or in "characters"."""
    chunk: list[T] = []
    characters = 0
    with stage("tokenising", unit, total, done) as progress:
        for row in stream:
            chunk.append(row)
            characters += size(row)
            if len(chunk) == ROWS or characters >= CHARACTERS:
                yield chunk
                progress.count += characters if unit == "characters" else len(chunk)
                chunk, characters = [], 0
        if chunk:
            yield chunk


def group_weights(store: Store, weights: Sequence[float]) -> Tensor | None:
    """The weight of every row [rows], by those of its groups; None: all are 1."""
    if all(weight == 1 for weight in weights):
        return None
    return torch.tensor(weights).repeat_interleave(torch.tensor(store.index["groups"]))


def _count_groups(writer: Writer, groups: Iterable[T]) -> Iterator[T]:
    """Each group; when the next is asked for, the rows that were written of this one are noted."""
    writer.notes.setdefault("groups", [])
    for group in groups:
        yield group
        writer.notes["groups"].append(writer.rows - sum(writer.notes["groups"]))


def store_pairs(
    groups: Iterable[Iterable[Pair]], folder: str | Path, source: Tokenizer, target: Tokenizer,
    state: Callable[[], str], *, name: str, max_length: int | None = None,
) -> Store:  # fmt: skip
    """Sentence pairs; longer ones than `max_length` are dropped and counted (`index["dropped"]`).

    `state` is the fingerprint of what decides the pairs, `name` is for messages.
    """

    def write(writer: Writer) -> None:
        dropped = 0
        pairs = _count_groups(writer, groups)
        size = lambda pair: len(pair.source) + len(pair.target)  # noqa: E731
        for chunk in chain.from_iterable(_chunks(group, size, "pairs") for group in pairs):
            sources = source.encode_batch([pair.source for pair in chunk], add_eos=True)
            targets = target.encode_batch([pair.target for pair in chunk], add_bos=True, add_eos=True)
            kept: list[int] = []
            for row, pair in enumerate(chunk):
                # A decoder reads its target without the last token, so both sides count one special token.
                if max_length is None or max(len(sources[row]), len(targets[row]) - 1) <= max_length:
                    kept.append(row)
                else:
                    dropped += 1
                    writer.notes.setdefault("first_dropped", f"{pair.file}, line {pair.line:,}")
            writer.append(source=[sources[row] for row in kept], target=[targets[row] for row in kept])
        writer.notes |= {"dropped": dropped, "max_length": max_length}
        if not writer.rows:
            why = f": all {dropped:,} are longer than max_length = {max_length}; raise it" if dropped else ""
            raise UserError(f"{name}: no sentence pairs{why}")

    columns = {"source": Column(token_type(len(source)), None), "target": Column(token_type(len(target)), None)}
    how = (digest_of(source), digest_of(target), max_length)
    return prepare(folder, columns, lambda: fingerprint((), state(), *how), write)


def store_labelled(
    groups: Iterable[Iterable[Example]], config: LabelData, folder: str | Path, tokenizer: Tokenizer,
    state: Callable[[], str],
) -> Store:  # fmt: skip
    """Labelled texts; `index["truncated"]` is how many were longer than `data.max_length`.

    `state` is the fingerprint of what decides the texts.
    """
    numbers = {name: number for number, name in enumerate(config.classes)}

    def write(writer: Writer) -> None:
        most = config.max_length
        writer.notes["truncated"] = 0
        parts = _count_groups(writer, groups)
        for chunk in chain.from_iterable(_chunks(part, lambda one: len(one.text), "texts") for part in parts):
            texts = tokenizer.encode_batch([one.text for one in chunk], add_bos=True, add_eos=True)
            writer.notes["truncated"] += sum(len(ids) > most for ids in texts)
            texts = [ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in texts]
            writer.append(text=texts, label=np.array([numbers[one.label] for one in chunk]))

    columns = {"text": Column(token_type(len(tokenizer)), None), "label": Column("<i4")}
    return prepare(folder, columns, lambda: fingerprint((), state(), digest_of(tokenizer)), write)


def store_tagged(
    groups: Iterable[Iterable[Sentence]], config: TagData, folder: str | Path, tokenizer: Tokenizer,
    state: Callable[[], str],
) -> Store:  # fmt: skip
    """Tagged sentences; `index["split"]` is how many were longer than `data.max_length`.

    `state` is the fingerprint of what decides the sentences.
    """
    numbers = {name: number for number, name in enumerate(config.classes)}

    def write(writer: Writer) -> None:
        writer.notes["split"] = 0
        size = lambda one: sum(map(len, one.words))  # noqa: E731
        parts = _count_groups(writer, groups)
        for chunk in chain.from_iterable(_chunks(part, size, "sentences") for part in parts):
            texts, labels = [], []
            for part in encode_words(tokenizer, [one.words for one in chunk], config.max_length):
                tags = chunk[part.sentence].tags[part.begin :]
                row = [Labels.IGNORE] * len(part.ids)
                for at, tag in zip(part.first, tags, strict=False):  # the rest is in the next part
                    row[at] = numbers[tag]
                row[-1] = Labels.IGNORE  # </s>, for words without tokens
                texts.append(part.ids)
                labels.append(row)
                writer.notes["split"] += part.begin == 0 and len(part.first) < len(tags)
            writer.append(text=texts, labels=labels)

    columns = {"text": Column(token_type(len(tokenizer)), None), "labels": Column("<i4", None)}
    return prepare(folder, columns, lambda: fingerprint((), state(), digest_of(tokenizer)), write)


def store_documents(
    groups: Iterable[Iterable[Piece]], folder: str | Path, tokenizer: Tokenizer, length: int, state: str,
    characters: int = 0,
) -> Store:  # fmt: skip
    """The documents in parts of at most `length` tokens, <s> and </s> included.

    `state` is the fingerprint of what decides the text; it has so many `characters`, if known.
    """
    bos, eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")

    def write(writer: Writer) -> None:
        for group in _count_groups(writer, groups):
            held: list[int] = []
            for chunk in _chunks(group, lambda piece: len(piece.text), "characters", characters):
                parts = []
                for (_, ends), ids in zip(chunk, tokenizer.encode_batch([text for text, _ in chunk]), strict=True):
                    held += ids
                    while len(held) > length - 2 or (ends and held):
                        parts.append([bos, *held[: length - 2], eos])
                        held = held[length - 2 :]
                writer.append(text=parts)
            if held:  # the text ends inside a document
                writer.append(text=[[bos, *held, eos]])
        if not writer.rows:
            raise UserError("the text has no tokens: it is empty")

    columns = {"text": Column(token_type(len(tokenizer)), None)}
    return prepare(folder, columns, lambda: fingerprint((), state, digest_of(tokenizer), length), write)


def store_tokens(
    groups: Sequence[Iterable[Piece]], folder: str | Path, tokenizer: Tokenizer, state: str, characters: int = 0
) -> Store:
    """All documents as one sequence of ids, with counts in its index.

    A large corpus takes hours, so checkpoints are saved, and an interrupted preparation continues from the last.
    """

    def write(writer: Writer) -> None:
        empty = {"pieces": 0, "documents": 0, "characters": 0, "bytes": 0, "unknown": 0}
        counts = writer.notes = {**empty, "first": [0, 0], "open": False, **writer.notes}
        saved = writer.rows
        for group in _count_groups(writer, groups[len(counts.get("groups", ())) :]):
            pieces = iter(group)
            for _ in range(counts["pieces"]):
                next(pieces)
            for chunk in _chunks(pieces, lambda piece: len(piece.text), "characters", characters, counts["characters"]):
                writer.append(ids=_joined(chunk, tokenizer, counts))
                if writer.rows - saved >= CHECKPOINT:
                    writer.checkpoint()
                    saved = writer.rows
            counts["pieces"] = 0
        if not writer.rows:
            raise UserError("the text has no tokens: it is empty")

    columns = {"ids": Column(token_type(len(tokenizer)))}
    return prepare(folder, columns, lambda: fingerprint((), state, digest_of(tokenizer)), write)


def _joined(chunk: list[Piece], tokenizer: Tokenizer, counts: dict[str, Any]) -> np.ndarray:
    """The ids of some pieces, </s> before each new document but the first; `counts` are updated.

    `first` are the characters and bytes of the first token, `open` says that the last document has not ended.
    """
    joined: list[int] = []
    for (text, ends), ids in zip(chunk, tokenizer.encode_batch([text for text, _ in chunk]), strict=True):
        begins = not counts["open"]
        if begins and text:
            if counts["documents"]:
                joined.append(tokenizer.special_id("eos"))
            elif ids:
                raw = tokenizer.token_bytes(ids[0]) if tokenizer.byte_level else tokenizer.decode([ids[0]]).encode()
                counts["first"] = [len(raw.decode(errors="ignore")), len(raw)]
        joined += ids
        counts["pieces"] += 1
        counts["documents"] += begins
        counts["characters"] += len(text)
        counts["bytes"] += utf8(text)
        counts["unknown"] += 0 if tokenizer.unk is None else ids.count(tokenizer.unk)
        counts["open"] = not ends
    return np.array(joined, np.int64)
