"""`regard cost`: what a model takes in parameters, operations and memory, before anything is built.

The formulas are in `regard.cost`; here they become a table that people read, or JSON that programs do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.cost import Cost
    from regard.models.config import ModelConfig

DESCRIPTION = """
Parameters, operations, memory and key/value cache of a model, by formula: nothing is built, so it takes
no time and no memory. MODEL is a preset, a recipe (a TOML file with a [model] table) or the folder of a
saved model.
"""

EXAMPLES = """
regard cost base --seq 512 --batch 32         the paper's base model on a batch of 32 x 512 tokens
regard cost gpt2 --set kv_heads=4 --batch 8   what a change to the model would cost
regard cost base --seq 100 --target-seq 20    a long source, a short target
regard cost gpt2 --dtype fp32                 numbers of 4 bytes
regard cost recipe.toml --set vocab_size=8000      a recipe that leaves the vocabulary to its tokenizer
regard cost runs/demo --json                  every number of a saved model, for programs
regard cost --list                            all presets and their sizes
"""

Row = tuple[str, str, str]  # what, how much, a remark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a preset, a recipe file or a model's folder")
    parser.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help="tokens a row; of the source, where there is a target too (default: max_length, or a picture's patches)",
    )
    parser.add_argument("--target-seq", type=int, metavar="N", help="tokens a row of the target (default: as --seq)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32", "fp64"),
        default="bf16",
        help="number format (default: %(default)s); training with 16 bits means mixed precision",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting of the model; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    parser.add_argument("--list", action="store_true", help="list the presets with their parameters")


def run(args: argparse.Namespace) -> int:
    from regard.cost import cost
    from regard.errors import UserError
    from regard.models.presets import PRESETS
    from regard.models.recipe import read_changes, read_model

    if args.list:
        if args.model is not None:
            raise UserError(f"--list shows every preset: leave {args.model!r} out, or leave --list out")
        print(_presets_json() if args.json else _presets_table())
        return 0
    if args.model is None:
        raise UserError(f"no model is named; give a recipe, a folder or one of the presets: {', '.join(PRESETS)}")
    config = read_model(args.model, read_changes(args.set))
    found = cost(config, seq=args.seq, batch=args.batch, target_seq=args.target_seq, dtype=args.dtype)
    if args.json:
        print(_json({"model": args.model, **found.to_dict()}))
    else:
        print(_report(args.model, config, found))
    return 0


def _json(values: object) -> str:
    import json

    return json.dumps(values, indent=2)


def _presets_json() -> str:
    from regard.cost import cost
    from regard.models.presets import PRESETS, preset

    return _json({name: cost(preset(name)).to_dict()["parameters"] for name in PRESETS})


def _presets_table() -> str:
    from regard.cost import cost
    from regard.models.presets import PRESETS, preset

    lines: list[tuple[str, ...]] = [
        ("preset", "architecture", "layers", "dim", "heads", "ff_dim", "vocab_size", "parameters")
    ]
    for name in PRESETS:
        config = preset(name)
        inside = ("-", "-") if config.architecture == "recurrent" else (config.heads, config.ff_dim)
        sizes = (_layers(config), config.dim, *inside, config.vocab_size or "-")
        total = sum(cost(config).parameters.values())
        lines.append((name, config.architecture, *map(str, sizes), f"{total:,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = (
        "  ".join(_pad(cell, width, i > 1) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in text)


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _layers(config: ModelConfig) -> str:
    if config.architecture not in ("encoder-decoder", "recurrent"):
        return str(config.layers)
    return f"{config.layers}+{config.layers if config.decoder_layers is None else config.decoder_layers}"


def _report(name: str, config: ModelConfig, found: Cost) -> str:
    """Four tables under one heading, columns aligned over all of them."""
    tables = {
        "parameters": _parameter_rows(config, found),
        "operations of a forward pass": _forward_rows(config, found),
        "operations of training and generation": _training_rows(config, found),
        "memory": _memory_rows(config, found),
    }
    rows = [row for table in tables.values() for row in table]
    label, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"{name}: {_describe(config)}", _workload(config, found)]
    for title, table in tables.items():
        lines += ["", title]
        lines += [f"  {row[0]:<{label}}  {row[1]:>{value}}  {row[2]}".rstrip() for row in table]
    return "\n".join([*lines, "", *_assumptions(config, found)])


def _describe(config: ModelConfig) -> str:
    heads = f"{config.heads} heads" + (f" ({config.kv_heads} for keys)" if config.kv_heads else "")
    parts = [config.architecture, f"{_layers(config)} layers", f"dim {config.dim}"]
    if config.architecture == "recurrent":
        parts += [config.cell, f"embed_dim {config.token_dim}", f"{config.attention_score} attention"]
    else:
        parts += [heads, f"ff_dim {config.ff_dim}"]
    if config.vocab_size is not None and (config.input == "tokens" or config.output_head == "tokens"):
        parts.append(f"vocab_size {config.vocab_size}")
    return ", ".join(parts)


def _workload(config: ModelConfig, found: Cost) -> str:
    unit = {"tokens": "tokens", "patches": "patches", "features": "features"}[config.input]
    if found.target_seq:
        return f"batch: {found.batch} x ({found.seq} source {unit}, {found.target_seq} target tokens)"
    return f"batch: {found.batch} x {found.seq} {unit}"


def _parameter_rows(config: ModelConfig, found: Cost) -> list[Row]:
    total = sum(found.parameters.values())
    rows = _parts(found.parameters, count)
    rows.append(("total", count(total), f"{total:,}"))
    rows.append(("without lookup tables", count(total - found.table_parameters), ""))
    if found.active_parameters != total:
        remark = f"{config.experts_per_token} of {config.experts} experts"
        rows.append(("that a token passes through", count(found.active_parameters), remark))
    return rows


def _forward_rows(config: ModelConfig, found: Cost) -> list[Row]:
    total = sum(found.forward.values())
    rows: list[Row] = [*_parts(found.forward, count), ("total", count(total), "")]
    rows.append((f"per {_token(config)}", count(total / found.tokens), ""))
    if found.hidden:
        share = f"{found.hidden / total:.1%} of the total: computed, then hidden"
        rows.append(("pairs that the mask hides", count(found.hidden), share))
    return rows


def _training_rows(config: ModelConfig, found: Cost) -> list[Row]:
    rule = 6 * found.multiplied_parameters
    rows: list[Row] = [
        ("training, per batch", count(found.train), "forward + backward"),
        (f"training, per {_token(config)}", count(found.train / found.tokens), ""),
        (
            "  rule of thumb 6·N",
            count(rule),
            f"N = {count(found.multiplied_parameters)} parameters that multiply",
        ),
    ]
    if found.recomputed:
        rows.append(("scores computed again", count(found.recomputed), "besides, in the backward pass"))
    if found.step:
        rows.append(("generation, one more token a row", count(found.step), "with the cache full"))
    return rows


def _memory_rows(config: ModelConfig, found: Cost) -> list[Row]:
    rows: list[Row] = [("weights", size(found.weights), found.dtype)]
    cache = sum(found.kv_cache.values())
    if cache:
        own = "state" if config.architecture == "recurrent" else "self"
        cross = f"{own} {size(found.kv_cache['self'])}, cross {size(found.kv_cache['cross'])}"
        rows.append(("key/value cache", size(cache), cross if found.kv_cache["cross"] else ""))
    state = "fp64" if found.dtype == "fp64" else "fp32"
    rows.append(("training: weights, gradients, Adam", size(found.training_state), state))
    rows.append(("training: activations", size(sum(found.activations.values())), ""))
    rows += [(f"  {name.replace('_', ' ')}", size(value), "") for name, value in found.activations.items()]
    if found.loss_gradients:
        rows.append(("training: gradients of the loss", size(found.loss_gradients), "as the backward pass begins"))
    rows.append(("training in all, at the peak", size(found.training_memory), ""))
    if config.attention != "reference" and config.architecture != "recurrent":
        written_out = found.training_memory + found.reference_activations - sum(found.activations.values())
        rows.append(("  with attention = 'reference'", size(written_out), ""))
    return rows


def _parts(parts: dict[str, int], show: Callable[[float], str]) -> list[Row]:
    total = sum(parts.values())
    return [
        (name.replace(".", " ").replace("_", " "), show(value), f"{value / total:6.1%}")
        for name, value in parts.items()
    ]


def _token(config: ModelConfig) -> str:
    if config.architecture in ("encoder-decoder", "recurrent"):
        return "target token"
    return {"tokens": "token", "patches": "patch", "features": "feature"}[config.input]


def _assumptions(config: ModelConfig, found: Cost) -> list[str]:
    path = {
        "fused": "every pair counts, hidden or not; fused attention keeps no weights",
        "reference": "every pair counts, hidden or not; the weights are kept for the backward pass",
        "flex": "only visible pairs count; hidden ones are skipped",
    }[config.attention]
    if config.architecture == "recurrent":
        path = "every pair of a target and a source token counts; the weights are kept for the backward pass"
    mixed = "; training in mixed precision" if found.dtype in ("bf16", "fp16") else ""
    return [
        f"assumed: {path}."
        if config.architecture == "recurrent"
        else f"assumed: attention = {config.attention!r}: {path}.",
        f"         A product [m, k] x [k, n] is 2·m·n·k operations, all else 0; no padding{mixed}.",
    ]


def count(value: float) -> str:
    """1234567 -> '1.23 M'"""
    return _scaled(value, 1000, ("", " K", " M", " G", " T", " P", " E"))


def size(value: float) -> str:
    """Bytes: 1536 -> '1.50 KiB'"""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while power + 1 < len(units) and value >= base:
        value, power = value / base, power + 1
    if value >= 1e6:
        return f"{value:.2e}{units[power]}"
    return f"{value:.0f}{units[power]}" if power == 0 else f"{value:.2f}{units[power]}"
