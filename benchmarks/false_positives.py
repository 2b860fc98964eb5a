"""A/A studies: how often is a row called different that is the base under another name?

    python benchmarks/false_positives.py --jobs 2 --out benchmarks/results/false-positives.json

The recipe of `regard ablate --smoke` is trained with many seeds. Each study takes runs of its own for the base and for
every row, with seeds that no other row has, since with the same seeds rows and base would be identical; `compare_rows`
then treats them as pairs, as `regard ablate` does. No row differs, so every verdict but "not decided" is false. Holm's
correction allows one in at most 5 % of the studies.

The same runs are then regrouped at random into many more studies, which overlap and so are not independent, but show
the rate more precisely. An interrupted benchmark continues.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure

from regard.commands.ablate import DEMO, SMOKE_BASE
from regard.metrics.significance import ALPHA, holm, paired
from regard.study.definition import Planned, Study
from regard.study.finished import FinishedRun
from regard.study.rows import compare_rows

REGROUPED = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--rows", type=int, default=3, help="besides the base")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--metric", default="chrf")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path("studies/false-positives"))
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    count = args.studies * (args.rows + 1) * args.seeds
    study = train(args, count)
    runs = [study.run_folder(Planned("base", seed)) for seed in range(1, count + 1)]
    result = {
        "kind": "false-positives", "machine": measure.machine(args.device), "studies": args.studies, "rows": args.rows,
        "seeds": args.seeds, "steps": args.steps, "metric": args.metric, **judge(runs, args),
        "regrouped": regroup([FinishedRun(run).score("test", args.metric) or 0.0 for run in runs], args),
    }  # fmt: skip
    measure.write(args.out, result)
    print(result)


def train(args: argparse.Namespace, count: int) -> Study:
    """A study without rows, with as many seeds as all A/A studies need."""
    settings = [word for one in [*SMOKE_BASE, f"train.steps={args.steps}"] for word in ("--set", one)]
    folder = str(args.folder)
    command = [sys.executable, "-m", "regard", "ablate", str(DEMO), *settings, "-o", folder, "--set-row", "unused"]
    command += ["train.lr=0.02", "--seeds", str(count), "--only", "base", "--jobs", args.jobs, "--device", args.device]
    subprocess.run(command, check=True)
    return Study.read(args.folder)


def judge(runs: list[Path], args: argparse.Namespace) -> dict[str, Any]:
    """The verdicts of the A/A studies."""
    size, verdicts, below = (args.rows + 1) * args.seeds, [], 0
    for begin in range(0, len(runs), size):
        own = runs[begin : begin + size]
        names = ["base", *(f"again-{row}" for row in range(1, args.rows + 1))]
        rows = {name: dict(enumerate(own[at * args.seeds : (at + 1) * args.seeds], 1)) for at, name in enumerate(names)}
        table = compare_rows("A/A", rows, test="test", metric=args.metric, examples=0)
        verdicts.append([row.verdict for row in table.rows[1:]])
        below += sum(row.difference is not None and (row.difference.p or 1) < ALPHA for row in table.rows[1:])
    different = [sum(one != "not decided" for one in some) for some in verdicts]
    return {
        "called_different": sum(different), "of_rows": args.studies * args.rows,
        "studies_with_one": sum(map(bool, different)), "uncorrected_p_below_0.05": below,
    }  # fmt: skip


def regroup(scores: list[float], args: argparse.Namespace) -> dict[str, float]:
    """The fraction of random studies with a false claim, and of rows whose uncorrected p is below 0.05."""
    generator, size = random.Random(0), args.seeds
    claims = below = 0
    for _ in range(REGROUPED):
        drawn = generator.sample(scores, (args.rows + 1) * size)
        groups = [drawn[at : at + size] for at in range(0, len(drawn), size)]
        p = [paired(groups[0], row).p for row in groups[1:]]
        claims += any(one is not None and one < ALPHA for one in holm(p))
        below += sum(one is not None and one < ALPHA for one in p)
    return {
        "studies": REGROUPED, "with_a_false_claim": claims / REGROUPED,
        "uncorrected_rows": below / (REGROUPED * args.rows),
    }  # fmt: skip


if __name__ == "__main__":
    main()
