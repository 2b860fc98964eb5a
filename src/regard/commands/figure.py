"""Draw the attention of a model over a text or an image. The file's extension chooses the format: .png and .svg are one
figure, .html is a page with all figures and the output, .json holds every number. By default the mean of the last
layer's heads is drawn; --layer draws the heads of a layer, --head one of them, --grid all heads of all layers.

examples:
  regard figure runs/demo "March 3rd, 2021" -o map.png                                   the alignment
  regard figure runs/demo "March 3rd, 2021" -o heads.svg --part encoder --layer 1        the heads of a layer
  regard figure runs/demo "March 3rd, 2021" -o one.png --part cross --layer 0 --head 2   one head
  regard figure runs/demo "March 3rd, 2021" -o step.png --layer 0 --head 2 --query 1     one query, stage by stage
  regard figure runs/demo "March 3rd, 2021" -o all.html --off cross.1.0 cross.1.1        two heads off, before and after
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands import REPEATABLE
from regard.commands.attention_options import ATTENTION, NOTE, check_output, describe_output, image_file, open_look
from regard.errors import UserError
from regard.messages import localize

if TYPE_CHECKING:
    from regard.explore.inside import Look

ARGUMENTS = {
    **ATTENTION,
    "-o --out FILE": ("output file: .png, .svg, .html or .json", {"required": True}),
    "--grid": "every head of every layer of that part",
    "--all": "every part: .png and .svg become one file per part",
    "--query POSITION": "stages of one query (its position or its token); over an image: the query",
    "--zoom X": ("pixels of a PNG per unit of the figure (2)", {"type": float, "default": 2.0}),
    "--font FILE": ("a font file for a PNG, besides the system's", REPEATABLE),
}


def run(args: argparse.Namespace) -> None:
    from regard.files import write_atomically

    path = check_output(args.out)
    if not 0.1 <= args.zoom <= 20:
        raise UserError(f"--zoom {args.zoom}: must be from 0.1 to 20")
    look, before = open_look(args)
    files = contents(args, path, look, before)  # draw everything before writing anything
    print("\n".join(map(localize, describe_output(look, before))))
    for file, content in files.items():
        write_atomically(file, content)
        print(file)
    print(localize(NOTE), file=sys.stderr)


def contents(args: argparse.Namespace, path: Path, look: Look, before: Look | None) -> dict[Path, bytes]:
    """The files and their content."""
    from regard.explore.figures import draw, main_part
    from regard.explore.report import look_page

    main_part(look, args.part)  # raises for a part that the model does not have
    ending = path.suffix.lower()
    for name in ("layer", "head", "query", "grid") if ending in (".html", ".json") else ():
        if (value := getattr(args, name)) not in (None, False):
            option = f"--{name}" if value is True else f"--{name} {value}"
            raise UserError(f"{option}: a {ending} file holds every layer and head; remove the option, or write a .png")
    match ending:
        case ".html":
            return {path: look_page(look, before).encode("utf-8", "replace")}
        case ".json":
            numbers = look.to_dict(None if args.part is None else [args.part])
            if before is not None:
                numbers["unchanged"] = before.output.to_dict()
            return {path: (json.dumps(numbers, ensure_ascii=False) + "\n").encode("utf-8", "replace")}
    if args.all and args.part is None:
        figures = {path.with_stem(f"{path.stem}-{name}"): draw(look, part=name, grid=True) for name in look.parts}
    else:
        chosen = {"layer": args.layer, "head": args.head, "query": args.query}
        figures = {path: draw(look, part=args.part, grid=args.grid or args.all, **chosen)}
    return {file: image_file(file, svg, args.zoom, args.font) for file, svg in figures.items()}
