"""The Python API from docstrings: the public names of `regard`, then every module of the packages.

Docstrings are Markdown already: what is indented stays as it is, as equations and tables of shapes need.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

import regard

PACKAGES = (
    "nn", "text", "models", "data", "predict", "metrics", "training", "tasks", "interop", "cost", "explore", "serve",
    "study",
)  # fmt: skip
EXTRA_MODULES = ("api", "errors", "settings")


def modules(package: str) -> Iterator[ModuleType]:
    """The package and its modules, those whose names begin with an underscore left out."""
    root = importlib.import_module(f"regard.{package}")
    yield root
    for info in sorted(pkgutil.iter_modules(getattr(root, "__path__", [])), key=lambda info: info.name):
        if not info.name.startswith("_") and info.name != "page":
            with suppress(ModuleNotFoundError):  # of a package that only a GPU needs
                yield importlib.import_module(f"regard.{package}.{info.name}")


def docstring(thing: Any) -> str:
    """As Markdown: paragraphs, and what is indented or in columns as blocks."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and text.startswith(f"{thing.__name__}("):  # made up by @dataclass
        return ""
    parts = []
    for preformatted, lines in itertools.groupby(_continued(text.splitlines()), key=lambda line: line[0]):
        block = "\n".join(line for _, line in lines).strip("\n")
        if preformatted:
            parts.append(f"```none\n{textwrap.dedent(block)}\n```")
        else:  # <s> is a token, not a tag
            parts.append(re.sub(r"(?<!`)<(\w[^>\n]*)>", r"\\<\1>", block))
    return "\n\n".join(parts)


def _continued(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """(whether a line is preformatted, line); an empty line is what the line before it is."""
    before = False
    for line in lines:
        if line.strip():
            before = line.startswith(("    ", ">>> ", "... ")) or bool(re.search(r"\S {3,}\S", line))
        yield before, line


def signature(name: str, thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return name
    found = re.sub(r"(: |-> )'([^']*)'", r"\1\2", found)  # annotations as they are written
    found = re.sub(
        r"<function <?(\w+)>?[^>]*>|<([\w.]+) object at [^>]*>", lambda match: match[1] or match[2] or "…", found
    )
    found = name + re.sub(r"<class '([\w.]+)'>", r"\1", found)
    return found if len(found) < 90 else _one_per_line(found)


def _one_per_line(text: str) -> str:
    """A long signature with each parameter on a line of its own."""
    depth, parts = 0, [""]
    start = text.index("(")
    for end, char in enumerate(text[start:], start):
        depth += (char in "([{") - (char in ")]}")
        if not depth:
            break
        if char == "," and depth == 1:
            parts.append("")
        elif end > start:
            parts[-1] += char
    return text[:start] + "(\n" + "".join(f"    {part.strip()},\n" for part in parts) + text[end:]


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(name, class or function) that a module defines itself, in the order of the source."""
    for name, thing in vars(module).items():
        defined = getattr(thing, "__module__", None) == module.__name__
        if defined and not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield name, thing


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(kind).items():
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if not name.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
            yield name, function


def entry(name: str, thing: Any, level: int, prefix: str = "") -> str:
    text = f"{'#' * level} {prefix}{name}\n\n```python\n{signature(name, thing)}\n```\n\n{docstring(thing)}\n\n"
    if inspect.isclass(thing):
        for method, function in methods(thing):
            text += f"**{name}.{method}**\n\n```python\n{signature(method, function)}\n```\n\n{docstring(function)}\n\n"
    return text


def module_text(module: ModuleType) -> str:
    text = f"## {module.__name__}\n\n{docstring(module)}\n\n"
    return text + "".join(entry(name, thing, 3) for name, thing in public(module))


def package_page(package: str) -> str:
    return f"# regard.{package}\n\n" + "".join(map(module_text, modules(package)))


def names_page() -> str:
    """The public names: `from regard import …`."""
    text = "# Python API\n\nThe names of `regard`, from their docstrings; how to use them: [api](../api.md).\n\n"
    for name in sorted(regard._LAZY):
        thing = getattr(regard, name)
        known = inspect.isclass(thing) or inspect.isfunction(thing)
        text += entry(name, thing, 2, "regard.") if known else f"## regard.{name}\n\n{docstring(type(thing))}\n\n"
    packages = "".join(f"- [regard.{name}](api/{name}.md)\n" for name in (*PACKAGES, *EXTRA_MODULES))
    return f"{text}## Packages\n\n{packages}"
