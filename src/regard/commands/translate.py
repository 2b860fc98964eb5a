"""`regard translate`: text through a trained encoder-decoder.

Standard input is read as it comes: what a pipe has to give is translated at once, so an endless one gives
output while it goes on, and a file is taken in large pieces, which batch well.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tqdm import tqdm

    from regard.predict.bundle import TextPrediction

DESCRIPTION = """
Translate lines with a trained model: those given, or those of standard input, a line for a line. With
--n-best the lines are  NUMBER<tab>SCORE<tab>TRANSLATION,  best first. What no option says comes from the
table [decode] of the run's recipe.toml, or is greedy search.
"""

EXAMPLES = """
regard translate runs/demo "July 4th, 1976"
regard translate runs/demo < in.txt > out.txt
regard translate runs/demo "seven hundred five" --beam 5 --n-best 3 --json
regard translate runs/demo "seven hundred five" --sample --temperature 0.8 --top-p 0.95 --seed 7
"""

PIECE = 2**18  # bytes of standard input that are taken at most at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="lines to translate (default: standard input)")
    search = parser.add_argument_group("beam search")
    search.add_argument("--beam", type=int, metavar="N", help="hypotheses kept at every step (1: greedy search)")
    search.add_argument("--coverage-penalty", type=float, metavar="B", help="weight of source tokens not looked at (0)")
    search.add_argument(
        "--early-stopping",
        action=argparse.BooleanOptionalAction,
        help="stop at the first N finished, not when no other can be better",
    )
    drawn = parser.add_argument_group("sampling")
    drawn.add_argument("--sample", action="store_true", default=None, help="draw the answer instead of searching it")
    drawn.add_argument("--temperature", type=float, metavar="T", help="below 1: likelier tokens; above: rarer ones (1)")
    drawn.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens (0: all)")
    drawn.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that hold a share P (1)")
    drawn.add_argument("--seed", type=int, metavar="N", help="the same seed and line, the same answer (1)")
    both = parser.add_argument_group("both")
    both.add_argument("--n-best", type=int, metavar="N", help="translations of each line (1)")
    both.add_argument("--length-penalty", type=float, metavar="A", help="score = log P / ((5 + length) / 6)^A (0)")
    both.add_argument("--min-length", type=int, metavar="N", help="fewest tokens of an answer (0)")
    both.add_argument("--max-length", type=int, metavar="N", help="most tokens of an answer (twice the source, and 50)")
    both.add_argument("--no-repeat-ngram", type=int, metavar="N", help="no N tokens in a row occur twice (0: they may)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="lines decoded together (default: 128)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line: source, translation, score, n_best"
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields
    from functools import partial

    from regard.commands import predictor_of
    from regard.errors import UserError
    from regard.predict.config import SearchConfig
    from regard.predict.translator import Translator

    if args.batch < 1:
        raise UserError(f"--batch {args.batch}: must be 1 or more lines")
    given = {field.name: getattr(args, field.name, None) for field in fields(SearchConfig)}
    changes = {name: value for name, value in given.items() if value is not None}
    translator = predictor_of(args.run, args.device, Translator)
    config = translator.configured(**changes)
    done = 0
    with progress(args.text) as bar:
        for lines in [args.text] if args.text else read_lines(bar):
            progress_of = partial(advance, bar, lines)
            found = translator.predict(lines, batch=args.batch, config=config, first=done, done=progress_of)
            for number, (line, prediction) in enumerate(zip(lines, found, strict=True), start=done + 1):
                write(number, line, prediction, args.json, config.n_best > 1)
            sys.stdout.flush()
            done += len(lines)
    return 0


def advance(bar: tqdm[Any], lines: Sequence[str], rows: Sequence[int]) -> None:
    """Count the bytes of the lines that were done together."""
    bar.update(sum(len(lines[row].encode()) for row in rows))


def write(number: int, line: str, found: TextPrediction, as_json: bool, several: bool) -> None:
    if as_json:
        listed = [{"translation": one.text, "score": one.score} for one in found.n_best]
        answer = {"source": line, "translation": found.text, "score": found.score, "n_best": listed}
        print(json.dumps(answer, ensure_ascii=False))
        return
    for one in found.n_best if several else found.n_best[:1]:
        text = " ".join(one.text.splitlines())  # a line for a line, even if the model has written a line end
        print(f"{number}\t{one.score:.4f}\t{text}" if several else text)


def read_lines(bar: Any) -> Iterator[list[str]]:
    """The whole lines that each read of standard input has completed."""
    from regard.errors import UserError

    stdin = cast(BufferedReader, sys.stdin.buffer)
    rest, number, taken = b"", 0, 0
    while True:
        piece = stdin.read1(PIECE)
        *lines, rest = (rest + piece).split(b"\n")
        if not piece and rest:  # the last line may lack its end
            lines, rest = [rest], b""
        lines = [line.removesuffix(b"\r") for line in lines]  # a file from Windows
        if lines and number == 0:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        try:
            texts = [line.decode("utf-8") for line in lines]
        except UnicodeDecodeError as error:
            bad = next(at for at, line in enumerate(lines, start=number + 1) if line == error.object)
            raise UserError(
                f"standard input: line {bad}, byte {error.start + 1} is not UTF-8 text; convert the file first"
            ) from None
        if texts:
            yield texts
        number += len(texts)
        taken += len(piece)
        bar.update(taken - bar.n)  # the bar may know of some of it already
        if not piece:
            return


def read_checked(given: list[str], bar: Any, check: Callable[[list[str]], object]) -> Iterator[list[str]]:
    """The lines given, or those of standard input; `check` raises if some are wrong.

    A file is checked to its end before its first lines are given, so that no output stands before an error; a pipe is
    checked as it comes.
    """
    from tqdm import tqdm

    if not given and sys.stdin.buffer.seekable():
        begin = sys.stdin.buffer.tell()
        for lines in read_lines(tqdm(disable=True)):
            check(lines)
        sys.stdin.buffer.seek(begin)
    for lines in [given] if given else read_lines(bar):
        check(lines)
        yield lines


def progress(given: Sequence[str]) -> tqdm[Any]:
    """A bar on standard error, where someone watches it and the end of the input is known."""
    from tqdm import tqdm

    from regard.errors import UserError

    if sys.stdin is None and not given:
        raise UserError("standard input is closed: give texts as arguments, or files")
    try:
        status = os.fstat(sys.stdin.fileno() if sys.stdin else -1)
        total = status.st_size if stat.S_ISREG(status.st_mode) and not given else 0
    except (OSError, ValueError):  # no standard input, or one that is no file
        total = 0
    shown = bool(total) and sys.stderr.isatty() and not sys.stdout.isatty()
    tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, leave=False)
