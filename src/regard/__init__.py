"""Regard: Transformers from the formula up.

    import regard
    model = regard.build(regard.preset("gpt2"))

The names below are imported when they are first used (PEP 562), so `import regard` takes milliseconds and
`regard --help` does not import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from regard.api import train as train
    from regard.models.config import ModelConfig as ModelConfig
    from regard.models.folder import save as save
    from regard.models.recipe import preset as preset
    from regard.models.transformer import build as build
    from regard.nn.mask import Mask as Mask
    from regard.nn.mask import causal as causal
    from regard.nn.mask import window as window
    from regard.nn.trace import trace as trace
    from regard.tasks.registry import load as load

# Public name -> the module that defines it. Add a new name here and to the block above, which type checkers and editors
# read; a test compares the two.
_LAZY = {
    "Mask": "regard.nn.mask",
    "ModelConfig": "regard.models.config",
    "build": "regard.models.transformer",
    "causal": "regard.nn.mask",
    "load": "regard.tasks.registry",
    "preset": "regard.models.recipe",
    "save": "regard.models.folder",
    "trace": "regard.nn.trace",
    "train": "regard.api",
    "window": "regard.nn.mask",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
