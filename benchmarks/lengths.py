"""Length extrapolation: the loss of language models at positions beyond their training length.

    python benchmarks/lengths.py --data data/shakespeare -o benchmarks/results/lengths-cpu.json --figure lengths.svg

Small models that differ only in their positions are trained on tiny Shakespeare in rows of 64 characters and evaluated
on the validation set in rows of 512, eight times as long. The result is the loss by position, in groups of 16.

    rope          every token attends to all previous ones; distances over 63 are new
    rope-window   a token attends to the last 16, itself included, so no distance is new; information from further
                  away arrives through the layers: four of them reach 60 characters back
    alibi         no positions, but scores that decrease with the distance (Press et al. 2022)

Minutes on one core. A point is the mean over the validation set; a run is one seed.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
import torch

from regard.errors import UserError
from regard.explore.chart import line_chart
from regard.metrics.perplexity import perplexity
from regard.tasks.language_modeling import LanguageModeling
from regard.training.run import Run

MODELS: dict[str, dict[str, Any]] = {
    "rope": {"position": "rope"},
    "rope-window": {"position": "rope", "window": 16},
    "alibi": {"position": "alibi"},
}
MODEL: dict[str, Any] = {
    "dim": 128, "layers": 4, "heads": 4, "ff_dim": 352, "norm": "rms", "norm_order": "pre", "activation": "swiglu",
    "bias": False, "qk_norm": True, "embed_scale": False, "init": "normal", "dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip
TRAIN: dict[str, Any] = {"optimizer": "muon", "lr": 6e-3, "warmup": 50, "betas": [0.9, 0.95], "weight_decay": 0.1}
CONTEXT, TIMES, GROUP = 64, 8, 16


def prepared(name: str, args: argparse.Namespace, folder: Path) -> Run:
    """The run of one model, before its first step."""
    small = {"dim": 16, "ff_dim": 32, "layers": 1, "heads": 2} if args.smoke else {}
    tables = {
        "task": "language-modeling",
        "data": {"train": ["input.txt"], "valid_fraction": 0.1, "folder": str(args.data)},
        "text": {"kind": "char"},
        "model": {**MODEL, **small, **MODELS[name], "max_length": CONTEXT},
        "train": {
            **TRAIN, "steps": args.steps, "batch_tokens": args.rows * CONTEXT, "pack": CONTEXT, "seed": args.seed,
            "log_every": max(1, args.steps // 20), "save_every": args.steps,
        },
    }  # fmt: skip
    run = Run(LanguageModeling(tables, folder / name, torch.device(args.device)))
    run.prepare()
    return run


def grouped(losses: tuple[float | None, ...]) -> list[float]:
    """Means of GROUP positions each; a text shorter than a row leaves gaps."""
    known = [math.nan if loss is None else loss for loss in losses]
    return [round(sum(known[at : at + GROUP]) / GROUP, 4) for at in range(0, len(known), GROUP)]


def measured(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = prepared(name, args, folder)
    trainer = run.trainer()
    trainer.run()
    text = run.task.examples("valid")
    near, far = (perplexity(trainer.model, text, CONTEXT * times) for times in (1, TIMES))
    return {
        "model": name, "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "loss": round(near["loss"], 4), "loss_at_8_times": round(far["loss"], 4),
        "by_position": grouped(far["loss_per_position"]),
    }  # fmt: skip


def chart(rows: list[dict[str, Any]]) -> str:
    series = {row["model"]: [((at + 0.5) * GROUP, loss) for at, loss in enumerate(row["by_position"])] for row in rows}
    title = f"Trained on rows of {CONTEXT} characters, read in rows of {CONTEXT * TIMES}"
    return line_chart(series, title=title, x_label="position", y_label="validation loss, nats per character")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="holds input.txt")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=800, help="default: 800")
    parser.add_argument("--rows", type=int, default=32, help="of a batch (default: 32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny models and few steps, as a test")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="draw the losses here")
    args = parser.parse_args()
    if args.steps < 1 or args.rows < 1:
        parser.error("--steps and --rows must be 1 or more")
    args.steps = 4 if args.smoke else args.steps
    return args


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    result = {"kind": "lengths", "machine": measure.machine(args.device), "context": CONTEXT, "times": TIMES}
    result |= {"group": GROUP, "steps": args.steps, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            rows.append(measured(name, args, Path(folder)))
            row = rows[-1]
            print(f"{name:12} loss {row['loss']:.4f}, at {TIMES} times the length {row['loss_at_8_times']:.4f}")
            if args.out:
                measure.write(args.out, result)
            if args.figure:
                args.figure.write_text(chart(rows), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
