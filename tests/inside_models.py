"""Small models of every shape, opened to be looked at; random weights, real tokenizers."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from regard.explore.inside import Inside
from regard.models import ModelConfig, build
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
    "encoder-decoder": {"shape": "encoder-decoder"},
    "decoder": {"shape": "decoder"},
    "masked": {"shape": "encoder", "head": "tokens"},
    "classes": {"shape": "encoder", "head": "classes", "classes": 3},
    "vectors": {"shape": "encoder", "head": "none"},
    "recurrent": {"shape": "recurrent"},
    "vit": {"shape": "encoder", "source": "patches", "head": "classes", "classes": 4},
    "mean-vit": {"shape": "encoder", "source": "patches", "head": "classes", "classes": 4, "pool": "mean"},
    "captions": {"shape": "encoder-decoder", "source": "patches"},
    "features": {"shape": "encoder-decoder", "source": "features", "feature_dim": 5},
}
TEXTS = [name for name, fields in SHAPES.items() if "source" not in fields]


def masked_words() -> Tokenizer:
    """Words with BERT's special tokens."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(LINES).split()]
    raw = RawTokenizer(models.WordLevel({name: id for id, name in enumerate(dict.fromkeys(names))}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(names[:5])
    return Tokenizer(raw.to_str())


def opened(shape: str = "decoder", seed: int = 0, **changes: object) -> Inside:
    tokenizer = masked_words() if shape == "masked" else WORDS
    values = {
        "dim": 16, "layers": 2, "heads": 4, "ff_dim": 24, "vocab": len(tokenizer), "max_length": 32,
        "image_size": SIDE, "patch_size": PATCH, "norm_order": "pre",
    }  # fmt: skip
    torch.manual_seed(seed)
    model = build(ModelConfig(**{**values, **SHAPES[shape], **changes})).double()
    for parameter in model.parameters():  # far from even, so that every change shows
        parameter.data += 0.3 * torch.randn_like(parameter)
    return Inside(model, {"tokenizer": tokenizer}, search=SearchConfig(max_length=10))


def given(shape: str, text: str = "the animal did not cross") -> dict[str, object]:
    """What that model can be asked to look at."""
    if SHAPES[shape].get("source") == "features":
        return {"picture": torch.rand(6, 5).double()}
    if "source" in SHAPES[shape]:
        return {"picture": torch.rand(3, SIDE, SIDE).double()}
    return {"text": text}
