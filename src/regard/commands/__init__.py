"""The commands of `regard`, one module each.

`regard NAME` imports `regard.commands.NAME` and nothing before that, so `regard --help` answers at once.
A command module is a `Command`:

    DESCRIPTION = "What it does, in a paragraph."
    EXAMPLES = '''
    regard NAME              the plain use
    regard NAME --option 3   a variation
    '''

    def add_arguments(parser): ...   # options, with their defaults in the help texts
    def run(args) -> int: ...        # the work; the result is the exit code

Imports that take time (torch, numpy, the rest of regard) belong inside `run`: `regard NAME --help` must be
quick too. A command raises `UserError` for what the user can mend and lets every other exception go; the
frame in `regard.cli` turns both into one line and an exit code. The one-line help of a command stands in
the table of `regard.cli`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from regard.predict.bundle import Predictor

Kind = TypeVar("Kind", bound="Predictor[Any, Any]")


class Command(Protocol):
    """What a command module offers the frame."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def program() -> str:
    """How to call `regard` from here: by name where the shell finds it, else by the path of this environment's."""
    if shutil.which("regard"):
        return "regard"
    beside = os.path.join(os.path.dirname(sys.executable), "regard")
    here = os.path.relpath(beside)
    return shlex.quote(beside if here.startswith("..") else here)


def predictor_of(run: str, device: str | torch.device, *kinds: type[Kind]) -> Kind:
    """The predictor of the model in a folder; one of another kind is refused, with the command for it."""
    from regard.errors import UserError
    from regard.tasks.registry import load

    bundle = load(run, device)
    if bundle.predictor_class is None or not issubclass(bundle.predictor_class, kinds):
        use = "" if bundle.predictor_class is None else f"; use  regard {bundle.predictor_class.COMMAND} {run}"
        raise UserError(f"{run}: {kinds[0].NEEDS} is needed here{use}")
    predictor = bundle.predictor
    assert isinstance(predictor, kinds)
    return predictor
