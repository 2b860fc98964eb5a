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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands import DEVICE, RUN, positive
from regard.commands.prediction import note, open_predictor, read_texts, write
from regard.errors import UserError
from regard.files import name_some

if TYPE_CHECKING:
    from regard.predict.regressor import Regressor

ARGUMENTS = {
    **RUN,
    "NUMBERS": ("a sequence, such as '1 2 3' (default: input)", {"nargs": "*"}),
    "--file FILE": "a time series, .csv or .tsv with a header: its last steps are read",
    "--steps N": ("how many numbers to predict", {"type": positive}),
    "--digits N": ("digits after the decimal point (4)", {"type": int, "choices": range(16), "default": 4}),
    **DEVICE,
    "--json": "print one JSON object per sequence: source, predicted",
}


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
    texts = chain.from_iterable(lines for lines, _ in read_texts(args.numbers))
    for number, text in enumerate(texts, 1):
        source, predicted = list[float](), list[float]()
        if text.strip():  # each line of input gives one line of output
            source = parse(f"{name} {number}", text)
            predicted = regressor.predict([source], steps=args.steps)[0].series
            outside += regressor.out_of_range(regressor.as_series(source))[0]
            longest = max(longest, len(source), len(predicted))
        row = (" ".join(f"{value:.{args.digits}f}" for value in predicted),)
        write(args, {"source": source, "predicted": predicted}, row)
        sys.stdout.flush()
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
    steps = predicted.tolist()
    rows = [(",".join(f"{value:.{args.digits}f}" for value in step),) for step in steps]
    write(args, {"channels": list(channels), "predicted": steps}, (",".join(channels),), *rows)
