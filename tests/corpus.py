"""Sentence pairs in every format, and `regard train` with a model small enough for a test."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from regard.cli import main
from regard.data.korean import examples

SMALL = [
    f"--set={setting}"
    for setting in (
        "text.vocab_size=300", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32",
        "train.batch_tokens=600", "train.warmup=4", "train.lr=0.01", "train.log_every=2", "train.save_every=4",
    )
]  # fmt: skip
FIVE_LINES = """[data]
train = ["train.en", "train.ko"]
valid = ["valid.en", "valid.ko"]
[train]
steps = 6
"""


def write_corpus(folder: Path) -> Path:
    """60 pairs to learn from, 6 and 8 to try, and a recipe of five lines."""
    for name, split, count in (("train", "train", 60), ("valid", "test", 6), ("news", "test", 8)):
        pairs = [(example.source, example.target) for example in examples(split, count, seed=len(name))]
        for side, ending in enumerate(("en", "ko")):
            (folder / f"{name}.{ending}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
        (folder / f"{name}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
        rows = "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
        for ending in ("en", "ko"):
            with gzip.open(folder / f"zipped-{name}.{ending}.gz", "wb") as file:
                file.write((folder / f"{name}.{ending}").read_bytes())
    (folder / "mine.toml").write_text(FIVE_LINES)
    return folder


def train(recipe: str | Path = "mine.toml", *arguments: str) -> int:
    return main(["train", str(recipe), *SMALL, *arguments, "--device", "cpu"])
