"""How text becomes ids: the [text] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.settings import check_fields


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How text becomes tokens."""

    kind: Literal["word", "char", "byte", "bpe", "unigram", "gpt2"] = "bpe"
    vocab_size: int | None = None  # None: 8,000 for bpe and unigram, everything in the text for word and char
    vocab_dir: str | None = None  # gpt2: the folder with its vocabulary files, relative to data.folder
    tokenizer_file: str | tuple[str, ...] | None = None  # tokenizer.json, its folder or a .model; two if not joint
    normalize: Literal["NFC", "NFKC", "none"] = "NFC"  # Unicode normalisation of all text; a tokenizer_file has its own
    joint: bool = True  # source and target use one tokenizer, so they can share embeddings
    target_kind: Literal["word", "char", "byte", "bpe", "unigram"] | None = None  # if not joint; default: kind

    def __post_init__(self) -> None:
        check_fields(self)
        if self.vocab_size is not None and self.vocab_size < 5:
            raise UserError(f"vocab_size = {self.vocab_size}: must be 5 or more, since four entries are special tokens")
        if self.vocab_size is not None and self.kind in ("byte", "gpt2"):
            raise UserError(
                f"vocab_size = {self.vocab_size}: kind = {self.kind!r} has a fixed vocabulary; remove vocab_size"
            )
        if (self.vocab_dir is None) == (self.kind == "gpt2"):
            raise UserError(
                f"kind = {self.kind!r} with vocab_dir = {self.vocab_dir!r}: kind = 'gpt2' needs the folder of its "
                "vocabulary files (regard data get gpt2-bpe); the other kinds learn their vocabulary from text"
            )
        if self.target_kind is not None and (self.joint or self.tokenizer_file is not None):
            raise UserError(
                f"target_kind = {self.target_kind!r}: needs joint = false and tokenizers that are learned; remove it"
            )
        if self.tokenizer_file is None:
            return
        if self.vocab_size is not None or self.vocab_dir is not None or self.normalize != "NFC":
            raise UserError(
                f"tokenizer_file = {self.tokenizer_file!r}: the file contains its vocabulary and normalisation; remove "
                "vocab_size, vocab_dir and normalize"
            )
        if len(self.tokenizer_files) != 2 - self.joint or "" in self.tokenizer_files:
            raise UserError(
                f"tokenizer_file = {self.tokenizer_file!r} with joint = {str(self.joint).lower()}: a joint tokenizer "
                'is one file; joint = false needs two: tokenizer_file = ["source.model", "target.model"]'
            )

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """The files of existing tokenizers; empty if they are to be trained."""
        return (self.tokenizer_file,) if isinstance(self.tokenizer_file, str) else self.tokenizer_file or ()
