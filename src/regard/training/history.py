"""What training has recorded: RUN/metrics.jsonl, a line every `log_every` steps and one per evaluation.

Reading it needs no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, except one that a crash has left incomplete."""
    path = folder / METRICS
    return parse(path.read_bytes().splitlines() if path.exists() else ())


def parse(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    lines = []
    for text in texts:
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "seconds"} <= line.keys():
                lines.append(line)
    return lines


def lines_with(key: str, content: bytes) -> Iterator[bytes]:
    """The lines that have this key: few of many, so only these need to be parsed."""
    name, end = json.dumps(key).encode(), 0
    while (at := content.find(name, end)) >= 0:
        begin, end = content.rfind(b"\n", 0, at) + 1, content.find(b"\n", at)
        end = len(content) if end < 0 else end
        yield content[begin:end]
