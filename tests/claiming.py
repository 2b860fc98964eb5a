"""A worker for tests of claims: python claiming.py FOLDER LEASE SECONDS, with pretended training."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from regard.study.claim import take

NAMES = [f"row-{row}@{seed}" for row in range(3) for seed in (1, 2)]


def main(folder: Path, lease: float, seconds: float) -> None:
    claims = folder / "claims"
    while any(not (folder / f"{name}.done").exists() for name in NAMES):
        for name in NAMES:
            done = folder / f"{name}.done"
            if done.exists() or (claim := take(claims, name, lease)) is None:
                continue
            if not done.exists():
                note(folder, f"begin {name}")
                time.sleep(seconds)
                note(folder, f"end {name}")
                done.touch()
            claim.release()
        time.sleep(0.05)


def note(folder: Path, text: str) -> None:
    with (folder / "log").open("a") as file:  # short lines are appended whole
        file.write(f"{os.getpid()} {text}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
