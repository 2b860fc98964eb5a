"""How much code one command executes: the distinct modules and functions of `regard` that it calls.

    python benchmarks/walk.py                       # train --smoke, translate, explore (one look), classify
    python benchmarks/walk.py translate --list      # with the names of the functions

`regard.cli.main` runs in this process under `sys.setprofile`. A function counts once, however often it is called;
comprehensions, lambdas and the bodies of modules and classes do not count, nor does what happens in other processes.
Another version is measured with its sources on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {"translate": "multi30k-en-de", "explore": "multi30k-en-de", "classify": "nsmc"}
TEXT = {"translate": "A man rides a horse.", "explore": "A man rides a horse.", "classify": "정말 재미있는 영화"}


def walk(work: Callable[[], object]) -> dict[str, set[str]]:
    """The functions of regard that `work` calls, by module."""
    import regard

    home = str(Path(regard.__file__).parent) + os.sep
    passed: dict[str, set[str]] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_NEWLOCALS and not code.co_qualname.endswith(">")
        if event == "call" and is_function and code.co_filename.startswith(home):
            passed.setdefault(code.co_filename.removeprefix(home), set()).add(code.co_qualname)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return passed


def command(name: str, run: Path) -> Callable[[], object]:
    from regard.cli import main

    def look() -> object:
        from regard.explore import Inside

        return Inside.open(run).look(TEXT[name])

    def called(*arguments: str) -> Callable[[], object]:
        def call() -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                assert main(arguments) == 0

        return call

    if name == "explore":
        return look
    if name == "train":
        recipe = str(ROOT / "recipes" / f"{RECIPES['translate']}.toml")
        return called("train", recipe, "--smoke", "-o", str(run), "--device", "cpu")
    return called(name, str(run), TEXT[name], "--device", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["train", "translate", "explore", "classify"])
    parser.add_argument("--list", action="store_true", help="name the functions")
    args = parser.parse_args()
    os.chdir(ROOT)
    for name in args.names:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            if name != "train":
                recipe = str(ROOT / "recipes" / f"{RECIPES[name]}.toml")
                train = [sys.executable, "-m", "regard", "train", recipe, "--smoke", "-o", str(run), "--device", "cpu"]
                subprocess.run(train, check=True, capture_output=True)
            passed = walk(command(name, run))
        print(f"{name:<10} {len(passed):>3} modules  {sum(map(len, passed.values())):>4} functions", flush=True)
        for module, functions in sorted(passed.items()) if args.list else ():
            print(f"  {module:<28} {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
