"""Replace model.safetensors of a run by the mean of its newest checkpoints. The checkpoints stay unchanged.

examples:
  regard average runs/multi30k-en-de --last 10
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="number of checkpoints (default: 10)")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.errors import UserError
    from regard.models.folder import WEIGHTS, load_config, write_weights
    from regard.training.average import average

    if args.last < 1:
        raise UserError(f"--last {args.last}: must be 1 or more")
    load_config(args.run)
    write_weights(Path(args.run) / WEIGHTS, average(Path(args.run), args.last))
    print(f"{Path(args.run) / WEIGHTS} is now the mean of the last {args.last} checkpoints")
    return 0
