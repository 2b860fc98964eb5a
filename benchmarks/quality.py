"""Quality: a recipe trained with several seeds, and its metrics.

    python benchmarks/quality.py recipes/multi30k-en-de.toml --data multi30k-tok \
        --set train.pack=128 train.cuda_graph=true train.precision=bf16 \
        -o benchmarks/results/quality-multi30k-en-de.json

Every run is  regard train RECIPE --data DIR --set train.seed=N …  in a separate process. The result file has each
seed's metrics on the validation and test sets, their mean and spread, and two times from the start of the process: to
the final weights (`seconds_to_weights`) and to the end, when all sets are evaluated. Settings are chosen on the
validation set only. With --together N, N runs share the machine, and times are not meaningful.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure

Json = dict[str, Any]


def run(recipe: Path, data: Path | None, settings: list[str], seed: int, folder: Path) -> Json:
    """One training run: its metrics and times."""
    command = ["train", str(recipe), *(["--data", str(data)] if data else []), "-o", str(folder)]
    for setting in (*settings, f"train.seed={seed}"):
        command += ["--set", setting]
    start = time.time()
    done = subprocess.run([sys.executable, "-m", "regard", *command], capture_output=True, text=True)
    wall = time.time() - start
    if done.returncode:
        sys.exit(f"regard {' '.join(command)}\n{done.stderr[-2000:]}")
    return {
        "seed": seed,
        "seconds_to_weights": round((folder / "model.safetensors").stat().st_mtime - start, 1),
        "seconds": round(wall, 1),
        "scores": json.loads((folder / "scores.json").read_text()),
    }


def summary(runs: list[Json]) -> Json:
    """{set: {metric: {mean, least, most}}} over the seeds."""
    found: Json = {}
    for name, scores in runs[0]["scores"].items():
        for figure in scores:
            values = [one["scores"][name][figure] for one in runs]
            if all(isinstance(value, float) for value in values):
                spread = {"mean": statistics.fmean(values), "least": min(values), "most": max(values)}
                found.setdefault(name, {})[figure] = {key: round(value, 4) for key, value in spread.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, help="the folder that the recipe's files are in")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings that override the recipe's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="named in the result")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        started = [
            pool.submit(run, args.recipe, args.data, args.set, seed, Path(folder) / str(seed)) for seed in args.seeds
        ]
        runs = [future.result() for future in started]
    result = {"kind": "quality", "machine": measure.machine(args.device), "together": args.together}
    result |= {"recipe": args.recipe.name, "settings": args.set, "summary": summary(runs), "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
