"""Read the lessons of the course and check your solutions of their exercises. Without arguments, list the lessons. A
number opens the lesson in the browser, as a page without network; `check` calls the functions that your file defines
and says, for each exercise, whether it passed, or gives a hint. Exit code 0: all exercises passed, 3: not all.

examples:
  regard lesson                          list the lessons
  regard lesson 1                        open lesson 1 in the browser
  regard lesson 1 --lang ko              in Korean
  regard lesson 1 --print                print its text
  regard lesson 1 --notebook one.ipynb   save it as a Jupyter notebook
  regard lesson check 1 my.py            check the solutions in my.py
  regard lesson check 1 my.py --json     the same, for programs
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import webbrowser
from pathlib import Path

from regard.commands import aligned, show
from regard.errors import UserError
from regard.messages import localize


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: must be greater than 0, such as 20")
    return value


ARGUMENTS = {
    "LESSON": ("number of a lesson, or: check", {"nargs": "?"}),
    "NUMBER": ("check: number of the lesson", {"nargs": "?"}),
    "FILE": ("check: Python file with your functions", {"nargs": "?"}),
    "--lang LANG": "language of the lesson: en or ko (default: that of messages)",
    "--print": "print the text of the lesson instead of opening it",
    "--no-browser": "only print the path of the page",
    "--notebook FILE": "save the lesson as a Jupyter notebook",
    "--timeout SECONDS": ("check: limit for one exercise (default: 20)", {"type": seconds, "default": 20.0}),
    "--json": "print the list or the results of the check as JSON",
}


def needs_torch(args: argparse.Namespace) -> bool:
    return args.lesson is not None and bool(args.notebook)  # the process of a check imports it itself


def run(args: argparse.Namespace) -> int | None:
    from regard.lessons.course import chosen_language

    language = chosen_language(args.lang)
    if args.lesson == "check":
        return _check(args, language)
    if args.number is not None:
        raise UserError(
            f"unexpected argument {args.number!r}: pass one lesson, or check a file with  regard lesson check "
            f"{args.lesson} {args.number}"
        )
    (_list if args.lesson is None else _open)(args, language)
    return None


def _list(args: argparse.Namespace, language: str) -> None:
    from regard.lessons.course import lessons

    for name in ("print", "no_browser", "notebook"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')}: pass the number of a lesson, such as 1")
    content = [
        {
            "number": one.number,
            "title": {lang: one.title(lang) for lang in ("en", "ko")},
            "minutes": one.minutes(language),
            "topics": one.topics(language),
            "files": {lang: str(one.path(lang)) for lang in ("en", "ko")},
        }
        for one in lessons()
    ]
    unit = " min" if language == "en" else "분"
    rows = [
        (str(one.number), one.title("en"), one.title("ko"), f"{one.minutes(language)}{unit}", one.topics(language))
        for one in lessons()
    ]
    show(args.json, content, aligned(rows, right=(0, 3)))
    if not args.json:
        print(localize("\nopen one:  regard lesson 1      check your solutions:  regard lesson check 1 my.py"))


def _open(args: argparse.Namespace, language: str) -> None:
    from regard.lessons.course import find_lesson

    lesson = find_lesson(args.lesson)
    if args.json:
        raise UserError("--json: is for the list of lessons and for  regard lesson check; remove it")
    if args.notebook and Path(args.notebook).exists():
        raise UserError(f"--notebook {args.notebook}: exists, and may contain your solutions; name another file")
    if args.print:
        print(lesson.text(language), end="")
        return
    if args.notebook:
        from regard.lessons.notebook import write_notebook

        write_notebook(args.notebook, lesson, language)
        print(args.notebook)
        return
    from regard.lessons.page import write_pages

    folder = cache_folder()
    write_pages(folder)
    page = folder / f"{lesson.name}.{language}.html"
    print(page)
    if not args.no_browser and not webbrowser.open(page.as_uri()):
        print(localize("no browser found; open this file in one"), file=sys.stderr)


def cache_folder() -> Path:
    """Where pages stay after the command has ended; a temporary folder where the cache cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base, "regard", "lessons")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="regard-lessons-"))


def _check(args: argparse.Namespace, language: str) -> int:
    from regard.lessons.attempt import check_file
    from regard.lessons.course import find_lesson

    if args.number is None or args.file is None:
        raise UserError("regard lesson check: name a lesson and a file, such as  regard lesson check 1 my.py")
    lesson = find_lesson(args.number)
    results = check_file(lesson.number, Path(args.file), language, args.timeout)
    total = len(results.exercises)
    summary = f"{results.passed} of {total} passed" if language == "en" else f"{total}개 중 {results.passed}개 통과"
    show(args.json, results.to_json(), [repr(results), "", summary])
    return 0 if results.passed == total else 3
