"""Three architectures of the same parts: encoder-decoder, decoder-only and encoder-only.

    EncoderDecoder   source -> encoder -> memory;  target -> decoder(memory) -> logits     Vaswani et al. 2017
                     or values, from sequences of numbers to sequences of numbers
    Decoder          tokens -> decoder -> logits of the next token                         Radford et al. 2019
    Encoder          source -> encoder -> states, a pooled vector, classes or token logits Devlin et al. 2018

`build(config)` creates one of them, or the `Recurrent` baseline of 2015. Logits have shape [B, N, vocab_size], those
of classes [B, classes], or with pooling = "none" [B, N, classes]. `is_real` is True for real tokens and False for
padding. A model that generates has `start` (encode the source, create a cache) and `step` (process more tokens with
that cache).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.output_head import OutputHead
from regard.models.prune import attention_layers, remove_heads
from regard.models.recurrent import Recurrent
from regard.nn.block import Memory, Stack
from regard.nn.cache import Cache
from regard.nn.embedding import Features, Patches, Tokens
from regard.nn.mask import Mask, Positions, everything
from regard.nn.trace import Traceable


def make_embedding(config: ModelConfig) -> Tokens | Patches | Features:
    match config.input:
        case "tokens":
            return Tokens(config.vocab_size or 0, config.dim, scaled=config.embed_scale, token_types=config.token_types)
        case "patches":
            sizes = (config.image_size, config.patch_size, config.channels, config.dim)
            mean, std = config.pixel_mean, config.pixel_std
            return Patches(*sizes, cls=config.has_cls, stem=config.stem_widths, mean=mean, std=std)
        case "features":
            return Features(config.feature_dim, config.dim)


@dataclass
class State:
    """The state of a generation: the cache, and the memory that cross-attention attends to."""

    cache: Cache
    memory: Memory | None = None

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order (beam search); see `Cache.reorder` for `sources`."""
        self.cache.reorder(rows, sources)
        kept = rows if sources is None else sources
        if self.memory is not None and (sources is None or sources.shape[0] < self.memory.states.shape[0]):
            self.memory = Memory(self.memory.states.index_select(0, kept), self.memory.positions.reorder(kept))


class EncoderDecoder(Traceable):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, values = config, config.output_head == "values"
        self.stages = ("values",) if values else ("logits",)
        self.source_embedding = source = make_embedding(config)
        size, dim = config.feature_dim if values else config.target_size, config.dim
        target = Features(size, dim) if values else Tokens(size, dim, scaled=config.embed_scale)
        self.target_embedding: Tokens | Features = target
        if config.share_embeddings and isinstance(source, Tokens) and isinstance(target, Tokens):
            target.tokens = source.tokens
        self.encoder = Stack(config, causal=False)
        layers = config.layers if config.decoder_layers is None else config.decoder_layers
        self.decoder = Stack(replace(config, layers=layers, pruned=None), causal=config.causal, memory=True)
        tied = target.tokens if config.tie_embeddings and isinstance(target, Tokens) else None
        self.output_head = OutputHead(config, size, tied)
        initialise(self)

    def encode(self, source: Tensor, is_real: Tensor | None = None, document: Tensor | None = None) -> Memory:
        x = self.source_embedding(source)
        positions = Positions.of(x.shape[1], x.device, is_real, document)
        return Memory(self.encoder(x, positions), positions)

    def states(
        self,
        target: Tensor,
        memory: Memory,
        is_real: Tensor | None = None,
        document: Tensor | None = None,
        mask: Mask = everything,
    ) -> Tensor:
        """The input of the output head, [B, T, dim]. Padding on the right needs no `is_real` if the mask is causal."""
        x = self.target_embedding(target)
        positions = Positions.of(x.shape[1], x.device, is_real, document)
        return self.decoder(x, positions, memory=memory, mask=mask)

    def forward(
        self, source: Tensor, target: Tensor, source_is_real: Tensor | None = None, target_is_real: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: logits of the token after each token of `target`.

        With output_head = "values", target and output are [B, T, feature_dim]; zeros take the place of <s>.
        """
        return self._output(self.states(target, self.encode(source, source_is_real), target_is_real))

    def _output(self, states: Tensor) -> Tensor:
        return self.mark(self.stages[0], self.output_head(states))

    def start(self, source: Tensor, is_real: Tensor | None = None, capacity: int = 0) -> State:
        return State(Cache(capacity), self.encode(source, is_real))

    def step(self, tokens: Tensor, state: State, is_real: Tensor | None = None, mask: Mask = everything) -> Tensor:
        """Process `tokens` [B, n] after those in `state`; logits [B, n, vocab_size] of the token after each."""
        x = self.target_embedding(tokens)
        positions = state.cache.next_positions(x.shape[1], x.device, is_real)
        return self._output(self.decoder(x, positions, memory=state.memory, cache=state.cache, mask=mask))


class Decoder(Traceable):
    stages = ("logits",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, size = config, config.vocab_size or 0
        self.embedding = Tokens(size, config.dim, scaled=config.embed_scale)
        self.decoder = Stack(config, causal=True)
        self.output_head = OutputHead(config, size, self.embedding.tokens if config.tie_embeddings else None)
        initialise(self)

    def forward(
        self, tokens: Tensor, is_real: Tensor | None = None, document: Tensor | None = None, mask: Mask = everything
    ) -> Tensor:
        return self.mark("logits", self.output_head(self.states(tokens, is_real, document, mask)))

    def states(
        self, tokens: Tensor, is_real: Tensor | None = None, document: Tensor | None = None, mask: Mask = everything
    ) -> Tensor:
        """The input of the output head, [B, N, dim]."""
        x = self.embedding(tokens)
        make = self.decoder.part.positions if self.training and self.decoder.part else Positions.of
        return self.decoder(x, make(x.shape[1], x.device, is_real, document), mask=mask)

    def start(self, capacity: int = 0) -> State:
        return State(Cache(capacity))

    def step(
        self, tokens: Tensor, state: State, is_real: Tensor | None = None, mask: Mask = everything, last: bool = False
    ) -> Tensor:
        """As in EncoderDecoder; with `last`, only the logits after the last token, [B, 1, vocab_size]."""
        x = self.embedding(tokens)
        positions = state.cache.next_positions(x.shape[1], x.device, is_real)
        x = self.decoder(x, positions, cache=state.cache, mask=mask)
        return self.mark("logits", self.output_head(x[:, -1:] if last else x))


class Encoder(Traceable):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, head = config, config.output_head
        is_pooled = head == "pooled" or (head == "classes" and config.pooling != "none")
        self.stages = ("pooled",) * is_pooled + ("logits",) * (head in ("classes", "tokens"))
        self.embedding = embedding = make_embedding(config)
        self.encoder = Stack(config, causal=False)
        self.pooler = nn.Linear(config.dim, config.dim) if config.pooler else None
        self.classifier = nn.Linear(config.dim, config.classes) if head == "classes" and config.classes else None
        tied = embedding.tokens if isinstance(embedding, Tokens) and config.tie_embeddings else None
        self.output_head = OutputHead(config, config.vocab_size or 0, tied) if head == "tokens" else None
        initialise(self)

    def encode(
        self,
        source: Tensor,
        is_real: Tensor | None = None,
        types: Tensor | None = None,
        mask: Mask = everything,
        document: Tensor | None = None,
    ) -> Tensor:
        """States [B, N, dim]."""
        x = self.embedding(source) if types is None else self.embedding(source, types)
        return self.encoder(x, Positions.of(x.shape[1], x.device, is_real, document), mask=mask)

    def pooled(self, states: Tensor, is_real: Tensor | None = None) -> Tensor:
        """One vector per sequence: the first real state, or the mean of the real ones. [B, dim]"""
        if states.shape[1] == 0:
            raise UserError("pooling: the sequence has no tokens; pass at least one")
        if self.config.pooling == "cls":
            x = states[:, 0]
            if is_real is not None:  # there may be padding on the left
                first = is_real.int().argmax(dim=1)
                x = states[torch.arange(first.shape[0], device=first.device), first]
        elif is_real is None:
            x = states.mean(dim=1)
        else:
            real = is_real[..., None].to(states.dtype)
            x = (states * real).sum(dim=1) / real.sum(dim=1).clamp_min(1)
        return x if self.pooler is None else torch.tanh(self.pooler(x))

    def pooled_documents(self, states: Tensor, document: Tensor, count: int) -> Tensor:
        """The same for documents 1 to `count` of packed rows: [B, count, dim], zeros for those that do not exist.

        A matmul adds in a fixed order, unlike index_add on a GPU.
        """
        chosen = document[:, None, :] == torch.arange(1, count + 1, device=document.device)[:, None]  # [B, count, N]
        if self.config.pooling == "cls":
            chosen = chosen & (chosen.cumsum(dim=-1) == 1)
        x = (chosen.to(states.dtype) @ states) / chosen.sum(dim=-1, keepdim=True).clamp_min(1)
        return x if self.pooler is None else torch.tanh(self.pooler(x))

    def forward(
        self, source: Tensor, is_real: Tensor | None = None, types: Tensor | None = None, mask: Mask = everything
    ) -> Tensor:
        states = self.encode(source, is_real, types, mask)
        if self.output_head is not None:
            return self.mark("logits", self.output_head(states))
        x = self.mark("pooled", self.pooled(states, is_real)) if "pooled" in self.stages else states
        return x if self.classifier is None else self.mark("logits", self.classifier(x))


SequenceToSequence = EncoderDecoder | Recurrent  # models with a source and a target
Model = SequenceToSequence | Decoder | Encoder


def build(config: ModelConfig) -> Model:
    """A new model with random weights (seed torch first for reproducible ones)."""
    if not isinstance(config, ModelConfig):
        raise UserError(f"build({config!r}): pass a ModelConfig; preset({str(config)!r}) makes one by name")
    match config.architecture:
        case "encoder-decoder":
            return EncoderDecoder(config)
        case "decoder":
            return Decoder(config)
        case "encoder":
            return Encoder(config)
        case "recurrent":
            return Recurrent(config)


def initialise(model: EncoderDecoder | Decoder | Encoder) -> None:
    """Random weights, then without the heads in `config.pruned`.

    xavier: Glorot & Bengio 2010, as in the code of Vaswani et al.; normal: standard deviation 0.02 (GPT-2), smaller
    for the last projection of each residual branch.
    """
    config, head = model.config, model.output_head
    depth = sum(len(stack.blocks) for stack in model.modules() if isinstance(stack, Stack))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.dim**-0.5 if config.embed_scale else 0.02)
        elif isinstance(module, nn.Linear | nn.Conv2d) and not name.startswith("output_head.project"):
            if config.init == "normal":
                last = name.endswith(("attention.out", "cross.out", ".down"))
                nn.init.normal_(module.weight, std=0.02 * (2 * depth) ** -0.5 if last else 0.02)
            else:
                nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if head is not None and (config.output_head == "values" or not config.tie_embeddings):
        nn.init.normal_(head.project.weight, std=config.dim**-0.5)
    if config.pruned:
        layers = attention_layers(model)
        for name, heads in config.pruned.items():
            remove_heads(model, name, layers[name], heads)
