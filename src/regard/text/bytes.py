"""Byte-level tokens: 256 bytes and the special tokens encode any text in any script, and nothing is unknown.

    "é" -> UTF-8 c3 a9 -> ids 4 + 0xc3, 4 + 0xa9

ByT5 (Xue et al. 2021, arXiv 2105.13626) trains on bytes directly: sequences become longer, and the vocabulary almost
disappears. The `tokenizers` library works on strings, so each byte is represented by a printable character, as in
GPT-2 (Radford et al. 2019): printable Latin-1 bytes by themselves, the other 68 by U+0100 onwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers


@functools.cache
def bytes_to_unicode() -> tuple[str, ...]:
    """The character that represents each byte, 0 to 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def byte_tokenizer(specials: Sequence[str]) -> RawTokenizer:
    """The special tokens first, then byte b with id  len(specials) + b."""
    raw = RawTokenizer(models.BPE({token: id for id, token in enumerate((*specials, *bytes_to_unicode()))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(specials))
    return raw
