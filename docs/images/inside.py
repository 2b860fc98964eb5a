"""Draw the figures of docs/inside.md.

    python docs/images/inside.py DEMO MINILM SHAPES

DEMO is a finished demo, MINILM a folder with all-MiniLM-L6-v2, SHAPES what `shapes.py` has trained.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from shapes import example_image

from regard.data.korean import examples
from regard.explore import Inside, svg_file
from regard.explore.examples import in_batches, read_examples
from regard.explore.figures import draw
from regard.explore.heads import measure
from regard.explore.importance import gradients, losses_when_off
from regard.explore.report import head_maps
from regard.explore.svg import to_png

HERE = Path(__file__).parent
SENTENCE = "The animal didn't cross the street because it was too tired."


def main(demo: str, minilm: str, shapes: str) -> None:
    inside = Inside.open(demo)
    (HERE / "inside-layer.png").write_bytes(
        to_png(draw(inside.look("March 3rd, 2021"), part="cross", layer=1), zoom=1.5)
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "test.tsv"
        data.write_text("".join(f"{one.source}\t{one.target}\n" for one in examples("test", 200, seed=1)))
        batches = in_batches(read_examples(inside, [str(data)], 200), inside.device)
        (Path(folder) / "shape.png").write_bytes(example_image(5))
        look = Inside.open(shapes).look(image=Path(folder) / "shape.png")
    importance = {"loss_changes": losses_when_off(inside, batches), "gradients": gradients(inside, batches)}
    svg_file(HERE / "inside-heads.svg", head_maps(measure(inside, batches, **importance)))
    (HERE / "inside-words.png").write_bytes(to_png(draw(look), zoom=1.2))
    look = Inside.open(minilm).look(SENTENCE)
    svg_file(HERE / "inside-it.svg", draw(look, layer=3, head=1, query="it"))


if __name__ == "__main__":
    main(*sys.argv[1:])
