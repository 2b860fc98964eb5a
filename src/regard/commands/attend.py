"""`regard attend`: what every token looks at, in words."""

from __future__ import annotations

import argparse

from regard.commands.looking import NOTE, add_changes, add_choice, add_input, look_at, tell_output

DESCRIPTION = """
For every token the tokens that it looks at most, with their weights: the mean of all heads, of one layer's, one
head, or (--each) every head by itself.
"""

EXAMPLES = """
regard attend runs/demo "March 3rd, 2021"                              the mean of all heads
regard attend runs/demo "March 3rd, 2021" --part encoder --layer 0     of one layer
regard attend runs/demo "March 3rd, 2021" --each --top 1               every head, its strongest
regard attend runs/demo "March 3rd, 2021" --json                       for a program
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser)
    add_choice(parser)
    parser.add_argument("--top", type=int, default=3, metavar="K", help="how many of each (default: 3)")
    parser.add_argument("--each", action="store_true", help="every head by itself instead of their mean")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_changes(parser)


def run(args: argparse.Namespace) -> int:
    import json
    import sys

    from regard.explore.attend import as_text, attended
    from regard.explore.figures import main_part

    look, before = look_at(args)
    part = main_part(look, args.part)
    found = attended(look, part, layer=args.layer, head=args.head, top=args.top, each=args.each)
    if args.json:
        told = {"model": look.inside.name, "text": look.reading.text, "changes": look.changes.to_dict()}
        content = {**told, "output": look.output.to_dict(), "maps": [one.to_dict() for one in found]}
        print(json.dumps(content, ensure_ascii=False, indent=1))
        return 0
    print("\n".join(tell_output(look, before)), end="\n\n")
    print("\n\n".join(map(as_text, found)))
    print(NOTE, file=sys.stderr)
    return 0
