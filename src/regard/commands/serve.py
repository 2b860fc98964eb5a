"""Serve trained models over HTTP: OpenAI-compatible completions and embeddings, LibreTranslate-compatible translation,
and a route for every other task; http://HOST:PORT/docs lists them, and http://HOST:PORT is a page to try them. A model
has the name of its folder, or NAME=RUN; for a translation model NAME:en-de=RUN also names its languages. Keys are read
from a file or from REGARD_API_KEYS.

examples:
  regard serve runs/shakespeare-char                      http://127.0.0.1:8000
  regard serve de=runs/multi30k-en-de sentiment=runs/nsmc --port 9000
  regard serve enko:en-ko=runs/tatoeba-en-ko --host 0.0.0.0 --keys keys.txt --rate-limit 600
  regard serve runs/multi30k-en-de --workers 2            two processes on one port
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path

from regard.commands import DEVICE, positive
from regard.errors import MissingExtra, UserError


def seconds(text: str) -> float:
    """The value of an option that must be a time."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be greater than 0 seconds")
    return number


ARGUMENTS = {
    "RUN": ("folders of trained models, or NAME=RUN, or NAME:en-de=RUN", {"nargs": "+"}),
    "--host ADDRESS": ("where to listen (default: 127.0.0.1, this machine only)", {"default": "127.0.0.1"}),
    "--port N": ("the port (default: 8000; 0: a free one)", {"type": int, "default": 8000}),
    "--workers N": ("processes that share the port (default: 1)", {"type": positive, "default": 1}),
    **DEVICE,
    "load": {
        "--queue-tokens N": (
            "tokens that may wait or be computed at once; beyond them 429 (default: 65536)",
            {"type": positive, "default": 65_536},
        ),
        "--batch-tokens N": (
            "tokens of a batch, padding included, and of one input (default: 4096)",
            {"type": positive, "default": 4096},
        ),
        "--batch-rows N": ("inputs of a batch (default: 64)", {"type": positive, "default": 64}),
        "--timeout S": ("seconds until a request is cancelled (default: 60)", {"type": seconds, "default": 60.0}),
    },
    "access": {
        "--keys FILE": "API keys, one per line (also: the environment variable REGARD_API_KEYS, separated by commas)",
        "--rate-limit N": ("requests per minute of each key, or address (default: no limit)", {"type": positive}),
        "--body-limit N": ("bytes of a request (default: 4000000)", {"type": positive, "default": 4_000_000}),
        "--cors ORIGIN": ("allow browsers to call from this origin; repeatable", {"action": "append", "default": []}),
        "--trust-proxy": "read the address of a client from X-Forwarded-For, which a proxy in front of it sets",
    },
}


def run(args: argparse.Namespace) -> int:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("serve", package, "regard serve")
    from regard.serve.listen import Settings, serve

    folders, languages = dict[str, Path](), dict[str, tuple[str, str]]()
    for text in args.run:
        name, folder, pair = read_run(text)
        if name in folders:
            raise UserError(f"RUN = {text!r}: there are two models named {name!r}; name them, such as  other={folder}")
        if not (folder / "recipe.toml").is_file():
            raise UserError(f"RUN = {text!r}: {folder} is not a trained model (it has no recipe.toml)")
        folders[name] = folder
        if pair is not None:
            languages[name] = pair
    return serve(
        Settings(
            folders, languages, args.device, args.host, args.port, args.workers, args.keys,
            os.environ.get("REGARD_ADMIN_KEY") or None, args.queue_tokens, args.batch_tokens, args.batch_rows,
            args.timeout, args.rate_limit or 0, args.body_limit, tuple(args.cors), args.trust_proxy,
        )
    )  # fmt: skip


def read_run(text: str) -> tuple[str, Path, tuple[str, str] | None]:
    """The name, folder and languages of  RUN,  NAME=RUN  or  NAME:en-de=RUN."""
    given, equals, folder = text.partition("=")
    if not equals or Path(text).is_dir():
        path = Path(text)
        return path.resolve().name, path, None
    name, _, pair = given.partition(":")
    codes = pair.split("-")
    if pair and len(codes) != 2:
        raise UserError(f"RUN = {text!r}: write the two languages as  {name}:en-de={folder}")
    return name, Path(folder), (codes[0], codes[1]) if pair else None
