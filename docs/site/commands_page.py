"""A page per command, from its parser: usage, description, options, examples."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator

from regard.cli import COMMANDS, EXIT_CODES, GROUPS, overview
from regard.commands import Parser


def parser_of(name: str) -> Parser:
    command = importlib.import_module(COMMANDS[name][0])
    return Parser(f"regard {name}", command.__doc__ or "", command.ARGUMENTS)


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<").replace("*", r"\*").replace("_", r"\_")


def options(group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        names = ", ".join(action.option_strings) or str(action.metavar)
        value = f" {action.metavar}" if action.option_strings and action.metavar and action.nargs != 0 else ""
        yield f"| `{names}{value}` | {cell((action.help or '').replace('%%', '%'))} |\n"


def command_page(name: str) -> str:
    parser = parser_of(name)
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    text = f"# regard {name}\n\n{parser.description}\n\n```none\n{usage}\n```\n\n"
    for group in parser._action_groups:
        lines = list(options(group))
        if lines:
            title = {"positional arguments": "Arguments", "options": "Options"}.get(str(group.title), str(group.title))
            text += f"## {title[:1].upper()}{title[1:]}\n\n| | |\n|---|---|\n{''.join(lines)}\n"
    examples = re.sub(r"^  ", "", str(parser.epilog).partition("examples:\n")[2], flags=re.M).rstrip()
    return f"{text}## Examples\n\n```none\n{examples}\n```\n"


def overview_page() -> str:
    """All commands by purpose, with links to their pages."""
    text = "# Every command\n\nGenerated from the parsers. With more examples: [commands](../commands.md).\n\n"
    for purpose, names in GROUPS.items():
        text += f"## {purpose[:1].upper()}{purpose[1:]}\n\n| | |\n|---|---|\n"
        text += "".join(
            f"| [`regard {name}`](commands/{name}.md) | {cell(summary)} |\n" for name, summary in names.items()
        )
        text += "\n"
    before = "".join(line for group in overview()._action_groups for line in options(group))
    text += f"## Options before the command\n\n| | |\n|---|---|\n{before}\n"
    codes = re.findall(r"^  (\d+) +(.+)$", EXIT_CODES, re.M)
    rows = "".join(f"| {code} | {cell(meaning)} |\n" for code, meaning in codes)
    return f"{text}## Exit codes\n\n| code | meaning |\n|---|---|\n{rows}"
