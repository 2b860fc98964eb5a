"""SentencePiece's normalisation: character rules, then white space.

A model file carries replacement rules ("①" -> "1", "ﾊﾟ" -> "パ", line feed -> space) as a compiled trie (its
"charsmap"); at each position of a text the longest matching rule is applied. Then, depending on the file, runs of
spaces become one, leading and trailing ones are removed, a space is prepended, and each space is written "▁".

`normalizer_steps` describes this in the JSON of the `tokenizers` library. That library applies the rules to whole
graphemes or single characters only, so it leaves "か" + U+3099 or decomposed Hangul syllables apart where
SentencePiece composes them. A tokenizer whose normaliser consists of these steps therefore uses the `sentencepiece`
package for normalisation, which gives exactly SentencePiece's text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import product
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from regard.errors import MissingExtra, UserError

SPACE = "▁"


def normalizer_steps(charsmap: bytes, *, remove_spaces: bool, add_prefix: bool) -> list[dict[str, Any]]:
    """The steps of SentencePiece's normalisation as normalisers of the `tokenizers` library."""

    def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": content}

    steps: list[dict[str, Any]] = []
    if charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if remove_spaces:
        steps += [replace({"Regex": " {2,}"}, " "), replace({"Regex": r"\A "}, "")]
    if add_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(replace({"String": " "}, SPACE))
    if remove_spaces:
        steps.append(replace({"Regex": rf"{SPACE}+\z"}, ""))
    return steps


def sentencepiece_normalizer(raw: RawTokenizer) -> Callable[[str], str] | None:
    """SentencePiece's normalisation function if the normaliser of `raw` consists of `normalizer_steps`, else None.

    User-defined symbols, which are the added tokens that are not special, are left as they are.
    """
    steps = json.loads(raw.normalizer.__getstate__())
    steps = steps.get("normalizers", [steps])
    charsmap = b""
    if steps and steps[0].get("type") == "Precompiled":
        charsmap = base64.b64decode(steps[0]["precompiled_charsmap"])
    for remove_spaces, add_prefix in product((True, False), repeat=2):
        if steps == normalizer_steps(charsmap, remove_spaces=remove_spaces, add_prefix=add_prefix):
            break
    else:
        return None
    try:
        from sentencepiece import SentencePieceProcessor
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise MissingExtra("sentencepiece", "sentencepiece", "a tokenizer converted from SentencePiece") from None
    # A model without a vocabulary, except for the two pieces that the package requires.
    model = ModelProto()
    model.pieces.add(piece="  ", type=ModelProto.SentencePiece.UNKNOWN)
    model.pieces.add(piece=" ")
    for token in raw.get_added_tokens_decoder().values():
        if not token.special:
            model.pieces.add(piece=token.content, type=ModelProto.SentencePiece.USER_DEFINED)
    model.normalizer_spec.precompiled_charsmap = charsmap
    model.normalizer_spec.remove_extra_whitespaces = remove_spaces
    model.normalizer_spec.add_dummy_prefix = add_prefix
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model.SerializeToString())
    except RuntimeError as error:
        raise UserError(f"the normalisation rules are damaged: {error}") from None
    normalize: Callable[[str], str] = processor.Normalize
    return normalize
