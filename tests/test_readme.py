"""What the README and the pages say is so: code runs, commands parse, links lead somewhere, tables are complete.

A ```python block is run, all blocks of a page one after the other in one namespace. A ```text block right
after it is what it prints, to the letter; a fence without a language is shown only. Pages that use the demo's
run find an untrained one of the same shape under runs/demo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from regard import cli
from regard.models.config import ModelConfig
from regard.predict.config import SearchConfig
from regard.text.config import TextConfig
from regard.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.ko.md")
# English page: the same in Korean
TRANSLATED = {
    "README.md": "README.ko.md",
    **{f"docs/{path.name}": f"docs/ko/{path.name}" for path in ROOT.glob("docs/ko/*.md")},
}
FOLDERS = ("docs", "docs/explanation", "docs/howto")
PAGES = [*READMES, *sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))]
ALL_PAGES = sorted({*PAGES, *TRANSLATED.values()})
OPTIONAL = ("transformers", "pyarrow", "zstandard")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of its first line, counted from 1
    follows: bool  # nothing but blank lines between the block before and this one


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def split(page: str) -> tuple[list[Block], str]:
    """The fenced blocks of a page, and its prose without them."""
    blocks: list[Block] = []
    prose: list[str] = []
    inside: list[str] | None = None
    language, start, quiet = "", 0, False
    for number, line in enumerate(read(page).splitlines(), 1):
        if line.startswith("```"):
            if inside is None:
                inside, language, start = [], line[3:].strip(), number + 1
            else:
                blocks.append(Block(language, "\n".join(inside) + "\n", start, quiet))
                inside, quiet = None, True
        elif inside is not None:
            inside.append(line)
        else:
            prose.append(line)
            quiet = quiet and not line.strip()
    assert inside is None, f"{page}: the block of line {start} has no end"
    return blocks, "\n".join(prose)


# --- code


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo` leaves behind, with the weights of a model that has learned nothing."""
    import torch

    from regard.api import open_recipe
    from regard.models.folder import save
    from regard.models.transformer import build
    from regard.tasks.registry import task_of
    from regard.training.run import Run

    folder = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    tables, _ = open_recipe("src/regard/recipes/demo.toml")
    run = Run(task_of(tables)(tables, folder, torch.device("cpu")))
    run.prepare()
    torch.manual_seed(0)
    save(build(run.task.model_config), folder)
    lines = ('{"step": 10, "loss": 3.0, "seconds": 1.0}', '{"step": 20, "loss": 0.5, "seconds": 2.0}')
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_code_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch, request):
    blocks, _ = split(page)
    code = [block for block in blocks if block.language == "python"]
    for name in OPTIONAL:
        if any(name in block.text for block in code):
            pytest.importorskip(name)
    if any("runs/demo" in block.text for block in code):
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "demo").symlink_to(request.getfixturevalue("demo_run"))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        if block.language != "python":
            assert block.language != "text" or block.follows, f"{page}:{block.line}: output of nothing"
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), namespace)
        if after is not None and after.language == "text" and after.follows:
            shown = [line.rstrip() for line in after.text.splitlines()]
            assert [line.rstrip() for line in printed.getvalue().splitlines()] == shown, f"{page}:{after.line}"


def test_the_quick_start_is_short():
    first = next(block for block in split("README.md")[0] if block.language == "python")
    assert len(first.text.splitlines()) <= 10


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_translated_page_shows_the_same_code(page):
    english, korean = ([(block.language, block.text) for block in split(one)[0]] for one in (page, TRANSLATED[page]))
    assert english == korean


def outline(page: str) -> list[object]:
    """The levels of the headings, the shape of the tables with the code in their first column, and the pictures."""
    found: list[object] = []
    for line in split(page)[1].splitlines():
        if match := re.match(r"#+ |!\[|\||<img|- ", line):
            first = line.split("|")[1] if line.startswith("|") else ""
            found.append((match[0].strip(), line.count("|"), re.findall(r"`[^`]+`", first)))
    return found


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_translated_page_has_the_same_parts(page):
    """A section, a setting or a picture that was added to one of them is missing in the other."""
    assert outline(TRANSLATED[page]) == outline(page)


# --- commands


def command_lines(page: str) -> Iterator[tuple[str, str]]:
    """(where, line) of every command in a block; what stands after two spaces or a # is a remark."""
    for block in split(page)[0]:
        if block.language in ("python", "text"):
            continue
        for number, line in enumerate(block.text.splitlines(), block.line):
            words = re.split(r"\s{2,}|\s[#<>|]", line.strip().removeprefix("$ "))[0]
            if words.startswith(("regard ", "make ")):
                yield f"{page}:{number}", words


def parse_command(where: str, words: list[str]) -> None:
    at = cli.find_command(words)
    cli.overview().parse_all([word for word in words[:at] if word not in ("--help", "--version")])
    if at == len(words):  # regard --help
        return
    name, *arguments = words[at:]
    assert name in cli.COMMANDS, f"{where}: there is no command {name!r}"
    parser = command_parser(name)
    if "--help" not in arguments:
        parser.parse_all(arguments)


def command_parser(name: str) -> cli.Parser:
    return cli.Parser(f"regard {name}", "", importlib.import_module(cli.COMMANDS[name][0]).ARGUMENTS)


def check_make(where: str, words: list[str]) -> None:
    makefile = read("Makefile")
    targets = [word for word in words if "=" not in word]
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{where}: make has no target {target!r}"
    for name, value in (word.split("=", 1) for word in words if "=" in word):
        assert re.search(rf"^{name} \?=", makefile, re.M), f"{where}: the Makefile has no variable {name!r}"
        if name == "ARGS" and targets == ["demo"]:
            parse_command(where, ["demo", *shlex.split(value)])


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_their_options(page):
    for where, line in command_lines(page):
        program, *words = shlex.split(line)
        (parse_command if program == "regard" else check_make)(where, words)


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_in_passing_exist(page):
    for span in re.findall(r"`((?:regard|make) [^`]+)`", split(page)[1]):
        program, *words = shlex.split(span)
        if program == "make":
            check_make(page, words)
            continue
        assert words[0] in cli.COMMANDS or words[0].startswith("--"), f"{page}: `{span}`"
        if words[0] in cli.COMMANDS:
            options = {option for action in command_parser(words[0])._actions for option in action.option_strings}
            for word in words[1:]:
                assert not word.startswith("-") or word.partition("=")[0] in options, f"{page}: `{span}`"


def test_every_command_is_shown():
    shown = {shlex.split(line)[1] for _, line in command_lines("docs/commands.md") if line.startswith("regard ")}
    assert shown >= set(cli.COMMANDS)


# --- links and pictures


def targets(page: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", split(page)[1])
    return re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href|srcset)="([^"]+)"', prose)


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page):
    for target in targets(page):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page}: {target} is not there"
        assert found.resolve().is_relative_to(ROOT), f"{page}: {target} leads out of the repository"
        assert not anchor or anchor in anchors(found), f"{page}: {path} has no heading #{anchor}"


def test_image_run_are_small_and_described():
    for page in ALL_PAGES:
        prose = split(page)[1]
        assert not re.search(r"!\[\s*\]\(", prose), f"{page}: a picture without words for those who cannot see it"
        for tag in re.findall(r"<img [^>]*>", prose):
            assert re.search(r'alt="[^"]{10,}"', tag), f"{page}: {tag}"
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 300_000, picture


def test_every_page_is_in_the_index():
    index = set(targets("docs/README.md"))
    assert {page.removeprefix("docs/") for page in ALL_PAGES if page.startswith("docs/")} - {"README.md"} <= index


@pytest.mark.parametrize("page", ALL_PAGES)
def test_modules_and_files_named_in_passing_exist(page):
    for span in re.findall(r"`([^`\n]+)`", split(page)[1]):
        if re.fullmatch(r"regard(\.[A-Za-z_]\w*)+", span):
            pkgutil.resolve_name(span)
        elif re.fullmatch(r"(src/)?(regard|tests|benchmarks|recipes|web|docs)(/[\w.-]+)+", span):
            path = f"src/{span}" if span.startswith("regard/") else span
            assert (ROOT / path).exists(), f"{page}: `{span}` does not exist"


# --- tables


def rows(page: str) -> Iterator[list[str]]:
    for line in read(page).splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


SETTINGS = {
    "docs/models.md": ModelConfig,
    "docs/text.md": TextConfig,
    "docs/train.md": TrainConfig,
    "docs/predict.md": SearchConfig,
}


@pytest.mark.parametrize(("page", "settings"), SETTINGS.items())
def test_tables_of_settings_are_complete(page, settings):
    """A row for each field, with its default."""
    shown = {row[0].strip("`"): row[1].strip("`") for row in rows(page) if row[0].startswith("`")}
    wanted = {field.name: toml(field.default) for field in dataclasses.fields(settings) if field.init}
    assert {name: shown.get(name, "no row") for name in wanted} == wanted


def toml(value: object) -> str:
    """A default as a recipe would say it; none where the key is left out."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return str(list(value))
    return str(value)


def test_the_table_of_variants_names_every_choice():
    hints = get_type_hints(ModelConfig)
    table = read("docs/models.md").split("## Variants and their papers")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| ([^|]+)\|", table, re.M)
    choices = {name: set(get_args(kind)) for name, kind in hints.items() if get_origin(kind) is Literal}
    variants = {name: set(re.findall(r"`([^`]+)`", values)) for name, values in listed if name in choices}
    assert variants == {name: choices[name] for name in variants}
    required = "position norm norm_order activation attention_score attention architecture input"
    assert set(required.split()) <= set(variants)


READING_PATH = ("attention", "mask", "position", "norm", "feedforward", "multihead", "block", "embedding")


@pytest.mark.parametrize("page", READMES)
def test_the_stated_size_of_the_reading_path(page):
    """The README says how many lines a reader of regard.nn has before them."""
    stated = re.search(r"(?:about|약) ([\d,]+)(?: lines|줄)", read(page))
    assert stated is not None
    lines = sum(read(f"src/regard/nn/{name}.py").count("\n") for name in READING_PATH)
    assert lines == pytest.approx(int(stated[1].replace(",", "")), rel=0.05)
