"""A result file of `attention.py` as a Markdown table.

    python benchmarks/table.py benchmarks/results/attention-h200.json

A GPU's figures are milliseconds. A shared CPU's are worth something only as ratios: each peer's time over ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    ratios = "CPU" in result["machine"]["hardware"] or "threads" in result["machine"]["hardware"]
    peers = list(result["rows"][0]["times"])
    shown = [peer for peer in peers if not (ratios and peer == "regard")]
    lines = [
        f"| block | size | mode | pass | {' | '.join(shown)} | fastest peer / ours |",
        "|---|---|---|---|" + "--:|" * (len(shown) + 1),
    ]
    for row in result["rows"]:
        own = row["times"]["regard"]["ms"]
        times = [row["times"][peer]["ms"] for peer in shown]
        cells = [f"{time / own:.2f}" if ratios else f"{time:.3f}" for time in times]
        head = f"| {row['block']} | {row['size']} {row['batch']}x{row['length']} | {row['mode']} | {row['pass']} |"
        lines.append(f"{head} {' | '.join(cells)} | {row['fastest_peer_over_ours']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
