"""Train a tokenizer on text, as `regard train` would with the same settings in [text], and print how well it fits that
text. Files are text, or tables (.tsv, .csv, .jsonl, .parquet) whose columns of text --column names. A recipe uses the
new folder with  tokenizer_file = "DIR"  in [text]; `regard tokenize DIR` shows its tokens.

examples:
  regard tokenizer train train.en train.de -o tokenizers/en-de
  regard tokenizer train reviews.tsv --column review -o tokenizers/reviews --kind unigram --vocab-size 16000
  regard tokenizer train corpus/*.txt.gz -o tokenizers/corpus --normalize NFKC --json
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import REPEATABLE, aligned, show
from regard.errors import UserError, suggest

if TYPE_CHECKING:
    from regard.text.tokenizer import Tokenizer

LINES = 10_000  # that are encoded together for the statistics
ACTIONS = ("train",)
KINDS = ("word", "char", "byte", "bpe", "unigram")
ARGUMENTS = {
    "ACTION": "train",
    "FILES": ("text files or tables", {"nargs": "+"}),
    "-o --out DIR": ("folder for tokenizer.json", {"required": True}),
    "--column NAME": ("column of a table with text; repeatable (default: text)", REPEATABLE),
    "--encoding NAME": ("encoding of the files, such as cp949 (utf-8)", {"default": "utf-8"}),
    "settings, as in the table [text] of a recipe": {
        "--kind": ("what a token is (default: bpe)", {"choices": KINDS, "default": "bpe"}),
        "--vocab-size N": (
            "number of tokens (default: 8,000 for bpe and unigram, every word or character otherwise)", {"type": int}
        ),
        "--normalize": (
            "Unicode normalisation (default: NFC)", {"choices": ("NFC", "NFKC", "none"), "default": "NFC"}
        ),
    },
    "--json": "print the statistics as JSON",
}  # fmt: skip


def run(args: argparse.Namespace) -> None:
    from regard.data.lines import check_encoding
    from regard.files import staged
    from regard.text.config import TextConfig
    from regard.text.tokenizer import Tokenizer

    if args.action not in ACTIONS:
        raise UserError(f"regard tokenizer {args.action}: unknown action; {suggest(args.action, ACTIONS)}")
    config, folder = TextConfig(kind=args.kind, vocab_size=args.vocab_size, normalize=args.normalize), Path(args.out)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"-o {folder}: already exists; choose another folder")
    encoding = check_encoding(args.encoding, "--encoding")
    texts = _texts(args.files, args.column, encoding)
    with staged(folder) as new:
        tokenizer = Tokenizer.train(texts, args.kind, config.vocab_size, normalize=config.normalize)
        tokenizer.save(new / "tokenizer.json")
        counts = _count(tokenizer, _texts(args.files, args.column, encoding))
    content = {
        "tokenizer": str(folder / "tokenizer.json"), "kind": args.kind, "normalize": args.normalize,
        "vocab_size": len(tokenizer), **counts,
    }  # fmt: skip
    lines = aligned([
        ("vocabulary", f"{len(tokenizer):,} tokens ({args.kind})"),
        ("text", f"{counts['lines']:,} lines, {counts['words']:,} words"),
        ("tokens", f"{counts['tokens']:,}"),
        ("tokens per word", f"{counts['tokens_per_word']:.2f}"),
        ("characters per token", f"{counts['characters_per_token']:.2f}"),
        ("unknown", f"{counts['unknown_rate']:.2%} of the tokens"),
    ])  # fmt: skip
    show(args.json, content, [*lines, f'In a recipe:  [text]  with  tokenizer_file = "{folder.resolve()}"'])


def _texts(files: list[str], columns: list[str], encoding: str) -> Iterator[str]:
    """The lines of text files, the cells of these columns of tables."""
    from regard.data.sets import find_files
    from regard.data.tables import read_rows, table_kind

    for path in find_files(files):
        kind = "text" if not columns and table_kind(path) is None else None
        how: dict[str, Any] = {"kind": kind, "encoding": encoding, "remedy": "Name the column with --column"}
        for row in read_rows([str(path)], columns or ["text"], **how):
            yield from row.cells


def _count(tokenizer: Tokenizer, texts: Iterator[str]) -> dict[str, Any]:
    """How well a tokenizer fits texts: few tokens, and few that are unknown."""
    counts: Counter[str] = Counter()
    while chunk := list(islice(texts, LINES)):
        ids = tokenizer.encode_batch(chunk)
        counts["lines"] += len(chunk)
        counts["words"] += sum(len(text.split()) for text in chunk)
        counts["characters"] += sum(map(len, chunk))
        counts["tokens"] += sum(map(len, ids))
        counts["unknown"] += sum(row.count(tokenizer.unk) for row in ids) if tokenizer.unk is not None else 0
    tokens = max(counts["tokens"], 1)
    return {
        **counts,
        "tokens_per_word": counts["tokens"] / max(counts["words"], 1),
        "characters_per_token": counts["characters"] / tokens,
        "unknown_rate": counts["unknown"] / tokens,
    }
