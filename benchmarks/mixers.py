"""Time and memory of each mixer over the length of its input, forward + backward.

    python benchmarks/mixers.py --device cuda --lengths 1024:65536 -o benchmarks/results/mixers-h200.json
    python benchmarks/mixers.py --lengths 512:4096 --window 256 -o benchmarks/results/mixers-cpu.json
    python benchmarks/mixers.py --lengths 8192:8192 --window 256 -o benchmarks/results/mixers-cpu.json --add
    python benchmarks/mixers.py -o benchmarks/results/mixers-cpu.json --draw --figure docs/images/mixers-cpu.svg

Four things are measured: "attention", softmax attention alone, from queries, keys and values on; "shared", the same
with a mask that another layer has prepared; "mixer", the layer that mixes tokens, with its projections; and "stack", a
stack of `layers`, with feed-forward layers, norms and residual connections, which take the same time for every mixer.
All but "shared" include the preparation of the mask.

One row of tokens, layers of `dim` with pre-norm and GELU, no dropout; causal, except for those marked "encoder":
`linformer` and `fourier` exist in encoders alone. On a GPU: bfloat16, blocks compiled as with `train.compile`, unless
--eager. "flex by hand" is the same stack, or attention alone, written with `flex_attention` and the same blocks,
compiled as a whole. `mask_ms` is the time to prepare the mask of one forward pass, which all layers share. Peak memory
(GPU) includes weights and gradients. A mixer is left out at lengths where one pass would take more than --max-seconds.
--add keeps other lengths of a result file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from regard.cost.layers import crossing
from regard.explore.chart import line_chart
from regard.nn.attention import attend
from regard.nn.block import Stack, run_block
from regard.nn.compiled import compiled
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions, causal, everything, window
from regard.nn.multihead import Context

BY_HAND = "flex by hand"
ENCODER = ", encoder"  # at the end of the names of those that are not causal
MIXERS = (
    "full", "window", "bigbird", "linear", "performer", "gated-linear", "full, encoder", "window, encoder",
    "linformer, encoder", "fourier, encoder",
)  # fmt: skip
PARTS = ("attention", "shared", "mixer", "stack")
SOFTMAX, SOFTMAX_PARTS = ("full", "window", "bigbird"), ("attention", "shared")


def settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    mixer = name.removesuffix(ENCODER)
    own: dict[str, Any] = {"mixer": mixer}
    if mixer in ("window", "bigbird"):
        own["window"] = args.window
    if mixer == "bigbird":
        own |= {"global_tokens": 64, "block_size": 64}
    return own


def parts_of(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, N, D] of [B, N, 3 · H · D]."""
    q, k, v = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


class Ours(nn.Module):
    def __init__(self, mixer: str, part: str, length: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.part, layers = part, args.layers if part == "stack" else 1
        config = StackConfig(
            dim=args.dim, layers=layers, heads=args.heads, ff_dim=4 * args.dim, norm_order="pre",
            activation="gelu", dropout=0.0, embed_dropout=0.0, position="none", max_length=length,
            **settings(mixer, args),
        )  # fmt: skip
        self.stack = Stack(config, causal=not mixer.endswith(ENCODER))
        self.run = compiled(run_block) if args.compile else run_block
        self.stack.compute = self.run
        self.prepared: Context | None = None

    def forward(self, x: Tensor) -> Tensor:
        positions = Positions.of(x.shape[1], x.device)
        if self.part == "stack":
            return self.stack(x, positions)  # type: ignore[no-any-return]
        context = self.prepared
        if context is None:
            (context,) = contexts = self.stack._contexts(positions, positions, positions.pos, None, None, everything)
            self.stack._prepare(contexts, x, x.dtype)
        if self.part == "shared":
            self.prepared = context
        if self.part in SOFTMAX_PARTS:
            return attend(*parts_of(x, self.stack.config.heads), context.attention_mask)
        return self.run(self.stack.blocks[0].attention, x, context)  # type: ignore[union-attr]


class ByHand(nn.Module):
    """The same stack with FlexAttention, as its documentation shows it."""

    def __init__(self, part: str, length: int, args: argparse.Namespace) -> None:
        super().__init__()
        self.part, dim, self.heads, size = part, args.dim, args.heads, args.window
        layers = range(args.layers)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * args.layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in layers)
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in layers)
        positions = Positions.of(length, torch.device(args.device))
        mask = AttentionMask(causal & window(size), positions, positions).blocks(1)  # create_block_mask reads all pairs
        assert mask is not None
        mask.mask_mod = lambda b, h, i, j: (i >= j) & (i - j < size)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "shared":
            return flex_attention(*parts_of(x, self.heads), block_mask=self.mask)  # type: ignore[return-value]
        for layer, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down, strict=True)):
            mixed = flex_attention(*parts_of(qkv(self.norms[2 * layer](x)), self.heads), block_mask=self.mask)
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(self.norms[2 * layer + 1](x))))
        return self.norms[-1](x)  # type: ignore[no-any-return]


def make(name: str, part: str, length: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = ByHand(part, length, args) if name == BY_HAND else Ours(name, part, length, args)
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


def passes(
    names: list[str], part: str, length: int, args: argparse.Namespace
) -> tuple[dict[str, measure.Call], dict[str, int]]:
    """A forward + backward pass of each, after a first one, and the peak memory of the second."""
    dtype = getattr(torch, args.dtype)
    width = args.dim * (3 if part in SOFTMAX_PARTS else 1)
    x = torch.randn(1, length, width, device=args.device, dtype=dtype, requires_grad=True)
    calls, memory = {}, {}
    for name in names:
        model = make(name, part, length, args)

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
    row: dict[str, Any] = {"length": length}
    for part in args.parts:
        own = [name for name in names if part in ("shared", "stack") or name != BY_HAND]
        if part in SOFTMAX_PARTS:
            own = [name for name in own if name.removesuffix(ENCODER) in (*SOFTMAX, BY_HAND)]
        calls, memory = passes(own, part, length, args)
        row[part] = measure.race(calls, args.device, args.rounds, args.least, args.warm)
        if memory:
            row[f"{part}_memory_mb"] = {name: round(value / 1e6) for name, value in memory.items()}
        torch.compiler.reset()
    if args.device == "cuda":
        row["mask_ms"] = mask_time(length, args)
    return row


def crossings(rows: list[dict[str, Any]], part: str) -> dict[str, float | None]:
    """The length from which on a mixer is faster than full attention of its kind; None: it is not."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(name for row in rows for name in row[part]):
        base = "full" + ENCODER if name.endswith(ENCODER) else "full"
        both = [(row["length"], row[part]) for row in rows if name in row[part] and base in row[part]]
        if name != base and both:
            lengths, times = zip(*both, strict=True)
            found[name] = crossing(lengths, [one[base]["ms"] for one in times], [one[name]["ms"] for one in times])
    return found


def chart(result: dict[str, Any], part: str) -> str:
    """One curve per mixer; a cross where it meets that of full attention."""
    rows = result["rows"]
    series = {
        name: [(row["length"], row[part][name]["ms"]) for row in rows if name in row[part]]
        for name in result["mixers"] if name != BY_HAND
    }  # fmt: skip
    marks = []
    for name, at in crossings(rows, part).items():
        points = series.get(name, [])
        if at is None or not points or at <= points[0][0]:
            continue
        low, high = max(one for one in points if one[0] <= at), min(one for one in points if one[0] >= at)
        share = 0.0 if low == high else math.log(at / low[0]) / math.log(high[0] / low[0])
        marks.append((at, low[1] * (high[1] / low[1]) ** share, f"n = {at:,.0f}: {name}"))
    what = {"mixer": "the layer that mixes tokens", "stack": f"{result['layers']} layers"}.get(part, part)
    return line_chart(
        series, title=f"Forward + backward of {what}, width {result['dim']}", x_label="tokens", y_label="milliseconds",
        log_x=True, log_y=True, marks=sorted(marks),
    )  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mixers", nargs="+", default=[*MIXERS, BY_HAND], choices=[*MIXERS, BY_HAND])
    parser.add_argument("--lengths", default="512:8192", metavar="FROM:TO", help="doubled from one to the next")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="samples, of which the median is reported")
    parser.add_argument("--least", type=float, default=0.1, help="seconds per sample")
    parser.add_argument("--warm", type=int, default=3, help="calls before the samples")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of one pass")
    parser.add_argument("--eager", action="store_true", help="on a GPU: compile nothing but FlexAttention")
    parser.add_argument("--add", action="store_true", help="keep other lengths of the result file")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw time over length here, see --of")
    parser.add_argument("--of", choices=PARTS, default="mixer", help="what --figure shows")
    parser.add_argument("--draw", action="store_true", help="draw the result file without measuring again")
    args = parser.parse_args()
    args.compile, args.dtype = (
        args.device == "cuda" and not args.eager,
        "bfloat16" if args.device == "cuda" else "float32",
    )
    if args.device == "cpu" and BY_HAND in args.mixers:
        args.mixers.remove(BY_HAND)  # FlexAttention has no backward pass on a CPU
    return args


def main() -> None:
    args = arguments()
    if not args.draw:
        first, last = map(int, args.lengths.split(":"))
        result: dict[str, Any] = {
            "kind": "mixers", "machine": measure.machine(args.device), "dtype": args.dtype, "compiled": args.compile,
            "window": args.window,
            "dim": args.dim, "layers": args.layers, "heads": args.heads, "mixers": args.mixers, "rows": [],
        }  # fmt: skip
        if args.add and args.out.exists():
            before = json.loads(args.out.read_text())
            if any(before[key] != result[key] for key in ("dtype", "window", "dim", "layers", "heads")):
                raise SystemExit(f"{args.out}: has other settings; remove --add")
            result |= {"rows": before["rows"], "mixers": list(dict.fromkeys((*before["mixers"], *args.mixers)))}
        names, length = list(args.mixers), first
        while length <= last and names:
            row = measured(length, names, args)
            known = next((one for one in result["rows"] if one["length"] == length), {})
            for part in args.parts:
                row[part] = {**known.get(part, {}), **row[part]}
            result["rows"] = sorted(
                [one for one in result["rows"] if one["length"] != length] + [{**known, **row}],
                key=lambda one: one["length"],
            )
            measure.write(args.out, result)  # after every length, so that an interrupted run keeps its results
            for part in args.parts:
                print(length, part, *(f"{name} {value['ms']:.2f}" for name, value in row[part].items()), flush=True)
            slowest = {name: max(row[part][name]["ms"] for part in args.parts if name in row[part]) for name in names}
            names = [name for name in names if 4 * slowest[name] < 1000 * args.max_seconds]
            length *= 2
    result = json.loads(args.out.read_text())
    for part in (part for part in PARTS if all(part in row for row in result["rows"])):
        print(part, "faster than full attention from:", crossings(result["rows"], part))
    if args.figure:
        args.figure.write_text(chart(result, args.of), encoding="utf-8")


if __name__ == "__main__":
    main()
