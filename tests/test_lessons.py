"""The lessons: code runs and prints what is shown, Korean has the same code, solutions pass their checks, and
plausible mistakes get the intended hint.

A lesson is one file per language. Its ```python blocks run in one namespace, a ```text block directly after one is
what it prints. An exercise is a heading `### Exercise 4.2: …`; its solution is the Python block in the <details> below
it, which is not part of the lesson's code. Plausible mistakes are in tests/lesson_mistakes/lesson_04.py:

    MISTAKES = {2: [("a part of the hint", '''def split_heads(x, heads): …'''), …]}    at least two per exercise
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

import regard.lessons
from regard.explore.changes import Changes
from regard.lessons.checker import Hint, exercises
from test_readme import ROOT, anchors, command_lines, parse_command

FOLDER = Path(regard.lessons.__file__).parent
FILES = [f"{path.relative_to(ROOT)}" for path in sorted(FOLDER.glob("[0-9]*.md"))]
LESSONS = sorted(FOLDER.glob("*.en.md"))
NAMES = [path.name.removesuffix(".en.md") for path in LESSONS]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$(\n\n?```text\n(.*?)^```$)?", re.M | re.S)
DETAILS = re.compile(r"<details>.*?</details>", re.S)
HANGUL = re.compile(r"[가-힣]")


def number_of(name: str) -> int:
    return int(name[:2])


def text_of(name: str, language: str = "en") -> str:
    return (FOLDER / f"{name}.{language}.md").read_text(encoding="utf-8")


def code(text: str) -> list[tuple[str, str]]:
    """(Python block, the output shown after it) of a lesson, without the solutions."""
    return [(match[2], match[4] or "") for match in BLOCK.finditer(DETAILS.sub("", text)) if match[1] == "python"]


def solutions(text: str) -> dict[int, str]:
    """{number of an exercise: its solution}"""
    parts = re.split(r"^### (?:Exercise|연습 문제) \d+\.(\d+)", text, flags=re.M)
    found = {}
    for number, part in zip(parts[1::2], parts[2::2], strict=True):
        details = DETAILS.search(part)
        assert details, f"exercise {number} has no solution"
        found[int(number)] = "".join(match[2] for match in BLOCK.finditer(details[0]) if match[1] == "python")
    return found


def function(source: str, name: str) -> Any:
    namespace: dict[str, Any] = {"__name__": "__solution__"}
    exec(compile(source, name, "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize("name", NAMES)
def test_code_runs_and_prints_what_is_shown(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()  # where the code of a lesson saves its figures
    namespace: dict[str, Any] = {"__name__": "__lesson__"}
    for block, shown in code(text_of(name)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, name, "exec"), namespace)
        if shown:
            got = [line.rstrip() for line in printed.getvalue().splitlines()]
            assert got == [line.rstrip() for line in shown.splitlines()], block


@pytest.mark.parametrize("name", NAMES)
def test_korean_has_the_same_code_and_solutions(name):
    english, korean = text_of(name), text_of(name, "ko")
    assert code(korean) == code(english)
    assert solutions(korean) == solutions(english)
    assert len(HANGUL.findall(korean)) > 500


@pytest.mark.parametrize("name", NAMES)
def test_solutions_pass_and_mistakes_get_their_hint(name):
    number = number_of(name)
    listed, solved = exercises(number), solutions(text_of(name))
    assert [one.number for one in listed] == sorted(solved) == list(range(1, len(listed) + 1))
    assert 3 <= len(listed) <= 5
    mistakes = importlib.import_module(f"lesson_mistakes.lesson_{number:02}").MISTAKES
    for one in listed:
        one.check(function(solved[one.number], one.name))
        assert len(mistakes[one.number]) >= 2, f"exercise {one.number}"
        for part, source in mistakes[one.number]:
            with pytest.raises(Hint) as caught:
                one.check(function(source, one.name))
            assert part in caught.value.en and HANGUL.search(caught.value.ko)


@pytest.mark.parametrize("name", NAMES)
def test_images_exist(name):
    for language in ("en", "ko"):
        for target in re.findall(r"(?:src=\"|\]\()(images/[^\")]+)", text_of(name, language)):
            assert (FOLDER / target).is_file(), target


# --- commands and links


@pytest.mark.parametrize("page", FILES, ids=lambda page: Path(page).stem)
def test_commands_exist_with_their_options(page):
    spans = re.findall(
        r"`(regard [a-z][^`]* [^`]+)`", re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    )
    for where, line in [*command_lines(page), *((page, span) for span in spans)]:
        parse_command(where, shlex.split(line)[1:])


@pytest.mark.parametrize("name", NAMES)
def test_links_open_a_state_of_the_page(name):
    """`regard explore RUN --link "#run=…"`: keys, views and changes that the page knows, the same in both languages."""
    ask = (ROOT / "web" / "src" / "lib" / "ask.ts").read_text()
    known = set(re.findall(r'(?:found\.get|whole|within)\("([\w.]+)"', ask))
    views = set(re.findall(r'"(\w+)"', ask.split("VIEWS = [")[1].split("]")[0]))
    links = {
        language: re.findall(r'explore (\S+) --link "#(\S+)"', text_of(name, language)) for language in ("en", "ko")
    }
    assert links["en"] == links["ko"]
    for run, link in links["en"]:
        state = dict(parse_qsl(link, keep_blank_values=True))
        assert set(state) <= known and state["run"] == re.split("[/:]", run)[-1], link
        assert state.get("view", "model") in views and state.get("part", "cross") in ("encoder", "decoder", "cross")
        if "changes" in state:
            assert Changes.from_dict(json.loads(state["changes"])), link


@pytest.mark.parametrize("page", FILES, ids=lambda page: Path(page).stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        if not target.startswith("https://"):
            linked = (ROOT / page).parent / path
            assert linked.exists() and (not anchor or anchor in anchors(linked)), target
