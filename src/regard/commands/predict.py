"""`regard predict`: the numbers that follow, by a trained model of numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.predict.regressor import Regressor

DESCRIPTION = """
Write the numbers that follow those given, free-running: every number that is written is read before the next. A model
of pairs writes as many as it was given, a model of a series as many as its horizon. Sequences are given, or read from
standard input, a line each; a series of several channels is read from a table with --file.
"""

EXAMPLES = """
regard predict runs/number-sequences "10 20 30 40 50"
regard predict runs/number-sequences "3 1 4 1 5" "2.5 7" --json
regard predict runs/number-sequences < sequences.txt > answers.txt
regard predict runs/seasonal-forecast --file recent.csv > next.csv
"""

SHOWN = 5  # numbers in a note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("numbers", metavar="NUMBERS", nargs="*", help="a sequence, such as '1 2 3' (default: input)")
    parser.add_argument("--file", metavar="FILE", help="a series, .csv or .tsv with a header: its last steps are read")
    parser.add_argument("--steps", type=int, metavar="N", help="how many numbers to write")
    parser.add_argument("--digits", type=int, default=4, metavar="N", help="digits after the point (4)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a sequence: source, predicted")


def run(args: argparse.Namespace) -> int:
    import torch

    from regard.commands import predictor_of
    from regard.errors import UserError
    from regard.predict.regressor import Regressor

    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: give 1 or more")
    if not 0 <= args.digits <= 15:
        raise UserError(f"--digits {args.digits}: give 0 to 15")
    if args.file is not None and args.numbers:
        raise UserError(f"--file {args.file}: there are NUMBERS too; give one of them")
    predictor = predictor_of(args.run, args.device, Regressor)
    if args.file is not None:
        return _table(args, predictor)
    if predictor.channels != 1:
        raise UserError(f"{args.run}: reads {predictor.channels} channels; give them as a table, with --file")
    for line in _lines(args) if args.numbers else ():  # a mistake shows before the first answer
        _parse(*line)
    strange: list[float] = []
    most = 0
    for number, text in _lines(args):
        if not text.strip() and not args.numbers:  # a line for a line
            print(json.dumps({"source": [], "predicted": []}) if args.json else "")
            continue
        source = _parse(number, text)
        found = predictor.predict([source], steps=args.steps)[0].series
        strange += predictor.out_of_range(torch.tensor(source, dtype=torch.float64)[:, None])[0]
        most = max(most, len(source), len(found))
        if args.json:
            print(json.dumps({"source": source, "predicted": found}))
        else:
            print(" ".join(f"{value:.{args.digits}f}" for value in found), flush=True)
    _tell_strange(predictor, [strange], ("",))
    _tell_long(predictor, most)
    return 0


def _lines(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(where it stands, the text) of each sequence."""
    if args.numbers:
        yield from ((f"NUMBERS {number}", text) for number, text in enumerate(args.numbers, 1))
        return
    for number, line in enumerate(sys.stdin or (), 1):
        yield f"standard input, line {number}", line


def _parse(where: str, text: str) -> list[float]:
    from regard.data.numeric import parse_numbers
    from regard.errors import UserError

    try:
        numbers = parse_numbers(text)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not numbers:
        raise UserError(f"{where}: holds no numbers; write  10 20 30")
    return numbers


def _tell_strange(predictor: Regressor, strange: list[list[float]], channels: Sequence[str]) -> None:
    """A note about each channel with numbers that the model was not trained for."""
    from regard.predict.regressor import DEVIATIONS

    about = "" if predictor.data.rule else f" (mean ± {DEVIATIONS} deviations)"
    lowest, highest = (part.tolist() for part in predictor.training_range)
    for channel, numbers, low, high in zip(channels, strange, lowest, highest, strict=True):
        if different := [f"{number:g}" for number in dict.fromkeys(numbers)]:
            more = f" and {len(different) - SHOWN:,} more" * (len(different) > SHOWN)
            where = f"column {channel!r}: " * bool(channel)
            print(
                f"note: {where}{', '.join(different[:SHOWN])}{more}: outside {low:g} to {high:g}{about}, "
                "where the model's training data lie; do not rely on the answer",
                file=sys.stderr,
            )


def _tell_long(predictor: Regressor, most: int) -> None:
    """A note where a sequence, read or written, is longer than any that the model was trained on."""
    if 0 < predictor.longest < most:
        print(
            f"note: {most:,} numbers are read or written, but a sequence of the model's training data has at most "
            f"{predictor.longest:,} (data.longest); do not rely on the answer",
            file=sys.stderr,
        )


def _table(args: argparse.Namespace, predictor: Regressor) -> int:
    from pathlib import Path

    from regard.data.series import read_series
    from regard.errors import UserError

    if not Path(args.file).is_file():
        raise UserError(f"--file {args.file}: no such file")
    (series,), channels = read_series([Path(args.file)], predictor.data.columns)
    if len(channels) != predictor.channels:
        raise UserError(
            f"{args.file}: has {len(channels)} columns of numbers ({', '.join(channels)}), but the model reads "
            f"{predictor.channels}; take the others out"
        )
    try:
        found = predictor.forecast(series, args.steps)
    except UserError as error:
        raise UserError(f"{args.file}: {error}") from None
    _tell_strange(predictor, predictor.out_of_range(series), channels)
    _tell_long(predictor, max(len(series), len(found)))
    if args.json:
        print(json.dumps({"channels": list(channels), "predicted": found.tolist()}, ensure_ascii=False))
        return 0
    print(",".join(channels))
    for step in found.tolist():
        print(",".join(f"{value:.{args.digits}f}" for value in step))
    return 0
