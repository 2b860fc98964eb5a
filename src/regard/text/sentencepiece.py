"""SentencePiece models (Kudo & Richardson 2018, arXiv 1808.06226) as tokenizers of the `tokenizers` library.

A .model (or .spm) file lists pieces with scores and says how text is normalised (`regard.text.charsmap`). A text gets
the same ids here as from the `sentencepiece` library, which is not needed for it:

    unigram   the cut that maximises the sum of scores, by the same algorithm
    bpe       of all neighbours that make a piece, those with the best piece are merged first; here every pair that
              makes a piece is a merge, ordered by the score of what it makes
    char      bpe without merges

Control pieces (<s>) never come out of text: they get a score that always loses. User-defined symbols are always one
token. Byte pieces (<0x0A>) spell characters that have no piece. What remains are ties: sums of scores that are equal
but for rounding (32 bits there, 64 here), and two ways to merge the same piece from overlapping parts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regard.errors import UserError
from regard.text.charsmap import SPACE, read_rules, steps
from regard.text.protobuf import Damaged, Message
from regard.text.tokenizer import Tokenizer

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, SYMBOL, UNUSED, BYTE, FOREIGN = 1, 2, 3, 4, 5, 6, 7  # what a piece may be; 7 only here
KINDS: dict[int, Literal["unigram", "bpe", "char"]] = {1: "unigram", 2: "bpe", 4: "char"}


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Pieces:
    """What a model file says; a piece's id is its place."""

    pieces: tuple[Piece, ...]
    kind: Literal["unigram", "bpe", "char"]
    byte_fallback: bool
    rules: bytes  # of `regard.text.charsmap`
    remove_spaces: bool
    add_prefix: bool

    def __post_init__(self) -> None:
        names = [piece.text for piece in self.pieces]
        if not names or len({*names}) < len(names) or "" in names:
            raise Damaged(f"{len(names)} pieces, {len({*names})} different ones")
        if sum(piece.kind == UNKNOWN for piece in self.pieces) != 1:
            raise Damaged("no piece, or more than one, for what is unknown")
        if not all(math.isfinite(piece.score) and NORMAL <= piece.kind <= FOREIGN for piece in self.pieces):
            raise Damaged("a piece with a score that is no number, or of a kind that does not exist")
        if self.byte_fallback and sum(piece.kind == BYTE for piece in self.pieces) != 256:
            raise Damaged("byte_fallback without 256 byte pieces")

    def texts(self, *kinds: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def from_sentencepiece(path: str | os.PathLike[str], ids: Mapping[str, int] | None = None) -> Tokenizer:
    """The tokenizer in a SentencePiece model file.

    `ids` gives the pieces other numbers, as Marian's vocab.json does for its two model files: what it has beyond
    this file never comes out of text, and what it lacks is spelled with smaller pieces.
    """
    model = read_pieces(path)
    try:
        if model.rules:
            read_rules(model.rules)  # before the library meets damaged ones
        return Tokenizer(json.dumps(to_json(model if ids is None else _renumbered(model, ids)), ensure_ascii=False))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file: tokenizer.json of the `tokenizers` library, or a SentencePiece model."""
    return Tokenizer.load(path) if str(path).endswith(".json") else from_sentencepiece(path)


def read_pieces(path: str | os.PathLike[str]) -> Pieces:
    """Read a model file; a damaged or foreign one is a UserError."""
    try:
        file = Message(Path(path).read_bytes())
        trainer, normaliser = file.message(2), file.message(3)
        kind = trainer.whole(3, 1)
        odd = [
            name
            for name, found in (
                ("model_type = word", kind == 3),
                ("treat_whitespace_as_suffix", trainer.flag(24, False)),
                ("escape_whitespaces = false", not normaliser.flag(5, True)),
            )
            if found
        ]
        if odd:
            raise UserError(f"{path}: a SentencePiece model with {odd[0]} is not supported; train one without it")
        if kind not in KINDS:
            raise Damaged(f"model type {kind}")
        return Pieces(
            tuple(Piece(piece.text(1), piece.real(2), piece.whole(3, NORMAL)) for piece in file.many(1)),
            kind=KINDS[kind],
            byte_fallback=trainer.flag(35, False),
            rules=normaliser.raw(2),
            remove_spaces=normaliser.flag(4, True),
            add_prefix=normaliser.flag(3, True),
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except Damaged as error:
        raise UserError(
            f"{path}: is no SentencePiece model, or a damaged one ({error}); copy or download it again"
        ) from None


def to_json(model: Pieces) -> Json:
    """The model in the format of the `tokenizers` library."""
    added = [
        {
            "id": id, "content": piece.text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": piece.kind != SYMBOL,
        }
        for id, piece in enumerate(model.pieces)
        if piece.kind in (UNKNOWN, CONTROL, SYMBOL)
    ]  # fmt: skip
    splits: list[Json] = []
    if model.kind == "unigram":
        inner, splits = _unigram(model)
    else:
        inner = _bpe(model)
    if _words_are_apart(model):
        splits.append({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True})
    normalisers = steps(model.rules, remove_spaces=model.remove_spaces, add_prefix=model.add_prefix)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": normalisers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model)},
        "model": inner,
    }


def _words_are_apart(model: Pieces) -> bool:
    """No piece reaches over a space: then words can be cut alone, which is faster and changes nothing."""
    texts = model.texts(NORMAL)
    return SPACE in texts and not any(SPACE in text[1:] for text in texts)


def _decoders(model: Pieces) -> list[Json]:
    def replace(old: str, new: str) -> Json:
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    made = [replace(" ", ""), replace(SPACE, " ")]  # see `_renumbered` for the first
    made += [{"type": "ByteFallback"}] * model.byte_fallback + [{"type": "Fuse"}]
    if model.remove_spaces or model.add_prefix:
        made.append({"type": "Strip", "content": " ", "start": 2**16 if model.remove_spaces else 1, "stop": 0})
    return made


def _unigram(model: Pieces) -> tuple[Json, list[Json]]:
    """The model, and the cuts that keep text from being read as a control piece where its score cannot."""
    normal = model.texts(NORMAL)
    known = {text for text in normal if len(text) == 1}
    lowest = min((piece.score for piece in model.pieces if piece.kind == NORMAL), default=0.0)
    # A character without a piece costs `lowest` - 10, for us minimum - 10. That is no matter where it cannot be
    # avoided: then there may be scores so low that nothing chooses them. Else `lowest` has to stay the minimum.
    forced = all(letter in known for text in normal for letter in text)
    never = 1000 * (lowest - 10) if forced else lowest
    vocab = [(piece.text, piece.score if piece.kind == NORMAL else never) for piece in model.pieces]
    names = [name for name in model.texts(UNKNOWN, CONTROL) if len(name) > 1]
    cuts = [_cut(name, known) for name in names if not forced or not known.issuperset(name)]
    if model.byte_fallback and not (forced and known.issuperset("<0x123456789ABCDEF>")):
        cuts.append("<(?=0x[0-9A-F]{2}>)")
    unk = next(id for id, piece in enumerate(model.pieces) if piece.kind == UNKNOWN)
    inner = {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": model.byte_fallback}
    split = {"type": "Split", "pattern": {"Regex": "|".join(cuts)}, "behavior": "MergedWithPrevious", "invert": False}
    return inner, [split] if cuts else []


def _cut(name: str, known: set[str]) -> str:
    """Where to cut it: beside a character without a piece, since no piece reaches over that."""
    at = next((i for i in range(1, len(name)) if (name[i - 1] in known) != (name[i] in known)), 1)
    return f"{re.escape(name[:at])}(?={re.escape(name[at:])})"


def _bpe(model: Pieces) -> Json:
    if wrong := [text for text in model.texts(UNKNOWN, CONTROL, BYTE) if len(text) == 1]:
        raise UserError(f"the control piece {wrong[0]!r} is a single character, which text may hold; not supported")
    if model.texts(UNUSED):
        raise UserError("bpe with unused pieces is not supported; train the model without a restricted vocabulary")
    order = {piece.text: (-piece.score, id) for id, piece in enumerate(model.pieces) if piece.kind == NORMAL}
    merges = [
        (order[text], order[text[:at]], order[text[at:]], text[:at], text[at:])
        for text in (order if model.kind == "bpe" else ())
        for at in range(1, len(text))
        if text[:at] in order and text[at:] in order
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.texts(UNKNOWN)[0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: id for id, piece in enumerate(model.pieces)},
        "merges": [merge[3:] for merge in sorted(merges)],
    }


def _renumbered(model: Pieces, ids: Mapping[str, int]) -> Pieces:
    """The same pieces at the places that `ids` gives them.

    Others get a space in front: normalised text holds none, so they never come out of it, and decoding removes it.
    Only a single character that this file lacks is taken from them before it would count as unknown (Marian does so
    where it stands alone; of several in a row it makes one <unk>).
    """
    own = {piece.text: piece for piece in model.pieces}
    named = {id: text for text, id in ids.items()}
    lowest = min(piece.score for piece in model.pieces)
    size = max(named, default=-1) + 1
    roles = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<pad>": CONTROL}

    def piece(id: int) -> Piece:
        text = named.get(id, f"unused {id}")
        if text in roles:
            return Piece(text, 0.0, roles[text])
        if re.fullmatch(r">>[\w-]+<<", text):  # the language to translate into, first in a text
            return Piece(SPACE + text, 0.0, SYMBOL)
        if text in own and own[text].kind in (NORMAL, SYMBOL, BYTE):
            return own[text]
        return Piece(text, lowest - 10, NORMAL) if len(text) == 1 else Piece(f" {text}", 0.0, FOREIGN)

    return Pieces(
        tuple(piece(id) for id in range(size)),
        model.kind, model.byte_fallback, model.rules, model.remove_spaces, model.add_prefix,
    )  # fmt: skip
