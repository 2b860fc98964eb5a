"""Options, files and output that the commands about attention share: figure, attend, heads and prune; and cost."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import DEVICE, Arguments
from regard.errors import MissingExtra, UserError

if TYPE_CHECKING:
    from regard.explore.inside import Look

MODEL = "folder of a run, an imported model or a Hugging Face model"
ENDINGS = (".png", ".svg", ".html", ".json")
NOTE = (
    'note: attention shows which values were mixed, not why (Jain & Wallace 2019, "Attention is not Explanation"). '
    "Switch a head off to see whether it matters:  --off PART.LAYER.HEAD"
)

# What `figure` and `attend` read: a model, its input, the attention to show and interventions
ATTENTION: Arguments = {
    "RUN": MODEL,
    "INPUT": "the text, or the file of an image for a model that reads images",
    "--target TEXT": "target text for an encoder-decoder (default: what it generates)",
    **DEVICE,
    "--part": ("which attention (default: cross, or the only one)", {"choices": ("encoder", "decoder", "cross")}),
    "--layer N": ("which layer, from 0 on", {"type": int}),
    "--head N": ("which head of that layer, from 0 on", {"type": int}),
    "interventions: the output is printed with and without them": {
        "--off HEAD": ("switch heads off, as PART.LAYER.HEAD: cross.1.3", {"nargs": "+", "default": []}),
        "--skip LAYER": ("skip layers: decoder.1", {"nargs": "+", "default": []}),
        "--future": "remove the causal mask",
        "--temperature T": ("of the softmax: below 1 sharper, above 1 flatter (1)", {"type": float, "default": 1.0}),
        "--shuffle SEED": ("permute the positions of the tokens", {"type": int}),
    },
}

# What `heads` and `prune` read: a model, and how much of the data with which its heads are measured
HEADS: Arguments = {
    "RUN": MODEL,
    "--limit N": ("number of examples (default: 200)", {"type": int, "default": 200}),
    **DEVICE,
}


def progress(items: Sequence[Any], what: str = "heads") -> Any:
    """The items with a progress bar, where a person sees it."""
    from tqdm import tqdm

    return tqdm(items, desc=what, disable=not sys.stderr.isatty(), leave=False)


def check_output(name: str) -> Path:
    """The path of a file whose format can be written, checked before the model runs."""
    path = Path(name)
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"-o {path}: the extension chooses the format; use one of {', '.join(ENDINGS)}")
    check_png(path)
    return path


def check_png(path: Path) -> None:
    """A PNG needs a package for drawing it."""
    if path.suffix.lower() == ".png" and importlib.util.find_spec("resvg_py") is None:
        raise MissingExtra("figure", "resvg-py", "drawing a PNG")


def image_file(path: Path, svg: str, zoom: float = 2.0, fonts: Sequence[str] = ()) -> bytes:
    """The content of a .png or .svg file."""
    from regard.explore.svg import document, to_png

    return to_png(svg, zoom=zoom, fonts=fonts) if path.suffix.lower() == ".png" else document(svg)


def read_head(text: str, option: str, numbers: int) -> tuple[Any, ...]:
    """ "cross.1.3" -> ("cross", 1, 3)"""
    from regard.explore.changes import PARTS

    part, *rest = text.split(".")
    if part not in PARTS or len(rest) != numbers or not all(number.isdecimal() for number in rest):
        form = "PART.LAYER.HEAD, such as encoder.0.3" if numbers == 2 else "PART.LAYER, such as decoder.1"
        raise UserError(f"{option} {text}: write {form}; the parts are {', '.join(PARTS)}")
    return part, *map(int, rest)


def open_look(args: argparse.Namespace) -> tuple[Look, Look | None]:
    """The look with the changes of the options, and the one without, or None if there are no changes."""
    from regard.explore.changes import Changes
    from regard.explore.inside import Inside

    inside = Inside.open(args.run, args.device)
    heads = tuple(read_head(text, "--off", 2) for text in args.off)
    layers = tuple(read_head(text, "--skip", 1) for text in args.skip)
    changes = Changes(heads, layers, args.future, args.temperature, args.shuffle)
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

    if before is None:
        return [_describe(look)]
    lines = [f"unchanged: {_describe(before)}", f"changed:   {_describe(look)}"]
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
    if output.kind == "tags":
        return "tags: " + "  ".join(
            f"{one.read} {one.top[0].label} {one.top[0].probability:.3f}" for one in output.positions
        )
    positions = [position for position in output.positions if position.expected is None] or output.positions[-1:]
    words = {"next": "next", "classes": "class", "masked": "[MASK]"}[output.kind]
    tops = ["  ".join(f"{one.label} {one.probability:.3f}" for one in position.top[:5]) for position in positions]
    return f"{words}: {' | '.join(tops)}{loss}"
