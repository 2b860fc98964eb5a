"""Exported models beside the run they come from: quality, size of the file, speed and memory.

    python benchmarks/exported.py runs/multi30k-en-de-best runs/nsmc runs/fashion-mnist-vit runs/shakespeare-char-best
        --exports exports -o benchmarks/results/exported-cpu.json

    torch              the run itself, in fp32
    ctranslate2, -int8 `regard export --ctranslate2 [--int8]`: encoder-decoders and language models
    onnx, -int8        `regard export --onnx [--int8]`, in ONNX Runtime

Quality is what `regard evaluate` computes on the first test set of the recipe. Speed is measured on some of its inputs:
sentences and reviews from text to text or class, images to classes, and the logits of blocks of text. Every model is in
a process of its own and they take turns; a ratio is the median over the rounds of the time of torch divided by the
time of the other, in wall-clock time and in CPU time (user + system), which other programs on the machine change less.
Size is that of the files with the weights: `size` relative to the run's, `size_of_fp32` to the same format in fp32. The
two ONNX graphs of an encoder-decoder have a copy each of an embedding that they share.
Memory is the peak of the process after loading the model and predicting these inputs, Python and PyTorch included.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch

from regard.cli import main as regard_command
from regard.errors import UserError
from regard.interop.ctranslate2 import refuse
from regard.models.recipe import read_recipe
from regard.predict.bundle import Bundle
from regard.tasks.registry import load, task_for, task_of
from regard.training.task import evaluate_bundle, own_tables

FORMATS = {
    "ctranslate2": ("--ctranslate2",), "ctranslate2-int8": ("--ctranslate2", "--int8"),
    "onnx": ("--onnx",), "onnx-int8": ("--onnx", "--int8"),
}  # fmt: skip
WEIGHTS = ("model.safetensors", "model.bin", "onnx/*.onnx")
ITEMS = {  # per round
    "translation": ("sentences", 256), "text-classification": ("texts", 1024), "image-classification": ("images", 512),
    "language-modeling": ("tokens", 4096),
}  # fmt: skip


def predict(bundle: Bundle, inputs: Any) -> None:
    match bundle.config.architecture, bundle.config.input:
        case "decoder", _:
            with torch.inference_mode():
                bundle.model(inputs)
        case _, "patches":
            predictor: Any = bundle.predictor
            predictor.probabilities(lambda begin, end: inputs[begin:end], len(inputs))
        case _:
            bundle.predict(inputs)


def read_inputs(run: Path, count: int) -> tuple[str, Any]:
    """The name of the first test set of a run, or of its validation set, and its first inputs."""
    bundle = load(run)
    kind = task_of({"task": task_for(bundle.config), **bundle.recipe})
    task = kind(own_tables(kind, bundle), run, bundle.device)
    task.use(bundle)
    task.prepare_evaluation()
    name = next((name for name in task.sets if name not in ("train", "valid")), "valid")
    if kind.NAME == "language-modeling":
        context = bundle.limits.context
        ids = torch.as_tensor(task.examples(name).columns["ids"][:count]).long()
        return name, ids[: len(ids) // context * context].view(-1, context)
    inputs = task.inputs(name, count)
    return name, torch.stack(inputs) if bundle.config.input == "patches" else inputs


def work(pipe: Any, folder: Path, run: Path, inputs: Any, test: str, threads: int) -> None:
    """A process with one model: None asks for a round of predictions, True for its quality."""
    torch.set_num_threads(threads)
    recipe = read_recipe(run, saved=True)
    bundle = load(folder, recipe=recipe)  # an export does not know where the data is
    kind = task_of({"task": task_for(bundle.config), **bundle.recipe})
    predict(bundle, inputs[:2])
    with suppress(EOFError):
        while True:
            if pipe.recv():
                pipe.send(evaluate_bundle(kind, bundle, {"test": test})[test][kind.HEADLINE[0]])
                continue
            begin, spent = time.perf_counter(), cpu_seconds()
            predict(bundle, inputs)
            pipe.send((time.perf_counter() - begin, cpu_seconds() - spent, peak_memory()))


def cpu_seconds() -> float:
    """Of this process and of the processes that it has ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, kinds))


def peak_memory() -> int:
    """Bytes of this process. ru_maxrss would begin with what the parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Worker:
    def __init__(self, *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(there, *arguments, torch.get_num_threads()))
        self.process.start()
        there.close()

    def ask(self, quality: bool) -> Any:
        self.pipe.send(quality)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def weights_size(folder: Path) -> int:
    return sum(path.stat().st_size for pattern in WEIGHTS for path in folder.glob(pattern))


def export_all(run: Path, folder: Path) -> dict[str, Path]:
    """The folders by the name of the format; those that `folder` already has are not exported again."""
    folders = {"torch": run}
    for name, options in FORMATS.items():
        if "ctranslate2" in name and refuse(load(run).config):
            continue
        out = folder / f"{run.name}-{name}"
        with redirect_stdout(sys.stderr):
            if not out.exists() and regard_command(["export", str(run), options[0], str(out), *options[1:]]):
                raise UserError(f"{run}: could not be exported to {name}")
        folders[name] = out
    return folders


def measured(run: Path, folder: Path, rounds: int, count: int | None) -> dict[str, Any]:
    task = task_of({"task": task_for(load(run).config), **read_recipe(run, saved=True)})
    unit, most = ITEMS[task.NAME]
    folders, (test, inputs) = export_all(run, folder), read_inputs(run, count or most)
    items = inputs.numel() if unit == "tokens" else len(inputs)
    row: dict[str, Any] = {
        "run": run.name, "task": task.NAME, "set": test, "metric": task.HEADLINE[0], "unit": unit, "items": items,
        "load": [round(os.getloadavg()[0], 1)], "models": {},
    }  # fmt: skip
    workers = {name: Worker(path, run, inputs, test) for name, path in folders.items()}
    try:
        times = measure.take_turns({name: partial(one.ask, False) for name, one in workers.items()}, rounds)
        for name, worker in workers.items():
            size, whole = (weights_size(folders[one]) for one in (name, name.removesuffix("-int8")))
            row["models"][name] = {
                "quality": round(worker.ask(True), 4), "bytes": size, "size": round(size / weights_size(run), 3),
                "size_of_fp32": round(size / whole, 3),
                "per_second": measure.spread([items / wall for wall, _, _ in times[name]]),
                "speed": ratio(times["torch"], times[name], 0), "speed_cpu": ratio(times["torch"], times[name], 1),
                "memory": max(memory for _, _, memory in times[name]),
            }  # fmt: skip
    finally:
        for worker in workers.values():
            worker.close()
    row["load"].append(round(os.getloadavg()[0], 1))
    return row


def ratio(ours: Sequence[Any], theirs: Sequence[Any], kind: int) -> float:
    return round(statistics.median(one[kind] / other[kind] for one, other in zip(ours, theirs, strict=True)), 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs whose data is on this machine")
    parser.add_argument("--exports", type=Path, metavar="DIR", help="keep the exported folders here")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the median is reported (default: 5)")
    parser.add_argument("--items", type=int, metavar="N", help="inputs per round (default: by the task)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the result file here")
    args = parser.parse_args()
    if min(args.repeats, args.items or 1) < 1:
        parser.error("--repeats and --items must be 1 or more")
    return args


def main() -> None:
    args = arguments()
    rows: list[dict[str, Any]] = []
    result = {"kind": "exported", "machine": measure.machine("cpu"), "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        for run in args.runs:
            rows.append(measured(run, args.exports or Path(folder), args.repeats, args.items))
            print(rows[-1], flush=True)
            if args.out:  # after every row, so that an interrupted run keeps its results
                measure.write(args.out, result)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
