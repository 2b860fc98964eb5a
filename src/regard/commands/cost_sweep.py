"""`regard cost MODEL --sweep`: a table of costs over one size, as text, JSON, CSV and a plot, with measurements."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import show
from regard.commands.attention_options import check_png, image_file, progress
from regard.errors import UserError
from regard.terminal import aligned, count, size

if TYPE_CHECKING:
    import torch

    from regard.cost import Cost
    from regard.cost.measure import Budget, Measurement
    from regard.cost.sweep import Sweep
    from regard.models.config import ModelConfig

MIB, GIGA = 2.0**20, 1e9
Row = dict[str, float]


def run_sweep(
    args: argparse.Namespace, model: Callable[[Mapping[str, Any]], ModelConfig], describe: Callable[[ModelConfig], str]
) -> None:
    """`model` makes the config with some settings changed; `describe` says in a line what it is."""
    from regard.cost.sweep import sweep

    check_files(args)
    sizes, batch = _sizes(args), 1 if args.batch is None else args.batch
    device = device_of(args)
    dtype = dtype_of(args, device)
    results = sweep(sizes, model, seq=args.seq, batch=batch, target_seq=args.target_seq, dtype=dtype)
    measured: list[Measurement] = []
    stopped = ""
    if device is not None:
        measured, stopped = _measure(results, sizes, budget_of(args, device), device)
    pairs = [(result, at) for (_, result), at in zip(results, [*measured, *[None] * len(results)], strict=False)]
    rows = [_row(sizes.name, value, *pair) for value, pair in zip(sizes.values, pairs, strict=True)]
    write_files(args, rows, lambda: _plot(args.model, sizes, results, measured, dtype))
    first, found = results[0]
    work = "" if sizes.name == "batch" else f"batch {batch}, "
    title = f"{args.model}: {describe(first)}" + (f" (at {sizes.name} = {sizes.values[0]})" if len(rows) > 1 else "")
    lines = [title, f"{work}{found.dtype}{'' if device is None else f', measured on {device_name(device)}'}", ""]
    lines += _table(sizes, rows, device is not None)
    if stopped:
        lines += ["", stopped]
    content = {
        "model": args.model,
        "sweep": {"name": sizes.name, "values": list(sizes.values)},
        "rows": [
            {sizes.name: value, **result.to_dict()} | ({"measured": at.to_dict()} if at else {})
            for value, (result, at) in zip(sizes.values, pairs, strict=True)
        ],
    }
    show(args.json, content | ({"stopped": stopped} if stopped else {}), lines)


def _sizes(args: argparse.Namespace) -> Sweep:
    from regard.cost.sweep import WORKLOAD, Sweep, read_sweep

    if args.sweep is None:  # --measure alone: one batch
        return Sweep("batch", (1 if args.batch is None else args.batch,))
    sizes = read_sweep(args.sweep)
    given = getattr(args, sizes.name) if sizes.name in WORKLOAD else None
    if given is not None:
        option = sizes.name.replace("_", "-")
        raise UserError(f"--{option} {given}: --sweep {args.sweep} sets it too; remove one of them")
    for assignment in args.set:
        if assignment.partition("=")[0].strip() == sizes.name:
            raise UserError(f"--set {assignment}: --sweep {args.sweep} sets it too; remove one of them")
    return sizes


# --- what sweeps of models and layers have in common


def check_files(args: argparse.Namespace) -> None:
    """The files that will be written, checked before anything is measured."""
    for option in ("csv", "plot"):
        name = getattr(args, option)
        if name is not None and not Path(name).resolve().parent.is_dir():
            raise UserError(f"--{option} {name}: the folder does not exist; create it first")
    if args.plot is not None:
        ending = Path(args.plot).suffix.lower()
        if ending not in (".svg", ".png"):
            raise UserError(f"--plot {args.plot}: the extension chooses the format; use .svg or .png")
        check_png(Path(args.plot))


def device_of(args: argparse.Namespace) -> torch.device | None:
    """The device to measure on; None: nothing is measured."""
    if not args.measure:
        return None
    if not args.max_seconds > 0:
        raise UserError(f"--max-seconds {args.max_seconds:g}: must be greater than 0")
    if args.max_memory is not None and not args.max_memory > 0:
        raise UserError(f"--max-memory {args.max_memory:g}: must be greater than 0")
    from regard.models.folder import find_device

    return find_device(args.device)


def dtype_of(args: argparse.Namespace, device: torch.device | None) -> str:
    if args.dtype is None:
        return "fp32" if device is not None and device.type == "cpu" else "bf16"
    dtype: str = args.dtype
    return dtype


def budget_of(args: argparse.Namespace, device: torch.device) -> Budget:
    from regard.cost.measure import Budget

    memory = None if args.max_memory is None else int(args.max_memory * 2**30)
    return Budget(device, args.max_seconds, memory)


def device_name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"the CPU with {threads} thread{'s' * (threads > 1)}"


def write_files(args: argparse.Namespace, rows: Sequence[Row], plot: Callable[[], str]) -> None:
    """The CSV file and the plot, where they are asked for."""
    from regard.files import write_atomically

    if args.csv is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(args.csv, text.getvalue().encode())
    if args.plot is not None:
        write_atomically(args.plot, image_file(Path(args.plot), plot()))


# --- models


def _measure(
    results: Sequence[tuple[ModelConfig, Cost]], sizes: Sweep, budget: Budget, device: torch.device
) -> tuple[list[Measurement], str]:
    """The measurements, and why they end before the last value."""
    from regard.cost.measure import measure_model

    measured: list[Measurement] = []
    for value, (config, result) in zip(sizes.values, progress(results, "measuring"), strict=True):
        run = partial(measure_model, config, result, device)
        found = budget.measure("model", result.train + result.recomputed, result.training_memory, run)
        if isinstance(found, str):
            return measured, f"measuring stopped at {sizes.name} = {value}: {found}"
        measured.append(found)
    return measured, ""


def _row(name: str, value: int, result: Cost, measured: Measurement | None) -> Row:
    row: Row = {
        name: value,
        "parameters": sum(result.parameters.values()),
        "forward_flops": sum(result.forward.values()),
        "training_flops": result.train,
        "activation_bytes": sum(result.activations.values()),
        "kv_cache_bytes": sum(result.kv_cache.values()),
        "training_bytes": result.training_memory,
    }
    if measured is not None:
        row |= {"seconds": measured.seconds, "peak_bytes": measured.peak}
    return row


def _table(sizes: Sweep, rows: Sequence[Row], is_measured: bool) -> list[str]:
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "parameters": ("parameters", count),
        "forward_flops": ("FLOPs forward", count),
        "training_flops": ("FLOPs training", count),
        "activation_bytes": ("activations", size),
        "kv_cache_bytes": ("key/value cache", size),
        "training_bytes": ("training memory", size),
    }
    columns = {name: column for name, column in columns.items() if any(row[name] for row in rows)}
    if is_measured:
        columns |= {"peak_bytes": ("measured", size), "seconds": ("time", milliseconds)}
    table = [[sizes.name, *(title for title, _ in columns.values())]]
    for value, row in zip(sizes.values, rows, strict=True):
        table.append([f"{value}", *(show(row[name]) if name in row else "-" for name, (_, show) in columns.items())])
        if is_measured:
            table[-1].append(f"{row['training_flops'] / row['seconds'] / GIGA:,.0f}" if "seconds" in row else "-")
    if is_measured:
        table[0].append("GFLOP/s")
    return aligned(table, right=range(len(table[0])))


def milliseconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _plot(
    name: str, sizes: Sweep, results: Sequence[tuple[ModelConfig, Cost]], measured: Sequence[Measurement], dtype: str
) -> str:
    from regard.cost.layers import fitted
    from regard.explore.chart import line_chart, stack_charts

    costs, x_label = [result for _, result in results], sizes.name.replace("_", " ")

    def points(values: Iterable[float], unit: float) -> list[tuple[float, float]]:
        return [(at, value / unit) for at, value in zip(sizes.values, values, strict=False) if value]

    def chart(title: str, y_label: str, series: dict[str, list[tuple[float, float]]], **more: Any) -> str:
        drawn = {label: line for label, line in series.items() if line}
        return line_chart(drawn, title=title, x_label=x_label, y_label=y_label, log_x=True, log_y=True, **more)

    training, parameters = [cost.train for cost in costs], [sum(cost.parameters.values()) for cost in costs]
    flops = {"training step": points(training, GIGA)}
    flops["forward"] = points((sum(cost.forward.values()) for cost in costs), GIGA)
    flops["generation, one token"] = points((cost.step for cost in costs), GIGA)
    memory = {"training, peak": points((cost.training_memory for cost in costs), MIB)}
    memory["activations"] = points((sum(cost.activations.values()) for cost in costs), MIB)
    memory["key/value cache"] = points((sum(cost.kv_cache.values()) for cost in costs), MIB)
    memory["weights"] = points((cost.weights for cost in costs), MIB)
    memory["measured peak"] = points((at.peak for at in measured), MIB)
    charts = [chart(f"{name}: FLOPs", "GFLOPs", flops), chart(f"{name}: memory, {dtype}", "MiB", memory)]
    if len(set(parameters)) > 1:
        charts.append(chart(f"{name}: parameters", "millions", {"parameters": points(parameters, 1e6)}))
    if measured:
        seconds = [at.seconds for at in measured]
        factor = fitted(seconds, training[: len(seconds)])
        label = "measured (thin: constant · FLOPs)"
        theory = {label: points((factor * value for value in training[: len(seconds)]), 1e-3)}
        series = {label: points(seconds, 1e-3)}
        charts.append(chart(f"{name}: time of forward and backward pass", "ms", series, theory=theory))
    return stack_charts(charts, f"{name}: cost over {x_label}")
