"""Remove heads from a model and save the smaller one: the heads named, or the least important. With --data the loss
before and after is printed. --least measures importance on one half of the data and the loss on the other half.

examples:
  regard prune runs/demo --heads encoder.0.3 cross.1.0 -o runs/smaller
  regard prune runs/multi30k-en-de --least 40% --data valid.en valid.de -o runs/smaller
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regard.commands import positive
from regard.commands.attention_options import HEADS, progress, read_head
from regard.errors import UserError
from regard.messages import localize

if TYPE_CHECKING:
    from regard.explore.examples import Batch
    from regard.explore.inside import Inside


def fraction(text: str) -> float | int:
    """ "40%" -> 0.4, "12" -> 12 heads"""
    with suppress(ValueError):
        if not text.endswith("%") and (heads := int(text)) > 0:
            return heads
        if text.endswith("%") and 0 < (percent := float(text[:-1])) < 100:
            return percent / 100
    raise argparse.ArgumentTypeError(f"{text!r}: give a percentage between 0% and 100%, or a whole number of heads")


ARGUMENTS = {
    **HEADS,
    "--data FILE": ("data on which the heads are measured", {"nargs": "+"}),
    "-o --out NEW": ("folder of the smaller model", {"required": True}),
    "--heads HEAD": ("heads to remove, as PART.LAYER.HEAD: cross.1.0", {"nargs": "+"}),
    "--least FRACTION": ("the least important: 40%%, or a number of heads", {"type": fraction}),
    "--by": (
        "measure of importance: the loss without the head (default), or the gradient at its gate",
        {"choices": ("loss", "gradient"), "default": "loss"},
    ),
    "--rounds N": ("rounds of measuring and removing (default: 4)", {"type": positive, "default": 4}),
    "--force": "replace NEW if it holds a saved model and nothing else",
}


def run(args: argparse.Namespace) -> None:
    from regard.explore.importance import mean_loss
    from regard.explore.inside import Inside
    from regard.files import staged
    from regard.models.folder import save, saved_files
    from regard.models.prune import prune

    if (args.heads is None) == (args.least is None):
        raise UserError("--heads names the heads to remove, --least how many: pass one of them")
    if args.least is not None and not args.data:
        raise UserError("--least: importance is measured on data; give --data FILE")
    inside = Inside.open(args.run, args.device)
    with staged(args.out, force=args.force, own=saved_files, keep=args.run) as folder:
        heads, batches = choose(args, inside)
        removed: dict[str, list[int]] = {}
        for part, layer, head in heads:
            removed.setdefault(inside.anatomy.path(part, layer, head), []).append(head)
        tables = {name: table for name, table in inside.bundle.recipe.items() if name != "model"}
        save(prune(inside.model, removed), folder, tokenizers=inside.bundle.tokenizers, recipe=tables)
    small = Inside.open(args.out, args.device)
    sizes = [sum(parameter.numel() for parameter in one.model.parameters()) for one in (inside, small)]
    print(localize(f"removed: {' '.join('.'.join(map(str, head)) for head in sorted(heads))}"))
    print(localize(f"heads: {len(inside.anatomy.heads)} -> {len(small.anatomy.heads)}"))
    print(localize(f"parameters: {sizes[0]:,} -> {sizes[1]:,} ({sizes[1] / sizes[0] - 1:+.1%})"))
    if batches and batches[0].expected is not None:
        before, after = mean_loss(inside, batches), mean_loss(small, batches)
        count = sum(batch.source.shape[0] for batch in batches)
        unseen = "" if args.least is None else " that were not used to choose the heads"
        print(localize(f"loss: {before:.4f} -> {after:.4f} nats per token, over {count:,} examples{unseen}"))
    print(args.out)


def choose(args: argparse.Namespace, inside: Inside) -> tuple[list[Any], list[Batch]]:
    """The heads to remove, and the batches for the loss: with --least, the half that did not choose the heads."""
    from regard.explore.examples import in_batches, read_examples
    from regard.explore.importance import least_important

    examples = read_examples(inside, args.data, args.limit) if args.data else []
    if args.least is None:
        heads = [read_head(text, "--heads", 2) for text in dict.fromkeys(args.heads)]
        return heads, in_batches(examples, inside.device)
    if len(examples) < 2:
        raise UserError("--least: one example is too few; half of them measure the heads, half the smaller model")
    count = args.least if isinstance(args.least, int) else round(args.least * len(inside.anatomy.heads))
    measured = in_batches(examples[::2], inside.device)
    least = least_important(inside, measured, count, by=args.by, rounds=args.rounds, watch=progress)
    return list(least), in_batches(examples[1::2], inside.device)
