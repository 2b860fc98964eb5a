"""The import of PyTorch, which is most of the time that a short command takes.

Of the 1.1 s that a plain `import torch` takes, 0.2 s load the libraries in C++; the rest are 766 modules in Python. A
prediction uses a part of them, so its command defers the others: they are there, and run when a name in one of them is
read, when one of their submodules is imported, or before `torch.compile` imports its compiler, which relies on what
they register. The deferred modules are packages that PyTorch imports for the convenience of its users (optimizers,
distributions, quantisation, data loaders), and the shape functions and decompositions that only tracing needs.

Which modules can wait depends on the version of PyTorch: modules import each other in cycles, and deferring one changes
the order. `TESTED` are the versions that the list has been tried with; others are imported as usual.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TESTED = ("2.11", "2.13")
DEFERRED = (
    "torch._meta_registrations", "torch.export",  # tracing
    "torch.optim", "torch.utils.data", "torch.profiler", "torch.distributions", "torch.masked",
    "torch.quantization", "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized",
)  # fmt: skip
COMPILER = "torch._dynamo"
THREADS = "OPENBLAS_NUM_THREADS"


def import_torch(defer: bool = False) -> None:
    """Import PyTorch without garbage collection, which would visit its modules again and again and find nothing."""
    if "torch" in sys.modules:
        return
    if defer and torch_version() in TESTED:
        sys.meta_path.insert(0, Deferring())
    gc.disable()
    if defer:
        import_numpy()
    torch = importlib.import_module("torch")
    if defer and hasattr(torch._C, "_set_generator_metaclass"):  # otherwise left to a module that is deferred
        torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)
    gc.freeze()  # later collections do not visit them either
    gc.enable()


def import_numpy() -> None:
    """Import numpy, as PyTorch does, without a pool of threads for matrix products: no prediction computes any in it.

    The threads of OpenBLAS, one per core, would wait in a loop for 0.1 s.
    """
    threads = os.environ.get(THREADS)
    os.environ[THREADS] = threads or "1"
    importlib.import_module("numpy")
    if threads is None:
        del os.environ[THREADS]  # other libraries, and processes that are started, have their own


def torch_version() -> str:
    """Of the installed package, such as 2.13, without importing it."""
    spec = importlib.util.find_spec("torch")
    try:
        with open(os.path.join(os.path.dirname((spec and spec.origin) or ""), "version.py"), encoding="utf-8") as file:
            found = re.search(r"__version__ = '(\d+\.\d+)", file.read())
    except OSError:
        return ""
    return found[1] if found else ""


class Deferring:
    """Finds the modules of `DEFERRED`; runs them before one of their submodules, or the compiler, is imported.

    This and the loaders are not subclasses of those in `importlib.abc`, whose import alone takes 10 ms.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER:
            for execute in list(self.waiting.values()):
                execute()
        elif (package := name.rpartition(".")[0]) in self.waiting:
            self.waiting[package]()
            if name in sys.modules:  # its package has imported it
                return ModuleSpec(name, Imported(sys.modules[name]))  # type: ignore[arg-type]
        spec = PathFinder.find_spec(name, path) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = Deferred(spec.loader, self.waiting)  # type: ignore[assignment]
        return spec


class Deferred:
    """A loader that runs a module when a name in it is read."""

    def __init__(self, loader: Any, waiting: dict[str, Callable[[], None]]) -> None:
        self.loader, self.waiting, self.lock = loader, waiting, threading.RLock()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def execute() -> None:
            with self.lock:  # another thread waits until the module is complete
                if self.waiting.pop(module.__name__, None) is not None:
                    module.__loader__ = self.loader
                    if module.__spec__ is not None:
                        module.__spec__.loader = self.loader
                    self.loader.exec_module(module)
                    if module.__dict__.get("__getattr__") is read:  # not one of the module's own
                        del module.__dict__["__getattr__"]

        def read(name: str) -> Any:
            if name.startswith("__") and name != "__all__":  # the import system asks for these
                raise AttributeError(name)
            execute()
            if module.__dict__.get("__getattr__") is read:  # a name of a module that is being executed
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} yet")
            return getattr(module, name)

        module.__dict__["__getattr__"] = read
        self.waiting[module.__name__] = execute


class Imported:
    """A loader of a module that exists already, where `importlib` would execute it a second time."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__
        module.__spec__ = None  # otherwise `importlib` prefers it to the one of this loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
