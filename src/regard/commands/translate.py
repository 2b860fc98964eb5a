"""`regard translate`: text through a trained encoder-decoder."""

from __future__ import annotations

import argparse
import json
import sys

DESCRIPTION = "Translate lines with a trained model: those given, or those of standard input, a line for a line."

EXAMPLES = """
regard translate runs/demo "July 4th, 1976"
regard translate runs/demo < in.txt > out.txt
regard translate runs/demo "seven hundred five" --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="lines to translate (default: standard input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line: source, translation")


def run(args: argparse.Namespace) -> int:
    from regard.decode.translate import Translator
    from regard.errors import UserError

    translator = Translator.load(args.run)
    try:
        lines = args.text or sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: byte {error.start} is not UTF-8 text; convert the file first") from None
    for line, answer in zip(lines, translator.translate(lines), strict=True):
        print(json.dumps({"source": line, "translation": answer}, ensure_ascii=False) if args.json else answer)
    return 0
