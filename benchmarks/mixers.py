"""Time and memory of a stack with each mixer over the length of its input, forward + backward.

    python benchmarks/mixers.py --device cuda --lengths 1024:65536 -o benchmarks/results/mixers-h200.json
    python benchmarks/mixers.py --lengths 512:32768 --window 256 -o benchmarks/results/mixers-cpu.json
    python benchmarks/mixers.py --figure docs/images/mixers.svg -o benchmarks/results/mixers-h200.json --draw

One row of tokens, layers of `dim` with pre-norm and GELU, no dropout; causal, except for `linformer` and `fourier`,
which exist in encoders alone. On a GPU: bfloat16, blocks compiled as in training. "flex by hand" is the same stack
written with `flex_attention` and `create_block_mask`, compiled as a whole. `mask_ms` is the time to prepare the mask
of one forward pass, which all layers share. Peak memory (GPU) includes weights and gradients. A mixer is left out at
lengths where one pass would take more than --max-seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from regard.cost.layers import crossing
from regard.explore.chart import line_chart
from regard.nn.block import Stack, run_block
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions, causal, window

BY_HAND = "flex by hand"
ENCODERS = ("linformer", "fourier")
MIXERS = ("full", "window", "bigbird", "linformer", "linear", "performer", "gated-linear", "fourier")


def settings(mixer: str, args: argparse.Namespace) -> dict[str, Any]:
    own: dict[str, Any] = {"mixer": mixer}
    if mixer in ("window", "bigbird"):
        own["window"] = args.window
    if mixer == "bigbird":
        own |= {"global_tokens": 64, "block_size": 64}
    return own


class Ours(nn.Module):
    def __init__(self, mixer: str, length: int, args: argparse.Namespace) -> None:
        super().__init__()
        config = StackConfig(
            dim=args.dim, layers=args.layers, heads=args.heads, ff_dim=4 * args.dim, norm_order="pre",
            activation="gelu", dropout=0.0, embed_dropout=0.0, position="none", max_length=length,
            **settings(mixer, args),
        )  # fmt: skip
        self.stack = Stack(config, causal=mixer not in ENCODERS)
        self.stack.compute = torch.compile(run_block) if args.compile else None

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x, Positions.of(x.shape[1], x.device))  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """The same stack with FlexAttention, as its documentation shows it."""

    def __init__(self, length: int, args: argparse.Namespace) -> None:
        super().__init__()
        dim, self.heads, size = args.dim, args.heads, args.window
        layers = range(args.layers)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * args.layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in layers)
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in layers)
        self.mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < size), None, None, length, length, device=args.device, _compile=True
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            q, k, v = qkv(self.norms[2 * layer](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = flex_attention(q, k, v, block_mask=self.mask)
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(self.norms[2 * layer + 1](x))))
        return self.norms[-1](x)  # type: ignore[no-any-return]


def make(name: str, length: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = ByHand(length, args) if name == BY_HAND else Ours(name, length, args)
    model = model.to(args.device, getattr(torch, args.dtype))
    return torch.compile(model) if name == BY_HAND else model  # type: ignore[return-value]


def mask_time(length: int, args: argparse.Namespace) -> float:
    """Milliseconds to prepare the mask of a causal window for FlexAttention, without the first one of a process."""
    times = []
    for _ in range(4):
        positions = Positions.of(length, torch.device(args.device))
        torch.cuda.synchronize()
        start = time.perf_counter()
        AttentionMask(causal & window(args.window), positions, positions).blocks(1)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return round(sorted(times[1:])[1], 2)


def passes(names: list[str], length: int, args: argparse.Namespace) -> tuple[dict[str, measure.Call], dict[str, int]]:
    """A forward + backward pass of each stack, after a first one, and the peak memory of the second."""
    dtype = getattr(torch, args.dtype)
    x = torch.randn(1, length, args.dim, device=args.device, dtype=dtype, requires_grad=True)
    calls, memory = {}, {}
    for name in names:
        model = make(name, length, args)

        def call(model: nn.Module = model) -> None:
            model.zero_grad(set_to_none=True)
            x.grad = None
            model(x).sum().backward()

        call()
        if args.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            memory[name] = torch.cuda.max_memory_allocated() - before
        calls[name] = call
    return calls, memory


def measured(length: int, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    calls, memory = passes(names, length, args)
    times = measure.race(calls, args.device, args.rounds, args.least)
    row: dict[str, Any] = {"length": length, "times": times}
    if memory:
        row |= {"memory_mb": {name: round(value / 1e6) for name, value in memory.items()}}
        row["mask_ms"] = mask_time(length, args)
    torch.compiler.reset()
    return row


def chart(result: dict[str, Any]) -> str:
    rows = result["rows"]
    series = {
        name: [(row["length"], row["times"][name]["ms"]) for row in rows if name in row["times"]]
        for name in result["mixers"] if name != BY_HAND
    }  # fmt: skip
    full, marks = dict(series["full"]), []
    for name, points in series.items():
        lengths = [n for n, _ in points if n in full]
        own = dict(points)
        at = crossing(lengths, [full[n] for n in lengths], [own[n] for n in lengths]) if name != "full" else None
        if at is not None and at > lengths[0]:
            i = max(i for i, n in enumerate(lengths) if n <= at)
            low, high = lengths[i], lengths[min(i + 1, len(lengths) - 1)]
            part = 0.0 if low == high else (at - low) / (high - low)
            marks.append((at, full[low] * (full[high] / full[low]) ** part, f"n = {at:,.0f}: {name}"))
    return line_chart(
        series, title=f"Forward + backward, {result['layers']} layers of {result['dim']}", x_label="tokens",
        y_label="milliseconds", log_x=True, log_y=True, marks=sorted(marks),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mixers", nargs="+", default=[*MIXERS, BY_HAND], choices=[*MIXERS, BY_HAND])
    parser.add_argument("--lengths", default="512:8192", metavar="FROM:TO", help="doubled from one to the next")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="samples, of which the median is reported")
    parser.add_argument("--least", type=float, default=0.1, help="seconds per sample")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of one pass")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw time over length here")
    parser.add_argument("--draw", action="store_true", help="draw the result file without measuring again")
    args = parser.parse_args()
    args.compile, args.dtype = args.device == "cuda", "bfloat16" if args.device == "cuda" else "float32"
    if args.device == "cpu" and BY_HAND in args.mixers:
        args.mixers.remove(BY_HAND)  # FlexAttention has no backward pass on a CPU
    return args


def main() -> None:
    args = arguments()
    if not args.draw:
        first, last = map(int, args.lengths.split(":"))
        result: dict[str, Any] = {
            "kind": "mixers", "machine": measure.machine(args.device), "dtype": args.dtype, "window": args.window,
            "dim": args.dim, "layers": args.layers, "heads": args.heads, "mixers": args.mixers, "rows": [],
        }  # fmt: skip
        names, length = list(args.mixers), first
        while length <= last and names:
            row = measured(length, names, args)
            result["rows"].append(row)
            measure.write(args.out, result)  # after every length, so that an interrupted run keeps its results
            print(length, *(f"{name} {value['ms']:.2f}" for name, value in row["times"].items()), flush=True)
            names = [name for name in names if 4 * row["times"][name]["ms"] < 1000 * args.max_seconds]
            length *= 2
    if args.figure:
        args.figure.write_text(chart(json.loads(args.out.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
