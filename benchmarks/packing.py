"""Texts of different lengths in a stack with full attention on a CPU: packed into rows, or padded.

    python benchmarks/packing.py -o benchmarks/results/packing-cpu.json

    all pairs   packed rows, scaled_dot_product_attention with a mask of each row's texts, as one writes it by hand
    texts       packed rows, each text read by itself (`regard.nn.plan`), as Regard does
    padded      the same texts in padded batches of similar length

A pass is forward + backward over the same tokens for all three. Lengths are uniform between a quarter and seven
quarters of their mean, or log-uniform from 4 to the length of a row. At the end the three outputs are compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure
import table
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.pack import assign
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.mask import Positions

SIZES = {"tiny": (128, 4), "base": (512, 8)}  # width, heads
CASES = [(512, 48), (512, 128), (2048, 128), (2048, 0)]  # tokens of a row; mean length of a text, 0: log-uniform
TOKENS = 8192  # of a batch


def lengths_of(row: int, mean: int) -> list[int]:
    """Texts of about TOKENS tokens together, all of which fit into the rows of one batch."""
    source, found = torch.Generator().manual_seed(0), list[int]()
    while True:
        uniform = float(torch.rand((), generator=source))
        size = round(mean * (0.25 + 1.5 * uniform)) if mean else int(4 * (row / 4) ** uniform)
        if max(assign([*found, size], [*found, size], row)) >= TOKENS // row:
            return found
        found.append(size)


class Texts:
    """The same embeddings in two forms: packed rows, and padded batches."""

    def __init__(self, row: int, lengths: list[int], dim: int) -> None:
        texts = [torch.randn(size, dim) for size in lengths]
        self.order = sorted(range(len(texts)), key=lambda one: lengths[one])
        self.rows, self.document = torch.zeros(TOKENS // row, row, dim), torch.zeros(TOKENS // row, row).long()
        self.places, used = list[tuple[int, slice]](), [0] * len(self.rows)
        for number, (text, at) in enumerate(zip(texts, assign(lengths, lengths, row), strict=True), 1):
            place = at, slice(used[at], used[at] + len(text))
            self.rows[place], self.document[place], used[at] = text, number, place[1].stop
            self.places.append(place)
        batches: list[list[int]] = []
        for one in self.order:
            if not batches or (len(batches[-1]) + 1) * lengths[one] > TOKENS // 4:
                batches.append([])
            batches[-1].append(one)
        self.batches = [pad_sequence([texts[one] for one in batch], batch_first=True) for batch in batches]
        sizes = [torch.tensor([lengths[one] for one in batch])[:, None] for batch in batches]
        self.is_real = [torch.arange(len(x[0])) < size for x, size in zip(self.batches, sizes, strict=True)]

    def packed(self, stack: Stack) -> list[Tensor]:
        out = one_pass(stack, self.rows, self.document > 0, self.document)
        return [out[self.places[one]] for one in self.order]

    def padded(self, stack: Stack) -> list[Tensor]:
        outs = [one_pass(stack, x, is_real) for x, is_real in zip(self.batches, self.is_real, strict=True)]
        return [
            one[own]
            for out, is_real in zip(outs, self.is_real, strict=True)
            for one, own in zip(out, is_real, strict=True)
        ]


def one_pass(stack: Stack, x: Tensor, is_real: Tensor, document: Tensor | None = None) -> Tensor:
    """Forward and backward; the output."""
    out = stack(x, Positions.of(x.shape[1], x.device, is_real, document))
    out[is_real].square().sum().backward()
    return out.detach()  # type: ignore[no-any-return]


def measured(name: str, row: int, mean: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    (dim, heads), lengths = SIZES[name], lengths_of(row, mean)
    config = StackConfig(
        dim=dim, heads=heads, ff_dim=2 * dim, layers=2, position="rope", dropout=0.0, embed_dropout=0.0
    )
    stack, texts = Stack(config, causal=False).train(), Texts(row, lengths, dim)

    def all_pairs() -> list[Tensor]:
        with patch("regard.nn.banded.plan_texts", return_value=None):
            return texts.packed(stack)

    calls = {"all pairs": all_pairs, "texts": lambda: texts.packed(stack), "padded": lambda: texts.padded(stack)}
    expected = texts.padded(stack)
    for call in calls.values():
        for own, other in zip(call(), expected, strict=True):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
    figures = measure.race(calls, "cpu", args.rounds, args.least, warm=1)
    about = {"size": name, "dim": dim, "row": row, "mean": mean or None, "texts": len(lengths), "tokens": sum(lengths)}
    print(about, *(f"{one} {value['ms']:.0f}" for one, value in figures.items()), flush=True)
    return {**about, "passes": figures, "ratio": round(figures["all pairs"]["ms"] / figures["texts"]["ms"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="samples, of which the median is reported")
    parser.add_argument("--least", type=float, default=0.2, help="seconds per sample")
    parser.add_argument("--smoke", action="store_true", help="three small cases, as a test")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    cases = [(name, *case) for name in SIZES for case in CASES][: 3 if args.smoke else None]
    result = {"kind": "packing", "machine": measure.machine("cpu"), "batch_tokens": TOKENS}
    measure.write(args.out, {**result, "rows": [measured(*case, args) for case in cases]})
    print(table.table(args.out))


if __name__ == "__main__":
    main()
