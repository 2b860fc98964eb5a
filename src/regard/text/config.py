"""How text becomes ids: the [text] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.settings import check_types


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    kind: Literal["word", "char", "bpe", "unigram"] = "bpe"
    vocab: int | None = None  # pieces of a tokenizer; None: 8,000 for bpe and unigram, all for word and char
    joint: bool = True  # source and target share one tokenizer, and so may share their embeddings

    def __post_init__(self) -> None:
        check_types(self)
        if self.vocab is not None and self.vocab < 5:
            raise UserError(f"vocab = {self.vocab}: four special tokens and something to say make 5; give 5 or more")
