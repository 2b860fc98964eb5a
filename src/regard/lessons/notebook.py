"""A lesson as a Jupyter notebook: its text, its code, and below each exercise a function to complete and its check.

The notebook format is JSON: a list of cells, of Markdown or code. Figures travel with the text as attachments; outputs
are left to Jupyter, so the ```text block after a Python block is omitted.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.files import write_atomically
from regard.lessons.course import EXERCISE, FOLDER, Lesson, solutions, stub

SETUP = (
    "from pathlib import Path\n\nfrom regard.lessons import check\n\nPath('images').mkdir(exist_ok=True)  # {note}\n"
)
NOTES = {"en": "the code below saves its figures here", "ko": "아래 코드가 그림을 저장하는 폴더"}
_CODE = re.compile(r"^```python\n(.*?)^```[ \t]*\n(?:\n?```text\n.*?^```[ \t]*\n)?", re.M | re.S)
_DETAILS = re.compile(r"^<details>.*?^</details>[ \t]*\n?", re.M | re.S)
_IMAGE = re.compile(r'(\]\(|src=")images/([^")\s]+)')


def notebook(lesson: Lesson, language: str, install: str | None = None) -> dict[str, Any]:
    """The notebook as its JSON; `install` is what pip installs where Regard is missing, such as in Colab."""
    cells = [_code(SETUP.format(note=NOTES[language]))]
    if install is not None:
        cells.insert(0, _code(f"try:\n    import regard\nexcept ImportError:\n    %pip install -q {install}\n"))
    cells += _cells(lesson, language)
    for at, cell in enumerate(cells):
        cell["id"] = f"cell-{at}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, "title": lesson.title(language)}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write_notebook(path: str | Path, lesson: Lesson, language: str, install: str | None = None) -> None:
    content = json.dumps(notebook(lesson, language, install), ensure_ascii=False, indent=1)
    write_atomically(path, f"{content}\n".encode())


def _cells(lesson: Lesson, language: str) -> Iterator[dict[str, Any]]:
    """The text up to an exercise, then each exercise; a solution (<details>) stays text, folded."""
    from regard.lessons.checker import exercises

    text = lesson.text(language)
    names, solved = {one.number: one.name for one in exercises(lesson.number)}, solutions(text)
    starts = [match.start() for match in EXERCISE.finditer(text)]
    parts = [text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
    for at, part in enumerate(parts):
        before, folded, after = _split(part)
        yield from _blocks(before)
        if at:
            name = names[at]
            call = f"check({lesson.number}, {name}" + ("" if language == "en" else f', lang="{language}"') + ")"
            yield _code(f"{stub(solved[at], name)}\n\n{call}\n")
        if folded:
            yield _markdown(folded)
            yield from _blocks(after)


def _split(part: str) -> tuple[str, str, str]:
    """(before the solution, the solution, after it)"""
    match = _DETAILS.search(part)
    return (part[: match.start()], match[0], part[match.end() :]) if match else (part, "", "")


def _blocks(text: str) -> Iterator[dict[str, Any]]:
    end = 0
    for match in _CODE.finditer(text):
        yield from _text(text[end : match.start()])
        yield _code(match[1])
        end = match.end()
    yield from _text(text[end:])


def _text(text: str) -> Iterator[dict[str, Any]]:
    if text.strip():
        yield _markdown(text)


def _code(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source.rstrip("\n")}


def _markdown(text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}, "source": ""}
    for _, name in _IMAGE.findall(text):
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        data = base64.b64encode((FOLDER / "images" / name).read_bytes()).decode()
        cell.setdefault("attachments", {})[name] = {kind: data}
    cell["source"] = _IMAGE.sub(r"\1attachment:\2", text).strip("\n")
    return cell
