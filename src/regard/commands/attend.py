"""For every token the keys that it attends to most, with their weights: the mean of all heads, of one layer's heads,
one head, or (--each) every head by itself.

examples:
  regard attend runs/demo "March 3rd, 2021"                              the mean of all heads
  regard attend runs/demo "March 3rd, 2021" --part encoder --layer 0     of one layer
  regard attend runs/demo "March 3rd, 2021" --each --top 1               every head, its largest weight
  regard attend runs/demo "March 3rd, 2021" --json                       for a program
"""

from __future__ import annotations

import argparse
import json
import sys

from regard.commands.attention_options import NOTE, add_input, describe_output, open_look


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    parser.add_argument("--top", type=int, default=3, metavar="K", help="keys per token (default: 3)")
    parser.add_argument("--each", action="store_true", help="every head by itself instead of their mean")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    from regard.explore.figures import as_text, attended, main_part

    look, before = open_look(args)
    part = main_part(look, args.part)
    maps = attended(look, part, layer=args.layer, head=args.head, top=args.top, each=args.each)
    if args.json:
        content = {**look.to_dict(parts=()), "maps": [one.to_dict() for one in maps]}
        del content["parts"]
        print(json.dumps(content, ensure_ascii=False, indent=1))
        return
    print("\n".join(describe_output(look, before)), end="\n\n")
    print("\n\n".join(map(as_text, maps)))
    print(NOTE, file=sys.stderr)
