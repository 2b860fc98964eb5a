"""What the commands that look inside a model share: its input, what is changed in it, and how that is told."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Look

NOTE = (
    'note: attention shows what was mixed, not why (Jain & Wallace 2019, "Attention is not Explanation"). '
    "Whether a head matters is seen by switching it off:  --off PART.LAYER.HEAD"
)


def add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a model: trained here, imported, or Hugging Face's own")
    parser.add_argument("input", metavar="INPUT", help="the text; for a model of pictures the file of one")
    parser.add_argument("--target", metavar="TEXT", help="what an encoder-decoder shall write (default: what it would)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", choices=("encoder", "decoder", "cross"), help="which attention (default: cross, or the only one)"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="which layer, from 0 on")
    parser.add_argument("--head", type=int, metavar="N", help="which head of that layer, from 0 on")


def add_changes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("experiments: the model is changed, and its output told before and after")
    group.add_argument(
        "--off", nargs="+", metavar="HEAD", default=[], help="switch heads off: cross.1.3 is PART.LAYER.HEAD"
    )
    group.add_argument("--skip", nargs="+", metavar="LAYER", default=[], help="leave layers out: decoder.1")
    group.add_argument("--future", action="store_true", help="take the causal mask away")
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="below 1: sharper; above: flatter (1)"
    )
    group.add_argument("--shuffle", type=int, metavar="SEED", help="tell every token another's position")


def read_place(text: str, option: str, numbers: int) -> tuple[Any, ...]:
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

    heads = tuple(read_place(text, "--off", 2) for text in args.off)
    layers = tuple(read_place(text, "--skip", 1) for text in args.skip)
    return Changes(heads, layers, args.future, args.temperature, args.shuffle)


def look_at(args: argparse.Namespace) -> tuple[Look, Look | None]:
    """What the model shows, changed where it was asked for; the second is the unchanged one, if there is a change."""
    from regard.errors import UserError
    from regard.explore.inside import Inside

    inside = Inside.open(args.run, args.device)
    changes = read_changes(args)
    text, picture = (args.input, None) if inside.config.input == "tokens" else (None, args.input)
    if text is not None and not text.strip():
        raise UserError("INPUT: the text is empty; give at least one word")
    if not changes:
        return inside.look(text, picture=picture, target=args.target), None
    both = inside.compare(text, picture=picture, target=args.target, changes=changes)
    return both.after, both.before


def tell_output(look: Look, before: Look | None) -> list[str]:
    """What the model says, in a line or two; with `before`, how much a change has changed it."""
    from regard.explore.output import difference

    lines = [f"{name}{_says(one)}" for name, one in (("unchanged: ", before), ("changed:   ", look)) if one is not None]
    if before is None:
        return [_says(look)]
    apart = difference(before.output, look.output)
    mean = sum(apart.divergence) / max(1, len(apart.divergence))
    if look.output.kind == "vector":
        return [*lines, f"1 - cosine of the vectors: {mean:.4f}"]
    flips = f"the likeliest is another at {len(apart.flipped)} of {len(look.output.places)} places"
    return [*lines, f"{flips}; mean divergence {mean:.4f} nats"]


def _says(look: Look) -> str:
    output = look.output
    loss = "" if output.loss is None else f"   (loss {output.loss:.4f} nats a token)"
    if output.answer is not None:
        return f"writes {output.answer!r}{loss}"
    if output.kind == "vector":
        return f"a vector of {output.logits.shape[-1]} numbers"
    places = [output.places[at] for at in look.reading.masked] if look.reading.masked else output.places[-1:]
    words = {"next": "next", "classes": "class", "masked": "there"}[output.kind]
    tops = ["  ".join(f"{one.label} {one.probability:.3f}" for one in place.top[:5]) for place in places]
    return f"{words}: {' | '.join(tops)}{loss}"
