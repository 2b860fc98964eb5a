"""`regard lesson`: the list, the page, the notebook, and checks of files that may contain anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from regard.cli import main
from regard.lessons import check
from regard.lessons.attempt import _run, attempt
from regard.lessons.checker import Exercise, Hint, exercises
from regard.lessons.course import EXERCISE, FOLDER, find_lesson, lessons, solutions, stub
from regard.lessons.notebook import notebook
from regard.lessons.page import page, renderer, write_pages

ROOT = Path(__file__).parent.parent
SOURCE = """
def weighted_mean(weights, values):
    print("weights:", weights)
    return weights @ values


def softmax(scores):
    {softmax}


def attention(q, k, v):
    {attention}
"""


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["lesson", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the list, the text and the page


def test_the_list_has_every_lesson_in_both_languages(capsys):
    code, out, _ = run(capsys, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["number"] for row in rows] == sorted(
        {int(path.name[:2]) for path in FOLDER.glob("*.en.md")}
    )
    for row in rows:
        assert row["topics"] and 0 < row["minutes"] <= 30  # the course promises half an hour per lesson
        assert re.search("[가-힣]", row["title"]["ko"]) and not re.search(r"[가-힣]|^\d", row["title"]["en"])
    _, text, _ = run(capsys, "--lang", "ko")
    assert all(row["title"]["ko"] in text and row["title"]["en"] in text for row in rows) and "분" in text


def test_print(capsys):
    assert run(capsys, "1", "--print", "--lang", "ko") == (0, find_lesson(1).text("ko"), "")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["99"], "lesson 99: does not exist"),
        (["one"], "lesson one: does not exist"),
        (["1", "my.py"], "regard lesson check 1 my.py"),
        (["check", "1"], "name a lesson and a file"),
        (["check", "1", "missing.py"], "missing.py: no such file"),
        (["check", "1", "."], ".: no such file"),
        (["check", "1", "my.ipynb"], "call  check(1, your_function)"),
        (["check", "1", "my.py", "--timeout", "0"], "--timeout"),
        (["--notebook", "x.ipynb"], "pass the number of a lesson"),
        (["1", "--notebook", __file__], "may contain your solutions"),
        (["1", "--json"], "remove it"),
        (["1", "--lang", "fr"], "--lang fr"),
    ],
)
def test_mistakes_on_the_command_line(capsys, arguments, part):
    code, out, error = run(capsys, *arguments)
    assert (code, out) == (2, "") and error.startswith("error: ") and part in error and error.count("\n") == 1


def test_the_page_is_one_file_that_loads_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = run(capsys, "1", "--no-browser")
    path = tmp_path / "regard" / "lessons" / f"{find_lesson(1).name}.en.html"
    assert code == 0 and out == f"{path}\n"
    names = {one.name for one in path.parent.iterdir()}
    assert names == {f"{one.name}.{language}.html" for one in lessons() for language in ("en", "ko")}
    for one in path.parent.iterdir():
        html = one.read_text(encoding="utf-8")
        assert not re.search(r"<script|@import|<link(?! rel=\"icon\" href=\"data:,\")|src=\"(?!data:)", html), one
        for link in re.findall(r'href="([^"#:]+\.html)', html):
            assert link in names, f"{one}: {link}"
        for anchor in re.findall(r'href="#([^"]+)"', html):
            assert f'id="{anchor}"' in html, f"{one}: #{anchor}"
    before = path.stat().st_mtime_ns
    write_pages(path.parent)
    assert path.stat().st_mtime_ns == before  # nothing has changed


def test_code_and_details_are_in_the_page():
    html = page(find_lesson(1), "en")
    assert html.count("<summary>") == len(exercises(1))
    assert '<span class="kn">import</span>' in html and "data:image/svg+xml;base64," in html


KOREAN = [*(one.path("ko") for one in lessons()), *ROOT.glob("docs/ko/*.md"), ROOT / "README.ko.md"]


@pytest.mark.parametrize("path", KOREAN, ids=lambda path: path.name)
def test_emphasis_is_closed(path):
    """In Markdown, `*I am.*은` is not emphasised: between a full stop and a letter, * closes nothing."""
    tokens = [child for token in renderer().parse(path.read_text(encoding="utf-8")) for child in token.children or []]
    assert not [token.content for token in tokens if token.type == "text" and re.search(r"\*\S|\S\*", token.content)]


# --- checks


def test_a_file_is_checked_exercise_by_exercise(tmp_path, capfd):
    """One passes, one never ends, one raises an exception, one is missing."""
    path = tmp_path / "my.py"
    path.write_text(SOURCE.format(softmax="while True: pass", attention="return q @ k"))
    code = main(["lesson", "check", "1", str(path), "--timeout", "3", "--json"])
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert code == 3 and result["passed"] == 1
    statuses = [(one["name"], one["status"]) for one in result["exercises"][:4]]
    assert statuses[:3] == [("weighted_mean", "passed"), ("softmax", "failed"), ("attention", "failed")]
    assert statuses[3][1] == "not attempted"
    hints = [one["hint"] for one in result["exercises"]]
    assert hints[0] is None and "endless loop" in hints[1] and "Line 12 raised RuntimeError" in hints[2]
    assert "weights:" in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def softmax(:\n", "my.py, line 1: SyntaxError: invalid syntax"),
        ("x = 1\n  y = 2\n", "my.py, line 2: IndentationError"),
        ("\0", "my.py: SyntaxError: source code string cannot contain null bytes"),
        ("import os\nos._exit(7)\n", "exit code 7"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, capfd, source, part):
    path = tmp_path / "my.py"
    path.write_text(source)
    assert main(["lesson", "check", "1", str(path)]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and part in captured.err and captured.err.count("\n") == 1


def test_an_exception_outside_of_functions_is_named_with_its_line(tmp_path, monkeypatch):
    path = tmp_path / "my.py"
    path.write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.setattr("sys.path", [])
    ready, (kind, hints) = _run(1, path, 0)
    assert (ready, kind) == (["ready"], "broken")
    assert "my.py, line 3: ValueError" in hints[0] and "my.py, 3번째 줄: ValueError" in hints[1]


def test_functions_are_checked_in_a_notebook():
    namespace: dict = {}
    exec(SOURCE.format(softmax="return scores.softmax(0)", attention="..."), namespace)
    results = check(1, *(namespace[name] for name in ("weighted_mean", "softmax", "attention")), lang="ko")
    assert [one.status for one in results.exercises] == ["passed", "failed", "not attempted"]
    assert "통과" in repr(results) and re.search("[가-힣]", results.exercises[1].hint[1])
    assert results._repr_html_().count("<div") == 3
    with pytest.raises(ValueError, match="did you mean 'softmax'"):
        check(1, softmx)


def softmx(): ...


@pytest.mark.parametrize(
    ("function", "status", "part"),
    [
        ("lambda: [][1]", "failed", "Line 1 raised IndexError: list index out of range"),
        ("lambda: exit()", "failed", "raised SystemExit"),
        ("lambda: 'text'", "failed", "cannot use the result, which is of type str"),
        ("lambda x: x", "failed", "The call raised TypeError"),
        ("lambda: None", "not attempted", ""),
        ("lambda: 2", "failed", "three"),
        ("lambda: 3", "passed", ""),
        ("type('A', (), {'__add__': lambda self, other: 3})", "passed", ""),
        ("type('A', (), {'__init__': lambda self: None})", "not attempted", ""),
    ],
)
def test_whatever_a_function_does_becomes_a_hint(function, status, part):
    def compare(answer):
        if answer() + 0 != 3:
            raise Hint("It should be three.", "3이어야 합니다.")

    answer = eval(compile(function, "my.py", "eval"))
    result = attempt(Exercise(1, "three", compare), answer)
    assert result.status == status and part in result.hint[0] and bool(result.hint[0]) == bool(result.hint[1])


def test_not_implemented_is_not_attempted():
    def unfinished():
        raise NotImplementedError

    assert attempt(Exercise(1, "unfinished", lambda answer: answer()), unfinished).status == "not attempted"


# --- notebooks


@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.name)
@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_notebook_has_the_code_and_a_check_per_exercise(lesson, language):
    nbformat = pytest.importorskip("nbformat")
    book = notebook(lesson, language)
    nbformat.validate(book)
    code = [cell["source"] for cell in book["cells"] if cell["cell_type"] == "code"]
    text = lesson.text(language)
    for number, solution in solutions(text).items():
        name = exercises(lesson.number)[number - 1].name
        cell = next(source for source in code if f"check({lesson.number}, {name}" in source)
        assert cell.startswith(stub(solution, name)) and solution.strip() not in code
    checks = sum(f"check({lesson.number}, " in source for source in code)
    assert checks == len(EXERCISE.findall(text))
    assert "](images/" not in json.dumps([cell["source"] for cell in book["cells"]])


def run_notebook(lesson, language: str, folder) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.from_dict(notebook(lesson, language))
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    results = [cell for cell in book.cells if cell.cell_type == "code" and "check(" in cell.source][1:]
    status = "not attempted" if language == "en" else "아직 풀지 않음"
    assert results and all(status in cell.outputs[0]["data"]["text/plain"] for cell in results)


def test_the_first_notebook_runs_from_top_to_bottom(tmp_path):
    run_notebook(find_lesson(1), "ko", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", lessons(), ids=lambda lesson: lesson.name)
def test_every_notebook_runs_from_top_to_bottom(lesson, tmp_path):
    run_notebook(lesson, "en", tmp_path)
