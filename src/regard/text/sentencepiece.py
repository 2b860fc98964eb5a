"""SentencePiece models (Kudo & Richardson 2018, arXiv 1808.06226) as tokenizers of the `tokenizers` library.

A .model (or .spm) file lists pieces with scores and says how text is normalised (`regard.text.normalizer`). The
`sentencepiece` package reads it; the converted tokenizer gives a text the same ids as that package:

    unigram   the segmentation that maximises the sum of scores, by the same algorithm
    bpe       adjacent pieces are merged into the piece with the best score first; here every pair that makes a piece
              is a merge, ordered by the score of the result
    char      bpe without merges

Control pieces (<s>) never come out of text: their score is too low to be chosen. User-defined symbols are always one
token. Byte pieces (<0x0A>) spell characters that have no piece. Only ties may differ: sums of scores that are equal
except for rounding (32 bits there, 64 here), and two ways to merge the same piece from overlapping parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import MissingExtra, UserError
from regard.text.normalizer import SPACE, normalizer_steps
from regard.text.tokenizer import Tokenizer

Json = dict[str, Any]

TOKENIZERS = ("tokenizer", "source", "target")  # file names of the tokenizers of a model, without .json
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces in a model file
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4  # types of models


def from_sentencepiece(path: str | os.PathLike[str], ids: Mapping[str, int] | None = None) -> Tokenizer:
    """The tokenizer in a SentencePiece model file.

    `ids` replaces the ids of the pieces, as Marian's vocab.json does for its two model files: pieces that only `ids`
    has never come out of text, and text whose pieces it lacks is segmented into smaller ones.
    """
    model = _read_model(path)
    try:
        if ids is not None:
            _renumber(model, ids)
        return Tokenizer(json.dumps(_to_json(model), ensure_ascii=False))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file: tokenizer.json of the `tokenizers` library, or a SentencePiece model.

    A folder stands for its tokenizer.json.
    """
    path = Path(path) / "tokenizer.json" if Path(path).is_dir() else path
    return Tokenizer.load(path) if str(path).endswith(".json") else from_sentencepiece(path)


def load_tokenizers(folder: str | os.PathLike[str]) -> dict[str, Tokenizer]:
    """The tokenizers in the folder of a model by name: {"tokenizer": …}, or {"source": …, "target": …}, or {}."""
    paths = {name: Path(folder) / f"{name}.json" for name in TOKENIZERS}
    return {name: Tokenizer.load(path) for name, path in paths.items() if path.is_file()}


def _read_model(path: str | os.PathLike[str]) -> Any:
    """The `ModelProto` in a model file; a damaged or unsupported one is a UserError."""
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise MissingExtra("sentencepiece", "sentencepiece", f"{path}: reading a SentencePiece model") from None
    try:
        content = Path(path).read_bytes()
        SentencePieceProcessor().LoadFromSerializedProto(content)  # checks pieces, types and rules
        model = ModelProto.FromString(content)
        if not all(isinstance(piece.piece, str) for piece in model.pieces):
            raise DecodeError("a piece is not UTF-8 text")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (RuntimeError, UnicodeDecodeError, DecodeError) as error:
        raise UserError(
            f"{path}: not a SentencePiece model, or a damaged one ({error}); copy or download it again"
        ) from None
    unsupported = {
        "model_type = word": model.trainer_spec.model_type == WORD,
        "treat_whitespace_as_suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "escape_whitespaces = false": not model.normalizer_spec.escape_whitespaces,
    }
    for name, present in unsupported.items():
        if present:
            raise UserError(f"{path}: a SentencePiece model with {name} is not supported; train one without it")
    return model


def _texts(model: Any, *types: int) -> list[str]:
    return [piece.piece for piece in model.pieces if piece.type in types]


def _to_json(model: Any) -> Json:
    """The model in the format of the `tokenizers` library."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    added = [
        {
            "id": id, "content": piece.piece, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": piece.type != USER_DEFINED,
        }
        for id, piece in enumerate(model.pieces)
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    splits: list[Json] = []
    if trainer.model_type == UNIGRAM:
        converted, splits = _unigram(model)
    else:
        converted = _bpe(model)
    texts = _texts(model, NORMAL)
    if SPACE in texts and not any(SPACE in text[1:] for text in texts):
        # No piece spans a space, so words can be segmented one by one: faster, with the same result.
        splits.append({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True})
    remove_spaces, add_prefix = normalizer.remove_extra_whitespaces, normalizer.add_dummy_prefix
    steps = normalizer_steps(normalizer.precompiled_charsmap, remove_spaces=remove_spaces, add_prefix=add_prefix)
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": old}, "content": new}
        for old, new in ((" ", ""), (SPACE, " "))  # the first is explained in `_renumber`
    ]
    decoders += [{"type": "ByteFallback"}] * trainer.byte_fallback + [{"type": "Fuse"}]
    if remove_spaces or add_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 2**16 if remove_spaces else 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": converted,
    }


def _unigram(model: Any) -> tuple[Json, list[Json]]:
    """The model, and the splits that keep text from being read as a control piece where its score cannot."""
    byte_fallback = model.trainer_spec.byte_fallback
    normal = _texts(model, NORMAL)
    known = {text for text in normal if len(text) == 1}
    lowest = min((piece.score for piece in model.pieces if piece.type == NORMAL), default=0.0)
    # An unknown character costs `lowest` - 10 there and minimum - 10 here. That makes no difference where every
    # character of a piece is a piece itself: an unknown one cannot be avoided then, so other pieces may have scores
    # too low to be chosen. Otherwise `lowest` has to stay the minimum.
    closed = all(char in known for text in normal for char in text)
    never = 1000 * (lowest - 10) if closed else lowest
    vocab = [(piece.piece, piece.score if piece.type == NORMAL else never) for piece in model.pieces]
    names = [name for name in _texts(model, UNKNOWN, CONTROL) if len(name) > 1]
    cuts = [_cut(name, known) for name in names if not closed or not known.issuperset(name)]
    if byte_fallback and not (closed and known.issuperset("<0x123456789ABCDEF>")):
        cuts.append("<(?=0x[0-9A-F]{2}>)")
    unk = next(id for id, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    converted = {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": byte_fallback}
    split = {"type": "Split", "pattern": {"Regex": "|".join(cuts)}, "behavior": "MergedWithPrevious", "invert": False}
    return converted, [split] if cuts else []


def _cut(name: str, known: set[str]) -> str:
    """A pattern that splits `name` next to a character without a piece, which no piece spans."""
    at = next((i for i in range(1, len(name)) if (name[i - 1] in known) != (name[i] in known)), 1)
    return f"{re.escape(name[:at])}(?={re.escape(name[at:])})"


def _bpe(model: Any) -> Json:
    if wrong := [text for text in _texts(model, UNKNOWN, CONTROL, BYTE) if len(text) == 1]:
        raise UserError(f"the control piece {wrong[0]!r} is a single character, which text may contain; not supported")
    if any(not text.startswith(" ") for text in _texts(model, UNUSED)):
        raise UserError("bpe with unused pieces is not supported; train the model without a restricted vocabulary")
    order = {piece.piece: (-piece.score, id) for id, piece in enumerate(model.pieces) if piece.type == NORMAL}
    merges = [
        (order[text], order[text[:at]], order[text[at:]], text[:at], text[at:])
        for text in (order if model.trainer_spec.model_type == BPE else ())
        for at in range(1, len(text))
        if text[:at] in order and text[at:] in order
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": _texts(model, UNKNOWN)[0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: id for id, piece in enumerate(model.pieces)},
        "merges": [merge[3:] for merge in sorted(merges)],
    }


def _renumber(model: Any, ids: Mapping[str, int]) -> None:
    """Replace the pieces by those of `ids`, each at its id.

    Pieces that the file lacks are unused and get a space in front: normalised text has no spaces, so they never come
    out of it, and decoding removes the space. Only a single character that the file lacks is used before it would
    count as unknown (as Marian does where it stands alone; of several in a row Marian makes one <unk>).
    """
    own = {piece.piece: (piece.score, piece.type) for piece in model.pieces}
    lowest = min(score for score, _ in own.values())
    texts = {id: text for text, id in ids.items()}
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<pad>": CONTROL}
    del model.pieces[:]
    for id in range(max(texts, default=-1) + 1):
        text = texts.get(id, f"unused {id}")
        score, type = own.get(text, (0.0, UNUSED))
        if text in special:
            score, type = 0.0, special[text]
        elif re.fullmatch(r">>[\w-]+<<", text):  # the target language, at the beginning of a text
            text, score, type = SPACE + text, 0.0, USER_DEFINED
        elif type not in (NORMAL, USER_DEFINED, BYTE):
            text, score, type = (text, lowest - 10, NORMAL) if len(text) == 1 else (f" {text}", 0.0, UNUSED)
        model.pieces.add(piece=text, score=score, type=type)
