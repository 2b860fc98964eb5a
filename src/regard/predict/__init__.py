"""Prediction: a bundle of a model and its tokenizers, and from there to text, classes or numbers.

The names below are imported when they are first used (PEP 562): `regard.predict.outputs` and what searches in
CTranslate2 do not import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.predict.beam import greedy as greedy
    from regard.predict.bundle import Bundle as Bundle
    from regard.predict.bundle import Predictor as Predictor
    from regard.predict.config import SearchConfig as SearchConfig
    from regard.predict.outputs import Hypothesis as Hypothesis
    from regard.predict.outputs import Prediction as Prediction
    from regard.predict.outputs import TextPrediction as TextPrediction
    from regard.predict.sampling import sample as sample
    from regard.predict.translator import Translator as Translator

_LAZY = {
    "Bundle": "bundle",
    "Hypothesis": "outputs",
    "Prediction": "outputs",
    "Predictor": "bundle",
    "SearchConfig": "config",
    "TextPrediction": "outputs",
    "Translator": "translator",
    "greedy": "beam",
    "sample": "sampling",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'regard.predict' has no attribute {name!r}")
    return getattr(importlib.import_module(f"regard.predict.{_LAZY[name]}"), name)
