"""Tasks other than translation and language modeling: recipes trained with several seeds, and their metrics.

    python benchmarks/tasks.py --data data --only vit scenes-en --seeds 1 2 3 --jobs 3 --out benchmarks/results

A task is a recipe, the folder of its data in --data, and settings; each run is  regard train RECIPE …  in a separate
process. A task that starts from a masked language model waits for that run, or uses that of an earlier call in --work.
With --jobs N, N processes share the device, so their times are not meaningful; the metrics do not change.
After every run the files of its task are written again:

    OUT/quality-TASK.json     every seed's metrics, in the format of `quality.py`
    OUT/tasks.json            one row per task: the main metric, its mean and spread, and the goal

`nsmc-cnn` and `naver-cnn` are the convolutional baseline of `sentiment.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import quality

Json = dict[str, Any]
ROOT = Path(__file__).parent.parent
FEW = ("train.batch_tokens=2048", "train.evaluate_every=25", "train.log_every=25")  # 1 % of the labels: 1,425 texts
SOME = ("train.batch_tokens=4096", "train.evaluate_every=100", "train.log_every=100")  # 10 %


@dataclass(frozen=True)
class Task:
    recipe: str
    data: str  # its folder in --data
    settings: tuple[str, ...] = ()
    start: str = ""  # the task whose run it starts from
    test: str = "test"
    figure: str = "accuracy"
    goal: float | None = None


def fine_tuned(fraction: str, *settings: str) -> Task:
    return Task("nsmc-pretrained", "nsmc", (f"data.fraction={fraction}", *settings), "nsmc-masked")


TASKS = {
    "nsmc-masked": Task("nsmc-masked", "nsmc", test="valid", figure="loss"),
    "naver-masked": Task("naver-masked", "naver-movies", test="valid", figure="loss"),
    "vit": Task("fashion-mnist-vit", "fashion-mnist", goal=0.94),
    "scenes-en": Task("fashion-scenes", "fashion-mnist", test="held-out", figure="exact", goal=0.95),
    "scenes-ko": Task(
        "fashion-scenes", "fashion-mnist", ("data.scenes.language=ko",), test="held-out", figure="exact", goal=0.95
    ),
    "nsmc-scratch": Task("nsmc", "nsmc", goal=0.86),
    "naver-scratch": Task("naver-sentiment", "naver-movies"),
    "nsmc-scratch-10": Task("nsmc", "nsmc", ("data.fraction=0.1", "train.steps=1000", *SOME)),
    "nsmc-scratch-1": Task("nsmc", "nsmc", ("data.fraction=0.01", "train.steps=400", "train.warmup=100", *FEW)),
    "nsmc-pretrained": Task("nsmc-pretrained", "nsmc", start="nsmc-masked", goal=0.88),
    "naver-pretrained": Task("naver-pretrained", "naver-movies", start="naver-masked"),
    "nsmc-pretrained-10": fine_tuned("0.1", "train.steps=800", *SOME),
    "nsmc-pretrained-1": fine_tuned("0.01", "train.steps=300", "train.warmup=50", *FEW),
    "nsmc-cnn": Task("nsmc", "nsmc"),
    "naver-cnn": Task("naver-sentiment", "naver-movies"),
}


@dataclass
class Run:
    """One process: a task with a seed, or the baseline with all of them."""

    name: str
    seed: int
    folder: Path
    command: list[str]
    after: Path | None = None  # a file that must exist first
    process: subprocess.Popen[bytes] | None = None
    begin: float = 0.0

    def start(self, threads: int) -> None:
        self.begin = time.time()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with self.folder.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    @property
    def over(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def result(self) -> Json:
        """In the format of `quality.run`; `training` are the seconds of the steps alone."""
        assert self.process is not None
        if self.process.returncode:
            return {"seed": self.seed, "failed": self.folder.with_suffix(".log").read_text(errors="replace")[-1500:]}
        found: Json = {"seed": self.seed, "seconds": round(time.time() - self.begin, 1)}
        if self.name.endswith("-cnn"):
            return found
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        weights = (self.folder / "model.safetensors").stat().st_mtime
        found |= {"training": lines[-1]["seconds"], "seconds_to_weights": round(weights - self.begin, 1)}
        return found | {"scores": json.loads((self.folder / "scores.json").read_text())}


@dataclass
class Bench:
    args: argparse.Namespace
    found: dict[str, list[Json]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Earlier results are kept, except for the same seed of the same task."""
        for name in TASKS:
            path = self.args.out / f"quality-{name}.json"
            if path.is_file():
                self.found[name] = json.loads(path.read_text())["runs"]
            elif (self.args.out / f"sentiment-{name}.json").is_file():
                self.found[name] = []

    def folder(self, name: str, seed: int) -> Path:
        """The settings of a run; if there are fewer pre-training runs than seeds, they alternate."""
        if TASKS[name].figure == "loss":
            seed = self.args.masked_seeds[(seed - 1) % len(self.args.masked_seeds)]
        return Path(self.args.work) / f"{name}-{seed}"

    def runs(self) -> list[Run]:
        args, runs = self.args, []
        for name in args.only:
            seeds = args.masked_seeds if TASKS[name].figure == "loss" else args.seeds
            runs += [self._baseline(name)] if name.endswith("-cnn") else [self._run(name, seed) for seed in seeds]
        return runs

    def _run(self, name: str, seed: int) -> Run:
        args, task, folder = self.args, TASKS[name], self.folder(name, seed)
        command = [sys.executable, "-m", "regard", "train", str(ROOT / "recipes" / f"{task.recipe}.toml"), "-o"]
        command += [str(folder), "--device", args.device]
        command += ["--smoke"] if args.smoke else ["--data", str(Path(args.data) / task.data)]
        settings = [] if args.smoke and "data.fraction" in "".join(task.settings) else [*task.settings]  # too few texts
        tokenizer = Path(args.tokenizers or "") / f"{task.recipe}.json"
        if args.tokenizers and not task.start and tokenizer.is_file():
            settings += ["text.vocab_size=none", f"text.tokenizer_file={tokenizer.resolve()}"]
        after = self.folder(task.start, seed) / "scores.json" if task.start else None
        if after is not None:
            settings.append(f"train.init_from={after.parent}")
        for setting in (*settings, *args.set, f"train.seed={seed}"):
            command += ["--set", setting]
        return Run(name, seed, folder, command, after)

    def _baseline(self, name: str) -> Run:
        args, task = self.args, TASKS[name]
        command = [sys.executable, str(ROOT / "benchmarks" / "sentiment.py")]
        command += [str(ROOT / "recipes" / f"{task.recipe}.toml"), "--only", "cnn", "--device", args.device, "--seeds"]
        command += [*map(str, args.seeds), "-o", str(args.out / f"sentiment-{name}.json")]
        command += ["--smoke"] if args.smoke else ["--data", str(Path(args.data) / task.data)]
        return Run(name, 0, Path(args.work) / name, command)

    def carry_out(self) -> None:
        """Up to `jobs` at a time, in order, except for those that wait for another."""
        waiting, going = self.runs(), list[Run]()
        own = {run.folder for run in waiting}
        threads = max(1, (os.cpu_count() or 1) // self.args.jobs)
        try:
            self._take_turns(waiting, going, own, threads)
        finally:  # interrupted: stop the running processes too
            for run in going:
                assert run.process is not None
                run.process.terminate()

    def _take_turns(self, waiting: list[Run], going: list[Run], own: set[Path], threads: int) -> None:
        while waiting or going:
            for run in [run for run in going if run.over]:
                going.remove(run)
                self._note(run)
            ready = [run for run in waiting if run.after is None or run.after.is_file()]
            for run in ready[: self.args.jobs - len(going)]:
                run.start(threads)
                waiting.remove(run)
                going.append(run)
            if not going and waiting:
                missing = {run.after.parent for run in waiting if run.after is not None}
                why = "has failed" if missing & own else "does not exist: add it to --only"
                print(f"left out: {len(waiting)} runs: {min(missing)} {why}", file=sys.stderr)
                return
            time.sleep(0.1)

    def _note(self, run: Run) -> None:
        args, task = self.args, TASKS[run.name]
        result = run.result()
        if "failed" in result:
            print(f"{run.name}, seed {run.seed}: FAILED\n{result['failed']}", flush=True)
            return
        self.found[run.name] = [one for one in self.found.get(run.name, []) if one["seed"] != run.seed] + [result]
        if run.name.endswith("-cnn"):
            print(
                f"{run.name}: {run.folder.with_suffix('.log').read_text().strip()}, {result['seconds']} s", flush=True
            )
        else:
            score = result["scores"][task.test][task.figure]
            times = f"{result['training']:.1f} s of training, {result['seconds']} s in all"
            print(f"{run.name}, seed {run.seed}: {task.figure} {score:.4f} on {task.test}, {times}", flush=True)
        self.write(run.name)
        measure.write(args.out / "tasks.json", {**self._head(), "rows": [self.row(name) for name in self.found]})

    def _head(self) -> Json:
        return {"kind": "tasks", "machine": measure.machine(self.args.device), "together": self.args.jobs}

    def write(self, name: str) -> None:
        if name.endswith("-cnn"):
            return
        runs, task = sorted(self.found[name], key=lambda one: one["seed"]), TASKS[name]
        result = {**self._head(), "kind": "quality", "recipe": f"{task.recipe}.toml"}
        result |= {"settings": [*task.settings, *self.args.set], "summary": quality.summary(runs), "runs": runs}
        measure.write(self.args.out / f"quality-{name}.json", result)

    def row(self, name: str) -> Json:
        task, runs = TASKS[name], self.found[name]
        if name.endswith("-cnn"):
            found = json.loads((self.args.out / f"sentiment-{name}.json").read_text())
            return {"task": name, "test": "test", "figure": "accuracy", "goal": None, **_spread(found["rows"][0])}
        spread = quality.summary(runs)[task.test][task.figure]
        seconds = round(sum(one["training"] for one in runs) / len(runs), 1)
        head = {"task": name, "test": task.test, "figure": task.figure, "goal": task.goal}
        return {**head, **spread, "seeds": sorted(one["seed"] for one in runs), "training_seconds": seconds}


def _spread(row: Json) -> Json:
    values = row["accuracy"]["all"]
    return {"mean": row["accuracy"]["mean"], "least": min(values), "most": max(values), "seconds": row["seconds"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", help="folder that has nsmc, naver-movies and fashion-mnist in it")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--masked-seeds", type=int, nargs="+", default=[1], help="of pre-training, which seeds share")
    parser.add_argument("--tokenizers", help="folder with RECIPE.json for recipes with an existing tokenizer")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of every run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--work", help="where the runs are kept (default: a folder that is removed)")
    parser.add_argument("--smoke", action="store_true", help="the recipes' --smoke forms")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the result files")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or folder
        Bench(args).carry_out()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
