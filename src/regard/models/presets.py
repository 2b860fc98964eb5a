"""Presets: configurations with published sizes.

    regard cost base --seq 512        from regard import preset, build
                                      model = build(preset("base", vocab_size=8000))

Any field can be changed by name: `preset("gpt2", layers=6, position="rope")`.
"""

from __future__ import annotations

from typing import Any

from regard.errors import UserError, suggest
from regard.models.config import ModelConfig

_PAPER: dict[str, Any] = {"vocab_size": 37000, "dropout": 0.1, "embed_dropout": 0.1}
_GPT2: dict[str, Any] = {
    "architecture": "decoder", "vocab_size": 50257, "max_length": 1024, "position": "learned", "norm_order": "pre",
    "activation": "gelu-tanh", "embed_scale": False, "init": "normal", "attention_dropout": 0.1,
}  # fmt: skip
_BERT: dict[str, Any] = {
    "architecture": "encoder", "vocab_size": 30522, "max_length": 512, "position": "learned", "activation": "gelu",
    "norm_eps": 1e-12, "embed_norm": True, "token_types": 2, "embed_scale": False, "pooler": True,
    "output_head": "pooled", "init": "normal", "attention_dropout": 0.1,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "architecture": "encoder", "input": "patches", "image_size": 224, "patch_size": 16, "max_length": 197,
    "position": "learned", "norm_order": "pre", "norm_eps": 1e-12, "activation": "gelu",
    "output_head": "classes", "classes": 1000, "init": "normal", "dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 32128, "norm": "rms", "norm_order": "pre", "norm_eps": 1e-6, "bias": False, "position": "t5",
    "attention_scale": 1.0, "embed_scale": False,
}  # fmt: skip

_RNN: dict[str, Any] = {"architecture": "recurrent", "cell": "gru", "attention_score": "additive", "layers": 1}
# Bahdanau et al. 2015, appendix B: RNNsearch-50; the readout is embed_dim wide, not 500
_SEARCH: dict[str, Any] = {
    **_RNN, "dim": 1000, "embed_dim": 620, "vocab_size": 30000, "target_vocab_size": 30000,
    "share_embeddings": False, "tie_embeddings": False,
    "max_length": 50, "dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip


def _size(dim: int, layers: int, heads: int, ff_dim: int) -> dict[str, int]:
    return {"dim": dim, "layers": layers, "heads": heads, "ff_dim": ff_dim}


# Transformer-Tiny: Wu et al. 2021; base, big: Vaswani et al. 2017, Table 3
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {**_PAPER, **_size(128, 4, 4, 256), "vocab_size": 10000, "dropout": 0.3, "embed_dropout": 0.3},
    "small": {**_PAPER, **_size(256, 4, 4, 1024), "vocab_size": 10000, "dropout": 0.2, "embed_dropout": 0.2},
    "base": {**_PAPER, **_size(512, 6, 8, 2048)},
    "big": {**_PAPER, **_size(1024, 6, 16, 4096), "dropout": 0.3, "embed_dropout": 0.3},
    "gpt2": {**_GPT2, **_size(768, 12, 12, 3072)},
    "gpt2-medium": {**_GPT2, **_size(1024, 24, 16, 4096)},
    "gpt2-large": {**_GPT2, **_size(1280, 36, 20, 5120)},
    "gpt2-xl": {**_GPT2, **_size(1600, 48, 25, 6400)},
    "bert-base": {**_BERT, **_size(768, 12, 12, 3072)},
    "bert-large": {**_BERT, **_size(1024, 24, 16, 4096)},
    "vit-tiny": {**_VIT, **_size(192, 12, 3, 768)},
    "vit-small": {**_VIT, **_size(384, 12, 6, 1536)},
    "vit-base": {**_VIT, **_size(768, 12, 12, 3072)},
    "t5-small": {**_T5, **_size(512, 6, 8, 2048), "logit_scale": 512**-0.5},
    "t5-base": {**_T5, **_size(768, 12, 12, 3072), "logit_scale": 768**-0.5},
    "rnn-2015": _SEARCH,
    # as "small": the same vocabulary and about as many parameters
    "rnn-small": {**_RNN, "dim": 512, "embed_dim": 256, "vocab_size": 10000, "dropout": 0.2, "embed_dropout": 0.2},
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config called `name`, with these fields changed."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} does not exist; {suggest(name, PRESETS)}")
    unknown = [key for key in changes if key not in ModelConfig.__dataclass_fields__]
    if unknown:
        raise UserError(f"{unknown[0]}: unknown setting; {suggest(unknown[0], ModelConfig.__dataclass_fields__)}")
    return ModelConfig(**{**PRESETS[name], **changes})
