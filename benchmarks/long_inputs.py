"""Mixers on tasks with long inputs: a study of all rows with several seeds, as a result file with the baselines.

    python benchmarks/long_inputs.py listops --jobs 2 -o benchmarks/results/long-listops-cpu.json
    python benchmarks/long_inputs.py nsmc-long --data data/nsmc -o …
    python benchmarks/long_inputs.py shakespeare-16k --data data/shakespeare -o …

The study is that of `regard ablate recipes/TASK.toml --rows recipes/rows/….toml --seeds 3`, in the folder --study: an
interrupted one continues, --jobs trains several runs side by side, --only some of the rows. The baselines:

    ListOps      the most frequent class; the most frequent class of the first operator, which needs one token
    documents    the most frequent class; the label of one of the joined texts (`data.join.majority`)
    text         the frequencies of single characters

Quality is that of the test set (for text, of the validation set). Cost is parameters, training FLOPs by the formulas of
`regard cost`, and seconds of training on this machine.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import measure
import table
import torch

from regard.cli import main as regard
from regard.data.columns import Store
from regard.models.folder import load_tokenizers
from regard.settings import read_toml
from regard.study.definition import Study
from regard.study.results import collect, done_file

RECIPES = Path(__file__).parent.parent / "recipes"
ROWS = {"listops": "listops", "nsmc-long": "nsmc-long", "shakespeare-16k": "long-text"}


def rows_of(study: Study) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the table is about, and its rows."""
    found = collect(study)
    about = {"metric": found.metric, "test": found.test, "higher_is_better": found.higher}
    return about, [
        {
            "name": "full" if row.name == "base" else row.name, "changes": dict(row.changes),
            "parameters": row.parameters, "flops": row.flops, "seconds": row.seconds,
            "scores": {str(seed): score for seed, score in row.scores.items()}, "mean": row.mean, "sd": row.sd,
            "difference": None if row.difference is None else row.difference.mean,
            "p": row.p_holm, "verdict": row.verdict, "paper": row.paper,
            "failed": {str(seed): reason for seed, reason in row.failed.items()},
        }
        for row in found.rows
    ]  # fmt: skip


def baselines(study: Study, test: str) -> dict[str, float]:
    """What is reached without reading the input, or with very little of it."""
    run = next((run for run in study.runs() if done_file(study, run).exists()), None)
    if run is None:
        return {}
    folder = study.run_folder(run)
    scores, data = json.loads((folder / "scores.json").read_text())[test], read_toml(folder / "recipe.toml")["data"]
    found = {"most frequent class": scores["majority"]} if "majority" in scores else {}
    if "root_operator" in scores:
        found["first operator alone"] = scores["root_operator"]
    if "join" in data:
        found["label of one text"] = data["join"]["majority"]
    if "bits_per_character" in scores:
        found["single characters"] = unigram(folder)
    return found


def unigram(folder: Path) -> float:
    """Cross-entropy of the validation text under the frequencies of single tokens in the training text, in nats."""
    size = len(load_tokenizers(folder)["tokenizer"])
    train, valid = (Store.open(folder / "data" / name).columns["ids"].long() for name in ("train", "valid"))
    counts = torch.bincount(train, minlength=size).double() + 1
    return float(-(counts / counts.sum()).log()[valid[1:]].mean())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=ROWS)
    parser.add_argument("--data", metavar="DIR", help="the files of the recipe, if it has any")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="other rows than those in recipes/rows")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows, and full attention")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--device", help="cpu, cuda, …")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings of the base")
    parser.add_argument("--study", type=Path, metavar="DIR", help="folder of the study (default: studies/TASK)")
    parser.add_argument("--smoke", action="store_true", help="the small form of the recipe, as a test")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    folder = args.study or Path("studies") / (args.task + "-smoke" * args.smoke)
    command = ["ablate", str(RECIPES / f"{args.task}.toml"), "-o", str(folder), "--seeds", str(args.seeds)]
    command += ["--rows", str(args.rows or RECIPES / "rows" / f"{ROWS[args.task]}.toml"), "--jobs", str(args.jobs)]
    command += ["--only", *args.only] if args.only else []
    command += [word for one in args.set for word in ("--set", one)]
    command += ["--smoke"] * args.smoke
    for name in ("data", "device"):
        command += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    code = regard(command)
    if code not in (0, 3):  # 3: some runs have failed; the others count
        raise SystemExit(code)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    study = Study.read(folder)
    about, rows = rows_of(study)
    base = study.base
    result = {
        "kind": "long-inputs", "task": args.task, **about, "seeds": args.seeds, "side_by_side": args.jobs,
        "data": base.get("data", {}), "model": base.get("model", {}), "train": base.get("train", {}),
        "machine": measure.machine(device.partition(":")[0]),
        "baselines": {name: value for name, value in baselines(study, about["test"]).items() if math.isfinite(value)},
        "rows": rows,
    }  # fmt: skip
    measure.write(args.out, result)
    print(table.table(args.out))


if __name__ == "__main__":
    main()
