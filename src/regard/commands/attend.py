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
from collections import Counter
from typing import Any

from regard.commands import aligned
from regard.commands.attention_options import ATTENTION, NOTE, describe_output, open_look
from regard.messages import localize

ARGUMENTS = {
    **ATTENTION,
    "--top K": ("keys per token (default: 3)", {"type": int, "default": 3}),
    "--each": "every head by itself instead of their mean",
    "--json": "print JSON",
}


def run(args: argparse.Namespace) -> None:
    from regard.explore.figures import attended, main_part

    look, before = open_look(args)
    part = main_part(look, args.part)
    maps = attended(look, part, layer=args.layer, head=args.head, top=args.top, each=args.each)
    if args.json:
        content = {**look.to_dict(parts=()), "maps": maps}
        del content["parts"]
        print(json.dumps(content, ensure_ascii=False, indent=1))
        return
    print("\n".join(map(localize, describe_output(look, before))), end="\n\n")
    print("\n\n".join(map(as_text, maps)))
    print(localize(NOTE), file=sys.stderr)


def as_text(attended: dict[str, Any]) -> str:
    """A line per token: the token, then what it attends to; a key that occurs several times, with its position."""
    from regard.explore.figures import map_title
    from regard.explore.html import token_label

    keys = {(key["token"], key["at"]) for token in attended["tokens"] for key in token["attends_to"]}
    count = Counter(label for label, _ in keys)
    rows = []
    for token in attended["tokens"]:
        largest = [(key["token"], key["at"], key["weight"]) for key in token["attends_to"]]
        texts = [f"{token_label(key)}{f'[{at}]' * (count[key] > 1)} {weight:.2f}" for key, at, weight in largest]
        rows.append([f"  {token_label(token['token'])}", "   ".join(texts)])
    return "\n".join([localize(map_title(attended["part"], attended["layer"], attended["head"])), *aligned(rows)])
