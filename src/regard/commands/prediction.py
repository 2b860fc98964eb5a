"""What the prediction commands share: options, the predictor, outputs, and inputs that cannot be used.

Outputs are lines of text, rows of a table or JSON lines, in the order of the inputs (`regard.commands.inputs`). One
input that cannot be used is reported, its output is empty (in JSON it is "error"), the others are processed, and the
exit code is `SOME_FAILED`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from regard.commands import DEVICE, RUN, Arguments, positive
from regard.commands.inputs import Inputs, Item, is_prompt, note, open_inputs, report
from regard.errors import UserError, listed
from regard.files import replacing

if TYPE_CHECKING:
    from regard.predict.bundle import Predictor, TextPrediction

Kind = TypeVar("Kind", bound="Predictor[Any, Any]")
SOME_FAILED = 3  # exit code
YES_OR_NO = {"action": argparse.BooleanOptionalAction}


def input_options(
    name: str,
    what: str,
    json: str,
    files: str = "",
    column: str = "",
    runs: Arguments = RUN,
    device: Arguments = DEVICE,
) -> Arguments:
    """The options that all prediction commands have: `what` are the inputs, `json` is an output in JSON."""
    return {
        **runs,
        f"inputs {name}": (f"{what} (default: standard input, or a prompt in a terminal)", {"nargs": "*"}),
        "--files FILE": (files or "read them from these files: one per line, or a column of a table", {"nargs": "+"}),
        "--column NAME": column or "column of a table (default: the recipe's)",
        "--encoding NAME": ("encoding of --files or standard input, such as cp949 (utf-8)", {"default": "utf-8"}),
        "-o --out FILE": "save to a file, which appears when it is complete",
        **device,
        "--json": f"print one JSON object per {json}",
    }


# Fields of `regard.predict.config.SearchConfig`, as options
DECODING = "decoding (default: the table [decode] of the recipe)"
SEARCH = {
    "--beam N": ("hypotheses kept at every step (1: greedy search)", {"type": int}),
    "--n-best N": ("outputs for each input (1)", {"type": positive}),
    "--length-penalty A": ("score = log P / ((5 + length) / 6)^A (0)", {"type": float}),
    "--coverage-penalty B": ("weight of the penalty for source tokens with little attention (0)", {"type": float}),
    "--early-stopping": ("stop at the first N finished hypotheses, not when no other can rank higher", YES_OR_NO),
    "--sample": ("sample from the distribution instead of searching", YES_OR_NO),
    "--temperature T": ("below 1: more probable tokens; above 1: less probable ones (1)", {"type": float}),
    "--top-k K": ("only the K most probable tokens; 1: always the most probable (0: all)", {"type": int}),
    "--top-p P": ("only the most probable tokens whose probabilities sum to P (1)", {"type": float}),
    "--seed N": ("the same seed gives the same samples (1)", {"type": int}),
    "--min-length N": ("fewest tokens of an output (0)", {"type": int}),
    "--max-length N": ("most tokens of an output (twice the source, plus 50)", {"type": positive}),
    "--no-repeat-ngram N": ("no N tokens in a row occur twice (0: off)", {"type": int}),
}


def is_run(text: str) -> bool:
    return os.path.isfile(os.path.join(text, "recipe.toml"))


def take_runs(args: argparse.Namespace) -> None:
    """Folders of trained models at the start of the inputs form an ensemble with RUN: they become `args.ensemble`."""
    args.ensemble = list(takewhile(is_run, args.inputs))
    del args.inputs[: len(args.ensemble)]


def is_ensemble(args: argparse.Namespace) -> bool:
    """Whether `take_runs` finds further folders, or has found some."""
    return bool(vars(args).get("ensemble")) or any(map(is_run, args.inputs[:1]))


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a search that were passed: fields of `SearchConfig`."""
    from regard.predict.config import SearchConfig

    return {name: value for name in SearchConfig.__dataclass_fields__ if (value := vars(args).get(name)) is not None}


def open_predictor(args: argparse.Namespace, *kinds: type[Kind]) -> Kind:
    """The predictor of the model in RUN, with the options of a search; another kind is refused, with its command."""
    from regard.models.folder import find_device
    from regard.tasks.registry import load

    bundle = load(args.run, find_device(args.device), ensemble=getattr(args, "ensemble", ()))
    kind = bundle.predictor_class
    if kind is None or not issubclass(kind, kinds):
        use = "" if kind is None else f"; use  regard {kind.COMMAND} {args.run}"
        raise UserError(f"{args.run}: {listed((one.NEEDS for one in kinds), 'or')} is needed here{use}")
    predictor: Any = bundle.predictor
    if search := search_options(args):
        predictor.config = predictor.configured(**search)
    return cast(Kind, predictor)


@dataclass
class Chunk:
    """Inputs that are processed together; `failed` gets the rows that cannot be used, with the reasons."""

    items: list[Item]
    out: TextIO
    count: Callable[[Sequence[int]], object]  # is called with rows that are done before all are
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [item.text for item in self.items]

    @property
    def first(self) -> int:
        """The index of the first input."""
        return self.items[0].number - 1

    def each(self, predict: Callable[[Item], Any]) -> list[Any]:
        """`predict` of every item on its own: a UserError concerns that item."""
        outputs: list[Any] = []
        for row, item in enumerate(self.items):
            try:
                outputs.append(None if item.error else predict(item))
            except UserError as error:
                self.failed[row] = str(error)
                outputs.append(None)
        return outputs

    def together(self, rows: Sequence[int], predict: Callable[[list[Item]], Sequence[Any]]) -> dict[int, Any]:
        """`predict` of the items in these rows at once, by row; one that cannot be used is found by halving them."""
        try:
            return dict(zip(rows, predict([self.items[row] for row in rows]), strict=True))
        except UserError as error:
            if len(rows) < 2:
                self.failed |= dict.fromkeys(rows, str(error))
                return {}
        middle = len(rows) // 2
        return self.together(rows[:middle], predict) | self.together(rows[middle:], predict)


Shown = Iterable[tuple[dict[str, Any], Iterable[Sequence[object]]]]  # objects of JSON, each with its rows of text


@dataclass
class Results:
    """Writes the output of each input in order, and counts those that failed.

    Failures among arguments and files wait for the first success: without any, there is no output at all.
    """

    args: argparse.Namespace
    inputs: Inputs
    out: TextIO
    header: Sequence[object]
    empty: Callable[[Item], Sequence[object]]
    done: int = 0
    failed: int = 0
    waiting: list[Item] | None = None

    def add(self, item: Item, shown: Callable[[], Shown]) -> None:
        self.done += 1
        self.failed += item.error is not None
        if item.error is not None and self.waiting is not None:
            self.waiting.append(item)
            return
        self.begin()
        if item.error is not None:
            self._write_failure(item)
            return
        for value, rows in shown():
            write(self.args, value, *rows, out=self.out)

    def begin(self) -> None:
        """Write the header, and the failures that waited."""
        if self.header and not self.args.json:
            write(self.args, {}, self.header, out=self.out)
        waiting, self.waiting, self.header = self.waiting or [], None, ()
        for item in waiting:
            self._write_failure(item)

    def _write_failure(self, item: Item) -> None:
        report(f"error: {item}")
        row = () if is_prompt(self.args) else self.empty(item)
        value = {self.inputs.name: item.text, "error": item.error, **item.origin}
        write(self.args, value, *([row] if row else []), out=self.out)

    def end(self) -> int:
        """The exit code; an error if every input failed."""
        if not self.failed or is_prompt(self.args):
            self.begin()
            return 0
        if self.failed < self.done:
            report(f"note: {self.failed:,} of {self.done:,} inputs failed")
            return SOME_FAILED
        if self.waiting and self.done == 1:
            raise UserError(str(self.waiting[0]))
        for item in self.waiting or ():
            report(f"error: {item}")
        raise UserError(f"none of the inputs ({self.done:,}) could be processed")


def predict_inputs(
    args: argparse.Namespace,
    inputs: Inputs,
    predict: Callable[[Chunk], Sequence[Any]],
    show: Callable[[Item, Any], Shown],
    *,
    size: int = 1,
    header: Sequence[object] = (),
    empty: Callable[[Item], Sequence[object]] = lambda item: ("",),
    after: Callable[[], None] = lambda: None,
) -> int:
    """Predict all inputs, `size` at a time, and write the outputs; returns the exit code.

    `show` gives the output of an item, `empty` the row of one that failed (without cells: none). `after` is called at
    the end, and in a prompt after each input: for notes about all of them.
    """
    from tqdm import tqdm

    total, pieces = open_inputs(args, inputs)
    shown = total > 0 and sys.stderr.isatty() and (args.out is not None or not sys.stdout.isatty())
    tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
    with opened(args.out) as out, tqdm(total=total, unit=" inputs", disable=not shown, leave=False) as bar:
        waiting: list[Item] | None = [] if args.inputs or args.files else None
        results = Results(args, inputs, out, header, empty, waiting=waiting)
        for piece in pieces:
            for at in range(0, len(piece), size):
                chunk = Chunk(piece[at : at + size], out, lambda rows: bar.update(len(rows)))
                for row, (item, output) in enumerate(zip(chunk.items, predict(chunk), strict=True)):
                    item.error = item.error or chunk.failed.get(row)
                    results.add(item, partial(show, item, output))
                out.flush()
                bar.update(results.done - bar.n)
                if is_prompt(args):
                    after()
        code = results.end()
    after()
    return code


def write(args: argparse.Namespace, value: dict[str, Any], *rows: Sequence[object], out: TextIO | None = None) -> None:
    """A prediction as a JSON object or as rows of a table, where probabilities have four digits.

    Line ends in a cell become spaces, and between other cells tabs too.
    """
    if args.json:
        print(json.dumps(value, ensure_ascii=False), file=out)
        return
    for row in rows:
        cells = (f"{cell:.4f}" if isinstance(cell, float) else " ".join(str(cell).splitlines()) for cell in row)
        print(*(cell if len(row) == 1 else cell.replace("\t", " ") for cell in cells), sep="\t", file=out)


def show_texts(inputs: Inputs, name: str, several: bool) -> Callable[[Item, TextPrediction], Shown]:
    """Translations or captions, `name` in JSON: their texts, or `several` of each input with their scores."""

    def show(item: Item, output: TextPrediction) -> Shown:
        if output.note:
            note(output.note)
        n_best = [{name: one.text, "score": one.score, "log_probability": one.log_probability} for one in output.n_best]
        rows = [(item.number, one.score, one.text) for one in output.n_best] if several else [(output.text,)]
        yield {inputs.name: item.text, **n_best[0], "n_best": n_best, **item.origin}, rows

    return show


@contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if name is None:
        yield sys.stdout
        return
    path = Path(name).resolve()  # follow links, so that a link stays a link
    if path.exists() and not path.is_file():  # a device, such as /dev/null
        with path.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        return
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", errors="replace") as file:
        yield file
