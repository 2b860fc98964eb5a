"""The import of PyTorch, which is most of the time that a short command takes.

Of its 1.1 s of CPU time, 0.25 s load the libraries in C++, and 0.3 s define what only tracing needs: shape functions
and decompositions of every operator in Python (`torch._meta_registrations`, `torch.export`). A prediction traces
nothing, so its command defers these two: the modules are there, and run when a name in one of them is read, or when
`torch.compile` imports its compiler, which relies on what they register.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEFERRED = ("torch._meta_registrations", "torch.export")
COMPILER = "torch._dynamo"


def import_torch(defer: bool = False) -> None:
    """Import PyTorch without garbage collection, which would visit its modules again and again and find nothing."""
    if "torch" in sys.modules:
        return
    if defer:
        sys.meta_path.insert(0, Deferring())
    gc.disable()
    importlib.import_module("torch")
    gc.freeze()  # later collections do not visit them either
    gc.enable()


class Deferring(MetaPathFinder):
    """Finds the modules of `DEFERRED`, and runs them before the compiler is imported."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER:
            for execute in self.waiting:
                execute()
        spec = PathFinder.find_spec(name, path) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = Deferred(spec.loader, self.waiting)
        return spec


class Deferred(Loader):
    """Runs a module when a name in it is read."""

    def __init__(self, loader: Loader, waiting: list[Callable[[], None]]) -> None:
        self.loader, self.waiting = loader, waiting

    def exec_module(self, module: ModuleType) -> None:
        def execute() -> None:
            if module.__dict__.pop("__getattr__", None) is not None:
                self.loader.exec_module(module)

        def read(name: str) -> Any:
            if name.startswith("__"):  # the import system asks for these
                raise AttributeError(name)
            execute()
            return getattr(module, name)

        module.__dict__["__getattr__"] = read
        self.waiting.append(execute)
