"""Marian (Junczys-Dowmunt et al. 2018; Opus-MT): the Transformer of 2017, post-LN with sinusoidal positions.

The layers are BART's; positions are computed and not stored. In Marian the sines fill the first half of a position
vector and the cosines the second (pairs = "halves"); in the paper they alternate ("interleaved"). A model with
interleaved pairs is exported exactly by permuting its residual stream: P x = (x₀, x₂, …, x₁, x₃, …). Everything that
reads from or writes to the stream is permuted with it,

    E Pᵀ,   W_in Pᵀ,   P W_out,   P b_out,   P g, P b of a norm (mean and variance do not depend on the order),

so each layer computes P times its original output, and the logits (E Pᵀ)(P x) = E x are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.errors import UserError
from regard.interop import bart
from regard.interop.bart import BIAS, OUTPUT, SHARED
from regard.interop.family import Family, Json, Key, read_architecture
from regard.interop.rules import Rule, Tensors
from regard.models.config import ModelConfig
from regard.nn.position import Sinusoidal

# The axis of a tensor that corresponds to the residual stream, by the end of its name
STREAM = {
    ".tokens.weight": 1, ".project.weight": 1, ".qkv.weight": 1, ".q.weight": 1, ".kv.weight": 1, ".up.weight": 1,
    ".out.weight": 0, ".out.bias": 0, ".down.weight": 0, ".down.bias": 0, "norm.weight": 0, "norm.bias": 0,
}  # fmt: skip


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bart.embeddings(config)
    yield from bart.layers(config)


def infer(hf: Json, tensors: Tensors | None) -> Json:
    read_architecture(MARIAN, hf)
    bart.check_symmetry(hf)
    fields = {**bart.infer_sharing(hf, tensors), "logit_bias": tensors is None or BIAS in tensors, "pairs": "halves"}
    return fields if fields["share_embeddings"] else {**fields, "target_vocab_size": hf.get("decoder_vocab_size")}


def to_config(config: ModelConfig) -> Json:
    return {
        **bart.sizes(config),
        "architectures": ["MarianMTModel"],
        "share_encoder_decoder_embeddings": config.share_embeddings,
        "decoder_vocab_size": config.target_size,
        "decoder_start_token_id": 0,  # required; a tokenizer or the metadata replaces it
    }


def check(config: ModelConfig, tensors: Tensors) -> None:
    """Stored position embeddings must be the sinusoidal ones that we compute."""
    for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
        if name in tensors:
            stored = tensors[name].double()
            computed = Sinusoidal(config).embed(torch.arange(len(stored))[None])[0]
            if stored.shape != computed.shape or (stored - computed).abs().max() > 2e-3:  # perhaps in half precision
                raise UserError(f"{name}: not the sinusoidal embeddings of a Marian model; it cannot be imported")


def to_halves(config: ModelConfig, tensors: Tensors) -> Tensors:
    """Our tensors with the residual stream in the order of pairs = "halves"."""
    if config.pairs == "halves":
        return tensors
    order = torch.cat((torch.arange(0, config.dim, 2), torch.arange(1, config.dim, 2)))

    def reorder(name: str) -> torch.Tensor:
        axis = next((axis for end, axis in STREAM.items() if name.endswith(end)), None)
        return tensors[name] if axis is None else tensors[name].index_select(axis, order.to(tensors[name].device))

    return {name: reorder(name) for name in tensors}


MARIAN = Family(
    model_type="marian",
    name="Marian",
    architectures=("MarianMTModel",),
    keys=(*bart.KEYS, Key("vocab_size", "vocab_size", 58101)),
    fixed={**bart.FIXED, "position": "sinusoidal", "embed_norm": False},
    rules=rules,
    supported={**bart.SUPPORTED, "normalize_embedding": False, "static_position_embeddings": True},
    prefix="model.",
    unprefixed=(OUTPUT, BIAS),
    unused=rf"{SHARED}|(encoder|decoder)\.embed_positions\.weight",
    infer=infer,
    mismatches=lambda config: bart.common_mismatches("Marian", config),
    to_config=to_config,
    copies=bart.copies,
    written_copies=lambda config: bart.written_copies(config) if config.share_embeddings else {},
    zeros=bart.zeros,
    check=check,
    reorder=to_halves,
)
