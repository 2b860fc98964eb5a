"""Training on rows of 65,536 tokens on one GPU: speed, memory and loss, with and without activation checkpointing.

    python benchmarks/long_training.py --data data/shakespeare -o benchmarks/results/long-training-h200.json

Each run is `regard train recipes/shakespeare-16k.toml` in a process of its own, with longer rows, a model of --dim and
--layers, and one of these mixers; a step is one row. Speed is the median over the lines of the log after the first,
peak memory is PyTorch's, of everything from the weights on. The loss is that of the last line, and says that the model
learns; the number of steps is too small to compare mixers by it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import table
import torch

from regard.cli import main as regard
from regard.training.history import read_metrics

RECIPE = Path(__file__).parent.parent / "recipes" / "shakespeare-16k.toml"
MIXERS = ("full", "window(512)", "window(512), window(512), full", "gated-linear")


def settings(mixer: str, checkpointing: bool, args: argparse.Namespace) -> list[str]:
    model = {"mixer": mixer, "dim": args.dim, "layers": args.layers, "heads": args.heads, "ff_dim": 4 * args.dim}
    if mixer == "gated-linear":
        model["position"] = "none"
    train = {"steps": args.steps, "batch_tokens": args.length, "log_every": args.steps // 6, "warmup": args.steps // 6}
    train |= {"evaluate_every": 0, "activation_checkpointing": str(checkpointing).lower()}
    if args.device == "cpu":
        train["precision"] = "fp32"
    tables = {"model": {**model, "max_length": args.length}, "train": train}
    return [f"{name}.{key}={value}" for name, own in tables.items() for key, value in own.items()]


def train(values: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", str(RECIPE), "-o", folder, "--data", args.data, "--device", args.device]
        code = regard([*command, *(word for value in values for word in ("--set", value))])
        if code:
            raise SystemExit(code)
        lines = [line for line in read_metrics(Path(folder)) if "loss" in line]
        valid = [line["valid_loss"] for line in read_metrics(Path(folder)) if "valid_loss" in line]
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    return {
        "tokens_per_second": round(statistics.median(line["tokens_per_second"] for line in lines[1:])),
        "first_loss": lines[0]["loss"], "loss": lines[-1]["loss"], "valid_loss": valid[-1],
        "memory_gb": None if peak is None else round(peak / 1e9, 2),
    }  # fmt: skip


def measured(mixer: str, checkpointing: bool, args: argparse.Namespace) -> dict[str, Any]:
    """On a GPU a run has a process of its own, so that its peak memory is its own; its last line is the result."""
    about, values = {"mixer": mixer, "checkpointing": checkpointing}, settings(mixer, checkpointing, args)
    if args.device == "cpu":
        return {**about, **train(values, args)}
    done = subprocess.run([sys.executable, *sys.argv, "--one", *values], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {**about, "failed": f"exit code {done.returncode}"}
    return {**about, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="sample:shakespeare", metavar="DIR", help="the files of the recipe")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), metavar="MIXER")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a row")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--smoke", action="store_true", help="two small models on a CPU, as a test")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.device, args.length, args.dim, args.layers, args.heads, args.steps = "cpu", 512, 32, 2, 2, 30
        args.mixers = ["full", "window(64), gated-linear"]
    if args.one:
        print(json.dumps(train(args.one, args)))
        return
    result = {"kind": "long-training", "machine": measure.machine(args.device)}
    result |= {name: getattr(args, name) for name in ("length", "dim", "layers", "heads", "steps")}
    result["rows"] = []
    for mixer in args.mixers:
        for checkpointing in (False, True):
            result["rows"].append(measured(mixer, checkpointing, args))
            measure.write(args.out, result)
    print(table.table(args.out))


if __name__ == "__main__":
    main()
