"""Predict the numbers that follow a sequence, autoregressively: every predicted number is an input of the next. A model
of pairs predicts as many as it reads, a model of a time series as many as its horizon. Sequences are arguments, or
the lines of standard input; a time series of several channels is read from a table with --file.

examples:
  regard predict runs/number-sequences "10 20 30 40 50"
  regard predict runs/number-sequences "3 1 4 1 5" "2.5 7" --json
  regard predict runs/number-sequences < sequences.txt > predictions.txt
  regard predict runs/seasonal-forecast --file recent.csv > next.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands import positive
from regard.commands.inputs import add_run, open_predictor
from regard.commands.outputs import note, write_json
from regard.errors import UserError
from regard.files import name_some

if TYPE_CHECKING:
    from regard.predict.regressor import Regressor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "cpu", "sequence: source, predicted")
    parser.add_argument("numbers", metavar="NUMBERS", nargs="*", help="a sequence, such as '1 2 3' (default: input)")
    add = parser.add_argument
    add("--file", metavar="FILE", help="a time series, .csv or .tsv with a header: its last steps are read")
    add("--steps", type=positive, metavar="N", help="how many numbers to predict")
    add("--digits", type=int, choices=range(16), default=4, metavar="N", help="digits after the decimal point (4)")


def run(args: argparse.Namespace) -> None:
    from regard.predict.regressor import Regressor

    if args.file is not None and args.numbers:
        raise UserError(f"--file {args.file}: there are NUMBERS too; pass one of them")
    regressor = open_predictor(args, Regressor)
    if args.file is not None:
        predict_table(args, regressor)
        return
    if regressor.channels != 1:
        raise UserError(f"{args.run}: reads {regressor.channels} channels; pass them as a table, with --file")
    name, outside, longest = "NUMBERS" if args.numbers else "standard input, line", list[float](), 0
    for number, text in enumerate(args.numbers, 1):  # an error comes before the first output
        parse(f"{name} {number}", text)
    for number, text in enumerate(args.numbers or sys.stdin or (), 1):
        if not text.strip():  # each line of input gives one line of output
            write_json({"source": [], "predicted": []}) if args.json else print()
            continue
        source = parse(f"{name} {number}", text)
        predicted = regressor.predict([source], steps=args.steps)[0].series
        outside += regressor.out_of_range(regressor.as_series(source))[0]
        longest = max(longest, len(source), len(predicted))
        if args.json:
            write_json({"source": source, "predicted": predicted})
        else:
            print(" ".join(f"{value:.{args.digits}f}" for value in predicted), flush=True)
    warn(regressor, [outside], ("",), longest)


def parse(where: str, text: str) -> list[float]:
    from regard.data.numeric import parse_numbers

    try:
        numbers = parse_numbers(text)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not numbers:
        raise UserError(f"{where}: holds no numbers; write  10 20 30")
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


def predict_table(args: argparse.Namespace, regressor: Regressor) -> None:
    from regard.data.numeric import read_series

    if not Path(args.file).is_file():
        raise UserError(f"--file {args.file}: no such file")
    (series,), channels = read_series([Path(args.file)], regressor.data.columns)
    if len(channels) != regressor.channels:
        columns = f"{len(channels)} columns of numbers ({', '.join(channels)})"
        raise UserError(f"{args.file}: has {columns}, but the model reads {regressor.channels}; remove the others")
    try:
        predicted = regressor.forecast(series, args.steps)
    except UserError as error:
        raise UserError(f"{args.file}: {error}") from None
    warn(regressor, regressor.out_of_range(series), channels, max(len(series), len(predicted)))
    if args.json:
        write_json({"channels": list(channels), "predicted": predicted.tolist()})
        return
    print(",".join(channels))
    for step in predicted.tolist():
        print(",".join(f"{value:.{args.digits}f}" for value in step))
