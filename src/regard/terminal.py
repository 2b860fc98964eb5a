"""Text for a terminal: columns that are aligned also where characters are two columns wide, and short numbers."""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterable, Sequence


def screen_width(text: str) -> int:
    """Terminal columns of a text: two per wide character, none for marks."""
    visible = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in visible)


def aligned(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The rows of a table as lines, their columns aligned: those with a number in `right` to the right."""
    rows = list(rows)
    widths = [max(map(screen_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - screen_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [gap + cell if i in right else cell + gap for i, (cell, gap) in enumerate(zip(row, gaps, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def count(value: float) -> str:
    """1234567 -> '1.23 M'"""
    return _scaled(value, 1000, ("", " K", " M", " G", " T", " P", " E"))


def size(value: float) -> str:
    """Bytes: 1536 -> '1.50 KiB'"""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while power + 1 < len(units) and value >= base:
        value, power = value / base, power + 1
    digits = ".2e" if value >= 1e6 else ".2f" if power else ".0f"
    return f"{value:{digits}}{units[power]}"
