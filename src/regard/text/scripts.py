"""Scripts: which writing systems a text uses, by the first word of the Unicode name of its letters."""

from __future__ import annotations

import unicodedata
from collections import Counter


def scripts(text: str) -> dict[str, float]:
    """The fraction of the letters of each script, most frequent first: {"HANGUL": 0.9, "LATIN": 0.1}."""
    counts = Counter(script for char in text if (script := script_of(char)))
    total = sum(counts.values())
    return {script: count / total for script, count in counts.most_common()}


def script_of(char: str) -> str:
    """The script of a letter; "" for anything else."""
    if not char.isalpha():
        return ""
    first = unicodedata.name(char, "").partition(" ")[0]
    return "HAN" if first == "CJK" else first
