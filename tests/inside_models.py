"""Small models of every shape, opened to be looked at; random weights, real tokenizers."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from regard.explore.inside import Inside
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.predict.config import SearchConfig
from regard.text.tokenizer import Tokenizer

LINES = [
    "the animal did not cross the street because it was tired .",
    "동물 이 길 을 건너 지 않았다 !",
    "a b c d e f g",
]
WORDS = Tokenizer.train(LINES, "word")
SIDE, PATCH = 16, 4
SHAPES: dict[str, dict[str, object]] = {
    "encoder-decoder": {"architecture": "encoder-decoder"},
    "decoder": {"architecture": "decoder"},
    "masked": {"architecture": "encoder", "output_head": "tokens"},
    "classes": {"architecture": "encoder", "output_head": "classes", "classes": 3},
    "tags": {"architecture": "encoder", "output_head": "classes", "classes": 3, "pooling": "none"},
    "vectors": {"architecture": "encoder", "output_head": "none"},
    "recurrent": {"architecture": "recurrent"},
    "vit": {"architecture": "encoder", "input": "patches", "output_head": "classes", "classes": 4},
    "mean-vit": {
        "architecture": "encoder",
        "input": "patches",
        "output_head": "classes",
        "classes": 4,
        "pooling": "mean",
    },
    "captions": {"architecture": "encoder-decoder", "input": "patches"},
    "features": {"architecture": "encoder-decoder", "input": "features", "feature_dim": 5},
}
TEXTS = [name for name, fields in SHAPES.items() if "input" not in fields]


def masked_words() -> Tokenizer:
    """Words with BERT's special tokens."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(LINES).split()]
    raw = RawTokenizer(models.WordLevel({name: id for id, name in enumerate(dict.fromkeys(names))}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(names[:5])
    return Tokenizer(raw.to_str())


def opened(architecture: str = "decoder", seed: int = 0, **changes: object) -> Inside:
    tokenizer = masked_words() if architecture == "masked" else WORDS
    values = {
        "dim": 16, "layers": 2, "heads": 4, "ff_dim": 24, "vocab_size": len(tokenizer), "max_length": 32,
        "image_size": SIDE, "patch_size": PATCH, "norm_order": "pre",
    }  # fmt: skip
    torch.manual_seed(seed)
    model = build(ModelConfig(**{**values, **SHAPES[architecture], **changes})).double()
    for parameter in model.parameters():  # far from even, so that every change shows
        parameter.data += 0.3 * torch.randn_like(parameter)
    return Inside(Bundle(model, {"tokenizer": tokenizer}), SearchConfig(max_length=10))


def given(architecture: str, text: str = "the animal did not cross") -> dict[str, object]:
    """What that model can be asked to look at."""
    if SHAPES[architecture].get("input") == "features":
        return {"image": torch.rand(6, 5).double()}
    if "input" in SHAPES[architecture]:
        return {"image": torch.rand(3, SIDE, SIDE).double()}
    return {"text": text}
