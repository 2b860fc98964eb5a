"""`regard heads`: what every head of a model does, and how much it matters."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.explore.heads import HeadFigures

DESCRIPTION = """
For every head its entropy, how far it looks, how much of its attention goes to the previous, next, first and last
token, to itself and to punctuation, the pattern that this makes, and its importance: the change of the loss when it
is switched off, and the slope of the loss at its gate (Michel et al. 2019). The data is what the model was made for:
sentence pairs (two files, or a table), text, or a table with columns text and label; of pictures, a table of files.
"""

EXAMPLES = """
regard heads runs/multi30k-en-de --data valid.en valid.de               a table
regard heads runs/gpt2 --data text.txt --limit 50 --no-loss             patterns and slopes only, much faster
regard heads runs/multi30k-en-de --data valid.en valid.de -o heads.html maps of importance, with patterns
"""

PAIRS = 10_000  # sentence pairs that alignment is counted from: many, where the heads are judged on few
SHARES = ("previous", "next", "self", "first", "last", "punctuation", "alignment")
ENDINGS = (".html", ".json", ".svg", ".png")
NOTE = (
    "score: share of its attention that makes the pattern. off: change of the {what} when the head alone is off; "
    "heads that stand in for each other all look idle, and what a set of them costs, regard prune tells."
)


def add_data(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--data", nargs="+", required=required, metavar="FILE", help="what the heads are judged on")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="examples that are read (default: 200)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a model: trained here, imported, or Hugging Face's own")
    add_data(parser, required=True)
    parser.add_argument("--no-loss", action="store_true", help="leave out switching heads off one by one")
    parser.add_argument(
        "--sort", choices=("place", "loss", "gradient", "pattern"), default="place", help="order of the table (place)"
    )
    parser.add_argument("-o", "--out", metavar="FILE", help="write .html, .json, or the maps as .svg or .png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    from regard.errors import UserError
    from regard.explore.examples import in_batches, read_examples
    from regard.explore.heads import measure, with_importance
    from regard.explore.importance import gradients, losses_when_off, mean_loss
    from regard.explore.inside import Inside
    from regard.files import write_whole

    if args.out is not None and Path(args.out).suffix.lower() not in ENDINGS:
        raise UserError(f"-o {args.out}: the ending says what is written; use one of {', '.join(ENDINGS)}")
    inside = Inside.open(args.run, args.device)
    aligns = "cross" in inside.anatomy.parts and inside.config.input == "tokens"
    known = read_examples(inside, args.data, max(args.limit, PAIRS) if aligns and args.limit > 0 else args.limit)
    batches = in_batches(known[: args.limit], inside.device)
    off = {} if args.no_loss else losses_when_off(inside, batches, watch=progress)
    found = with_importance(measure(inside, batches, in_batches(known, inside.device)), off, gradients(inside, batches))
    loss = None if batches[0].expected is None else mean_loss(inside, batches)
    count = sum(batch.source.shape[0] for batch in batches)
    told = {"model": inside.name, "data": args.data, "examples": count, "loss": loss}
    if args.out is not None:
        write_whole(args.out, content(Path(args.out), told, found))
    if args.json:
        print(json.dumps({**told, "heads": [one.to_dict() for one in ordered(found, args.sort)]}, ensure_ascii=False))
        return 0
    print(f"{count:,} examples" + ("" if loss is None else f", loss {loss:.4f} nats a token"), end="\n\n")
    print("\n".join(table_of(ordered(found, args.sort))))
    what = "output (1 - cosine)" if loss is None else "loss in nats a token"
    print(f"\n{NOTE.format(what=what)}", file=sys.stderr)
    if args.out is not None:
        print(f"\n{args.out}")
    return 0


def progress(heads: list[Any]) -> Any:
    from tqdm import tqdm

    return tqdm(heads, desc="heads", disable=not sys.stderr.isatty(), leave=False)


def ordered(found: Sequence[HeadFigures], by: str) -> list[HeadFigures]:
    match by:
        case "loss" | "gradient":
            return sorted(found, key=lambda one: -(getattr(one, by) if getattr(one, by) is not None else 0.0))
        case "pattern":
            return sorted(found, key=lambda one: (one.pattern[0], -one.pattern[1]))
    return list(found)


def table_of(found: Sequence[HeadFigures]) -> list[str]:
    from regard.explore.attend import lines_of

    rows = [["head", "pattern", "score", "entropy", "distance", *SHARES, "at distance", "off", "slope"]]
    for one in found:
        pattern, score = one.pattern
        shares = [f"{one.shares[name]:.2f}" if name in one.shares else "-" for name in SHARES]
        importance = ["-" if value is None else f"{value:.4f}" for value in (one.loss, one.gradient)]
        distance = "-" if one.distance is None else f"{one.distance:.1f}"
        numbers = [f"{score:.2f}", f"{one.entropy:.2f}", distance]
        far = "-" if one.offset is None else f"{one.shares['positional']:.2f} ({one.offset:+d})"
        rows.append([one.name, pattern, *numbers, *shares, far, *importance])
    return lines_of(rows, [False, False] + [True] * (len(rows[0]) - 2))


def content(path: Path, told: dict[str, Any], found: Sequence[HeadFigures]) -> bytes:
    """What the file shall hold."""
    from regard.explore.headmaps import head_maps, head_page
    from regard.explore.png import to_png
    from regard.explore.report import svg_document

    match path.suffix.lower():
        case ".json":
            text = json.dumps({**told, "heads": [one.to_dict() for one in found]}, ensure_ascii=False, indent=1)
            return f"{text}\n".encode()
        case ".html":
            return head_page(told, found).encode("utf-8", "replace")
        case ".png":
            return to_png(head_maps(found))
    return svg_document(head_maps(found)).encode("utf-8", "replace")
