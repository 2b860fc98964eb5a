"""The runs of a study side by side, against the same runs one after another by hand.

    python benchmarks/studies.py --device cuda --jobs 1 4 8 --out benchmarks/results/studies-h200.json

The task of `regard ablate --smoke` with four rows and nine seeds, 36 tiny runs: first each by a `regard train` of its
own, then as a study with as many processes as `--jobs` says. The weights of every run must be the same, bit for bit;
`identical` counts them. With `--by-hand 2` only the runs of two seeds are trained by hand, and their time is scaled to
all. On a CPU all processes have one thread, since rounding depends on their number. What limits the study is shown by
the time per run with one process: a start costs seconds, which a study pays once per process, and preparing the data
once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import measure

from regard.commands.ablate import DEMO, SMOKE_BASE, SMOKE_ROWS

REGARD = [sys.executable, "-m", "regard"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--by-hand", type=int, metavar="N", help="seeds trained by hand too (default: all)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = {"base": [], **{name: ["--set", change] for name, change in SMOKE_ROWS.items()}}
    settings = [word for one in [*SMOKE_BASE, f"train.steps={args.steps}"] for word in ("--set", one)]
    common = [str(DEMO), *settings, "--device", args.device]
    with TemporaryDirectory() as folder:
        home, began = Path(folder), time.monotonic()
        for seed in range(1, (args.by_hand or args.seeds) + 1):
            for name, change in rows.items():
                out = str(home / "hand" / name / str(seed))
                run("train", *common, *change, "--set", f"train.seed={seed}", "-o", out)
        expected = weights(home / "hand")
        one, runs = (time.monotonic() - began) / len(expected), len(rows) * args.seeds
        print(f"by hand: {one:.1f} s per run", flush=True)
        result: dict[str, Any] = {
            "kind": "studies", "machine": measure.machine(args.device), "runs": runs, "steps": args.steps,
            "trained_by_hand": len(expected), "by_hand_seconds": one * runs, "studies": [],
        }  # fmt: skip
        named = [word for name, change in SMOKE_ROWS.items() for word in ("--set-row", name, change)]
        for jobs in args.jobs:
            out, began = home / f"study-{jobs}", time.monotonic()
            run("ablate", *common, *named, "--seeds", str(args.seeds), "--jobs", str(jobs), "-o", str(out))
            seconds = time.monotonic() - began
            trained = weights(out / "runs")
            assert len(trained) == runs
            identical = sum(trained[name] == digest for name, digest in expected.items())
            study = {"jobs": jobs, "seconds": seconds, "of_by_hand": seconds / (one * runs), "identical": identical}
            result["studies"].append(study)
            print(study, flush=True)
    measure.write(args.out, result)


def run(*arguments: str) -> None:
    subprocess.run([*REGARD, *arguments], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)


def weights(folder: Path) -> dict[str, str]:
    """The digest of the weights of every run."""
    paths = sorted(folder.glob("*/*/model.safetensors"))
    return {str(path.parent.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


if __name__ == "__main__":
    main()
