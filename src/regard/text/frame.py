"""Framing: the special tokens around a sentence, which tell a model where it begins and ends.

source   … </s>             target   <s> … </s>
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer


def framed(tokenizer: Tokenizer, lines: Sequence[str], *, begin: bool = False) -> list[list[int]]:
    """ids of each line, ending with </s> and, where `begin`, starting with <s>."""
    return frame(tokenizer, tokenizer.encode_batch(list(lines)), begin=begin)


def frame(tokenizer: Tokenizer, sequences: Sequence[list[int]], *, begin: bool = False) -> list[list[int]]:
    """The same for sentences that are ids already."""
    before, after = [special(tokenizer, "bos")] if begin else [], [special(tokenizer, "eos")]
    return [before + ids + after for ids in sequences]


def special(tokenizer: Tokenizer, name: str) -> int:
    """The id of <s> (bos) or </s> (eos), which translation cannot do without."""
    found: int | None = getattr(tokenizer, name)
    if found is None:
        raise UserError(
            f"the tokenizer has no {name} token, which is needed here: use the one the model was trained with"
        )
    return found
