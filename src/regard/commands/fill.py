"""`regard fill`: words for the gaps of a text, by a masked language model."""

from __future__ import annotations

import argparse
import json
import sys

DESCRIPTION = """
Find what may stand in the gaps of a text. A gap is written <mask>; each is guessed on its own. Texts are given, or are
the lines of standard input. The answer is a table, a row for a guess: text, gap, rank, token, probability.
"""

EXAMPLES = """
regard fill runs/nsmc-masked "이 영화 <mask> 재밌다"
regard fill runs/nsmc-masked "배우들의 <mask> 이 <mask>" --top 3 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="texts with <mask> in them (default: standard input)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="guesses for each gap (default: 5)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a text: text, gaps")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict
    from itertools import chain

    from regard.commands import predictor_of
    from regard.commands.translate import progress, read_checked
    from regard.errors import UserError
    from regard.models.folder import find_device
    from regard.predict.mask_predictor import MaskPredictor

    if args.top < 1:
        raise UserError(f"--top {args.top}: must be 1 or more")
    filler = predictor_of(args.run, find_device(args.device), MaskPredictor)
    number = 0
    with progress(args.text) as bar:
        pieces = read_checked(args.text, bar, lambda lines: [filler.encode(text) for text in lines])
        first = next(pieces, [])  # a mistake shows before the head of the table
        if not args.json:
            print("text", "gap", "rank", "token", "probability", sep="\t")
        for lines in chain([first], pieces):
            for text in lines:
                number += 1
                gaps = filler.predict([text], top=args.top)[0].masks
                if args.json:
                    found = {"text": text, "gaps": [[asdict(guess) for guess in gap] for gap in gaps]}
                    print(json.dumps(found, ensure_ascii=False))
                    continue
                for place, gap in enumerate(gaps, 1):
                    for rank, guess in enumerate(gap, 1):
                        print(number, place, rank, guess.token, f"{guess.probability:.4f}", sep="\t")
            sys.stdout.flush()
    return 0
