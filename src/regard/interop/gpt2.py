"""GPT-2 (Radford et al. 2019): a decoder with pre-LN, learned positions and the tanh form of GELU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from regard.interop.family import Family, Json, is_tied
from regard.interop.rules import Rule, Tensors, conv1d, layer, linear, same
from regard.models.config import ModelConfig

NORMS = {"attention_norm": ("ln_1",), "feedforward_norm": ("ln_2",)}
MATRICES = {  # [in, out] in GPT-2, [out, in] here
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}


class GPT2(Family):
    model_type = "gpt2"
    name = "GPT-2"
    architectures = ("GPT2LMHeadModel", "GPT2Model")
    keys = (
        ("dim", "n_embd", 768),
        ("layers", "n_layer", 12),
        ("heads", "n_head", 12),
        ("vocab_size", "vocab_size", 50257),
        ("max_length", "n_positions", 1024),
        ("activation", "activation_function", "gelu_new"),
        ("norm_eps", "layer_norm_epsilon", 1e-5),
        ("dropout", "resid_pdrop", 0.1),
        ("attention_dropout", "attn_pdrop", 0.1),
        ("embed_dropout", "embd_pdrop", 0.1),
    )
    fixed: ClassVar[Json] = {
        "architecture": "decoder", "input": "tokens", "position": "learned", "norm": "layer", "norm_order": "pre",
        "final_norm": True, "embed_norm": False, "bias": True, "embed_scale": False, "head_layer": False,
        "logit_scale": 1.0, "logit_bias": False,
    }  # fmt: skip
    supported: ClassVar[Json] = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    free = ("attention_scale",)
    prefix = "transformer."
    unprefixed = ("lm_head.",)
    unused = r"h\.\d+\.attn\.(bias|masked_bias)"  # the causal mask, a buffer of old versions

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield same("embedding.tokens.weight", "wte.weight")
        yield same("decoder.position.embedding.weight", "wpe.weight")
        for number in range(config.layers):
            ours, theirs = f"decoder.blocks.{number}", f"h.{number}"
            yield from layer(ours, theirs, NORMS)
            for name, part in MATRICES.items():
                yield from conv1d(f"{ours}.{name}", f"{theirs}.{part}")
        yield from linear("decoder.norm", "ln_f")
        if not config.tie_embeddings:
            yield same("output_head.project.weight", "lm_head.weight")

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        width = hf.get("n_embd") or 768
        return {
            "ff_dim": hf.get("n_inner") or (4 * width if isinstance(width, int) else width),
            "tie_embeddings": is_tied(hf, tensors, "lm_head.weight", "wte.weight"),
            "attention_scale": 1.0 if hf.get("scale_attn_weights") is False else None,
        }

    def mismatches(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        yield from super().mismatches(config)
        if config.scale != 1.0 and not math.isclose(config.scale, config.key_dim**-0.5):
            yield "attention_scale", "1 / sqrt(head_dim) or 1"

    def to_config(self, config: ModelConfig) -> Json:
        return {
            "n_inner": config.ff_dim,
            "tie_word_embeddings": config.tie_embeddings,
            "scale_attn_weights": config.scale != 1.0 or config.key_dim == 1,
        }

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {"lm_head.weight": "wte.weight"} if config.tie_embeddings else {}
