"""Open a model in the browser: the attention of every head, one query step by step, the predictions; switch heads off,
edit attention weights, and see the output change beside the original. RUN is a run, an imported or downloaded Hugging
Face model, or a folder that holds several. The page is served from this machine and loads nothing from elsewhere.
Ctrl-C stops it.

examples:
  regard explore runs/demo                            one run
  regard explore runs                                 all runs in a folder
  regard explore runs/gpt2 --text "Hello, my name"    start with this text
  regard explore runs/demo --no-browser --port 8765   print the address, on a port of your choice
  regard explore sample:korean-small                  a small Korean model, installed with Regard
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from regard.commands import DEVICE
from regard.errors import MissingExtra, UserError
from regard.page import page_missing
from regard.start import import_torch


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


def needs_torch(args: argparse.Namespace) -> bool:
    return False  # `run` imports it in a thread: the page is there before


def run(args: argparse.Namespace) -> None:
    check_page()
    fragment = (args.link or "").partition("#")[2]
    if args.link and not fragment:
        raise UserError(f"--link {args.link!r}: has no part after #, where a link keeps its state")
    open_page(args.run, args.device, args.text, args.port, fragment, browser=not args.no_browser)


def check_page() -> None:
    """Raise where the page cannot be served."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtra("explore", str(error.name), "the page") from None
    if (why := page_missing()) is not None:
        raise UserError(why)


def open_page(
    run: str, device: str | None, text: str | None = None, port: int = 0, fragment: str = "", *, browser: bool = True
) -> None:
    """Serve the page until Ctrl-C."""
    from regard.explore.server.models import Models, find_runs
    from regard.samples import sample_folder

    runs = find_runs(sample_folder(run) or Path(run))
    threading.Thread(target=import_torch, args=(True,), daemon=True).start()  # while the rest is imported
    from regard.explore.server.listen import serve

    serve(Models(runs, device, text, Path(run)), port, fragment, browser=browser)
