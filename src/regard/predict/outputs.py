"""What predictions are made of, without PyTorch: limits, hypotheses, texts with their scores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The longest sequences that a model can process, in tokens with special tokens included; None: no limit.

    A table of learned positions has `max_length` rows; other positions extend to any length.
    """

    positions: int | None  # of learned positions: their number, which also limits the output of an encoder-decoder
    source: int | None  # the longest input: not beyond the positions, nor beyond data.max_length
    context: int  # tokens that a language model was trained to attend to: train.pack, or model.max_length

    def too_long(self, tokens: int) -> str:
        """Why an encoder-decoder cannot read so many tokens, or nothing."""
        if self.positions is None or tokens <= self.positions:
            return ""
        return (
            f"has {tokens} tokens, its end included, but the model's learned positions end at max_length = "
            f"{self.positions}: split the line"
        )


@dataclass(frozen=True)
class Hypothesis:
    """One output: its tokens without <s> and </s>, its score, and log P(tokens | source)."""

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool = True  # False: it reached its limit before </s>


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for one input."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ScoredText:
    """An output text; `score` ranks it among its alternatives, `log_probability` is log P(text | source)."""

    text: str
    score: float
    log_probability: float


@dataclass(frozen=True)
class TextPrediction(Prediction):
    """The outputs of a search for one input, best first; `text`, `score` and `log_probability` are the best one's."""

    n_best: tuple[ScoredText, ...]
    note: str | None = None  # what was changed about the input

    @property
    def text(self) -> str:
        return self.n_best[0].text

    @property
    def score(self) -> float:
        return self.n_best[0].score

    @property
    def log_probability(self) -> float:
        return self.n_best[0].log_probability
