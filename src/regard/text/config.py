"""How text becomes ids: the [text] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.settings import check_types


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    kind: Literal["word", "char", "byte", "bpe", "unigram", "gpt2"] = "bpe"
    vocab_size: int | None = None  # pieces of a tokenizer; None: 8,000 for bpe and unigram, all for word and char
    vocabulary: str | None = None  # gpt2: the folder of its vocabulary files; relative to data.folder
    model: str | tuple[str, ...] | None = None  # a finished one: a SentencePiece .model or tokenizer.json, or two
    joint: bool = True  # source and target share one tokenizer, and so may share their embeddings
    dropout: float = 0.0  # of BPE merges, in the training text only (Provilkov et al. 2020); 0.1 is usual
    alpha: float | None = None  # unigram: training text is cut at random, by P^alpha (Kudo 2018); 0.2 is usual
    segmentations: int = 8  # versions of the training text with either: one plain, the others cut at random

    def __post_init__(self) -> None:
        check_types(self)
        if self.vocab_size is not None and self.vocab_size < 5:
            raise UserError(
                f"vocab_size = {self.vocab_size}: four special tokens and something to say make 5; give 5 or more"
            )
        if self.vocab_size is not None and self.kind in ("byte", "gpt2"):
            raise UserError(
                f"vocab_size = {self.vocab_size}: kind = {self.kind!r} has a vocabulary of its own; leave "
                "vocab_size out"
            )
        if (self.vocabulary is None) == (self.kind == "gpt2"):
            raise UserError(
                f"kind = {self.kind!r} with vocabulary = {self.vocabulary!r}: kind = 'gpt2' needs the folder of its "
                "vocabulary files (regard data get gpt2-bpe), and the other kinds learn theirs"
            )
        if self.model is not None:
            self._check_model()
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout = {self.dropout}: must be a probability from 0 to below 1, such as 0.1")
        if self.dropout and self.kind not in ("bpe", "gpt2"):
            raise UserError(f"dropout = {self.dropout}: leaves out merges of kind = 'bpe', but kind = {self.kind!r}")
        if self.alpha is not None and (self.alpha <= 0 or self.dropout):
            raise UserError(f"alpha = {self.alpha}: must be above 0, such as 0.2, without dropout, which is for bpe")
        if self.alpha is not None and self.kind != "unigram" and not self.models:
            raise UserError(f"alpha = {self.alpha}: draws cuts of kind = 'unigram', but kind = {self.kind!r}")
        if not 1 + self.sampled <= self.segmentations <= 64:
            raise UserError(
                f"segmentations = {self.segmentations} with dropout or alpha: the first version is the plain one, and "
                "each takes as much room on disk; give 2 to 64, such as 8"
            )

    @property
    def sampled(self) -> bool:
        """Whether training text is cut at random."""
        return self.dropout > 0 or self.alpha is not None

    @property
    def models(self) -> tuple[str, ...]:
        """The file of each tokenizer that is not to be learned."""
        return (self.model,) if isinstance(self.model, str) else self.model or ()

    def _check_model(self) -> None:
        if self.vocab_size is not None or self.vocabulary is not None:
            raise UserError(f"model = {self.model!r}: the file has its vocabulary; leave vocab_size and vocabulary out")
        if len(self.models) != 2 - self.joint or "" in self.models:
            raise UserError(
                f"model = {self.model!r} with joint = {str(self.joint).lower()}: a joint tokenizer is one file, with "
                'joint = false there are two: model = ["source.model", "target.model"]'
            )
