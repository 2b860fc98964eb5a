"""Marian (Junczys-Dowmunt et al. 2018; Opus-MT): the Transformer of 2017, post-LN with sinusoidal positions.

The layers are BART's; positions are computed and never stored. There the sines fill the first half of a
vector and the cosines the second (pairs = "halves"), where the paper lets them take turns ("interleaved").
A model with interleaved pairs goes out exactly all the same, with the numbers of its residual stream in
another order: P x = (x₀, x₂, …, x₁, x₃, …). Whatever reads or writes the stream is reordered with it,

    E Pᵀ,   W_in Pᵀ,   P W_out,   P b_out,   P g, P b of a norm (whose mean and variance know no order),

so each layer computes P times what it did, and the logits (E Pᵀ)(P x) = E x stay.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.errors import UserError
from regard.interop.bart import (
    BIAS,
    FIXED,
    KEYS,
    ONLY,
    OUTPUT,
    SHARED,
    check_symmetry,
    common_doubts,
    copies,
    layers,
    open_tables,
    repeats,
    sizes,
    tables,
    zeros,
)
from regard.interop.family import Family, Json, Key, read_architecture
from regard.interop.rules import Rule, Tensors
from regard.models.config import ModelConfig
from regard.nn.position import Sinusoidal

# The axis along which a tensor touches the residual stream, by the end of its name.
STREAM = {
    ".tokens.weight": 1, ".project.weight": 1, ".qkv.weight": 1, ".q.weight": 1, ".kv.weight": 1, ".up.weight": 1,
    ".out.weight": 0, ".out.bias": 0, ".down.weight": 0, ".down.bias": 0, "norm.weight": 0, "norm.bias": 0,
}  # fmt: skip


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from tables(config)
    yield from layers(config)


def open_fields(hf: Json, tensors: Tensors | None) -> Json:
    read_architecture(MARIAN, hf)
    check_symmetry(hf)
    fields = {**open_tables(hf, tensors), "logit_bias": tensors is None or BIAS in tensors}
    return fields if fields["share_embeddings"] else {**fields, "target_vocab_size": hf.get("decoder_vocab_size")}


def doubts(config: ModelConfig) -> list[str]:
    return common_doubts("Marian", config)


def extend(config: ModelConfig) -> Json:
    return {
        **sizes(config),
        "architectures": ["MarianMTModel"],
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "decoder_vocab_size": config.target_size,
        "decoder_start_token_id": 0,  # a number is compulsory; a tokenizer or `notes` says which
    }


def inspect(config: ModelConfig, tensors: Tensors) -> None:
    """A position table that was stored must be the one that we compute."""
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        if name in tensors:
            stored = tensors[name].double()
            table = Sinusoidal(config).embed(torch.arange(len(stored))[None])[0]
            if stored.shape != table.shape or (stored - table).abs().max() > 2e-3:  # stored in half precision perhaps
                raise UserError(f"{name} is not the sinusoidal table that a Marian model has; it cannot be imported")


def to_halves(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Our tensors with the residual stream in the order of pairs = "halves"."""
    if config.pairs == "halves":
        return tensors
    order = torch.cat((torch.arange(0, config.dim, 2), torch.arange(1, config.dim, 2)))

    def reorder(name: str) -> torch.Tensor:
        axis = next((axis for end, axis in STREAM.items() if name.endswith(end)), None)
        return tensors[name] if axis is None else tensors[name].index_select(axis, order.to(tensors[name].device))

    return {name: reorder(name) for name in tensors}


def marian_repeats(config: ModelConfig) -> dict[str, str]:
    return repeats(config) if config.share_embeddings else {}


MARIAN = Family(
    kind="marian",
    title="Marian",
    architectures=("MarianMTModel",),
    keys=(*KEYS, Key("vocab_size", "vocab_size", 58101)),
    fixed={**FIXED, "position": "sinusoidal", "embed_norm": False},
    rules=rules,
    only={**ONLY, "normalize_embedding": False, "static_position_embeddings": True},
    prefix="model.",
    outside=(OUTPUT, BIAS),
    unused=rf"{SHARED}|(encoder|decoder)\.embed_positions\.weight",
    open=lambda hf, tensors: {**open_fields(hf, tensors), "pairs": "halves"},
    doubts=doubts,
    extend=extend,
    copies=copies,
    repeats=marian_repeats,
    zeros=zeros,
    inspect=inspect,
    arrange=to_halves,
)
