"""What the prediction commands print: tables and JSON lines on standard output or in a file, and notes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.bundle import TextPrediction


def write_json(value: dict[str, Any], out: TextIO | None = None) -> None:
    print(json.dumps(value, ensure_ascii=False), file=out)


def write_row(*cells: object, out: TextIO | None = None) -> None:
    """A row of a table; tabs and line ends in a cell become spaces, probabilities have four digits."""
    texts = (f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in cells)
    print(*(" ".join(text.replace("\t", " ").splitlines()) for text in texts), sep="\t", file=out)


def write_text(as_json: bool, number: int, prediction: TextPrediction, several: bool, name: str, **input: str) -> None:
    """A translation or caption (the `name` in JSON): its text, or `several` with their scores."""
    if as_json:
        n_best = [{name: one.text, "score": one.score} for one in prediction.n_best]
        write_json({**input, **n_best[0], "n_best": n_best})
    elif several:
        for one in prediction.n_best:
            write_row(number, one.score, one.text)
    else:
        print(" ".join(prediction.text.splitlines()))  # one line per input, even if the model generated a line end


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if name is None:
        yield sys.stdout
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"-o {name}: is a folder, or in one that does not exist; pass the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
