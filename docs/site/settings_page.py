"""The page of recipe keys, from the dataclasses that read a recipe: name, type, default and meaning of every key.

The meaning is that of the table on the page of the package (docs/models.md, train.md, text.md, predict.md), or else the
comment beside the field in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import tokenize
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from regard.settings import field_types
from regard.tasks.registry import TASKS

DOCS = Path(__file__).resolve().parent.parent
PAGES = {"ModelConfig": "models.md", "TrainConfig": "train.md", "TextConfig": "text.md", "SearchConfig": "predict.md"}
INTRODUCTION = """# Recipe keys

A recipe is a TOML file. Its tables are read by frozen dataclasses, and this page is generated from them: every key with
its type, its default and its meaning. A wrong name, type or value is an error that names the key. How a recipe is used:
[train](../train.md); complete recipes: the pages of the tasks.

`task` at the top of a recipe is one of {tasks}; without it, `"translation"`. The default `none` is what applies when
the key is left out; TOML has no value for it. Some tasks have [defaults of their own](#defaults-by-task). A table
`[smoke.NAME]` contains changes to `[NAME]` for `regard train --smoke`.

"""
PRESET = (
    "preset",
    "string",
    "`none`",
    "the name of a [preset](../models.md#presets): other defaults for this table; with `dim`, its `ff_dim` is scaled",
)


@cache
def comments(kind: type) -> dict[str, str]:
    """{field: the comment beside it} of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        source = inspect.getsource(base)
        lines = {
            token.start[0]: token.string.lstrip("# ").strip()
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# fmt:", "# noqa"))
        }
        lines |= {
            token.start[0]: re.sub(r"^# type: ignore\[[\w-]+\] *#? *", "", token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT and token.string.startswith("# type: ignore") and "  # " in token.string
        }
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words = [
                    lines[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in lines
                ]
                if words:
                    found[node.target.id] = " ".join(words)
    return found


@cache
def table(page: str) -> dict[str, str]:
    """{name: meaning} of the tables with the columns field, default and meaning of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for rows in re.findall(r"^\| field \| default \| meaning \|\n\|[-|: ]+\n((?:\|.*\n)+)", text, re.M):
        for line in rows.splitlines():
            name, _, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
            meaning = re.sub(r"\]\((?=#)", f"]({page}", meaning)
            found[name.strip("`")] = re.sub(r"\]\((?!https?:)", "](../", meaning)  # the page is in reference/
    return found


def meanings(kind: type) -> dict[str, str]:
    known = table(PAGES[kind.__name__]) if kind.__name__ in PAGES else {}
    return comments(kind) | {name: text for name, text in known.items() if text}


def type_name(kind: Any) -> str:
    """A type as the reader of a recipe knows it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f'"{part}"' if isinstance(part, str) else str(part).lower() for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in parts if part is not types.NoneType))
    if origin is tuple:
        return f"list of {type_name(parts[0])}"
    if origin is dict:
        return f"table of {type_name(parts[1])}"
    if dataclasses.is_dataclass(kind):
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}.get(
        kind, getattr(kind, "__name__", "any")
    )


def toml(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case tuple() | list():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{}" if not value else "{ " + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + " }"
        case float() if value and abs(value) < 1e-3:
            return f"{value:g}"
    return str(value)


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{toml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{toml(field.default_factory())}`"
    return "required"


def rows(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key that a recipe can set."""
    hints, words = field_types(kind), meanings(kind)
    if kind.__name__ == "ModelConfig":
        yield PRESET
    for field in dataclasses.fields(kind):
        if field.init:
            yield field.name, type_name(hints[field.name]), default(field), words.get(field.name, "")


def nested(kind: type) -> Iterator[tuple[str, type]]:
    """(key, dataclass) of the tables inside a table."""
    for name, hint in field_types(kind).items():
        stack = [hint]
        while stack:
            part = stack.pop()
            if dataclasses.is_dataclass(part):
                yield name, part  # type: ignore[misc]
            stack += get_args(part)


def tables() -> list[tuple[str, type, list[str]]]:
    """(name of the table, dataclass, tasks that have it), tables inside tables after them."""
    from regard.data.mixture import TaskOptions
    from regard.models.config import ModelConfig
    from regard.training.config import TrainConfig

    users: dict[tuple[str, type], list[str]] = {("model", ModelConfig): [], ("train", TrainConfig): []}
    users["data.tasks.NAME", TaskOptions] = ["text-to-text"]  # beside the keys of its kind of data
    for task in TASKS:
        for key, kind in task_class(task).TABLES.items():
            users.setdefault((key, kind), []).append(task)
    order = ["data", "data.tasks.NAME", "text", "model", "train", "decode"]
    listed: list[tuple[str, type, list[str]]] = []
    for (key, kind), tasks in sorted(users.items(), key=lambda one: [*order, one[0][0]].index(one[0][0])):
        pending = [(key, kind)]
        while pending:
            name, one = pending.pop(0)
            if (name, one) not in [(a, b) for a, b, _ in listed]:
                listed.append((name, one, tasks))
                pending += [(f"{name}.{inner}", child) for inner, child in nested(one)]
    return listed


def task_class(name: str) -> Any:
    module, kind = TASKS[name]
    return getattr(importlib.import_module(module), kind)


def defaults_by_task() -> str:
    """The section with the defaults of tasks that differ from those of the dataclasses."""
    text = "## Defaults by task\n\nWhere a task needs other defaults than those of the tables above:\n\n"
    text += "| task | defaults |\n|---|---|\n"
    for task in TASKS:
        named = [
            f"`{table}.{key} = {toml(value)}`"
            for table, keys in task_class(task).DEFAULTS.items()
            for key, value in keys.items()
        ]
        text += f"| {task} | {cell(', '.join(named) or 'none')} |\n"
    return text


def cell(text: str) -> str:
    """Text for a table: | is escaped, and, outside of code, what would begin an HTML tag."""
    text = re.sub(r"(?<!\\)\|", r"\\|", text.replace("\n", " "))
    return re.sub(r"(`+.*?`+)|<", lambda match: match[1] or r"\<", text)


def settings_page() -> str:
    """The page, in Markdown."""
    text = INTRODUCTION.format(tasks=", ".join(f'`"{task}"`' for task in TASKS))
    indexed = set[str]()
    for name, kind, tasks in tables():
        of = (
            f" ({', '.join(tasks)})"
            if tasks and len(tasks) < len(TASKS) and name.split(".")[0] in ("data", "augment", "mask")
            else ""
        )
        text += f"## [{name}]{of}\n\n"
        summary = (inspect.getdoc(kind) or "").split("\n\n")[0]
        if summary and not summary.startswith(f"{kind.__name__}("):
            text += f"{summary} "
        text += f"Read by `{kind.__module__}.{kind.__qualname__}`.\n\n"
        listed = list(rows(kind))
        unique = {key for key, *_ in listed if "_" in key} - indexed  # a search for it should lead here first
        text += "".join(f"```{{index}} ! {key}\n```\n" for key in sorted(unique)) + "\n" * bool(unique)
        indexed |= unique
        text += "| key | type | default | meaning |\n|---|---|---|---|\n"
        for key, type_, value, meaning in listed:
            own = any(key in task_class(task).DEFAULTS.get(name, {}) for task in TASKS)
            value += ", [by task](#defaults-by-task)" * own
            text += f"| `{key}` | {cell(type_)} | {cell(value)} | {cell(meaning)} |\n"
        text += "\n"
    return text + defaults_by_task()
