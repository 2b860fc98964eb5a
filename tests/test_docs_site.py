"""The site of the documentation: generated pages are complete, links lead somewhere, Korean can be found."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def module():
    """Call with the name of a module of docs/site."""
    sys.path.insert(0, str(SITE))
    yield importlib.import_module
    sys.path.remove(str(SITE))


# --- generated pages


def test_every_recipe_key_has_a_type_and_a_meaning(module):
    page = module("settings_page")
    from regard.tasks.registry import TASKS

    tables = page.tables()
    assert {task for name, _, tasks in tables if name == "data" for task in tasks} == set(TASKS)
    for name, kind, _ in tables:
        for key, type_, default, meaning in page.rows(kind):
            where = f"[{name}] {key} ({kind.__module__}.{kind.__qualname__}): {meaning}"
            assert type_ and default and re.search(r"\w", re.sub(r"`[^`]*`", "", meaning)), where  # not values alone
            assert not re.match(r"(and|or|of|on)\b", meaning) and meaning[-1] not in ",;:", where  # a phrase of its own
    text = page.settings_page()
    assert '| `norm_order` | "pre", "post" | `"post"`, [by task](#defaults-by-task) | norm after the residual' in text
    assert "| `betas` | list of number | `[0.9, 0.98]`, [by task](#defaults-by-task) |" in text
    assert "`train.betas = [0.9, 0.999]`, `train.eps = 1e-08`" in text and "| `preset` | string | `none` |" in text
    assert r'| `separator` | string | `"\n"` |' in text and text.count("{index} ! norm_order") == 1


def test_every_command_and_option_has_its_place(module):
    page = module("commands_page")
    from regard.cli import COMMANDS

    overview = page.overview_page()
    assert "| `--lang LANG` |" in overview and "| 130 | interrupted" in overview
    for name in COMMANDS:
        assert f"(commands/{name}.md)" in overview
        text = page.command_page(name)
        options = {option for action in page.parser_of(name)._actions for option in action.option_strings}
        assert all(re.search(rf"`[^`]*{re.escape(option)}\b", text) for option in options) and f"regard {name}" in text


def test_messages_of_errors_are_listed_with_what_varies(module):
    page = module("errors_page")
    found = list(page.messages(page.SOURCE / "lessons" / "course.py"))
    assert "lesson {number}: does not exist; choose a number from 1 to {last} (list them with  regard lesson)" in found
    assert len(list(page.messages(page.SOURCE / "training" / "config.py"))) > 5
    text = page.errors_page()
    for message in (
        "{path}: no such file{near}",
        "{purpose} needs the package {package}: install it with  pip install 'regard[{extra}]'",
        "is not JSON: {error}",
    ):
        assert f"| `` {message} `` |" in text, message


def test_docstrings_become_markdown(module):
    page = module("api_page")
    from regard.nn import attention

    text = page.module_text(attention)
    assert text.startswith("## regard.nn.attention\n") and "### attention_stages\n" in text
    for name, _ in page.public(attention):
        assert f"### {name}\n" in text
    assert text.count("```") % 2 == 0


def test_every_public_name_has_a_docstring(module):
    page = module("api_page")
    import regard

    for name in regard._LAZY:
        thing = getattr(regard, name)
        assert page.docstring(thing if callable(thing) else type(thing)), name


# --- links and navigation


def test_links_are_led_to_staged_pages(module, tmp_path, monkeypatch):
    stage = module("stage")
    monkeypatch.setattr(stage, "REPOSITORY", "")
    staged = stage.Stage(tmp_path / "source")
    source = ROOT / "docs" / "nn.md"

    def rewrite(text: str, page: str = "nn.md") -> str:
        return staged.rewrite(source, page, text)

    assert rewrite("[a](models.md#presets)") == "[a](models.md#presets)"
    assert rewrite("[a](models.md)", "deep/nn.md") == "[a](../models.md)"
    assert (
        rewrite("[1](../src/regard/lessons/01-weighted-mean.en.md#papers)")
        == "[1](learn/01-weighted-mean.en.md#papers)"
    )
    assert rewrite("[docs](README.md) [web](https://a.b)") == "[docs](index.md) [web](https://a.b)"
    assert rewrite("```\n[a](b.md)\n```\n") == "```\n[a](b.md)\n```\n" and not staged.missing
    assert rewrite("[recipe](../recipes/nsmc.toml), [all](../recipes)") == "[recipe](files/recipes/nsmc.toml), all"
    assert (tmp_path / "source/files/recipes/nsmc.toml").is_file()
    assert rewrite("[x](nowhere.md)") == "x" and staged.missing == ["docs/nn.md: nowhere.md leads nowhere"]
    monkeypatch.setattr(stage, "REPOSITORY", "someone/regard")
    assert rewrite("[all](../recipes)") == "[all](https://github.com/someone/regard/tree/main/recipes)"


def test_lessons_link_their_notebook_and_colab_where_the_repository_is_known(module, tmp_path, monkeypatch):
    stage = module("stage")
    from regard.lessons.course import find_lesson

    staged, book = stage.Stage(tmp_path / "source"), "01-weighted-mean.ko.ipynb"
    monkeypatch.setattr(stage, "REPOSITORY", "")
    text = staged.lesson(find_lesson(1), "ko")
    assert f'href="../notebooks/{book}"' in text and "colab" not in text and "(01-weighted-mean.en.md)" in text
    path = tmp_path / "source" / "extra" / "notebooks" / book
    assert "pip install" not in path.read_text(encoding="utf-8")
    monkeypatch.setattr(stage, "REPOSITORY", "someone/regard")
    text = staged.lesson(find_lesson(1), "ko")
    assert f"https://colab.research.google.com/github/someone/regard/blob/gh-pages/notebooks/{book}" in text
    assert "pip install -q git+https://github.com/someone/regard" in path.read_text(encoding="utf-8")


def test_the_navigation_has_every_page_once(module, tmp_path, monkeypatch):
    stage = module("stage")
    staged = stage.Stage(tmp_path / "source")
    source = ROOT / "docs" / "README.md"
    text = staged.rewrite(source, "index.md", source.read_text(encoding="utf-8"))
    listed = [
        line
        for block in re.findall(r"```\{toctree\}\n(.*?)```", staged.navigation(text), re.S)
        for line in block.split("\n")
    ]
    pages = [line for line in listed if line and not line.startswith(":")]
    assert sorted(pages) == sorted({page.removesuffix(".md") for page in staged.pages.values()} - {"index"})


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="b.html#there">b</a>', None),
        ('<a href="b.html#gone">b</a>', "a.html: b.html has no #gone"),
        ('<a href="c.html">c</a>', "a.html: c.html leads nowhere"),
        ('<a href="https://elsewhere.org/">links may leave</a>', None),
        ('<script src="https://cdn.org/x.js"></script>', "a.html: loads https://cdn.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.org/x.css">', "a.html: loads //fonts.org/x.css"),
        ('<img src="gone.png">', "a.html: gone.png is missing"),
        ("<style></style>", None),
    ],
)
def test_the_checker_of_links_and_resources(module, tmp_path, html, problem):
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2>')
    (tmp_path / "x.css").write_text("a { background: url(data:,) }")
    assert list(module("check").problems(tmp_path)) == ([problem] if problem else [])


def test_a_small_site_builds_without_warning_and_korean_is_in_its_index(tmp_path):
    source = tmp_path / "source"
    (source / "_static").mkdir(parents=True)
    (source / "extra").mkdir()
    for name in ("site.css", "icon.svg"):
        (source / "_static" / name).write_bytes((SITE / name).read_bytes())
    (source / "index.md").write_text(
        "# Index\n\n```{toctree}\nko\n```\n\n[link](ko.md#멀티헤드를-본다)\n", encoding="utf-8"
    )
    (source / "ko.md").write_text("# 어텐션은 가중 평균\n\n## 멀티헤드를 본다\n\n드롭아웃이 있다.\n", encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", str(SITE), str(source), str(tmp_path / "html")]
    done = subprocess.run(command, env=os.environ | {"REGARD_SITE_SOURCE": str(source)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "html" / "searchindex.js").read_text(encoding="utf-8")
    for term in ("어텐", "텐션", "헤드", "드롭"):
        assert json.dumps(term) in index, term
    assert "Scorer" in (tmp_path / "html" / "_static" / "language_data.js").read_text(encoding="utf-8")


# --- topics


@pytest.mark.parametrize(("page", "other"), [("topics.md", "ko/topics.md"), ("ko/topics.md", "topics.md")])
def test_every_topic_leads_somewhere(page, other):
    """The links themselves are checked with those of the other pages, by tests/test_readme.py."""
    rows, others = (
        [line for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
        for name in (page, other)
    )
    topics = [row for row in rows if "---" not in row and not row.startswith(("| topic", "| 주제"))]
    assert len(topics) >= 64 and len(rows) == len(others)
    for row in topics:
        assert "](" in row, row


@pytest.mark.parametrize("name", ["topics.md", "ko/topics.md"])
def test_commands_of_topics_are_complete(module, name):
    parser_of = module("commands_page").parser_of
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    commands = [shlex.split(command) for command in re.findall(r"\| `regard ([^`]+)` \|$", text, re.M)]
    assert len(commands) > 40
    for command, *arguments in commands:
        parser_of(command).parse_all(arguments)  # raises a UserError, or exits


def test_every_lesson_is_in_the_index_and_in_the_table_of_topics():
    from regard.lessons.course import TOPICS, lessons

    index, topics = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("README.md", "topics.md"))
    assert [lesson.number for lesson in lessons()] == list(TOPICS)
    for lesson in lessons():
        english = f"[{lesson.title('en')}](../src/regard/lessons/{lesson.name}.en.md)"
        row = f"| {lesson.number} | {english} | [{lesson.title('ko')}]"
        assert row in index and f"{lesson.name}.en.md#" in topics


@pytest.mark.slow
def test_the_whole_site(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SITE / "build.py"), str(tmp_path / "html")], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
