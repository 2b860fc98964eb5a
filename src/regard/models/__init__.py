"""Models: how the parts of `regard.nn` are connected.

Only names that build a model import torch, so that reading a config starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.models.config import ModelConfig

if TYPE_CHECKING:
    from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Model, Recurrent, SequenceToSequence, build

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "ModelConfig", "Recurrent", "SequenceToSequence", "build"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regard.models import transformer

    return getattr(transformer, name)
