"""The index of errors: every message for users in the source, by the package that raises it.

The parts of a message that vary are shown in braces. A message contains its remedy, so the index needs no more words;
it is for finding, from a message, what raises it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "regard"
# {what is called with a message: which of its arguments the message is}; `Problem` is one of a row or file of data
ERRORS = {"UserError": 0, "MissingFiles": 0, "Unfinished": 0, "Locked": 0, "ValueError": 0, "ArgumentTypeError": 0} | {
    "Problem": 2
}
RETURNING = {"_expand", "undecodable", "page_missing", "_broken"}  # functions that return messages
INTRODUCTION = """# Errors

The messages of errors that the user can correct, generated from the source. On the command line such an error is
one line after `error:` and exit code 2; in Python it is a `regard.errors.UserError`, which is a `ValueError`. Parts in
braces vary: search this page for a few fixed words of your message. A message about data begins with its file and line.
For PyTorch's *out of memory*: [out of memory](../howto/memory.md).

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
            own = called in ("suggest", "listed") or called.startswith("_") or not args  # a part made by a function
            return called.strip("_") if own else name(args[0])
        case ast.Subscript(value=value):
            return name(value)
    return "…"


def alternatives(node: ast.expr) -> Iterator[str]:
    """The texts that an expression may be: `a if x else b` has two, a tuple is a text in several languages."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*alternatives(body), *alternatives(orelse))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in alternatives(value))
        case ast.Tuple(elts=[first, *_]):
            yield from alternatives(first)
        case _ if (text := template(node)) and len(text) > 10:
            yield text


def messages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args):
                if called in ERRORS and len(args) > ERRORS[called]:
                    yield from alternatives(args[ERRORS[called]])
            case ast.ClassDef(bases=[ast.Name(id="UserError")], body=body):  # a message made from the arguments
                for call in (part for one in body for part in ast.walk(one) if isinstance(part, ast.Call)):
                    if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
                        yield from alternatives(call.args[0])
            case ast.FunctionDef(name=function, body=body) if function in RETURNING:
                for part in (part for one in body for part in ast.walk(one)):
                    if isinstance(part, ast.Return) and part.value:
                        yield from alternatives(part.value)


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
