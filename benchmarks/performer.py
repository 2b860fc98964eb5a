"""Performer: the error against softmax attention, over the number of random features.

    python benchmarks/performer.py -o benchmarks/results/performer-cpu.json --figure docs/images/performer.svg

Queries and keys are sampled from N(0, scale²), values from N(0, 1). The error of the attention weights Â of random
features against A of softmax, and that of the outputs, is the mean over seeds of |Â - A| / |A| in the Frobenius norm.

    orthogonal    positive features, orthogonal in blocks of head_dim: what `mixer = "performer"` uses
    independent   positive features, sampled independently
    trigonometric sin and cos features (Rahimi & Recht 2007), which can be negative

The variance of an estimate is inversely proportional to the number of features M, so the error falls by half for four
times as many; orthogonal features have less (Choromanski et al. 2021, theorem 2 and figure 4). It also grows with
exp(|q + k|²): queries and keys of scale 1 need many more features than those of scale 0.5. Seconds on one core.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.chart import line_chart
from regard.nn.linear_attention import orthogonal_features, random_features

KINDS = ("orthogonal", "independent", "trigonometric")
TOKENS, DIM = 256, 16


def features_of(kind: str, count: int, dim: int, seed: int) -> Tensor:
    """The random vectors ω, [count, dim]."""
    if kind == "orthogonal":
        return orthogonal_features(count, dim, seed)
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def weights(q: Tensor, k: Tensor, features: Tensor, kind: str) -> Tensor:
    """The attention weights [N, N] of these features, normalised over the keys; q and k are scaled by d^(-1/4)."""
    if kind == "trigonometric":
        first, second = (torch.cat(((x @ features.T).sin(), (x @ features.T).cos()), dim=1) for x in (q, k))
        products = first @ second.T * (k.square().sum(dim=1) / 2).exp()  # exp(|q|² / 2) cancels
    else:
        own = random_features(features)
        products = own.of_q(q) @ own.keys(k, None, torch.amax).T
    return products / products.sum(dim=1, keepdim=True)


def error(kind: str, count: int, seed: int, scale: float) -> tuple[float, float]:
    """Relative errors of weights and output for one draw of queries, keys, values and features."""
    source = torch.Generator().manual_seed(10_000 + seed)
    q, k, v = (torch.randn(TOKENS, DIM, generator=source, dtype=torch.float64) for _ in range(3))
    q, k = (x * scale * DIM**-0.25 for x in (q, k))
    exact = (q @ k.T).softmax(dim=1)
    found = weights(q, k, features_of(kind, count, DIM, seed).double(), kind)
    return float((found - exact).norm() / exact.norm()), float(((found - exact) @ v).norm() / (exact @ v).norm())


def measured(kind: str, count: int, seeds: int, scale: float) -> dict[str, Any]:
    errors = torch.tensor([error(kind, count, seed, scale) for seed in range(seeds)], dtype=torch.float64)
    mean, spread = errors.mean(dim=0), errors.std(dim=0)
    return {
        "features": kind, "scale": scale, "count": count,
        "weights": round(float(mean[0]), 5), "output": round(float(mean[1]), 5),
        "weights_std": round(float(spread[0]), 5), "output_std": round(float(spread[1]), 5),
    }  # fmt: skip


def slope(rows: list[dict[str, Any]]) -> float:
    """The exponent a of error ~ M^a, by least squares on logarithms."""
    x, y = (torch.tensor([math.log(row[name]) for row in rows]) for name in ("count", "weights"))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def chart(rows: list[dict[str, Any]]) -> str:
    """Orthogonal features at every scale, the others at the first; a thin line for 1 / sqrt(M)."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["features"] == "orthogonal" or row["scale"] == rows[0]["scale"]:
            series.setdefault(f"{row['features']}, scale {row['scale']:g}", []).append((row["count"], row["weights"]))
    name, points = next(iter(series.items()))
    rate = [(count, points[-1][1] * (points[-1][0] / count) ** 0.5) for count, _ in points]
    return line_chart(
        series, title="Random features against softmax attention", x_label="random features M",
        y_label="relative error of the attention weights", log_x=True, log_y=True, theory={name: rate},
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--seeds", type=int, default=20, help="default: 20")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.5, 1.0], help="of queries and keys")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw the errors here")
    args = parser.parse_args()
    if args.seeds < 2 or min(args.counts) < 1:
        parser.error("--seeds must be 2 or more and --counts 1 or more")
    return args


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    for scale in args.scales:
        for kind in KINDS:
            own = [measured(kind, count, args.seeds, scale) for count in args.counts]
            rows += own
            print(f"scale {scale:g} {kind:14}" + "  ".join(f"{row['count']}: {row['weights']:.3f}" for row in own))
            if len(own) > 1:
                print(f"    error ~ M^{slope(own):.2f}")
    result = {"kind": "performer", "machine": measure.machine("cpu"), "tokens": TOKENS, "head_dim": DIM}
    result |= {"seeds": args.seeds, "rows": rows}
    if args.out:
        measure.write(args.out, result)
    if args.figure:
        args.figure.write_text(chart(rows), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
