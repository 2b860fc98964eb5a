"""Output: what a model predicts at every position, and how much that changes under an intervention.

    p = softmax(logits)                                    the probability of each token (or class) at a position
    loss = -mean log p(expected token)                     where the expected one is known: the text itself, shifted
    KL(p ‖ p') = Σ_y p(y) log(p(y) / p'(y))   in nats      how far p' of the changed model is from p

The outputs of a model that gives a vector (a sentence embedding) are compared by the cosine of the two vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["next", "target", "masked", "classes", "vector"]


@dataclass(frozen=True)
class Choice:
    """One of the most probable tokens (or classes) of a position."""

    id: int
    label: str
    probability: float


@dataclass(frozen=True)
class Position:
    """One position: after `read`, `top` are the most probable tokens, `expected` is the correct one."""

    at: int
    read: str
    top: tuple[Choice, ...]
    expected: Choice | None = None


@dataclass(frozen=True)
class Output:
    """
    kind        next     the token after each one of a text (decoder)
                target   the tokens of a target, given those before (encoder-decoder)
                masked   the token at each position of a text (encoder with token logits)
                classes  the class of the whole: one position
                vector   states or a pooled vector: no positions
    loss        mean cross-entropy of `expected`, in nats per token; None where nothing is expected
    generated   what an encoder-decoder generates: the best of `hypotheses`, which have a score each
    """

    kind: Kind
    positions: tuple[Position, ...]
    loss: float | None
    logits: Tensor  # [positions, vocab_size or classes]; kind "vector": [N, dim] or [1, dim]
    generated: str | None = None
    hypotheses: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the logits."""

        return {
            "kind": self.kind,
            "loss": self.loss,
            "generated": self.generated,
            "hypotheses": [{"text": text, "score": score} for text, score in self.hypotheses],
            "positions": [asdict(position) for position in self.positions],
        }


def read_output(
    kind: Kind,
    logits: Tensor,
    read: Sequence[str],
    name: Callable[[int], str],
    expected: Sequence[int | None],
    top: int,
    hypotheses: Sequence[tuple[str, float]] = (),
) -> Output:
    """An `Output` from logits [positions, size]; `name` gives the label of an id, `expected` the correct ids."""
    logits = logits.float().cpu()
    generated = hypotheses[0][0] if hypotheses else None
    if kind == "vector":
        return Output(kind, (), None, logits)
    log_p = logits.log_softmax(dim=-1)
    values, ids = log_p.exp().topk(min(top, logits.shape[-1]), dim=-1)
    positions, losses = [], []
    for at, correct in enumerate(expected):
        best = zip(ids[at].tolist(), values[at].tolist(), strict=True)
        choice = None
        if correct is not None:
            losses.append(-float(log_p[at, correct]))
            choice = Choice(correct, name(correct), float(log_p[at, correct].exp()))
        positions.append(Position(at, read[at], tuple(Choice(id, name(id), p) for id, p in best), choice))
    loss = sum(losses) / len(losses) if losses else None
    return Output(kind, tuple(positions), loss, logits, generated, tuple(hypotheses))


@dataclass(frozen=True)
class Difference:
    """How the output after a change differs from the one before.

    divergence   KL(before ‖ after) at every position, in nats; of vectors 1 - cosine
    flipped      the positions whose most probable token (or class) has changed
    """

    divergence: tuple[float, ...]
    flipped: tuple[int, ...]
    loss: float | None  # after - before

    @property
    def mean_divergence(self) -> float:
        return sum(self.divergence) / max(1, len(self.divergence))


def difference(before: Output, after: Output) -> Difference:
    if before.kind == "vector":
        cosine = torch.cosine_similarity(before.logits.double(), after.logits.double(), dim=-1)
        return Difference(tuple((1 - cosine).clamp_min(0).tolist()), (), None)
    p, q = before.logits.log_softmax(dim=-1), after.logits.log_softmax(dim=-1)
    divergence = (p.exp() * (p - q)).sum(dim=-1).clamp_min(0)  # rounding may leave -1e-9
    flipped = (p.argmax(dim=-1) != q.argmax(dim=-1)).nonzero()[:, 0].tolist()
    loss = None if before.loss is None or after.loss is None else after.loss - before.loss
    return Difference(tuple(divergence.tolist()), tuple(flipped), loss)
