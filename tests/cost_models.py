"""Small models for the tests of `regard.cost`: one for each formula, and random ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from regard.errors import UserError
from regard.models.config import ModelConfig

SMALL: dict[str, Any] = {
    "dim": 16, "heads": 4, "layers": 2, "ff_dim": 24, "vocab_size": 50, "max_length": 40, "image_size": 12,
    "patch_size": 4,
    "feature_dim": 10, "position_distance": 5, "position_buckets": 8, "dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip

# one change each that has a formula of its own
CASES: dict[str, dict[str, Any]] = {
    "encoder-decoder": {},
    "decoder_layers": {"decoder_layers": 3},
    "two vocabularies": {
        "share_embeddings": False,
        "target_vocab_size": 30,
        "tie_embeddings": False,
        "logit_bias": True,
    },
    "decoder": {"architecture": "decoder"},
    "gpt": {"architecture": "decoder", "norm_order": "pre", "position": "learned", "activation": "gelu-tanh"},
    "grouped queries": {"architecture": "decoder", "kv_heads": 2},
    "multi-query cross": {"kv_heads": 1},
    "own head sizes": {"head_dim": 6, "value_dim": 5},
    "swiglu": {"architecture": "decoder", "activation": "swiglu", "bias": False, "position": "rope"},
    "geglu": {"activation": "geglu", "residual": False},
    "experts": {"architecture": "decoder", "experts": 3, "experts_per_token": 2},
    "gated experts": {"experts": 4, "experts_per_token": 1, "activation": "swiglu"},
    "window": {"architecture": "decoder", "window": 3},
    "linear": {"mixer": "linear", "kv_heads": 2},
    "performer": {"architecture": "decoder", "mixer": "performer", "features": 7, "value_dim": 5},
    "gated-linear": {"mixer": "gated-linear, full", "kv_heads": 2, "position": "rope"},
    "linformer": {"architecture": "encoder", "mixer": "linformer", "projected_length": 4, "kv_heads": 2},
    "fourier": {"architecture": "encoder", "mixer": "fourier, full"},
    "qk_norm": {"qk_norm": True, "kv_heads": 2},
    "qk_norm with rope": {"architecture": "decoder", "qk_norm": True, "position": "rope", "norm": "rms"},
    "relative": {"position": "relative"},
    "t5": {"position": "t5", "norm": "none"},
    "alibi": {"position": "alibi"},
    "multiplicative": {"attention_score": "multiplicative"},
    "additive": {"attention_score": "additive"},
    "concat": {"attention_score": "concat", "architecture": "decoder"},
    "masked language model": {"architecture": "encoder", "token_types": 2, "embed_norm": True, "head_layer": True},
    "states": {"architecture": "encoder", "output_head": "none"},
    "bert": {
        "architecture": "encoder",
        "output_head": "pooled",
        "pooler": True,
        "position": "learned",
        "activation": "gelu",
    },
    "classes": {
        "architecture": "encoder",
        "output_head": "classes",
        "classes": 3,
        "pooling": "mean",
        "final_norm": True,
    },
    "tags": {"architecture": "encoder", "output_head": "classes", "classes": 3, "pooling": "none"},
    "vit": {"architecture": "encoder", "input": "patches", "output_head": "classes", "classes": 3, "norm_order": "pre"},
    "features": {"architecture": "encoder", "input": "features", "output_head": "classes", "classes": 3},
    "captions from patches": {"input": "patches", "position": "learned"},
    "captions from regions": {"input": "features", "decoder_layers": 1},
    "conv stem": {
        "architecture": "encoder",
        "input": "patches",
        "output_head": "classes",
        "classes": 3,
        "stem": "conv",
        "pooling": "mean",
    },
    "shifted windows": {
        "architecture": "encoder",
        "input": "patches",
        "output_head": "pooled",
        "shifted_window": 2,
        "layers": 3,
        "position_axes": 2,
    },
    "turned by row and column": {"input": "patches", "position": "rope", "position_axes": 2, "tie_embeddings": False},
    "numbers": {"input": "features", "output_head": "values"},
}


def small(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **CASES[name], **changes})


def drawn(count: int, seed: int = 0) -> Iterator[ModelConfig]:
    """Random configs: every field that costs something, in any combination that is allowed."""
    draw = random.Random(seed)
    fields: dict[str, list[Any]] = {
        "architecture": ["encoder-decoder", "decoder", "encoder"], "layers": [1, 2], "decoder_layers": [None, 1, 3],
        "dim": [8, 16, 24], "heads": [2, 4], "kv_heads": [None, 1, 2], "head_dim": [None, 4, 6], "value_dim": [None, 5],
        "attention_score": ["dot", "dot", "dot", "multiplicative", "additive", "concat"], "window": [None, 3],
        "ff_dim": [16, 20],
        "activation": ["relu", "gelu", "gelu-tanh", "silu", "swiglu", "geglu"], "experts": [0, 0, 3],
        "experts_per_token": [1, 2], "norm": ["layer", "rms", "none"], "norm_order": ["pre", "post"],
        "final_norm": [None, True, False], "embed_norm": [True, False], "residual": [True, False],
        "bias": [True, False], "qk_norm": [False, False, True],
        "position": ["sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none"], "position_distance": [5, 20],
        "input": ["tokens", "tokens", "patches", "features"], "target_vocab_size": [None, 30], "token_types": [0, 2],
        "share_embeddings": [True, False], "tie_embeddings": [True, False], "logit_bias": [True, False],
        "logit_scale": [1.0, 0.5],
        "output_head": ["tokens", "tokens", "none", "pooled", "classes"], "pooling": ["cls", "mean"],
        "pooler": [True, False],
        "head_layer": [True, False], "classes": [3, 5],
    }  # fmt: skip
    while count:
        with contextlib.suppress(UserError):  # a combination that makes no sense; draw again
            choice = {name: draw.choice(values) for name, values in fields.items()}
            yield ModelConfig(**{**SMALL, "attention": "reference", **choice})
            count -= 1


def sizes(config: ModelConfig, batch: int = 3, seq: int = 7, target: int = 5) -> dict[str, int]:
    """Arguments of `cost`, as far as this config has a choice."""
    given = {"batch": batch}
    if config.input != "patches":
        given["seq"] = seq
    return {**given, "target_seq": target} if config.architecture == "encoder-decoder" else given
