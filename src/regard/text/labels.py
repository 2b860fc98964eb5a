"""Labels: tokens as a person reads them.

A token of a byte-level vocabulary may be a part of a character: 를 is the bytes EB A5 BC, which may be the tokens
(EB A5) and (BC). Neither can be printed alone, but within their text both belong to 를:

    labels(…)           를₁ 를₂          the character, and which of its parts the token is
    label(…, pending)   를₂  or  ⟨EB A5⟩   a token after the bytes `pending` of an incomplete character
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from regard.text.tokenizer import Tokenizer

SUBSCRIPTS = "₁₂₃₄"


def labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, ...]:
    """The label of each token of a text."""
    made = [tokenizer.token(id) for id in ids]
    if not tokenizer.byte_level:
        return tuple(made)
    start = 0
    while start < len(ids):
        end, content = start + 1, tokenizer.token_bytes(ids[start])
        if _unfinished(content):
            while end < len(ids) and _unfinished(content) and (more := tokenizer.token_bytes(ids[end])):
                content, end = content + more, end + 1
            made[start:end] = _parts([tokenizer.token_bytes(id) for id in ids[start:end]])
        start = end
    return tuple(made)


def label(tokenizer: Tokenizer, id: int, pending: bytes = b"") -> str:
    """The label of a token after the bytes of an incomplete character."""
    if not tokenizer.byte_level:
        return tokenizer.token(id)
    content = tokenizer.token_bytes(id)
    if not content or (not pending and not _unfinished(content) and _decodes(content)):
        return tokenizer.token(id)
    return _parts([pending, content])[1] if pending else _readable(content)


def pending_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes of the incomplete character at the end of a text; b"" if there is none."""
    content = b""
    for id in reversed(ids[-4:]) if tokenizer.byte_level else ():
        content = tokenizer.token_bytes(id) + content
    for length in (1, 2, 3):
        if len(content) >= length and _unfinished(content[-length:]):
            return content[-length:]
    return b""


def _parts(pieces: Sequence[bytes]) -> list[str]:
    """The text of the characters that each piece has bytes of; parts of a character are numbered."""
    text, owners = b"".join(pieces), []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begin = 0
    for at in range(len(text)):
        char = decoder.decode(text[at : at + 1])
        if char:
            owners += [(begin, char)] * (at + 1 - begin)
            begin = at + 1
    if begin < len(text) or any("\ufffd" in char for _, char in owners):
        return [_readable(piece) for piece in pieces]
    made, offset, number = [], 0, 0
    for piece in pieces:
        own = owners[offset : offset + len(piece)]
        chars = "".join(char for _, char in dict.fromkeys(own))
        first, last = (
            own[0][0] < offset,
            offset + len(piece) < len(text) and owners[offset + len(piece)][0] == own[-1][0],
        )
        number = number + 1 if first else 1
        mark = SUBSCRIPTS[min(number, 4) - 1] if first or last else ""
        visible = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in chars)
        made.append(visible.replace(" ", "▁") + mark)
        offset += len(piece)
    return made


def _readable(content: bytes) -> str:
    """Bytes that are no characters, as hexadecimal digits."""
    return f"⟨{content.hex(' ').upper()}⟩"


def _decodes(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _unfinished(content: bytes) -> bool:
    """Whether the bytes end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(content)
    return bool(decoder.getstate()[0])
