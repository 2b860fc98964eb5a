"""The index of errors: every message of a `UserError` in the source, by the package that raises it.

The parts of a message that vary are shown in braces. A message contains its remedy, so the index needs no more words;
it is for finding, from a message, what raises it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "regard"
ERRORS = {"UserError", "MissingFiles", "Unfinished"}
INTRODUCTION = """# Errors

Every message of an error that the user can correct, generated from the source. On the command line such an error is
one line after `error:` and exit code 2; in Python it is a `regard.errors.UserError`, which is a `ValueError`. Parts in
braces vary: search this page for a few fixed words of your message. When memory does not suffice: [out of
memory](../howto/memory.md).

"""


def template(node: ast.expr) -> str | None:
    """The text of a message: constants as they are, other parts of f-strings as {name}."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = []
            for one in values:
                if isinstance(one, ast.Constant):
                    parts.append(str(one.value))
                elif isinstance(one, ast.FormattedValue):
                    parts.append("{" + name(one.value) + "}")
            return "".join(parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = template(left), template(right)
            return None if both[0] is None or both[1] is None else "".join(map(str, both))
    return None


def name(node: ast.expr) -> str:
    """A short name for what is filled in."""
    match node:
        case ast.Name(id=text) | ast.Attribute(attr=text):
            return text
        case ast.Call(func=func, args=args):
            called = name(func)
            return called if called in ("suggest", "listed") or not args else name(args[0])
        case ast.Subscript(value=value):
            return name(value)
    return "…"


def messages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
            text = template(node.args[0])
            if text and len(text) > 10:
                yield text


def errors_page() -> str:
    text = INTRODUCTION
    for package in sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}):
        files = [SOURCE / package] if package.endswith(".py") else sorted((SOURCE / package).rglob("*.py"))
        rows = [(one, path) for path in files for one in messages(path)]
        if rows:
            text += f"## {package.removesuffix('.py')}\n\n| message | raised in |\n|---|---|\n"
            for message, path in sorted(dict.fromkeys(rows)):
                module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
                shown = message.replace("\n", " ").replace("|", "\\|").replace("`", "'")
                text += f"| `` {shown} `` | `regard.{module}` |\n"
            text += "\n"
    return text
