"""For every head its entropy, its mean distance, how much it attends to the previous, next, first and last token, to
itself and to punctuation, its pattern, and its importance: the change of the loss when it is switched off, and the
gradient of the loss at its gate (Michel et al. 2019). The data is what the model was trained for: sentence pairs (two
files, or a table), text, or a table with columns text and label; for images, a table that names their files.

examples:
  regard heads runs/multi30k-en-de --data valid.en valid.de               a table
  regard heads runs/gpt2 --data text.txt --limit 50 --no-loss             patterns and gradients only, much faster
  regard heads runs/multi30k-en-de --data valid.en valid.de -o heads.html maps of importance, with patterns
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import aligned
from regard.commands.attention_options import HEADS, check_output, image_file, progress
from regard.messages import localize

if TYPE_CHECKING:
    from regard.explore.heads import HeadMetrics

PAIRS = 10_000  # sentence pairs for the word alignment: more than the heads are measured on
FRACTIONS = ("previous", "next", "self", "first", "last", "punctuation", "alignment")
ORDERS: dict[str, Callable[[HeadMetrics], Any]] = {  # the keys by which --sort sorts
    "position": lambda one: 0,
    "loss": lambda one: -(one.loss_change or 0.0),
    "gradient": lambda one: -(one.gradient or 0.0),
    "pattern": lambda one: (one.pattern[0], -one.pattern[1]),
}
NOTE = (
    "score: fraction of its attention that follows the pattern. off: change of the {what} when the head alone is off; "
    "redundant heads all seem unimportant, so use regard prune to measure what a set of heads contributes."
)

ARGUMENTS = {
    **HEADS,
    "--data FILE": ("data on which the heads are measured", {"nargs": "+", "required": True}),
    "--no-loss": "do not switch heads off one by one",
    "--sort": ("order of the rows (position)", {"choices": ORDERS, "default": "position"}),
    "-o --out FILE": "write .html, .json, or the maps as .svg or .png",
    "--json": "print JSON instead of the table",
}


def run(args: argparse.Namespace) -> None:
    from regard.explore.examples import in_batches, read_examples
    from regard.explore.heads import measure
    from regard.explore.importance import gradients, losses_when_off, mean_loss
    from regard.explore.inside import Inside
    from regard.files import write_atomically

    path = None if args.out is None else check_output(args.out)
    inside = Inside.open(args.run, args.device)
    inside.anatomy.check_weights()
    aligns = "cross" in inside.anatomy.parts and inside.config.input == "tokens"
    known = read_examples(inside, args.data, max(args.limit, PAIRS) if aligns and args.limit > 0 else args.limit)
    batches = in_batches(known[: args.limit], inside.device)
    off = {} if args.no_loss else losses_when_off(inside, batches, watch=progress)
    importance = {"loss_changes": off, "gradients": gradients(inside, batches)}
    metrics = measure(inside, batches, in_batches(known, inside.device), **importance)
    rows = sorted(metrics, key=ORDERS[args.sort])
    loss = None if batches[0].expected is None else mean_loss(inside, batches)
    count = sum(batch.source.shape[0] for batch in batches)
    facts = {"model": inside.name, "data": args.data, "examples": count, "loss": loss}
    if path is not None:
        write_atomically(path, content(path, facts, metrics))
    if args.json:
        print(json.dumps({**facts, "heads": [one.to_dict() for one in rows]}, ensure_ascii=False))
        return
    examples = f"{count:,} examples" + ("" if loss is None else f", loss {loss:.4f} nats per token")
    print(localize(examples), end="\n\n")
    print("\n".join(table_of(rows)))
    what = "output (1 - cosine)" if loss is None else "loss in nats per token"
    print(f"\n{localize(NOTE.format(what=what))}", file=sys.stderr)
    if path is not None:
        print(f"\n{path}")


def table_of(metrics: Sequence[HeadMetrics]) -> list[str]:
    rows = [["head", "pattern", "score", "entropy", "distance", *FRACTIONS, "at offset", "off", "gradient"]]
    for one in metrics:
        pattern, score = one.pattern
        fractions = [f"{one.fractions[name]:.2f}" if name in one.fractions else "-" for name in FRACTIONS]
        importance = ["-" if value is None else f"{value:.4f}" for value in (one.loss_change, one.gradient)]
        distance = "-" if one.distance is None else f"{one.distance:.1f}"
        numbers = [f"{score:.2f}", f"{one.entropy:.2f}", distance]
        far = "-" if one.offset is None else f"{one.fractions['positional']:.2f} ({one.offset:+d})"
        rows.append([one.name, pattern, *numbers, *fractions, far, *importance])
    return aligned(rows, right=range(2, len(rows[0])))


def content(path: Path, facts: dict[str, Any], metrics: Sequence[HeadMetrics]) -> bytes:
    """The content of the output file."""
    from regard.explore.report import head_maps, head_page

    match path.suffix.lower():
        case ".json":
            text = json.dumps({**facts, "heads": [one.to_dict() for one in metrics]}, ensure_ascii=False, indent=1)
            return f"{text}\n".encode()
        case ".html":
            return head_page(facts, metrics).encode("utf-8", "replace")
    return image_file(path, head_maps(metrics))
