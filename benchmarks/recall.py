"""Recall: what the maximum path length of Table 1 means for learning.

    python benchmarks/recall.py -o benchmarks/results/recall-cpu.json --figure docs/images/recall.svg

The task is to repeat the token seen k steps ago: the input is random, the label of position t is the token at t - k.
Nothing has to be understood; only the distance is hard. Each kind of layer learns it by itself, at each distance with a
new model of the same form: an embedding, three residual layers x + layer(norm(x)), an output layer. All are causal and
have about the same number of parameters (the widths differ), the same data, steps and learning rate.

    self-attention         rotary positions; every earlier token is one step away
    restricted attention   the last 9 positions per layer, so three layers reach 24 steps back
    LSTM, GRU              every step passes through the state, which has to hold the last k tokens at once
    convolution            kernel 3, so three layers reach 6 steps back
    dilated convolution    kernel 3 with dilation 1, 3, 9: 26 steps back

The accuracy is that on new sequences, at positions t >= k; chance is 1/16. A run stops early when it has learned the
task (accuracy over 99.5 % on new sequences). Minutes on one core.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.cost.layer_modules import build_layer
from regard.cost.layers import ATTENTION, CONVOLUTION, DILATED, GRU, LSTM, RESTRICTED, LayerSizes
from regard.errors import UserError
from regard.explore.chart import line_chart
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions, causal, window
from regard.nn.multihead import Context, MultiHead
from regard.nn.position import Rotary

KINDS = (ATTENTION, RESTRICTED, LSTM, GRU, CONVOLUTION, DILATED)
TOKENS, LENGTH, LAYERS, HEADS, KERNEL, WINDOW = 16, 64, 3, 4, 3, 9
DIM = 64  # of self-attention; other widths follow from its parameters
DISTANCES = (1, 2, 4, 8, 16, 32)
ROWS, LEARNED, EVERY = 16, 0.995, 20


class Attention(nn.Module):
    """Causal self-attention with rotary positions, over all earlier tokens or the last `reach`."""

    def __init__(self, dim: int, reach: int | None) -> None:
        super().__init__()
        config = StackConfig(dim=dim, heads=HEADS, position="rope")
        self.attention, self.position = MultiHead(config), Rotary(config, causal=True)
        self.mask = causal if reach is None else causal & window(reach)

    def forward(self, x: Tensor) -> Tensor:
        positions = Positions.of(x.shape[1], x.device)
        rotation = self.position.rotation(positions.pos)
        return self.attention(x, Context(AttentionMask(self.mask, positions, positions), rotation=rotation))


def layer(kind: str, dim: int, number: int) -> nn.Module:
    if kind in (ATTENTION, RESTRICTED):
        return Attention(dim, WINDOW if kind == RESTRICTED else None)
    return build_layer(kind, LayerSizes(dim=dim, heads=1, kernel=KERNEL), dilation=KERNEL**number)


class Model(nn.Module):
    """Embedding, residual layers of one kind, output: [B, N] -> [B, N, TOKENS]"""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(TOKENS, dim), nn.Linear(dim, TOKENS)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(LAYERS + 1))
        self.layers = nn.ModuleList(layer(kind, dim, number) for number in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, one in zip(self.norms, self.layers, strict=False):  # the last norm is before the output
            x = x + one(norm(x))
        return self.output(self.norms[-1](x))


def parameters(kind: str, dim: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(kind, dim).parameters())


def width(kind: str, target: int) -> int:
    """The width whose number of parameters is the nearest to `target`; that of a head is even."""
    step = 2 * HEADS if kind in (ATTENTION, RESTRICTED) else 1
    widths = range(8, 129, step)
    above = bisect.bisect_left(widths, target, key=lambda dim: parameters(kind, dim))
    return min(widths[above - 1 : above + 1], key=lambda dim: abs(parameters(kind, dim) - target))


def reach(kind: str) -> int | None:
    """How many steps back the layers can see; None: without a limit."""
    per_layer = {
        RESTRICTED: [WINDOW - 1] * LAYERS,
        CONVOLUTION: [KERNEL - 1] * LAYERS,
        DILATED: [(KERNEL - 1) * KERNEL**number for number in range(LAYERS)],
    }
    return sum(per_layer[kind]) if kind in per_layer else None


def correct(model: nn.Module, distance: int, draw: torch.Generator, device: str) -> float:
    """Accuracy on new sequences."""
    tokens = torch.randint(TOKENS, (4 * ROWS, LENGTH), generator=draw).to(device)
    with torch.inference_mode():
        guesses = model(tokens)[:, distance:].argmax(dim=-1)
    return (guesses == tokens[:, : LENGTH - distance]).float().mean().item()


def learned(kind: str, dim: int, distance: int, seed: int, args: argparse.Namespace) -> tuple[float, int]:
    """(accuracy, steps) after training, at most `args.steps` of them."""
    torch.manual_seed(seed)
    draw, test = (torch.Generator().manual_seed(part + seed) for part in (1_000, 2_000))
    model = Model(kind, dim).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    accuracy = 0.0
    for step in range(1, args.steps + 1):
        tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=draw).to(args.device)
        logits, labels = model(tokens)[:, distance:], tokens[:, : LENGTH - distance]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 20)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0 or step == args.steps:
            accuracy = correct(model, distance, test, args.device)
            if accuracy > LEARNED:
                return accuracy, step
    return accuracy, args.steps


def chart(rows: list[dict[str, Any]], seeds: int) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row["layer"], []).append((row["distance"], row["accuracy"]))
    title = f"Repeat the token seen k steps ago: mean of {seeds} seeds, chance {1 / TOKENS:.2f}"
    return line_chart(series, title=title, x_label="distance k", y_label="accuracy", log_x=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--distances", nargs="+", type=int, default=list(DISTANCES))
    parser.add_argument("--steps", type=int, default=200, help="at most (default: 200)")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--lr", type=float, default=5e-3, help="default: 0.005")
    parser.add_argument("--smoke", action="store_true", help="few steps at two distances, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw the accuracies here")
    args = parser.parse_args()
    if min(args.steps, args.seeds) < 1 or not all(1 <= distance < LENGTH for distance in args.distances):
        parser.error(f"--steps and --seeds must be 1 or more, distances from 1 to {LENGTH - 1}")
    if args.smoke:
        args.steps, args.distances, args.seeds = 2, [1, 8], 1
    return args


def main() -> None:
    args = arguments()
    target, rows = parameters(ATTENTION, DIM), list[dict[str, Any]]()
    result = {"kind": "recall", "machine": measure.machine(args.device), "tokens": TOKENS, "length": LENGTH}
    result |= {"layers": LAYERS, "kernel": KERNEL, "window": WINDOW, "batch": ROWS, "lr": args.lr}
    result |= {"steps": args.steps, "seeds": args.seeds, "rows": rows}
    for kind in args.layers:
        dim = width(kind, target)
        for distance in args.distances:
            begin = time.perf_counter()
            runs = [learned(kind, dim, distance, seed, args) for seed in range(1, args.seeds + 1)]
            accuracies, steps = [[run[part] for run in runs] for part in (0, 1)]
            rows.append({
                "layer": kind, "distance": distance, "accuracy": round(statistics.mean(accuracies), 4),
                "accuracies": [round(accuracy, 4) for accuracy in accuracies], "steps": steps,
                "reach": reach(kind), "dim": dim, "parameters": parameters(kind, dim),
                "seconds": round(time.perf_counter() - begin, 1),
            })  # fmt: skip
            seen = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
            print(f"{kind:21} k = {distance:2}  accuracy {seen}  steps {steps}", flush=True)
            if args.out:
                measure.write(args.out, result)
            if args.figure:
                args.figure.write_text(chart(rows, args.seeds), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
