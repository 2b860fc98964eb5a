"""A small untrained model of every kind that predicts, with inputs for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

import regard
from regard.models.config import ModelConfig
from regard.predict.captioner import Captioner
from regard.predict.classifier import ImageClassifier, TextClassifier
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.regressor import Regressor
from regard.predict.translator import Translator
from regard.text.tokenizer import MASK_NAMES, Tokenizer

LINES = ["one two three", "four five"]
WORDS = Tokenizer.train(LINES, "word")
MASKED = WORDS.with_special_tokens(MASK_NAMES[:1])
SMALL = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "image_size": 8, "patch_size": 4, "channels": 1}
DATA = {"context": 3, "horizon": 2, "period": 1, "mean": [5.0], "std": [2.0], "train": ["a.csv"]}

# name: (fields of the config, tokenizer, tables of the recipe, predictor, inputs, command line after RUN)
KINDS: dict[str, tuple[dict[str, Any], Tokenizer | None, dict[str, Any], type, list[Any], list[str]]] = {
    "translate": ({}, WORDS, {}, Translator, LINES, ["one two"]),
    "recurrent": ({"architecture": "recurrent"}, WORDS, {}, Translator, LINES, ["one two"]),
    "generate": ({"architecture": "decoder"}, WORDS, {}, Generator, LINES, ["one", "--max-tokens", "3"]),
    "classify": (
        {"architecture": "encoder", "output_head": "classes", "classes": 2, "pooling": "mean"},
        WORDS, {"data": {"classes": ["bad", "good"]}}, TextClassifier, LINES, ["one two"],
    ),
    "images": (
        {"architecture": "encoder", "input": "patches", "output_head": "classes", "classes": 2},
        None, {}, ImageClassifier, ["a.png"], ["a.png"],
    ),
    "fill": ({"architecture": "encoder"}, MASKED, {}, MaskPredictor, ["one <mask>"], ["one <mask>"]),
    "caption": ({"input": "patches"}, WORDS, {}, Captioner, ["a.png"], ["a.png"]),
    "predict": (
        {"input": "features", "output_head": "values", "feature_dim": 1},
        None, {"data": DATA}, Regressor, [[1.0, 2.0, 3.0]], ["1 2 3"],
    ),
}  # fmt: skip


def make_run(kind: str, **changes: object) -> None:
    """The folder "run", as `regard.save` writes it: no task in the recipe; and an image, "a.png"."""
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save("a.png")
    fields, tokenizer, recipe, *_ = KINDS[kind]
    sizes = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    torch.manual_seed(1)
    model = regard.build(ModelConfig(**{**SMALL, **sizes, **fields, **changes}))  # type: ignore[arg-type]
    tokenizers = {} if tokenizer is None else {"tokenizer": tokenizer}
    regard.save(model, "run", tokenizers=tokenizers, recipe=recipe)
