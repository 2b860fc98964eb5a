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
  regard cost base --sweep seq=128:65536         how the cost grows with the length; --csv FILE, --plot FILE.svg
  regard cost base --sweep heads=1,2,4,8 --measure     and the time and memory of a real pass on this machine
  regard cost --layers --plot layers.png         attention, recurrence and convolution, as in Table 1 of the paper
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from regard.commands import DEVICE, REPEATABLE, aligned, show
from regard.errors import UserError
from regard.terminal import count, size

if TYPE_CHECKING:
    from regard.cost import Cost
    from regard.models.config import ModelConfig

Row = tuple[str, float, str]  # quantity, value, remark

ARGUMENTS = {
    "MODEL": ("a preset, a recipe file or a model folder", {"nargs": "?"}),
    "--seq N": ("tokens per row, or source tokens (default: max_length, or the patches of an image)", {"type": int}),
    "--target-seq N": ("target tokens per row (default: as --seq)", {"type": int}),
    "--batch B": ("rows (default: 1)", {"type": int}),
    "--dtype": (
        "data type (default: bf16; to measure on a CPU: fp32); training with 16 bits means mixed precision",
        {"choices": ("bf16", "fp16", "fp32", "fp64")},
    ),
    "--set NAME=VALUE": ("change a setting of the model; repeatable", REPEATABLE),
    "--json": "print all values as JSON",
    "--list": "list the presets with their parameters",
    "sweeps": {
        "--sweep NAME=VALUES": (
            "change one size: seq=128:65536 doubles it, seq=128:1024:128 goes in steps, heads=1,2,4 lists values; "
            "seq, target_seq, batch or a setting of the model",
            {},
        ),
        "--csv FILE": "write the table, exact numbers",
        "--plot FILE": "draw the curves on logarithmic axes, as .svg or .png",
    },
    "measurement": {
        "--measure": "also run a forward and a backward pass on this machine: time and peak memory",
        **DEVICE,
        "--max-seconds S": ("stop measuring after about this long (default: 60)", {"type": float, "default": 60.0}),
        "--max-memory GIB": ("measure nothing that needs more (default: 80 %% of what is free)", {"type": float}),
    },
    "layers": {
        "--layers": "compare self-attention, restricted attention, LSTM, GRU and convolutions over the length "
        "(--sweep seq=…, default: seq=64:16384)",
        "--dim D": ("width of each layer (default: 512)", {"type": int}),
        "--kernel K": ("width of a convolution (default: 3)", {"type": int}),
        "--window R": ("neighbourhood of restricted attention, odd (default: 65)", {"type": int}),
    },
}


def run(args: argparse.Namespace) -> None:
    from regard.cost import cost
    from regard.models.recipe import PRESETS, preset, read_changes

    _check_options(args)
    if args.layers:
        from regard.commands.cost_layers import run_layers

        return run_layers(args)
    if args.list:
        if args.model is not None:
            raise UserError(f"--list shows every preset: remove either {args.model!r} or --list")
        rows = [["preset", "architecture", "layers", "dim", "heads", "ff_dim", "vocab_size", "parameters"]]
        parameters = {}
        for name in PRESETS:
            config, parameters[name] = preset(name), cost(preset(name)).to_dict()["parameters"]
            inside = ("-", "-") if config.architecture == "recurrent" else (config.heads, config.ff_dim)
            sizes = (_layers(config), config.dim, *inside, config.vocab_size or "-")
            rows.append([name, config.architecture, *map(str, sizes), f"{parameters[name]['total']:,}"])
        show(args.json, parameters, aligned(rows, right=range(2, 8)))
        return
    if args.model is None:
        raise UserError(f"no model: pass a recipe, a folder or one of the presets: {', '.join(PRESETS)}")
    changes = read_changes(args.set)
    if args.sweep or args.measure:
        from regard.commands.cost_sweep import run_sweep

        return run_sweep(args, lambda more: _read_model(args.model, {**changes, **more}), describe)
    config, batch = _read_model(args.model, changes), 1 if args.batch is None else args.batch
    result = cost(config, seq=args.seq, batch=batch, target_seq=args.target_seq, dtype=args.dtype or "bf16")
    show(args.json, {"model": args.model, **result.to_dict()}, _report(args.model, config, result))


def _check_options(args: argparse.Namespace) -> None:
    """Options that belong together."""
    for name, needs in (("csv", ("sweep", "layers")), ("plot", ("sweep", "layers")), ("device", ("measure",))):
        if getattr(args, name) is not None and not any(getattr(args, other) for other in needs):
            options = " or ".join(f"--{other}" for other in needs)
            raise UserError(f"--{name} {getattr(args, name)}: only with {options}")
    for name in ("dim", "kernel", "window"):
        if getattr(args, name) is not None and not args.layers:
            value = getattr(args, name)
            instead = "" if name == "kernel" else f"; for a model, --set {name}={value}"
            raise UserError(f"--{name} {value}: only with --layers{instead}")
    if args.layers and (args.model is not None or args.list or args.set):
        other = repr(args.model) if args.model is not None else "--list" if args.list else "--set"
        raise UserError(f"--layers compares single layers, without a model: remove {other} or --layers")
    if args.list and (args.sweep or args.measure):
        raise UserError("--list shows every preset: pass one of them to sweep or measure it")


def _read_model(name: str, changes: dict[str, Any]) -> ModelConfig:
    """The config of a preset, a folder, or a recipe with what its task and its [text] imply."""
    from regard.models.recipe import PRESETS, model_config, read_model, read_recipe

    tables = {} if name in PRESETS or os.path.isdir(name) else read_recipe(name)
    model, text = tables.get("model"), tables.get("text")
    if not isinstance(model, dict):
        return read_model(name, changes)
    if "task" in tables:  # a classifier is an encoder
        from regard.tasks.registry import task_of

        model = {**task_of(tables).DEFAULTS.get("model", {}), **model}
    if isinstance(text, dict) and type(text.get("vocab_size")) is int:  # the tokenizer's, not that of a preset
        model = {"vocab_size": text["vocab_size"], **model}
    return model_config({**tables, "model": model}, name, changes)


def _layers(config: ModelConfig) -> str:
    if config.architecture not in ("encoder-decoder", "recurrent"):
        return str(config.layers)
    return f"{config.layers}+{config.layers if config.decoder_layers is None else config.decoder_layers}"


def _report(name: str, config: ModelConfig, cost: Cost) -> list[str]:
    """The model, the batch, four tables with aligned columns, and the assumptions."""
    batch = f"{cost.seq} {config.input}"
    if cost.target_seq:
        batch = f"({cost.seq} source {config.input}, {cost.target_seq} target tokens)"
    lines = [f"{name}: {describe(config)}", f"batch: {cost.batch} x {batch}"]
    tables = {
        title: [
            (label, (size if title == "memory" else count)(value), remark) for label, value, remark in rows if value
        ]
        for title, rows in _tables(config, cost).items()
    }
    texts = iter(aligned([row for rows in tables.values() for row in rows], right=(1,)))
    for title, rows in tables.items():
        lines += ["", title, *(f"  {text}" for text in islice(texts, len(rows)))]
    return [*lines, "", *_assumptions(config, cost)]


def describe(config: ModelConfig) -> str:
    """The sizes of a model in one line."""
    heads = f"{config.heads} heads" + (f" ({config.kv_heads} for keys)" if config.kv_heads else "")
    parts = [config.architecture, f"{_layers(config)} layers", f"dim {config.dim}"]
    if config.architecture == "recurrent":
        parts += [config.cell, f"embed_dim {config.token_dim}", f"{config.attention_score} attention"]
    else:
        parts += [heads, f"ff_dim {config.ff_dim}"]
    if config.vocab_size is not None and (config.input == "tokens" or config.output_head == "tokens"):
        parts.append(f"vocab_size {config.vocab_size}")
    return ", ".join(parts)


def _tables(config: ModelConfig, cost: Cost) -> dict[str, list[Row]]:
    """The rows by title; one whose value is 0 is not shown."""
    total, forward, N = sum(cost.parameters.values()), sum(cost.forward.values()), cost.multiplied_parameters
    cache, activations = sum(cost.kv_cache.values()), sum(cost.activations.values())
    recurrent = config.architecture == "recurrent"
    token = {"tokens": "token", "patches": "patch", "features": "feature"}[config.input]
    token = "target token" if cost.target_seq else token
    idle = cost.active_parameters != total
    own, cross = size(cost.kv_cache["self"]), size(cost.kv_cache["cross"])
    caches = f"{'state' if recurrent else 'self'} {own}, cross {cross}" if cost.kv_cache["cross"] else ""
    written_out = cost.training_memory + cost.reference_activations - activations
    return {
        "parameters": [
            *_parts(cost.parameters),
            ("total", total, f"{total:,}"),
            ("without embeddings", total - cost.table_parameters, ""),
            (
                "active per token",
                idle * cost.active_parameters,
                f"{config.experts_per_token} of {config.experts} experts",
            ),
        ],
        "FLOPs of a forward pass": [
            *_parts(cost.forward),
            ("total", forward, ""),
            (f"per {token}", forward / cost.tokens, ""),
            ("masked query-key pairs", cost.masked, f"{cost.masked / forward:.1%} of the total: computed, then masked"),
        ],
        "FLOPs of training and generation": [
            ("training, per batch", cost.train, "forward + backward"),
            (f"training, per {token}", cost.train / cost.tokens, ""),
            ("  rule of thumb 6·N", 6 * N, f"N = {count(N)} parameters in matmuls"),
            ("attention scores, recomputed", cost.recomputed, "in addition, in the backward pass"),
            ("generation, one token per row", cost.step, "with a full cache"),
        ],
        "memory": [
            ("weights", cost.weights, cost.dtype),
            ("key/value cache", cache, caches),
            ("training: weights, gradients, Adam", cost.training_state, "fp64" if cost.dtype == "fp64" else "fp32"),
            ("training: activations", activations, ""),
            *((f"  {name.replace('_', ' ')}", value, "") for name, value in cost.activations.items()),
            ("training: gradients of the loss", cost.loss_gradients, "at the start of backward"),
            ("training, peak total", cost.training_memory, ""),
            ("  with attention = 'reference'", (config.attention != "reference" and not recurrent) * written_out, ""),
        ],
    }


def _parts(parts: dict[str, int]) -> Iterator[Row]:
    total = sum(parts.values())
    for name, value in parts.items():
        yield name.replace(".", " ").replace("_", " "), value, f"{value / total:6.1%}"


def _assumptions(config: ModelConfig, cost: Cost) -> list[str]:
    from regard.nn.config import LONG

    path = {
        "fused": "all query-key pairs count, masked or not; fused attention stores no weights",
        "reference": "all query-key pairs count, masked or not; the backward pass keeps the weights",
        "flex": "only unmasked query-key pairs count",
    }[config.attention]
    if config.attention == "fused" and any(size is not None for _, size in config.pattern):
        path = path.replace(";", f" (from {LONG} tokens on, of layers with a window only those in it);")
    path = f"attention = {config.attention!r}: {path}"
    if config.architecture == "recurrent":
        path = "all pairs of a target and a source token count; the weights are kept for the backward pass"
    mixed = "; training in mixed precision" if cost.dtype in ("bf16", "fp16") else ""
    return [
        f"assumptions: {path}.",
        f"             A matmul [m, k] x [k, n] has 2·m·n·k FLOPs, everything else 0; no padding{mixed}.",
    ]
