"""Bytes as tokens: 256 of them and the special ones; any text in any script, nothing to learn, nothing unknown.

    "é" -> UTF-8 c3 a9 -> ids 4 + 0xc3, 4 + 0xa9

ByT5 (Xue et al. 2021, arXiv 2105.13626) shows that a model can do without pieces: its sequences are longer, its
vocabulary is almost nothing. The `tokenizers` library works on strings, so each byte has a printable stand-in there:
GPT-2's table (Radford et al. 2019), in which printable Latin-1 bytes stand for themselves and the other 68 for
U+0100 onwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers


@functools.cache
def byte_letters() -> tuple[str, ...]:
    """The stand-in of each byte, 0 to 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def make_bytes(specials: Sequence[str]) -> RawTokenizer:
    """The special tokens first, then byte b as id  len(specials) + b."""
    raw = RawTokenizer(models.BPE({piece: id for id, piece in enumerate((*specials, *byte_letters()))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(specials))
    return raw
