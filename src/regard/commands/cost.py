"""Parameters, FLOPs, memory and key/value cache of a model, computed by formula without building it. MODEL is a preset,
a recipe (a TOML file with a [model] table) or the folder of a saved model.

examples:
  regard cost base --seq 512 --batch 32          the paper's base model on a batch of 32 x 512 tokens
  regard cost gpt2 --set kv_heads=4 --batch 8    with grouped-query attention
  regard cost base --seq 100 --target-seq 20     a long source, a short target
  regard cost gpt2 --dtype fp32                  single precision
  regard cost recipe.toml --set vocab_size=8000  a recipe whose vocabulary size depends on its tokenizer
  regard cost runs/demo --json                   all values of a saved model as JSON
  regard cost --list                             all presets and their sizes
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from regard.commands import REPEATABLE, aligned, show
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.cost import Cost
    from regard.models.config import ModelConfig

Row = tuple[str, str, str]  # quantity, value, remark

ARGUMENTS = {
    "MODEL": ("a preset, a recipe file or a model folder", {"nargs": "?"}),
    "--seq N": (
        "tokens per row, of the source if there is a target (default: max_length, or the patches of an image)",
        {"type": int},
    ),
    "--target-seq N": ("target tokens per row (default: as --seq)", {"type": int}),
    "--batch B": ("rows (default: 1)", {"type": int, "default": 1}),
    "--dtype": (
        "data type (default: bf16); training with 16 bits means mixed precision",
        {"choices": ("bf16", "fp16", "fp32", "fp64"), "default": "bf16"},
    ),
    "--set NAME=VALUE": ("change a setting of the model; repeatable", REPEATABLE),
    "--json": "print all values as JSON",
    "--list": "list the presets with their parameters",
}


def run(args: argparse.Namespace) -> None:
    from regard.cost import cost
    from regard.models.presets import PRESETS, preset
    from regard.models.recipe import read_changes, read_model

    if args.list:
        if args.model is not None:
            raise UserError(f"--list shows every preset: remove either {args.model!r} or --list")
        costs = {name: cost(preset(name)) for name in PRESETS}
        parameters = {name: one.to_dict()["parameters"] for name, one in costs.items()}
        show(args.json, parameters, aligned(_presets(costs), right=range(2, 8)))
        return
    if args.model is None:
        raise UserError(f"no model: pass a recipe, a folder or one of the presets: {', '.join(PRESETS)}")
    config = read_model(args.model, read_changes(args.set))
    result = cost(config, seq=args.seq, batch=args.batch, target_seq=args.target_seq, dtype=args.dtype)
    show(args.json, {"model": args.model, **result.to_dict()}, _report(args.model, config, result))


def _presets(costs: dict[str, Cost]) -> Iterator[list[str]]:
    """The rows of the table of presets."""
    from regard.models.presets import preset

    yield ["preset", "architecture", "layers", "dim", "heads", "ff_dim", "vocab_size", "parameters"]
    for name, cost in costs.items():
        config = preset(name)
        inside = ("-", "-") if config.architecture == "recurrent" else (config.heads, config.ff_dim)
        sizes = (_layers(config), config.dim, *inside, config.vocab_size or "-")
        yield [name, config.architecture, *map(str, sizes), f"{sum(cost.parameters.values()):,}"]


def _layers(config: ModelConfig) -> str:
    if config.architecture not in ("encoder-decoder", "recurrent"):
        return str(config.layers)
    return f"{config.layers}+{config.layers if config.decoder_layers is None else config.decoder_layers}"


def _report(name: str, config: ModelConfig, cost: Cost) -> list[str]:
    """Four tables with aligned columns."""
    tables = {
        "parameters": list(_parameter_rows(config, cost)),
        "FLOPs of a forward pass": list(_forward_rows(config, cost)),
        "FLOPs of training and generation": list(_training_rows(config, cost)),
        "memory": list(_memory_rows(config, cost)),
    }
    rows = iter(aligned([row for table in tables.values() for row in table], right=(1,)))
    lines = [f"{name}: {_describe(config)}", _workload(config, cost)]
    for title, table in tables.items():
        lines += ["", title, *(f"  {line}" for line in islice(rows, len(table)))]
    return [*lines, "", *_assumptions(config, cost)]


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


def _workload(config: ModelConfig, cost: Cost) -> str:
    if cost.target_seq:
        return f"batch: {cost.batch} x ({cost.seq} source {config.input}, {cost.target_seq} target tokens)"
    return f"batch: {cost.batch} x {cost.seq} {config.input}"


def _parameter_rows(config: ModelConfig, cost: Cost) -> Iterator[Row]:
    total = sum(cost.parameters.values())
    yield from _parts(cost.parameters)
    yield "total", count(total), f"{total:,}"
    yield "without embeddings", count(total - cost.table_parameters), ""
    if cost.active_parameters != total:
        remark = f"{config.experts_per_token} of {config.experts} experts"
        yield "active per token", count(cost.active_parameters), remark


def _forward_rows(config: ModelConfig, cost: Cost) -> Iterator[Row]:
    total = sum(cost.forward.values())
    yield from _parts(cost.forward)
    yield "total", count(total), ""
    yield f"per {_token(config)}", count(total / cost.tokens), ""
    if cost.masked:
        fraction = f"{cost.masked / total:.1%} of the total: computed, then masked"
        yield "masked query-key pairs", count(cost.masked), fraction


def _training_rows(config: ModelConfig, cost: Cost) -> Iterator[Row]:
    multiplied = cost.multiplied_parameters
    yield "training, per batch", count(cost.train), "forward + backward"
    yield f"training, per {_token(config)}", count(cost.train / cost.tokens), ""
    yield "  rule of thumb 6·N", count(6 * multiplied), f"N = {count(multiplied)} parameters in matmuls"
    if cost.recomputed:
        yield "attention scores, recomputed", count(cost.recomputed), "in addition, in the backward pass"
    if cost.step:
        yield "generation, one token per row", count(cost.step), "with a full cache"


def _memory_rows(config: ModelConfig, cost: Cost) -> Iterator[Row]:
    yield "weights", size(cost.weights), cost.dtype
    if cache := sum(cost.kv_cache.values()):
        own = "state" if config.architecture == "recurrent" else "self"
        cross = f"{own} {size(cost.kv_cache['self'])}, cross {size(cost.kv_cache['cross'])}"
        yield "key/value cache", size(cache), cross if cost.kv_cache["cross"] else ""
    yield "training: weights, gradients, Adam", size(cost.training_state), "fp64" if cost.dtype == "fp64" else "fp32"
    activations = sum(cost.activations.values())
    yield "training: activations", size(activations), ""
    yield from ((f"  {name.replace('_', ' ')}", size(value), "") for name, value in cost.activations.items())
    if cost.loss_gradients:
        yield "training: gradients of the loss", size(cost.loss_gradients), "at the start of backward"
    yield "training, peak total", size(cost.training_memory), ""
    if config.attention != "reference" and config.architecture != "recurrent":
        written_out = cost.training_memory + cost.reference_activations - activations
        yield "  with attention = 'reference'", size(written_out), ""


def _parts(parts: dict[str, int]) -> Iterator[Row]:
    total = sum(parts.values())
    for name, value in parts.items():
        yield name.replace(".", " ").replace("_", " "), count(value), f"{value / total:6.1%}"


def _token(config: ModelConfig) -> str:
    if config.architecture in ("encoder-decoder", "recurrent"):
        return "target token"
    return {"tokens": "token", "patches": "patch", "features": "feature"}[config.input]


def _assumptions(config: ModelConfig, cost: Cost) -> list[str]:
    path = {
        "fused": "all query-key pairs count, masked or not; fused attention stores no weights",
        "reference": "all query-key pairs count, masked or not; the backward pass keeps the weights",
        "flex": "only unmasked query-key pairs count",
    }[config.attention]
    path = f"attention = {config.attention!r}: {path}"
    if config.architecture == "recurrent":
        path = "all pairs of a target and a source token count; the weights are kept for the backward pass"
    mixed = "; training in mixed precision" if cost.dtype in ("bf16", "fp16") else ""
    return [
        f"assumptions: {path}.",
        f"             A matmul [m, k] x [k, n] has 2·m·n·k FLOPs, everything else 0; no padding{mixed}.",
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
    digits = ".2e" if value >= 1e6 else ".2f" if power else ".0f"
    return f"{value:{digits}}{units[power]}"
