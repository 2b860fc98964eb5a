"""Options and output that `regard figure` and `regard attend` share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Look

NOTE = (
    'note: attention shows which values were mixed, not why (Jain & Wallace 2019, "Attention is not Explanation"). '
    "Switch a head off to see whether it matters:  --off PART.LAYER.HEAD"
)


def add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, an imported model or a Hugging Face model")
    parser.add_argument(
        "input", metavar="INPUT", help="the text, or the file of an image for a model that reads images"
    )
    parser.add_argument(
        "--target", metavar="TEXT", help="target text for an encoder-decoder (default: what it generates)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", choices=("encoder", "decoder", "cross"), help="which attention (default: cross, or the only one)"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="which layer, from 0 on")
    parser.add_argument("--head", type=int, metavar="N", help="which head of that layer, from 0 on")


def add_changes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("interventions: the output is printed with and without them")
    group.add_argument(
        "--off", nargs="+", metavar="HEAD", default=[], help="switch heads off, as PART.LAYER.HEAD: cross.1.3"
    )
    group.add_argument("--skip", nargs="+", metavar="LAYER", default=[], help="skip layers: decoder.1")
    group.add_argument("--future", action="store_true", help="remove the causal mask")
    group.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of the softmax: below 1 sharper, above 1 flatter (default: 1)",
    )
    group.add_argument("--shuffle", type=int, metavar="SEED", help="permute the positions of the tokens")


def read_head(text: str, option: str, numbers: int) -> tuple[Any, ...]:
    """ "cross.1.3" -> ("cross", 1, 3)"""
    from regard.errors import UserError
    from regard.explore.changes import PARTS

    part, *rest = text.split(".")
    if part not in PARTS or len(rest) != numbers or not all(number.isdecimal() for number in rest):
        form = "PART.LAYER.HEAD, such as encoder.0.3" if numbers == 2 else "PART.LAYER, such as decoder.1"
        raise UserError(f"{option} {text}: write {form}; the parts are {', '.join(PARTS)}")
    return part, *map(int, rest)


def read_changes(args: argparse.Namespace) -> Changes:
    from regard.explore.changes import Changes

    heads = tuple(read_head(text, "--off", 2) for text in args.off)
    layers = tuple(read_head(text, "--skip", 1) for text in args.skip)
    return Changes(heads, layers, args.future, args.temperature, args.shuffle)


def open_look(args: argparse.Namespace) -> tuple[Look, Look | None]:
    """The look with the changes of the options, and the one without, or None if there are no changes."""
    from regard.errors import UserError
    from regard.explore.inside import Inside

    inside = Inside.open(args.run, args.device)
    changes = read_changes(args)
    text, image = (args.input, None) if inside.config.input == "tokens" else (None, args.input)
    if text is not None and not text.strip():
        raise UserError("INPUT: the text is empty; give at least one word")
    if not changes:
        return inside.look(text, image=image, target=args.target), None
    both = inside.compare(text, image=image, target=args.target, changes=changes)
    return both.after, both.before


def describe_output(look: Look, before: Look | None) -> list[str]:
    """The output in a line or two; with `before`, how much the changes have changed it."""
    from regard.explore.forward import difference

    lines = [
        f"{name}{_describe(one)}" for name, one in (("unchanged: ", before), ("changed:   ", look)) if one is not None
    ]
    if before is None:
        return [_describe(look)]
    change = difference(before.output, look.output)
    if look.output.kind == "vector":
        return [*lines, f"1 - cosine of the vectors: {change.mean_divergence:.4f}"]
    flips = f"the most probable token differs at {len(change.flipped)} of {len(look.output.positions)} positions"
    return [*lines, f"{flips}; mean KL divergence {change.mean_divergence:.4f} nats"]


def _describe(look: Look) -> str:
    output = look.output
    loss = "" if output.loss is None else f"   (loss {output.loss:.4f} nats per token)"
    if output.generated is not None:
        return f"generates {output.generated!r}{loss}"
    if output.kind == "vector":
        return f"a vector of {output.logits.shape[-1]} numbers"
    positions = [output.positions[at] for at in look.input.masked] or output.positions[-1:]
    words = {"next": "next", "classes": "class", "masked": "[MASK]"}[output.kind]
    tops = ["  ".join(f"{one.label} {one.probability:.3f}" for one in position.top[:5]) for position in positions]
    return f"{words}: {' | '.join(tops)}{loss}"
