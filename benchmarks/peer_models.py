"""The same encoder-decoder in other libraries, behind one call:  model(source, is_real, target) -> logits [B, T, V].

    torch            nn.Transformer, with the embedding, positions and output layer that it leaves to its user
    marian           transformers.MarianMTModel: Marian is the Transformer of 2017, and so is ours
    x-transformers   Encoder and Decoder in a TransformerWrapper each

All have the layers, width, heads, feed-forward width, vocabulary and activation of `config`, one embedding matrix for
source, target and output, sinusoidal positions, and dropout on the output of each sub-layer and on the embeddings, not
on attention weights (x-transformers drops inside its feed-forward instead). The remaining differences show in the
number of parameters: nn.Transformer ends both stacks with one more norm; x-transformers is pre-norm without biases in
attention.

Masks: padding in the source is masked, and the target is causal. Padding is at the end of a target, where no real token
attends to it, so it needs no mask.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.interop.convert import config_to_hf
from regard.models.config import ModelConfig
from regard.nn.position import Sinusoidal


class TorchTransformer(nn.Module):
    positions: Tensor  # [max_length, dim]
    future: Tensor  # [max_length, max_length] True: masked

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = config.layers if config.decoder_layers is None else config.decoder_layers
        self.table = nn.Embedding(config.target_size, config.dim)
        nn.init.normal_(self.table.weight, std=config.dim**-0.5)
        self.stacks = nn.Transformer(
            config.dim, config.heads, config.layers, layers, config.ff_dim, config.dropout, config.activation,
            batch_first=True,
        )  # fmt: skip
        for part in self.stacks.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0  # of the attention weights
            elif isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                part.dropout.p = 0.0  # inside the feed-forward
        self.dropout = nn.Dropout(config.embed_dropout)
        self.scale = math.sqrt(config.dim)
        positions = Sinusoidal(config).embed(torch.arange(config.max_length)[None])[0]
        self.register_buffer("positions", positions.float(), persistent=False)
        hidden = nn.Transformer.generate_square_subsequent_mask(config.max_length, dtype=torch.bool)
        self.register_buffer("future", hidden, persistent=False)

    def forward(self, source: Tensor, is_real: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        states = self.stacks(
            self._embed(source), self._embed(target), tgt_mask=self.future[:length, :length], tgt_is_causal=True,
            src_key_padding_mask=~is_real, memory_key_padding_mask=~is_real,
        )  # fmt: skip
        return F.linear(states, self.table.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.table(ids) * self.scale + self.positions[: ids.shape[1]])


class Marian(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 2}
        self.model = MarianMTModel(MarianConfig.from_dict(config_to_hf(config, ids)))

    def forward(self, source: Tensor, is_real: Tensor, target: Tensor) -> Tensor:
        found = self.model(input_ids=source, attention_mask=is_real, decoder_input_ids=target, use_cache=False)
        logits: Tensor = found.logits
        return logits


class XTransformers(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from x_transformers import Decoder, Encoder, TransformerWrapper

        parts = {
            "dim": config.dim, "heads": config.heads, "attn_dim_head": config.dim // config.heads, "attn_flash": True,
            "ff_mult": config.ff_dim / config.dim, "ff_dropout": config.dropout, "ff_custom_activation": nn.ReLU(),
            "verbose": False,
        }  # fmt: skip
        around = {
            "num_tokens": config.target_size, "max_seq_len": config.max_length, "emb_dropout": config.embed_dropout,
            "scaled_sinu_pos_emb": True,
        }  # fmt: skip
        layers = config.layers if config.decoder_layers is None else config.decoder_layers
        encoder = Encoder(depth=config.layers, **parts)
        self.encoder = TransformerWrapper(attn_layers=encoder, return_only_embed=True, **around)
        decoder = Decoder(depth=layers, cross_attend=True, **parts)
        self.decoder = TransformerWrapper(
            attn_layers=decoder, token_emb=self.encoder.token_emb, tie_embedding=True, **around
        )

    def forward(self, source: Tensor, is_real: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source, mask=is_real)
        logits: Tensor = self.decoder(target, context=memory, context_mask=is_real)
        return logits


MODELS: dict[str, type[nn.Module]] = {"torch": TorchTransformer, "marian": Marian, "x-transformers": XTransformers}
