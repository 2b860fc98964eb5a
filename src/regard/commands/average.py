"""Replace model.safetensors of a run by the mean of its newest checkpoints. The checkpoints stay unchanged.

examples:
  regard average runs/multi30k-en-de --last 10
"""

from __future__ import annotations

import argparse
from pathlib import Path

from regard.commands import positive
from regard.messages import localize

ARGUMENTS = {
    "RUN": "folder of the run",
    "--last N": ("number of checkpoints (default: 10)", {"type": positive, "default": 10}),
}


def run(args: argparse.Namespace) -> None:
    from regard.models.folder import WEIGHTS, write_weights
    from regard.models.recipe import model_config, read_recipe
    from regard.training.checkpoint import average

    folder = Path(args.run)
    model_config(read_recipe(folder, saved=True), folder)
    write_weights(folder / WEIGHTS, average(folder, args.last))
    print(localize(f"{folder / WEIGHTS} is now the mean of the last {args.last} checkpoints"))
