"""`regard average`: the mean of a run's last checkpoints becomes its model."""

from __future__ import annotations

import argparse

DESCRIPTION = (
    "Make the mean of the newest checkpoints of a run its model.safetensors. The checkpoints stay as they are."
)

EXAMPLES = """
regard average runs/multi30k-en-de --last 10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="how many checkpoints (default: 10)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.errors import UserError
    from regard.models.folder import WEIGHTS, load_config, write_weights
    from regard.training.average import average

    if args.last < 1:
        raise UserError(f"--last {args.last}: give 1 or more")
    load_config(args.run)
    write_weights(Path(args.run) / WEIGHTS, average(Path(args.run), args.last))
    print(f"{Path(args.run) / WEIGHTS} is now the mean of the last {args.last} checkpoints")
    return 0
