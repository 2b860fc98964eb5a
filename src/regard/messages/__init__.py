"""Messages in Korean: `regard --lang ko`, REGARD_LANG=ko, or a Korean locale.

A message is written in English where it arises, and translated where a person reads it:

    print(localize(f"saved at step {step} of {steps}"))

The tables in ko/*.toml have the Korean of each message, with the parts that vary in braces:

    "saved at step {step} of {steps}" = "전체 {steps}스텝 중 {step}스텝까지 저장했습니다"

The parts are copied unchanged: numbers, names and paths are the same in both languages. {n}, {n2}, … are numbers; a
part whose name begins with an underscore, such as {_remedy}, is a message in turn; {s} is the ending of a plural, which
Korean does not have. What has no entry stays English, and so does everything that programs read: JSON, data files,
exceptions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from regard.errors import UserError

LANGUAGES = ("en", "ko")
VARIABLE = "REGARD_LANG"
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides, as in POSIX
PREFIX = re.compile("(?:error|note|warning|left out|split|truncated): ")
SUFFIX = re.compile(r" \(see: (.*) --help\)$")
NUMBER = r"[-+−]?\d[\d,.]*(?:e[-+]?\d+)?|-?inf|nan"
PART = re.compile(r"\{(\w+)\}")


def language() -> str:
    """The language of messages, "en" or "ko": by REGARD_LANG, or by the locale."""
    if (chosen := os.environ.get(VARIABLE)) in LANGUAGES:
        return str(chosen)
    locale = next((value for name in LOCALE if (value := os.environ.get(name))), "")
    return "ko" if re.split("[_.@-]", locale)[0] == "ko" else "en"


def check_language(value: str, name: str) -> str:
    """A language that was chosen by the setting `name`."""
    if value not in LANGUAGES:
        raise UserError(f"{name} {value}: unknown language; choose one of: {', '.join(LANGUAGES)}")
    return value


@contextmanager
def using(chosen: str | None) -> Iterator[None]:
    """In this language inside the block, for the processes that it starts too; None changes nothing."""
    before = os.environ.get(VARIABLE)
    if chosen is not None:
        os.environ[VARIABLE] = chosen
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def localize(text: str, chosen: str | None = None) -> str:
    """`text` in the language `chosen`, or that of the user; a text of several messages, line by line."""
    if (chosen or language()) == "en":
        return text
    if (korean := _korean(text)) is not None:
        return korean
    lines = text.split("\n")
    return text if len(lines) == 1 else "\n".join(_korean(line) or line for line in lines)


def description(command: str, english: str) -> str:
    """What `regard COMMAND --help` says first."""
    return english if language() == "en" else str(_read("descriptions").get(command, english)).strip("\n")


@cache
def _read(name: str) -> dict[str, Any]:
    import tomllib  # here: English needs neither

    with open(os.path.join(os.path.dirname(__file__), "ko", f"{name}.toml"), "rb") as file:
        return tomllib.load(file)


@cache
def entries() -> dict[str, str]:
    """All messages: {English: Korean}."""
    return {**_read("help"), **_read("messages"), **_read("errors"), **_read("reports")}


@cache
def _templates() -> list[tuple[str, str, str]]:
    """(English, Korean, the longest fixed piece of the English) of messages with parts, the most specific first."""
    found = [(en, ko, max(PART.split(en)[::2], key=len)) for en, ko in entries().items() if PART.search(en)]
    return sorted(found, key=lambda one: -len(PART.sub("", one[0])))


@cache
def _pattern(english: str) -> re.Pattern[str]:
    pieces = PART.split(english)  # fixed, name, fixed, name, …, fixed
    named = (f"(?P<{name}>{_form(name)})" for name in pieces[1::2])
    return re.compile("".join(re.escape(fixed) + next(named, "") for fixed in pieces[::2]))


def _form(name: str) -> str:
    return "s?" if name == "s" else NUMBER if re.fullmatch(r"n\d*", name) else ".*?"


def _korean(text: str) -> str | None:
    if (found := entries().get(text)) is not None:
        return found
    if prefix := PREFIX.match(text):
        return entries()[prefix[0]] + localize(text[prefix.end() :], "ko")
    if suffix := SUFFIX.search(text):
        return f"{localize(text[: suffix.start()], 'ko')} (참고: {suffix[1]} --help)"
    for english, korean, piece in _templates():
        if piece in text and (match := _pattern(english).fullmatch(text)):
            parts = match.groupdict()
            return korean.format_map({n: localize(part, "ko") if n[0] == "_" else part for n, part in parts.items()})
    return None
