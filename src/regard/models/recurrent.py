"""The recurrent baseline: the encoder-decoder with attention that came before the Transformer.

The encoder reads the source in both directions; h_j = [h→_j; h←_j] describes token j. The decoder generates one token
at a time. Before each one it scores its state against every h_j and takes their weighted mean:

    e_ij = score(s_i-1, h_j)       α_i = softmax(e_i)       c_i = Σ_j α_ij h_j           (attention, one head)
    s_i  = cell([E y_i-1; c_i], s_i-1)                      s_0 = tanh(W h←_1)
    p(y_i) ∝ exp(W_o t_i)          t_i = max of pairs in  W_t [s_i; c_i; E y_i-1]         (maxout readout)

    score   additive        vᵀ tanh(U s + W h)    Bahdanau et al. 2015
            multiplicative  s · W h               Luong et al. 2015 ("general")
            dot             s · (h→ + h←)         Luong et al. 2015; the sum has the width of s

    h [B, S, 2 dim]    s [B, dim]    c [B, 2 dim]    t [B, T, embed_dim]    weights [B, 1, T, S]

Without attention (`cross_attention = false`) the source is one vector for all steps, c_i = [h→_S; h←_1], the last state
of each direction: the encoder-decoder of Cho et al. 2014.

State s_i depends on c_i, and c_i on s_i-1, so the decoder loops over time even in training; the Transformer removed
this loop. What does not depend on the state is computed outside of it: W h once per sentence, readout and logits once
for all tokens. With several layers, the state of the last one computes the attention. The memory cell of an LSTM
starts at zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.output_head import OutputHead
from regard.nn.attention import attention_stages, dot
from regard.nn.block import Memory
from regard.nn.dropout import dropout
from regard.nn.embedding import Tokens
from regard.nn.mask import AttentionMask, Positions, everything
from regard.nn.score import additive_projected
from regard.nn.trace import Traceable

Layer = tuple[Tensor, ...]  # one layer's state: (h,) of a GRU, (h, memory cell) of an LSTM, [B, dim] each


class RecurrentEncoder(Traceable):
    """A bidirectional RNN over the source: [B, S, embed_dim] -> [B, S, 2 dim]."""

    stages = ("embedding", "embedded", "output")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kind = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
        between = config.dropout if config.layers > 1 else 0.0
        sizes, options = (config.token_dim, config.dim, config.layers), {"batch_first": True, "bidirectional": True}
        self.layers = kind(*sizes, bias=config.bias, dropout=between, **options)

    def forward(self, x: Tensor, is_real: Tensor | None = None) -> Tensor:
        x = self.mark("embedded", _dropout(self, self.mark("embedding", x), self.config.embed_dropout))
        states = self.layers(x)[0] if is_real is None else self._real(x, is_real)
        return self.mark("output", _dropout(self, states, self.config.dropout))

    def _real(self, x: Tensor, is_real: Tensor) -> Tensor:
        """Skip padding, wherever it is; its states are zero."""
        order = (~is_real).int().argsort(dim=1, stable=True)[..., None]  # real tokens first, in their order
        lengths = is_real.sum(dim=1).clamp_min(1).cpu()  # an empty row still needs a length
        padded = x.gather(1, order.expand_as(x))
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=x.shape[1])
        back = torch.empty_like(states).scatter(1, order.expand_as(states), states)
        return back.masked_fill(~is_real[..., None], 0.0)


@dataclass
class RecurrentState:
    """The state of a generation: that of each layer, and the keys and values of the source."""

    layers: list[Layer]
    k: Tensor  # [B, 1, S, dim] keys of the source
    v: Tensor  # [B, 1, S, 2 dim] values of the source
    positions: Positions  # of the source
    length: int = 0  # tokens read so far

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order (beam search); the source is stored once per row, whatever `sources` says."""
        self.layers = [tuple(part.index_select(0, rows) for part in layer) for layer in self.layers]
        self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)
        self.positions = self.positions.reorder(rows)


def ends(states: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last state of each direction, h→_S and h←_1, of states [B, S, 2 dim]: [B, dim] each."""
    rows, dim = torch.arange(states.shape[0], device=states.device), states.shape[2] // 2
    first = torch.zeros_like(rows) if is_real is None else is_real.int().argmax(dim=1)
    last = first - 1 if is_real is None else is_real.shape[1] - 1 - is_real.flip(1).int().argmax(dim=1)
    return states[rows, last, :dim], states[rows, first, dim:]


class Alignment(Traceable):
    """Attention from the state of the decoder to the source, with one head."""

    stages = ("q", "k", "v", "mask", "scores", "scaled", "masked", "weights", "heads")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dim
        score = config.attention_score if config.cross_attention else "dot"
        self.q = nn.Linear(dim, dim, bias=False) if score == "additive" else None
        self.k = None if score == "dot" else nn.Linear(2 * dim, dim, bias=False)
        self.v = nn.Parameter(torch.empty(1, dim)) if score == "additive" else None  # [heads, dim]
        self.scale = 1.0 if config.attention_scale is None else config.attention_scale

    def keys(self, states: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Once per sentence: keys [B, 1, S, dim] and values [B, 1, S, 2 dim].

        Without attention all keys are zero and all values the same, so that every weighted mean is this value.
        """
        if not self.config.cross_attention:
            states = torch.cat(ends(states, positions.is_real), dim=-1)[:, None].expand_as(states)
            return self.mark("k", torch.zeros_like(states[:, None, :, : self.config.dim])), self.mark(
                "v", states[:, None]
            )
        k = states.unflatten(-1, (2, -1)).sum(dim=-2) if self.k is None else self.k(states)
        return self.mark("k", k[:, None]), self.mark("v", states[:, None])

    def mask(self, queries: Positions, keys: Positions) -> Tensor | None:
        """bool [B|1, 1, T|1, S], or None where nothing is masked."""
        attention_mask = AttentionMask(everything, queries, keys)
        if self.tap is not None:
            attention_mask = attention_mask.with_mask(self.tap.see(self.path + "mask", attention_mask.mask))
        return None if attention_mask.kind == "everything" else attention_mask.dense()

    def forward(self, state: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """state [B, dim] -> context [B, 2 dim]"""
        q = self.mark("q", (state if self.q is None else self.q(state))[:, None, None])  # [B, 1, 1, dim]
        dropout = self.config.attention_dropout if self.training and self.config.cross_attention else 0.0
        score = dot if self.v is None else partial(additive_projected, v=self.v)
        stages = attention_stages(q, k, v, mask, scale=self.scale, dropout=dropout, score=score, mark=self.mark)
        return stages.output[:, 0, 0]


class RecurrentDecoder(Traceable):
    """Attention, one cell per layer, and a readout."""

    stages = ("embedding", "embedded", "states", "output")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, dim, width = config, config.dim, config.token_dim
        layers = config.layers if config.decoder_layers is None else config.decoder_layers
        kind = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[config.cell]
        self.first = nn.Linear(dim, layers * dim, bias=config.bias)  # s_0 of every layer
        self.cross = Alignment(config)
        self.cells = nn.ModuleList(
            kind(dim if layer else width + 2 * dim, dim, bias=config.bias) for layer in range(layers)
        )
        self.readout = nn.Linear(3 * dim + width, 2 * width, bias=config.bias)

    def start(self, memory: Memory) -> RecurrentState:
        states = memory.states
        _, backward = ends(states, memory.positions.is_real)
        begin = torch.tanh(self.first(backward)).chunk(len(self.cells), dim=-1)
        lstm = self.config.cell == "lstm"
        layers: list[Layer] = [(h, torch.zeros_like(h)) if lstm else (h,) for h in begin]
        return RecurrentState(layers, *self.cross.keys(states, memory.positions), memory.positions)

    def forward(self, x: Tensor, state: RecurrentState, is_real: Tensor | None = None) -> Tensor:
        """Embeddings x [B, T, embed_dim] -> t [B, T, embed_dim]; updates `state`."""
        x = self.mark("embedded", _dropout(self, self.mark("embedding", x), self.config.embed_dropout))
        mask = self.cross.mask(Positions.of(x.shape[1], x.device, start=state.length), state.positions)
        states, contexts = [], []
        with self.cross.joined(dim=2):
            for at, token in enumerate(x.unbind(dim=1)):
                visible = mask if mask is None or mask.shape[2] == 1 else mask[:, :, at : at + 1]
                contexts.append(self.cross(state.layers[-1][0], state.k, state.v, visible))
                layers = self._advance(torch.cat((token, contexts[-1]), dim=-1), state.layers)
                if is_real is not None:  # padding leaves the state as it is
                    real = is_real[:, at, None]
                    layers = [
                        tuple(torch.where(real, new, old) for new, old in zip(*pair, strict=True))
                        for pair in zip(layers, state.layers, strict=True)
                    ]
                state.layers = layers
                states.append(layers[-1][0])
        state.length += x.shape[1]
        s = self.mark("states", torch.stack(states, dim=1))
        joined = torch.cat((_dropout(self, s, self.config.dropout), torch.stack(contexts, dim=1), x), dim=-1)
        return self.mark("output", torch.maximum(*self.readout(joined).chunk(2, dim=-1)))

    def _advance(self, x: Tensor, layers: list[Layer]) -> list[Layer]:
        """One step of every layer."""
        advanced: list[Layer] = []
        for cell, layer in zip(self.cells, layers, strict=True):
            if advanced:
                x = _dropout(self, x, self.config.dropout)
            new: Layer = cell(x, layer) if len(layer) == 2 else (cell(x, layer[0]),)
            advanced.append(new)
            x = new[0]
        return advanced


class Recurrent(Traceable):
    """The interface of EncoderDecoder, so that training, search and explore treat both alike."""

    stages = ("logits",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, width = config, config.token_dim
        self.source_embedding = Tokens(config.vocab_size or 0, width, scaled=config.embed_scale)
        self.target_embedding = Tokens(config.target_size, width, scaled=config.embed_scale)
        if config.share_embeddings:
            self.target_embedding.tokens = self.source_embedding.tokens
        self.encoder = RecurrentEncoder(config)
        self.decoder = RecurrentDecoder(config)
        table = self.target_embedding.tokens if config.tie_embeddings else None
        self.output_head = OutputHead(replace(config, dim=width, head_layer=False), config.target_size, table)
        initialise(self)

    def encode(self, source: Tensor, is_real: Tensor | None = None, document: Tensor | None = None) -> Memory:
        x = _embed("source", self.source_embedding, source, document)
        positions = Positions.of(x.shape[1], x.device, is_real)
        return Memory(self.encoder(x, is_real), positions)

    def states(
        self, target: Tensor, memory: Memory, is_real: Tensor | None = None, document: Tensor | None = None
    ) -> Tensor:
        """The input of the output head, [B, T, embed_dim]. Padding on the right needs no `is_real`."""
        x = _embed("target", self.target_embedding, target, document)
        return self.decoder(x, self.decoder.start(memory), is_real)

    def forward(
        self, source: Tensor, target: Tensor, source_is_real: Tensor | None = None, target_is_real: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: logits of the token after each token of `target`."""
        states = self.states(target, self.encode(source, source_is_real), target_is_real)
        return self.mark("logits", self.output_head(states))

    def start(self, source: Tensor, is_real: Tensor | None = None, capacity: int = 0) -> RecurrentState:
        """Encode the source. The state never grows, so `capacity` has no effect."""
        return self.decoder.start(self.encode(source, is_real))

    def step(self, tokens: Tensor, state: RecurrentState, is_real: Tensor | None = None) -> Tensor:
        """Process `tokens` [B, n] after those in `state`; logits [B, n, vocab_size] of the token after each."""
        x = _embed("target", self.target_embedding, tokens)
        return self.mark("logits", self.output_head(self.decoder(x, state, is_real)))


def _dropout(module: nn.Module, x: Tensor, p: float) -> Tensor:
    return dropout(x, p) if module.training and p else x


def _embed(name: str, embedding: Tokens, tokens: Tensor, document: Tensor | None = None) -> Tensor:
    if document is not None:
        raise UserError(
            "document: architecture = 'recurrent' needs one text per row, as its state would continue into the next: "
            "disable packing, or use architecture = 'encoder-decoder'"
        )
    x: Tensor = embedding(tokens)
    if not x.shape[1]:
        raise UserError(f"{name} has shape {tuple(x.shape[:2])}: a recurrent model needs at least one token per row")
    return x


def initialise(model: Recurrent) -> None:
    """Recurrent matrices orthogonal, the others xavier, biases 0; forget gates of an LSTM start at bias 1."""
    config = model.config
    for name, parameter in model.named_parameters():
        if "weight_hh" in name or "weight_ih" in name:
            fill = nn.init.orthogonal_ if "weight_hh" in name else nn.init.xavier_uniform_
            for gate in parameter.data.split(config.dim):
                fill(gate)
        elif name.endswith("tokens.weight") or name == "output_head.project.weight":
            nn.init.normal_(parameter, std=config.token_dim**-0.5 if config.embed_scale else 0.02)
        elif name == "decoder.cross.v":
            nn.init.normal_(parameter, std=config.dim**-0.5)
        elif parameter.dim() == 2:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
            if "bias_ih" in name and config.cell == "lstm":  # gates: input, forget, cell, output
                parameter.data[config.dim : 2 * config.dim] = 1.0
