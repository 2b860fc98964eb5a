"""Where the time of a command goes before its first output.

    python benchmarks/startup.py --out benchmarks/results/startup-cpu.json

    git worktree add --detach ../before 6203aaf
    python benchmarks/startup.py --runs runs/multi30k-en-de --before ../before --out startup-multi30k.json

Every command runs on a tiny model, or on those of `--runs`, in a process of its own, several times. The phases are
milliseconds of CPU time, which other processes on the machine do not change:

    interpreter   python itself, and the command line
    torch         import torch, without what only tracing needs
    imports       our modules, and the packages that torch has not imported yet
    load          the model and its tokenizers; `train`: check the data, learn the tokenizer, build the optimizer
    first         the first prediction; `train`: the first step

`ours` is the sum of the last three, to be compared with `torch`. The command line imports torch without garbage
collection and defers what only tracing needs (`regard.start`); the row `translate (plain import)` shows what that
saves. `translate (ctranslate2)` is the same model in a folder for CTranslate2, which needs no torch at all.

The second table is the whole process `regard translate RUN "a small model"` from its start to its end, in milliseconds
of wall-clock and CPU time; `--before` adds the same command of another checkout, such as one of an earlier commit. All
processes use cached bytecode, as an installed package does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import measure

from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer

PHASES = ("interpreter", "torch", "imports", "load", "first")
WORDS = "a small model reads what stands before it and predicts the next word"
SIZES = {"dim": 32, "heads": 2, "layers": 2, "ff_dim": 64, "max_length": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # [model], and the other tables of the recipe
    "translate": ({"architecture": "encoder-decoder"}, {"task": "translation", "data": {"train": ["a", "b"]}}),
    "generate": ({"architecture": "decoder"}, {"task": "language-modeling", "data": {"train": ["a"]}}),
    "classify": (
        {"architecture": "encoder", "output_head": "classes", "classes": 2, "pooling": "mean"},
        {"task": "text-classification", "data": {"train": ["a.tsv"], "classes": ["no", "yes"]}},
    ),
}
BEGIN = """
import json, sys, time
marks = [time.process_time()]
def mark(): marks.append(time.process_time())
from regard.start import import_torch
{torch}; mark()
"""
PREDICT = """
from regard.models.recipe import read_recipe
from regard.tasks.registry import load, predictor_of
import regard.commands.{command}
tables = read_recipe({folder!r}, saved=True)
predictor_of(tables["task"]); mark()
predictor = load({folder!r}, "cpu", tables).predictor; mark()
predictor.predict(["a small model"]); mark()
"""
PLAIN = """
import regard.commands.{command}
from regard.predict.ctranslate2_search import open_plain
import ctranslate2; mark()
translator = open_plain({folder!r}, "cpu", {{}}); mark()
translator.predict(["a small model"], failed={{}}, done=len); mark()
assert "torch" not in sys.modules
"""
TRAIN = """
import os, tempfile
from pathlib import Path
from regard.api import Run, open_recipe, task_of
import torch
tables, _ = open_recipe({folder!r})
task = task_of(tables); mark()
with tempfile.TemporaryDirectory() as folder:
    run = Run(task(tables, Path(folder, "run"), torch.device("cpu")))
    run.prepare()
    trainer = run.trainer(); mark()
    trainer.run(); mark()
    os.chdir("/")
"""
RECIPE = """task = "language-modeling"
[data]
train = ["text.txt"]
[text]
kind = "word"
[model]
architecture = "decoder"
dim = 32
heads = 2
layers = 2
ff_dim = 64
[train]
steps = 1
pack = 32
batch_tokens = 64
"""


def make_folders(folder: Path) -> dict[str, str]:
    """A tiny model for every command that predicts, and a recipe for `train`."""
    tokenizer = Tokenizer.train([WORDS], "word")
    for command, (fields, tables) in MODELS.items():
        model = build(ModelConfig(**SIZES, **fields, vocab_size=len(tokenizer)))
        save(model, folder / command, tokenizers={"tokenizer": tokenizer}, recipe=tables)
    (folder / "text.txt").write_text(f"{WORDS}\n" * 50)
    (folder / "recipe.toml").write_text(RECIPE)
    return {**{command: str(folder / command) for command in MODELS}, "train": str(folder / "recipe.toml")}


def environment(**values: str) -> dict[str, str]:
    """Python writes and reads bytecode, as it does where the variables of this machine do not forbid it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | values


def phases(command: str, folder: str, torch: str | None = None, code: str = "") -> list[float]:
    """Milliseconds of CPU time of each phase, in a process of its own."""
    torch = torch or f"import_torch(defer={command != 'train'})"
    code = code or (TRAIN if command == "train" else PREDICT)
    code = BEGIN.format(torch=torch) + code.format(command=command, folder=folder)
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(json.dumps(marks))"], stdout=subprocess.PIPE, text=True,
        check=True, stderr=subprocess.DEVNULL, env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    marks = json.loads(done.stdout.splitlines()[-1])
    return [1000 * (after - before) for before, after in zip([0.0, *marks], marks, strict=False)]


def whole(folder: str, source: Path) -> list[float]:
    """Milliseconds of wall-clock and CPU time of a process that translates a line, with the package in `source`."""
    command = [sys.executable, "-m", "regard", "translate", folder, "a small model", "--device", "cpu"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment(PYTHONPATH=str(source)))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return [1000 * wall, 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)]


def export(folder: str, to: Path) -> str:
    """The same model in a folder for CTranslate2."""
    from regard.interop.ctranslate2 import export_ctranslate2
    from regard.tasks.registry import load

    to.mkdir()
    export_ctranslate2(load(folder), to)
    return str(to)


def run(rounds: int, runs: list[str], before: Path | None) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": "startup", "machine": measure.machine("cpu"), "rows": []}
    own = Path(__file__).resolve().parent.parent / "src"
    if before is not None:
        described = subprocess.run(["git", "-C", before, "describe", "--always"], capture_output=True, text=True)
        result["before"] = described.stdout.strip()
    with tempfile.TemporaryDirectory() as name:
        folders = {"translate": runs[0]} if runs else make_folders(Path(name))
        calls = {command: partial(phases, command, folder) for command, folder in folders.items()}
        calls["translate (plain import)"] = partial(phases, "translate", folders["translate"], "import torch")
        processes = {"translate (before)": partial(whole, folders["translate"], before / "src")} if before else {}
        processes["translate"] = partial(whole, folders["translate"], own)
        if importlib.util.find_spec("ctranslate2") is not None:
            exported = export(folders["translate"], Path(name, "exported"))
            calls["translate (ctranslate2)"] = partial(phases, "translate", exported, "pass", PLAIN)
            processes["translate (ctranslate2)"] = partial(whole, exported, own)
        times = measure.take_turns(processes, rounds + 1)  # the first round may write bytecode and read files from disk
        result["processes"] = table(times, ("wall", "cpu"))
        print()
        result["rows"] = table(measure.take_turns(calls, rounds + 1), PHASES, sums=True)
    return result


def table(times: dict[str, list[list[float]]], columns: tuple[str, ...], sums: bool = False) -> list[dict[str, Any]]:
    """Prints and returns the medians of all rounds but the first."""
    names = (*columns, "ours", "all") if sums else columns
    print(f"| command | {' | '.join(names)} |\n|---|{'--:|' * len(names)}")
    rows = []
    for command, values in times.items():
        medians = [statistics.median(column) for column in zip(*values[1:], strict=True)]
        row = {name: round(value, 1) for name, value in zip(columns, medians, strict=True)}
        if sums:
            row |= {"ours": round(sum(row[phase] for phase in PHASES[2:]), 1), "all": round(sum(row.values()), 1)}
        rows.append({"command": command, **row})
        print(f"| `{command}` | {' | '.join(f'{row[name]:.0f}' for name in names)} |")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/startup-cpu.json"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", nargs=1, default=[], metavar="RUN", help="a translation model instead of tiny ones")
    parser.add_argument("--before", type=Path, help="another checkout of this repository to compare with")
    given = parser.parse_args()
    measure.write(given.out, run(given.rounds, given.runs, given.before))
