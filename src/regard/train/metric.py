"""Which validation figure chooses the best weights.

A task offers figures by name (`train.metric = "loss"`, "bleu", …); a `Metric` says where one stands in what its
evaluation gives, and whether more of it is better.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """`figure` is its name in metrics.jsonl."""

    figure: str
    higher: bool = False  # whether more is better

    def better(self, value: float, best: float) -> bool:
        return value > best if self.higher else value < best


LOSS = Metric("valid_loss")
