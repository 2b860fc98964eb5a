"""`regard classify`: which class a text has, by a trained classifier."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from regard.predict.image_classifier import ImageClassifier
    from regard.predict.text_classifier import ClassPrediction

DESCRIPTION = """
Name the class of texts, with the probability of every class: those given, those of files, or the lines of standard
input. The answer is a table, a row for a text: label, a column for each class, text. Files are tables (.tsv, .csv,
.jsonl, .parquet) whose column of texts is the recipe's, or --column; any other file has a text a line. A model that
was trained on pictures takes files of pictures instead.
"""

EXAMPLES = """
regard classify runs/nsmc "아 더빙.. 진짜 짜증나네요"
regard classify runs/nsmc --files reviews.tsv --column review -o labels.tsv
regard classify runs/nsmc --json < reviews.txt > labels.jsonl
regard classify runs/fashion-mnist-vit shoe.png bag.jpg
"""

CHUNK = 4096  # texts that are classified together


class Asked(NamedTuple):
    """A text, and where it stands in a file."""

    text: str
    file: str | None = None
    row: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument(
        "text", metavar="TEXT", nargs="*", help="texts to classify (default: standard input), or files of pictures"
    )
    parser.add_argument("--files", nargs="+", metavar="FILE", help="read the texts from these files")
    parser.add_argument("--column", metavar="NAME", help="column of a table with the text (default: the recipe's)")
    parser.add_argument("-o", "--out", metavar="FILE", help="write to a file, whole or not at all")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a text: text, label, probabilities, file, row"
    )


def run(args: argparse.Namespace) -> int:
    from itertools import chain

    from regard.commands import predictor_of
    from regard.errors import UserError
    from regard.models.folder import find_device
    from regard.predict.image_classifier import ImageClassifier
    from regard.predict.text_classifier import TextClassifier

    if args.text and args.files:
        raise UserError(f"--files {args.files[0]}: there is a TEXT too; give one of them")
    if args.column is not None and not args.files:
        raise UserError(f"--column {args.column}: is a column of --files, and there are none")
    classifier = predictor_of(args.run, find_device(args.device), TextClassifier, ImageClassifier)
    if isinstance(classifier, ImageClassifier):
        return classify_pictures(args, classifier)
    data, cut = classifier.bundle.table("data"), 0
    with opened(args.out) as out:
        chunks = read_files(args.files, args.column, data) if args.files else read_given(args.text)
        answered = (list(zip(chunk, classifier.predict([one.text for one in chunk]), strict=True)) for chunk in chunks)
        first = next(answered, ())  # a mistake shows before the head of the table
        if not args.json:
            print("label", *map(_cell, classifier.classes), "text", sep="\t", file=out)
        for rows in chain([first], answered):
            write(rows, args.json, out)
            cut += sum(prediction.note is not None for _, prediction in rows)
            out.flush()
    if cut:
        texts = "1 text is" if cut == 1 else f"{cut:,} texts are"
        print(f"note: {texts} cut to the model's {classifier.max_length} tokens", file=sys.stderr)
    if named := [text for text in args.text if _names_file(text)]:
        more = f" and {len(named) - 1:,} more" if len(named) > 1 else ""
        told = "the name of a file, and the name itself was classified; --files reads files"
        print(f"note: {named[0]}{more}: {told}", file=sys.stderr)
    return 0


def _names_file(text: str) -> bool:
    """Whether a text looks like the name of a file and is one."""
    short = len(text.encode(errors="replace")) <= 255
    return short and not any(map(str.isspace, text)) and os.path.isfile(text)  # which is False where it cannot be asked


def classify_pictures(args: argparse.Namespace, classifier: ImageClassifier) -> int:
    from regard.errors import UserError

    files = args.text or args.files
    if not files or args.column is not None:
        raise UserError(f"{args.run}: reads images; give their files, such as  classify {args.run} image.png")
    predictions = classifier.predict(files)  # all of them before the first is printed: one may not be readable
    with opened(args.out) as out:
        if not args.json:
            print("label", *map(_cell, classifier.classes), "image", sep="\t", file=out)
        for file, found in zip(files, predictions, strict=True):
            if found.note is not None:
                print(f"note: {file}: {found.note}", file=sys.stderr)
            if args.json:
                answer = {"image": file, "label": found.label, "probabilities": found.probabilities}
                print(json.dumps(answer, ensure_ascii=False), file=out)
            else:
                numbers = (f"{p:.4f}" for p in found.probabilities.values())
                print(_cell(found.label), *numbers, _cell(file), sep="\t", file=out)
    return 0


def write(rows: Iterable[tuple[Asked, ClassPrediction]], as_json: bool, out: TextIO) -> None:
    for one, prediction in rows:
        label, found = prediction.label, prediction.probabilities
        if as_json:
            answer: dict[str, Any] = {"text": one.text, "label": label, "probabilities": found}
            if one.file is not None:
                answer |= {"file": one.file, "row": one.row}
            print(json.dumps(answer, ensure_ascii=False), file=out)
        else:
            print(_cell(label), *(f"{p:.4f}" for p in found.values()), _cell(one.text), sep="\t", file=out)


def _cell(text: str) -> str:
    """Text that stays in its cell of a table."""
    return " ".join(text.replace("\t", " ").splitlines())


def read_given(texts: list[str]) -> Iterator[list[Asked]]:
    from regard.commands.translate import progress, read_checked

    with progress(texts) as bar:
        for lines in read_checked(texts, bar, len):
            yield from _chunks(iter([Asked(line) for line in lines]))


def read_files(names: list[str], column: str | None, data: object) -> Iterator[list[Asked]]:
    """The texts of files, a chunk at a time; every file is read to its end before the first."""
    from itertools import chain

    from regard.data.sets import find_files
    from regard.data.tables import read_rows, table_kind

    known = data.get("text") if isinstance(data, dict) else None
    tables = [
        read_rows(
            [str(path)],
            (column or str(known or "text"),),
            kind="text" if column is None and table_kind(path) is None else None,
            remedy="Name the column with --column",
        )
        for path in find_files(names)
    ]
    for table in tables:
        table.check()
    rows = chain.from_iterable(tables)
    return _chunks(Asked(row.cells[0], row.file, row.line) for row in rows)


def _chunks(stream: Iterator[Asked]) -> Iterator[list[Asked]]:
    from itertools import islice

    while chunk := list(islice(stream, CHUNK)):
        yield chunk


@contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when all is written."""
    from regard.errors import UserError

    if name is None:
        yield sys.stdout
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"-o {name}: is a folder, or in one that does not exist; give the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
