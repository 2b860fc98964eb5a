"""Output: what a model says, at every place, and how much that changes when something inside it is changed.

    p = softmax(logits)                                    the chances of each token (or class) at a place
    loss = -mean log p(right token)                        where the right one is known: the text itself, shifted
    KL(p ‖ p') = Σ_y p(y) log(p(y) / p'(y))   in nats      how far p' of the changed model is from p

A model that gives a vector instead (a sentence embedding) is compared by the cosine of the two vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["next", "target", "masked", "classes", "vector"]


@dataclass(frozen=True)
class Choice:
    """One of the likeliest tokens (or classes) of a place."""

    id: int
    label: str
    probability: float


@dataclass(frozen=True)
class Place:
    """One place: after `read`, `top` are the likeliest to stand there, `expected` is what does."""

    at: int
    read: str
    top: tuple[Choice, ...]
    expected: Choice | None = None


@dataclass(frozen=True)
class Output:
    """
    kind      next     the token after each one of a text (decoder)
              target   the tokens of a target, given those before (encoder-decoder)
              masked   the token at each place of a text (encoder with token logits)
              classes  the class of the whole: one place
              vector   states or a pooled vector: no places
    answer    what an encoder-decoder writes by itself, `answers` the n best with their scores
    loss      mean surprise at `expected`, in nats a token; None where nothing is expected
    """

    kind: Kind
    places: tuple[Place, ...]
    loss: float | None
    logits: Tensor  # [places, vocab_size or classes]; kind "vector": [N, dim] or [1, dim]
    answer: str | None = None
    answers: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the logits."""

        def plain(choice: Choice) -> dict[str, Any]:
            return {"id": choice.id, "label": choice.label, "probability": choice.probability}

        places = [
            {
                "at": place.at,
                "read": place.read,
                "expected": None if place.expected is None else plain(place.expected),
                "top": [plain(choice) for choice in place.top],
            }
            for place in self.places
        ]
        answers = [{"text": text, "score": score} for text, score in self.answers]
        return {"kind": self.kind, "loss": self.loss, "answer": self.answer, "answers": answers, "places": places}


def read_output(
    kind: Kind,
    logits: Tensor,
    read: Sequence[str],
    name: Callable[[int], str],
    expected: Sequence[int | None],
    top: int,
    answers: Sequence[tuple[str, float]] = (),
) -> Output:
    """Make an `Output` of logits [places, size]; `name` is the label of an id, `expected` the id that stands there."""
    logits = logits.float().cpu()
    answer = answers[0][0] if answers else None
    if kind == "vector":
        return Output(kind, (), None, logits)
    log_p = logits.log_softmax(dim=-1)
    values, ids = log_p.exp().topk(min(top, logits.shape[-1]), dim=-1)
    places, surprise = [], []
    for at, right in enumerate(expected):
        best = zip(ids[at].tolist(), values[at].tolist(), strict=True)
        chosen = None
        if right is not None:
            surprise.append(-float(log_p[at, right]))
            chosen = Choice(right, name(right), float(log_p[at, right].exp()))
        places.append(Place(at, read[at], tuple(Choice(id, name(id), p) for id, p in best), chosen))
    loss = sum(surprise) / len(surprise) if surprise else None
    return Output(kind, tuple(places), loss, logits, answer, tuple(answers))


@dataclass(frozen=True)
class Difference:
    """How the output after a change differs from the one before.

    divergence   KL(before ‖ after) of every place, in nats; of vectors 1 - cosine of every one
    flipped      the places whose likeliest token (or class) is another now
    """

    divergence: tuple[float, ...]
    flipped: tuple[int, ...]
    loss: float | None  # after - before

    def to_dict(self) -> dict[str, Any]:
        return {"divergence": list(self.divergence), "flipped": list(self.flipped), "loss": self.loss}


def difference(before: Output, after: Output) -> Difference:
    if before.kind == "vector":
        apart = (1 - torch.cosine_similarity(before.logits.double(), after.logits.double(), dim=-1)).clamp_min(0)
        return Difference(tuple(apart.tolist()), (), None)
    p, q = before.logits.log_softmax(dim=-1), after.logits.log_softmax(dim=-1)
    apart = (p.exp() * (p - q)).sum(dim=-1).clamp_min(0)  # rounding may leave -1e-9
    flipped = (p.argmax(dim=-1) != q.argmax(dim=-1)).nonzero()[:, 0].tolist()
    loss = None if before.loss is None or after.loss is None else after.loss - before.loss
    return Difference(tuple(apart.tolist()), tuple(flipped), loss)
