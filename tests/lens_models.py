"""GPT-2 of transformers with random weights, and the same model opened by Regard: peers of the analysis functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inside_models import WORDS
from regard.explore.inside import Inside
from regard.interop import read_folder
from regard.predict.bundle import Bundle

CLEAN, CORRUPTED = "the animal did not cross the street", "the animal did not cross the animal"
SIZES = {"n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 4}


def make_peers(folder: Path) -> tuple[Any, Inside]:
    """(GPT2LMHeadModel, Inside) with the same weights, large enough that every effect is far above rounding."""
    import transformers

    config = transformers.GPT2Config(vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0, **SIZES)
    config._attn_implementation = "eager"
    peer = transformers.GPT2LMHeadModel(config).eval()
    for seed, (name, parameter) in enumerate(peer.named_parameters()):  # numbers that no version of PyTorch changes
        values = np.random.RandomState(seed).standard_normal(parameter.shape)
        parameter.data = torch.tensor(0.2 * values + (".ln_" in name and name.endswith("weight")), dtype=torch.float32)
    peer.save_pretrained(folder)
    model = read_folder(folder).model
    return peer, Inside(Bundle(model, {"tokenizer": WORDS}))


def ids(text: str) -> Tensor:
    return torch.tensor([WORDS.encode(text)])
