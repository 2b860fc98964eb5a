"""Kill training repeatedly at random times and compare the result with that of an uninterrupted run.

    python benchmarks/chaos.py --kills 50

Two runs of one recipe on a small generated corpus: the first is not interrupted, the second is killed with
SIGKILL (so it cannot save anything) at random times and resumed each time, until it has been killed often enough; then
it finishes. All weights and the log must be bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from regard.data.korean import examples

RECIPE = """
[data]
train = ["train.tsv"]
valid = ["valid.tsv"]
[text]
kind = "char"
[model]
dim = 32
layers = 1
heads = 2
ff_dim = 64
dropout = 0.1
[train]
steps = {steps}
batch_tokens = 512
warmup = 20
ema = 0.99
save_every = 20
evaluate_every = 1000
[decode]
max_length = 8
"""


def command(folder: Path, run: str) -> list[str]:
    recipe, out = str(folder / "recipe.toml"), str(folder / run)
    return [sys.executable, "-m", "regard", "train", recipe, "-o", out, "--device", "cpu"]


def prepare(folder: Path, steps: int) -> None:
    for name, split, count in (("train", "train", 400), ("valid", "test", 40)):
        lines = [f"{pair.source}\t{pair.target}\n" for pair in examples(split, count, 1)]
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE.format(steps=steps), encoding="utf-8")


def step_of(run: Path) -> int:
    steps = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def torment(folder: Path, kills: int, chance: random.Random) -> tuple[int, list[str]]:
    """Start and kill until `kills` are done, then let it finish; (runs that finished, files that differ).

    A run that finishes before the next kill is compared as well and started again.
    """
    done, finished, different = 0, 0, list[str]()
    while True:
        process = subprocess.Popen(command(folder, "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=chance.uniform(0.5, 5.0) if done < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            done += 1
            print(f"kill {done:2}: the last complete checkpoint is step {step_of(folder / 'killed')}", flush=True)
            continue
        if code:
            raise SystemExit(f"the run could not be resumed: exit code {code}")
        finished += 1
        different += compare(folder / "whole", folder / "killed")
        if done == kills:
            return finished, different
        shutil.rmtree(folder / "killed")


def compare(whole: Path, killed: Path) -> list[str]:
    """The files with results that differ."""
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*.safetensors"))]
    different = [str(name) for name in names if (whole / name).read_bytes() != (killed / name).read_bytes()]
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, killed)]
    for log in logs:
        for line in log:
            line.pop("seconds"), line.pop("tokens_per_second", None)
    return different + (["metrics.jsonl"] if logs[0] != logs[1] else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.steps)
        subprocess.run(command(folder, "whole"), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        finished, different = torment(folder, args.kills, random.Random(args.seed))
    print(f"{args.kills} kills over {finished} run{'s' * (finished > 1)} of {args.steps:,} steps")
    print(f"different: {', '.join(different)}" if different else "all weights and the log are bitwise equal")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
