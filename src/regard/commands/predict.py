"""Predict the numbers that follow a sequence, autoregressively: every predicted number is an input of the next. A model
of pairs predicts as many as it reads, a model of a time series as many as its horizon. Sequences are arguments, the
lines of files (of a table, the column source), or the lines of standard input. For a model of a time series, every
file of --files is a series: a table with a header, of which the last steps are read. If it has a column of time stamps,
the output continues them. An input that cannot be used is reported, its output is an empty line (of a series, nothing),
and the exit code is 3.

examples:
  regard predict runs/number-sequences "10 20 30 40 50"
  regard predict runs/number-sequences              enter sequences at a prompt
  regard predict runs/number-sequences "3 1 4 1 5" "2.5 7" --json
  regard predict runs/number-sequences --files sequences.txt -o predictions.txt
  regard predict runs/seasonal-forecast --files recent.csv -o next.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import positive
from regard.commands.inputs import Inputs, Item, check_inputs, note
from regard.commands.prediction import Shown, input_options, open_predictor, predict_inputs
from regard.errors import UserError
from regard.files import name_some

if TYPE_CHECKING:
    from regard.predict.regressor import Regressor

ARGUMENTS = {
    **input_options(
        "NUMBERS", "sequences, such as '1 2 3'", "sequence: source, predicted",
        "read sequences from these files, or time series", "column of a table with sequences (default: source)",
    ),
    "--steps N": ("how many numbers to predict", {"type": positive}),
    "--digits N": ("digits after the decimal point (4)", {"type": int, "choices": range(16), "default": 4}),
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.predict.regressor import Regressor

    check_inputs(args)
    regressor = open_predictor(args, Regressor)
    if args.files and regressor.data.context:
        return predict_series(args, regressor)
    if regressor.channels != 1:
        raise UserError(f"{args.run}: reads {regressor.channels} channels; pass them as a table, with --files")
    outside, longest = list[float](), 0

    def predict(item: Item) -> tuple[list[float], list[float]]:
        nonlocal longest
        if not item.text.strip() and not args.inputs:
            return [], []  # each line of input gives one line of output
        source = parse(item.text)
        series = regressor.predict([source], steps=args.steps)[0].series
        outside.extend(regressor.out_of_range(regressor.as_series(source))[0])
        longest = max(longest, len(source), len(series))
        return source, series

    def show(item: Item, output: tuple[list[float], list[float]]) -> Shown:
        source, series = output
        row = (" ".join(f"{value:.{args.digits}f}" for value in series),)
        yield {"source": source, "predicted": series, **item.origin}, [row]

    def after() -> None:
        nonlocal longest
        warn(regressor, [outside], ("",), longest)
        longest = 0
        outside.clear()

    inputs = Inputs("source", "a sequence of numbers", "NUMBERS", "source", cell=as_text)
    return predict_inputs(args, inputs, lambda chunk: chunk.each(predict), show, after=after)


def as_text(cell: Any) -> str:
    """A cell with a sequence: text, a number, or a list of numbers."""
    return " ".join(map(str, cell)) if isinstance(cell, list) else str(cell)


def parse(text: str) -> list[float]:
    from regard.data.numeric import parse_numbers

    numbers = parse_numbers(text)
    if not numbers:
        raise UserError("holds no numbers; write  10 20 30")
    return numbers


def warn(regressor: Regressor, outside: list[list[float]], channels: Sequence[str], longest: int) -> None:
    """Notes about inputs unlike the training data: numbers out of its range by channel, and longer sequences."""
    from regard.predict.regressor import DEVIATIONS

    about = "" if regressor.data.rule else f" (mean ± {DEVIATIONS} standard deviations)"
    lowest, highest = (part.tolist() for part in regressor.training_range)
    reasons = []
    for channel, numbers, low, high in zip(channels, outside, lowest, highest, strict=True):
        if different := [f"{number:g}" for number in dict.fromkeys(numbers)]:
            where = f"column {channel!r}: " * bool(channel) + name_some(different)
            reasons.append(f"{where}: outside {low:g} to {high:g}{about}, the range of the training data")
    if 0 < regressor.longest < longest:
        most = f"a sequence of the training data has at most {regressor.longest:,} (data.longest)"
        reasons.append(f"{longest:,} numbers are read or predicted, but {most}")
    for reason in reasons:
        note(f"{reason}; the prediction is unreliable")


def predict_series(args: argparse.Namespace, regressor: Regressor) -> int:
    """Each file of --files is a time series; with several of them the name is the first column of the output."""
    from regard.data.numeric import Series, read_series
    from regard.data.sets import find_files

    if args.column is not None:
        raise UserError(
            f"--column {args.column}: the columns of a time series are data.columns of the recipe; remove it"
        )
    encoding = {} if args.encoding == "utf-8" else {"encoding": args.encoding}
    first, timed, several = True, False, len(find_files(args.files)) > 1

    def forecast(item: Item) -> tuple[Series, list[list[float]]]:
        file = item.text
        data = regressor.data
        (table,) = read_series([Path(file)], data.columns, data.time, **data.format | encoding)
        series, channels = table.values, table.channels
        if len(channels) != regressor.channels:
            columns = f"{len(channels)} columns of numbers ({', '.join(channels)})"
            raise UserError(f"{file}: has {columns}, but the model reads {regressor.channels}; remove the others")
        try:
            steps = regressor.forecast(series, args.steps)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        warn(regressor, regressor.out_of_range(series), channels, max(len(series), len(steps)))
        return table, steps.tolist()

    def show(item: Item, output: tuple[Series, list[list[float]]]) -> Shown:
        nonlocal first, timed
        table, steps = output
        times = [] if table.clock is None else table.clock.following(len(steps))
        timed = timed or bool(first and times)  # the first series decides the columns
        stamps = [(time,) for time in times or [""] * len(steps)] if timed else [()] * len(steps)
        numbers = ([f"{value:.{args.digits}f}" for value in step] for step in steps)
        rows = [",".join((*name(item.text), *stamp, *row)) for stamp, row in zip(stamps, numbers, strict=True)]
        header = [",".join((*name("file"), *[str(table.time)] * timed, *table.channels))] if first else []
        first = False
        value = {"file": item.text, "channels": list(table.channels), "predicted": steps}
        yield value | ({"times": times} if times else {}), [(row,) for row in header + rows]

    def name(file: str) -> tuple[str, ...]:
        return (file,) if several else ()

    inputs = Inputs("file", argument="", is_list=lambda path: False)
    return predict_inputs(args, inputs, lambda chunk: chunk.each(forecast), show, empty=lambda item: ())
