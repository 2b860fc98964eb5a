"""What training has recorded: RUN/metrics.jsonl, a line every `log_every` steps and one per evaluation.

Reading it needs no PyTorch.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, except one that a crash has left incomplete."""
    path, lines = folder / METRICS, []
    for text in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "seconds"} <= line.keys():
                lines.append(line)
    return lines
