"""`regard cost --layers`: Table 1 of the paper as formulas, as numbers over the length, and as measurements."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from regard.commands import show
from regard.commands.attention_options import progress
from regard.commands.cost_sweep import (
    GIGA,
    MIB,
    budget_of,
    check_files,
    device_name,
    device_of,
    dtype_of,
    milliseconds,
    write_files,
)
from regard.errors import UserError, listed
from regard.terminal import aligned, count, size

if TYPE_CHECKING:
    import torch

    from regard.cost.layers import LayerSizes
    from regard.cost.measure import Budget, Measurement

LENGTHS = "seq=64:16384"
FORMULA, FLOPS, TIME = "formula", "flops", "time"
Measured = dict[str, dict[int, "Measurement"]]  # by layer, by length


def run_layers(args: argparse.Namespace) -> None:
    from regard.cost import layers
    from regard.cost.sweep import read_sweep

    check_files(args)
    sizes, lengths = _sizes(args), read_sweep(args.sweep or LENGTHS)
    batch = 1 if args.batch is None else args.batch
    for name, value in (("seq", args.seq), ("target-seq", args.target_seq)):
        if value is not None:
            raise UserError(f"--{name} {value}: layers are compared over the length; use --sweep seq={value}")
    if lengths.name != "seq":
        raise UserError(f"--sweep {args.sweep}: layers are compared over the length; use --sweep seq=64:4096")
    if batch < 1 or min(lengths.values) < 1:
        raise UserError(f"--batch {batch}, --sweep {args.sweep or LENGTHS}: sizes must be 1 or more")
    ns = sorted(set(lengths.values))
    device = device_of(args)
    dtype, measured, stopped = dtype_of(args, device), Measured(), list[str]()
    if device is not None:
        measured, stopped = _measure(sizes, ns, batch, budget_of(args, device), device, dtype)
    crossings = _crossings(sizes, ns, measured)
    rows = []
    for n in ns:
        for kind in layers.TABLE:
            row: dict[str, Any] = {
                "layer": kind,
                "n": n,
                "complexity": layers.complexity(kind, sizes, n),
                "sequential_operations": layers.sequential_operations(kind, n),
                "path_length": layers.path_length(kind, sizes, n),
                "forward_flops": batch * layers.operations(kind, sizes, n),
            }
            if at := measured.get(kind, {}).get(n):
                row |= {"seconds": at.seconds, "peak_bytes": at.peak}
            rows.append(row)
    write_files(args, rows, lambda: _plot(sizes, ns, batch, measured, crossings, dtype))
    content: dict[str, Any] = {
        "sizes": {"dim": sizes.dim, "heads": sizes.heads, "kernel": sizes.kernel, "window": sizes.window},
        "batch": batch,
        "growth": {kind: growth._asdict() for kind, growth in layers.TABLE.items()},
        "rows": rows,
        "crossings": crossings,
    }
    if device is not None:
        content |= {"device": device_name(device), "dtype": dtype, "stopped": stopped}
    show(args.json, content, _report(sizes, ns, batch, measured, crossings, stopped, device, dtype))


def _sizes(args: argparse.Namespace) -> LayerSizes:
    from regard.cost.layers import LayerSizes

    dim, plain = 512 if args.dim is None else args.dim, LayerSizes()
    if dim < 1:
        raise UserError(f"--dim {dim}: must be 1 or more")
    heads = next(heads for heads in (8, 4, 2, 1) if dim % heads == 0)
    kernel = plain.kernel if args.kernel is None else args.kernel
    window = plain.window if args.window is None else args.window
    return LayerSizes(dim=dim, heads=heads, kernel=kernel, window=window)


def _measure(
    sizes: LayerSizes, ns: Sequence[int], batch: int, budget: Budget, device: torch.device, dtype: str
) -> tuple[Measured, list[str]]:
    """The measurements, shortest sequences first, and why a layer ends before the last length."""
    from regard.cost.layer_modules import build_layer
    from regard.cost.layers import TABLE, operations
    from regard.cost.measure import measure_layer

    def run(kind: str, n: int) -> Measurement:
        return measure_layer(build_layer(kind, sizes), batch, n, sizes.dim, device, dtype)

    measured: Measured = {kind: {} for kind in TABLE}
    stopped: list[str] = []
    active = list(TABLE)
    for n in progress(ns, "measuring"):
        for kind in list(active):
            work = 3 * batch * operations(kind, sizes, n)
            memory = max((n / before * at.peak for before, at in measured[kind].items()), default=0.0)
            try:
                found = budget.measure(kind, work, memory, partial(run, kind, n))
            except RuntimeError as error:  # as of cuDNN, whose recurrent layers have a longest sequence
                found = f"the device cannot: {str(error).partition(chr(10))[0]}"
            if isinstance(found, str):
                active.remove(kind)
                stopped.append(f"{kind}: measuring stopped at n = {n}: {found}")
            else:
                measured[kind][n] = found
    return measured, stopped


def _crossings(sizes: LayerSizes, ns: Sequence[int], measured: Measured) -> dict[str, dict[str, float | None]]:
    """From which length on self-attention costs more than each other layer, by formula, in FLOPs and in time."""
    from regard.cost.layers import ATTENTION, TABLE, complexity, crossing, first_above, operations

    def by(cost: Callable[[str, LayerSizes, int], int], kind: str) -> int | None:
        return first_above(lambda n: cost(ATTENTION, sizes, n), lambda n: cost(kind, sizes, n))

    found: dict[str, dict[str, float | None]] = {}
    for kind in TABLE:
        if kind == ATTENTION:
            continue
        found[kind] = {FORMULA: by(complexity, kind), FLOPS: by(operations, kind)}
        if measured:
            own, other = measured[ATTENTION], measured[kind]
            both = [n for n in ns if n in own and n in other]
            times = [[curve[n].seconds for n in both] for curve in (own, other)]
            found[kind][TIME] = crossing(both, *times)
    return found


def _report(
    sizes: LayerSizes,
    ns: Sequence[int],
    batch: int,
    measured: Measured,
    crossings: dict[str, dict[str, float | None]],
    stopped: list[str],
    device: torch.device | None,
    dtype: str,
) -> list[str]:
    from regard.cost.layers import TABLE, operations, path_length, sequential_operations

    heads = f"{sizes.heads} head{'s' * (sizes.heads > 1)}"
    rows = [("layer", "complexity", "sequential operations", "maximum path length")]
    lines = [
        f"one layer: d = {sizes.dim}, {heads}, kernel k = {sizes.kernel}, neighbourhood r = {sizes.window}, "
        f"batch {batch}",
        "",
        *aligned([*rows, *((kind, *growth) for kind, growth in TABLE.items())]),
    ]

    def table(title: str, cell: Callable[[str, int], str]) -> None:
        cells = [["n", *TABLE], *([f"{n}", *(cell(kind, n) for kind in TABLE)] for n in ns)]
        lines.extend(["", title, *(f"  {line}" for line in aligned(cells, right=range(len(cells[0]))))])

    table("FLOPs of a forward pass", lambda kind, n: count(batch * operations(kind, sizes, n)))
    table("sequential operations", lambda kind, n: f"{sequential_operations(kind, n):,}")
    table("maximum path length", lambda kind, n: f"{path_length(kind, sizes, n):,}")
    if device is not None:

        def cell(kind: str, n: int, value: Callable[[Measurement], str]) -> str:
            return value(measured[kind][n]) if n in measured[kind] else "-"

        where = f"forward and backward pass on {device_name(device)}, {dtype}"
        table(f"time: {where}", lambda kind, n: cell(kind, n, lambda at: milliseconds(at.seconds)))
        table(f"peak memory: {where}", lambda kind, n: cell(kind, n, lambda at: size(at.peak)))
    lines += ["", *_crossing_table(crossings, ns)]
    if stopped:
        lines += ["", *stopped]
    return lines


def _crossing_table(crossings: dict[str, dict[str, float | None]], ns: Sequence[int]) -> list[str]:
    titles = {FORMULA: "by the paper's formula", FLOPS: "in FLOPs", TIME: "in measured time"}
    names = [name for name in titles if name in next(iter(crossings.values()))]

    def text(name: str, value: float | None) -> str:
        if value is None:
            return f"not up to n = {ns[-1]:,}" if name == TIME else "never"
        if value <= (ns[0] if name == TIME else 1):
            return "always"
        return f"n = {value:,.0f}" if name == TIME else f"n > {value - 1:,.0f}"

    rows = [["self-attention costs more than", *(titles[name] for name in names)]]
    rows += [[kind, *(text(name, values[name]) for name in names)] for kind, values in crossings.items()]
    return aligned(rows)


def _plot(
    sizes: LayerSizes,
    ns: Sequence[int],
    batch: int,
    measured: Measured,
    crossings: dict[str, dict[str, float | None]],
    dtype: str,
) -> str:
    from regard.cost.layers import ATTENTION, TABLE, fitted, operations, path_length
    from regard.explore.chart import line_chart, stack_charts

    named = f"d = {sizes.dim}, k = {sizes.kernel}, r = {sizes.window}, batch {batch}"
    axes: dict[str, Any] = {"x_label": "length n", "log_x": True, "log_y": True}
    work = {kind: {n: batch * operations(kind, sizes, n) for n in ns} for kind in TABLE}

    def marks(name: str, curve: Callable[[float], float]) -> list[tuple[float, float, str]]:
        found: dict[float, list[str]] = {}  # layers by the length where self-attention crosses them
        for kind, values in crossings.items():
            n = values.get(name)
            if n is not None and ns[0] < n <= ns[-1]:
                found.setdefault(n if name == TIME else n - 1, []).append(kind)
        return [(n, curve(n), f"n = {n:,.0f}: {listed(kinds)}") for n, kinds in sorted(found.items())]

    flops = {kind: [(n, value / GIGA) for n, value in line.items()] for kind, line in work.items()}
    paths = {kind: [(n, path_length(kind, sizes, n)) for n in ns] for kind in TABLE}
    at_flops = marks(FLOPS, lambda n: batch * operations(ATTENTION, sizes, round(n)) / GIGA)
    charts = [
        line_chart(flops, title=f"FLOPs of a forward pass, {named}", y_label="GFLOPs", marks=at_flops, **axes),
        line_chart(paths, title="Maximum path length", y_label="layers or steps", **axes),
    ]
    times: dict[str, list[tuple[float, float]]] = {}
    peaks, fits, lines = dict(times), dict(times), dict(times)
    for kind, curve in measured.items():
        if curve:
            times[kind] = [(n, at.seconds * 1000) for n, at in curve.items()]
            peaks[kind] = [(n, at.peak / MIB) for n, at in curve.items()]
            factor = fitted([time for _, time in times[kind]], [work[kind][n] for n in curve])
            fits[kind] = [(n, factor * work[kind][n]) for n in curve]
            lines[kind] = _straight(peaks[kind])
    if times:
        at_time = marks(TIME, _interpolated(times[ATTENTION])) if ATTENTION in times else []
        what = f"of a forward and a backward pass, {dtype}"
        title = f"Time {what} (thin: constant · FLOPs)"
        charts.append(line_chart(times, title=title, y_label="ms", theory=fits, marks=at_time, **axes))
        title = f"Peak memory {what} (thin: a + b · n)"
        charts.append(line_chart(peaks, title=title, y_label="MiB", theory=lines, **axes))
    return stack_charts(charts, f"One layer of each kind over the length, {named}")


def _straight(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """a + b · n through the first and the last point: memory that does not depend on n, and memory per position."""
    (first, low), (last, high) = points[0], points[-1]
    slope = (high - low) / (last - first) if last > first else 0.0
    return [(n, low + slope * (n - first)) for n, _ in points]


def _interpolated(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The curve through these points, straight between them on logarithmic axes."""
    import numpy as np

    x, y = (np.log([point[axis] for point in points]) for axis in (0, 1))
    return lambda at: float(np.exp(np.interp(np.log(at), x, y)))
