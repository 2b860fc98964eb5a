"""What is each part of a model worth? Train a recipe and named changes to it, each with several seeds, and say which
differences are larger than chance. A study is a folder; the same command, or `regard ablate STUDY`, continues it, adds
rows and seeds, and may run in several processes and on several machines at once.

examples:
  regard ablate recipes/multi30k-en-de.toml --data multi30k-tok --rows table3 --seeds 3 -o studies/table3
  regard ablate mine.toml --set-row rope model.position=rope --set-row small model.dim=64 model.heads=2
  regard ablate mine.toml --rows rows.toml --dry-run                rows, parameters, FLOPs and estimated time
  regard ablate studies/table3 --seeds 6 --only heads-8 pre-norm    three more seeds for two rows
  regard ablate studies/table3 --jobs 4                             four runs side by side on this machine
  regard ablate studies/table3 --slurm job.sh                       a script for  sbatch
  regard ablate --smoke                                             four rows of the demo's task, in minutes on a CPU
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regard
from regard.commands import DEVICE, aligned, positive, show
from regard.commands.attention_options import check_png
from regard.errors import UserError, program
from regard.terminal import count

if TYPE_CHECKING:
    from regard.study.definition import Row, Study
    from regard.study.reporter import Reporter

DEMO = Path(regard.__file__).parent / "recipes" / "demo.toml"
# The smoke study: the task of the demo, with a model and a number of steps that leave room for differences
SMOKE_BASE = [
    "data.generator.train=4000", "data.generator.test=300", "model.dim=32", "model.layers=1", "model.heads=4",
    "model.ff_dim=64", "train.steps=600", "train.batch_tokens=512", "train.warmup=40", "train.lr=0.01",
    "train.save_every=1000",
]  # fmt: skip
SMOKE_ROWS = {"heads-1": "model.heads=1", "no-positions": "model.position=none", "no-residual": "model.residual=false"}
SMOKE_SEEDS = 3


def seeds(text: str) -> list[int]:
    """The seeds 1, 2, 3 of "3", 1 and 5 of "1,5"."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: write a number of seeds, such as 3, or a list, such as 4,5"
        ) from None
    if min(numbers) < 0 or numbers == [0]:
        raise argparse.ArgumentTypeError(f"{text}: must be positive")
    return numbers if len(numbers) > 1 else list(range(1, numbers[0] + 1))


ARGUMENTS = {
    "RECIPE": ("TOML file, or the folder of a study", {"nargs": "?"}),
    "-o --out STUDY": "folder of the study (default: studies/NAME-OF-THE-RECIPE)",
    "--data DIR": "folder of the data, or sample:NAME (default: the recipe's)",
    "--set TABLE.NAME=VALUE": ("change a setting of the base; repeatable", {"action": "append", "default": []}),
    "what is compared": {
        "--rows FILE": "TOML file with rows, or table3: the paper's Table 3 and more (default for a new study)",
        "--set-row NAME": (
            "a row: --set-row NAME key=value …; repeatable", {"nargs": "+", "action": "append", "default": []}
        ),
        "--seeds N": ("number of seeds, or a list: 4,5 (default: 3)", {"type": seeds}),
        "--only NAME": ("train only these rows and the base; --seeds is then for them", {"nargs": "+", "default": []}),
        "--test NAME": "the test set of the table (default: the first)",
        "--metric NAME": "a metric of scores.json (default: the most important one of the task)",
    },
    "how it is run": {
        **DEVICE,
        "--jobs N": ("runs side by side on this machine (default: 1)", {"type": positive}),
        "--dry-run": "measure a few steps of each row and print sizes and estimated time",
        "--slurm FILE": "write a job script for  sbatch, in which --jobs tasks share the study",
        "--no-wait": "end when nothing is left to begin, although other processes still train",
        "--retry": "train failed runs again",
        "--keep-checkpoints": "keep the checkpoints of finished runs",
        "--smoke": "the recipe's small form; without a recipe, four rows of the demo's task",
    },
    "--png": "save the figures of the report as PNG too",
    "--json": "print the table (with --dry-run: the estimate) as JSON",
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.study.definition import STUDY, Study
    from regard.study.processes import follow_parent, is_worker
    from regard.study.reporter import Reporter
    from regard.study.results import collect, progress
    from regard.study.worker import Interrupted

    follow_parent()
    if args.png:
        check_png(Path("figures.png"))
    study = open_study(args)
    if args.png:
        from regard.explore.svg import check_fonts

        check_fonts("".join(study.names), without="or remove --png: the SVG figures use the reader's fonts")
    if args.dry_run:
        return show_estimate(args, study)
    if args.test or args.metric:
        collect(study)  # a mistake shows before it is saved
    if not (study.folder / STUDY).exists() or Study.read(study.folder) != study:
        study.save()
    if args.retry:
        from regard.study.results import failed_file

        for one in progress(study, args.only).failed:
            failed_file(study, one).unlink(missing_ok=True)
    if args.slurm is not None:
        return write_job(args, study)
    reporter = Reporter(study, args.only)
    try:
        with reporter:
            train(args, study, reporter)
    except (Interrupted, KeyboardInterrupt) as stop:
        reporter.refresh()
        print(f"\n{str(stop) or 'interrupted'}. To continue:  {again(study)}", file=sys.stderr)
        return 130
    if is_worker():  # the process that has started this one shows the results
        return 0
    from regard.study.formats import lines, to_json

    reporter.refresh()
    study = Study.read(study.folder)  # another process may have added rows
    table, state = collect(study), progress(study, args.only)
    show(args.json, to_json(table), lines(table, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if args.png:
        from regard.study.report import write_all

        write_all(study.folder, table, png=True)
    if not args.json:
        print(f"\nreport: {(study.folder / 'report.html').resolve()}")
    return 3 if state.failed else 0


def again(study: Study) -> str:
    return f"{program()} ablate {shlex.quote(str(study.folder))}"


# --- from arguments to a study


def open_study(args: argparse.Namespace) -> Study:
    """The study that the arguments describe: one that exists, with more rows and seeds, or a new one."""
    from regard.models.recipe import PRESETS
    from regard.study.definition import STUDY, Study, begin, extended, fitting, read_rows, row_of

    options = {"test": args.test, "metric": args.metric}
    rows: list[Row] = [row_of(name, changes) for name, *changes in args.set_row]
    lenient: list[Row] = []
    folder = Path(args.recipe) if args.recipe is not None else None
    if folder is not None and folder.is_dir():
        if args.data or args.set or args.smoke or args.out:
            raise UserError(f"{folder}: a study keeps its base; remove --data, --set, --smoke and -o")
        study = begin(folder, "", Study.read(folder).base, **options)
    elif folder is not None and not folder.exists() and args.recipe not in PRESETS:
        raise UserError(f"{folder}: no such file or folder; name a recipe, or the folder of a study")
    else:
        study = begin(*new_base(args), **options)
        if args.rows is None and not rows and not study.rows:
            smoke = [row_of(name, [change]) for name, change in SMOKE_ROWS.items()]
            rows, lenient = (smoke, []) if args.recipe is None else ([], read_rows("table3"))
    if args.rows is not None:
        named = read_rows(args.rows)
        rows, lenient = (rows, named) if args.rows == "table3" else ([*rows, *named], lenient)
    new = not (study.folder / STUDY).exists()
    kept, notes = fitting(study.base, rows, lenient=False)
    more, others = fitting(study.base, lenient, lenient=True)
    for note in [*notes, *others]:
        print(f"note: {note}", file=sys.stderr)
    given = args.seeds or (list(range(1, SMOKE_SEEDS + 1)) if new else [])
    if new and args.only:
        study = extended(study, [*kept, *more], given)
        for name in args.only:
            study.row(name)
        return study
    return extended(extended(study, [*kept, *more], ()), (), given, args.only)


def new_base(args: argparse.Namespace) -> tuple[Path, str, dict[str, Any]]:
    """The folder, the title and the base of a new study."""
    from regard.api import open_recipe
    from regard.study.definition import resolved

    if args.recipe is None and not args.smoke:
        raise UserError("no recipe: name a TOML file or the folder of a study, or try  regard ablate --smoke")
    if args.recipe is None:
        tables, _ = open_recipe(DEMO, args.data, assignments=[*SMOKE_BASE, *args.set])
        name = "smoke"
    else:
        tables, _ = open_recipe(args.recipe, args.data, smoke=args.smoke, assignments=args.set)
        name = Path(args.recipe).stem + "-smoke" * args.smoke
    tables.get("train", {}).pop("seed", None)
    resolved(tables)  # a mistake in the recipe shows before anything is written
    return Path(args.out or Path("studies") / name), name, tables


# --- training


def train(args: argparse.Namespace, study: Study, reporter: Reporter) -> None:
    """Train what is left, in this process or in several."""
    from regard.models.folder import find_device
    from regard.study.results import progress
    from regard.study.worker import work, work_in_processes

    left = len(progress(study, args.only).pending)
    jobs = min(args.jobs or 1, left)
    if not left:
        return
    if jobs == 1:
        device, keep = find_device(args.device), args.keep_checkpoints
        work(study.folder, device, reporter, only=args.only, wait=not args.no_wait, keep_checkpoints=keep)
        return
    options = ["--no-wait"] * args.no_wait + ["--keep-checkpoints"] * args.keep_checkpoints
    options += ["--only", *args.only] if args.only else []
    work_in_processes(study.folder, jobs, args.device, options, reporter, args.only)


# --- without training


def show_estimate(args: argparse.Namespace, study: Study) -> int:
    """With --dry-run: every row with its sizes and its time, and nothing is left behind."""
    from dataclasses import asdict

    from regard.models.folder import find_device
    from regard.progress import duration
    from regard.study.estimate import estimate

    found = estimate(study, find_device(args.device), args.only)

    def cell(value: float | None, form: Callable[[float], str]) -> str:
        return "–" if value is None else form(value)

    rows = [
        [
            one.row, str(one.pending), cell(one.parameters, lambda n: f"{n:,}"), cell(one.flops, count),
            cell(one.seconds_per_step, lambda s: f"{1000 * s:.3g} ms"), cell(one.seconds, duration), one.reason,
        ]
        for one in found
    ]  # fmt: skip
    total = sum(one.seconds or 0.0 for one in found)
    jobs = args.jobs or 1
    beside = f", {jobs} side by side: {duration(total / jobs)} if they do not slow each other down" if jobs > 1 else ""
    runs = sum(one.pending for one in found)
    header = ["row", "runs", "parameters", "FLOPs of a run", "step", "time", ""]
    content = {"rows": [{**asdict(one), "seconds": one.seconds} for one in found], "runs": runs, "seconds": total}
    text = f"{runs} runs one after another: about {duration(total)} without evaluation{beside}"
    show(args.json, content, [*aligned([header, *rows], right=range(1, 6)), "", text])
    return 0


JOB = """#!/bin/bash
# {runs} runs of {folder}: tasks of this array share them, and each trains one after another.
# A task that ends, for whatever reason, loses at most the steps since its last checkpoint:  sbatch {script}  continues.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
{gpu}#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}

exec srun {command} --no-wait
"""


def write_job(args: argparse.Namespace, study: Study) -> int:
    """With --slurm: a job script; the study itself is written too."""
    from regard.files import make_folder, write_atomically
    from regard.study.results import progress

    runs = len(progress(study, args.only).pending)
    if not runs:
        raise UserError(f"{study.folder}: nothing is left to train")
    folder = study.folder.resolve()
    make_folder(folder / "logs")
    only = "".join(f" {shlex.quote(name)}" for name in args.only)
    command = f"{shlex.quote(sys.executable)} -m regard ablate {shlex.quote(str(folder))}"
    command += f" --only{only}" * bool(only) + " --keep-checkpoints" * args.keep_checkpoints
    command += f" --device {shlex.quote(args.device)}" if args.device else ""
    text = JOB.format(
        runs=runs, folder=folder, script=shlex.quote(str(args.slurm)), command=command,
        name=shlex.quote(f"regard-{study.title}"), log=shlex.quote(f"{folder}/logs/slurm-%A_%a.log"),
        last=min(args.jobs or 8, runs) - 1, gpu="" if args.device == "cpu" else "#SBATCH --gres=gpu:1\n",
    )  # fmt: skip
    write_atomically(args.slurm, text.encode())
    content = {"job": str(args.slurm), "runs": runs, "study": str(folder)}
    print(json.dumps(content) if args.json else f"{args.slurm}: start it with  sbatch {shlex.quote(str(args.slurm))}")
    return 0
