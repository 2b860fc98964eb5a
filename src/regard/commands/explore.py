"""Open a model in the browser: the attention of every head, one query step by step, the predictions; switch heads off,
edit attention weights, and see the output change beside the original. RUN is a run, an imported or downloaded Hugging
Face model, or a folder that holds several. The page is served from this machine and loads nothing from elsewhere.
Ctrl-C stops it.

examples:
  regard explore runs/demo                            one run
  regard explore runs                                 all runs in a folder
  regard explore runs/gpt2 --text "Hello, my name"    start with this text
  regard explore runs/demo --no-browser --port 8765   print the address, on a port of your choice
"""

from __future__ import annotations

import argparse
from pathlib import Path

from regard.commands import DEVICE
from regard.errors import MissingExtra, UserError
from regard.page import page_missing


def port_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 <= int(text[:6]) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 (any free one) to 65535")
    return int(text)


ARGUMENTS = {
    "RUN": "a run, a Hugging Face model, or a folder of several",
    "--text TEXT": "the text to start with",
    "--link URL": "start with the state of a link copied from the page",
    "--port PORT": ("default: 0, any free port", {"type": port_number, "default": 0}),
    "--no-browser": "only print the address",
    **DEVICE,
}


def run(args: argparse.Namespace) -> None:
    try:
        from regard.explore.server.listen import serve
        from regard.explore.server.models import Models, find_runs
    except ImportError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        raise MissingExtra("explore", str(error.name), "the page") from None
    models = Models(find_runs(Path(args.run)), args.device, args.text)
    if (why := page_missing()) is not None:
        raise UserError(why)
    fragment = (args.link or "").partition("#")[2]
    if args.link and not fragment:
        raise UserError(f"--link {args.link!r}: has no part after #, where a link keeps its state")
    serve(models, args.port, fragment, browser=not args.no_browser)
