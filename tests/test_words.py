"""The vocabulary of code, messages and documentation: standard terms instead of private ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"src/regard": ("*.py", "*.toml"), "docs": ("*.md",), "web/src": ("*.ts", "*.svelte"), "recipes": ("*.toml",)}
# pattern of a private term: the standard one
WORDS = {
    r"fillers?": "padding",
    r"foretells?|foretold|foresees?|foreseen": "predict, forecast",
    r"heretofore": "so far",
    r"mends?|mended|mending": "correct",
    r"shall": "should, must",
    r"likeliest|likelier": "most probable, more probable",
    r"surprises?|surprised": "cross-entropy, log-probability",
    r"free-running": "autoregressive",
    r"go on|goes on|went on|going on": "continue, resume",
    r"wiring": "architecture",
    r"answerers?": "predictor",
    r"visibility": "attention mask",
    r"recognisers?": "classifier",
    r"whoever": "who",
    r"nats an? \w+": "nats per token",
    r"(?:tokens|frames|steps|sentences|pairs|rows|images|texts|characters|operations|bytes) a second": "per second, /s",
    r"(?:numbers|bytes|rows|tokens|pairs) a (?:row|token|step|head|word|text|block|batch|layer|image|sentence)": "per",
}


def files() -> list[Path]:
    found = [path for folder, names in FOLDERS.items() for name in names for path in (ROOT / folder).rglob(name)]
    built = {ROOT / "src/regard/explore/page", ROOT / "src/regard/interop/page"}
    return [
        *sorted(path for path in found if not built.intersection(path.parents)),
        ROOT / "README.md",
        ROOT / "README.ko.md",
    ]


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """(file:line, text) of everything."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


@pytest.mark.parametrize("pattern", WORDS)
def test_private_terms_are_not_used(lines, pattern: str) -> None:
    word = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    matches = [f"{where}: {text.strip()[:80]}" for where, text in lines if word.search(text)]
    assert not matches, f"use {WORDS[pattern]!r}:\n" + "\n".join(matches)
