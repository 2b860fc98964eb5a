"""Scores of heads from controlled inputs and from the weights alone: induction and copying.

    induction   a text of random tokens, twice: r_1 … r_n r_1 … r_n. In the second half an induction head attends from
                r_i to the token that followed r_i in the first half, and so predicts the continuation:

                    score = mean over the second half of a(i, i - n + 1)                        Olsson et al. 2022

    copying     what a head writes for the token it attends to, as logits: the map from tokens to logits
                M = W_U · g_f ⊙ C · W_o,h W_v,h · C (g_a ⊙ W_E)ᵀ has the eigenvalues λ, and

                    score = Σ λ / Σ |λ|        1: the head raises the logits of what it attends to; Elhage et al. 2021

W_E and W_U are the embedding and the output matrix, g_a and g_f the gains of the norm before the head and of the final
one, C subtracts the mean (layer norm). M is as large as the vocabulary squared, but has the eigenvalues of a matrix of
head_dim by head_dim. Only a stack that reads and predicts the same tokens has this score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.forward import Input
from regard.explore.inside import Inside, NotebookFigure
from regard.explore.readout import Readout
from regard.nn.multihead import MultiHead
from regard.nn.trace import trace

LENGTH = 24  # tokens that are repeated
ROWS = 4  # random texts


@dataclass(frozen=True)
class HeadScores:
    """Scores of the self-attention heads of a decoder, [heads] of every layer; copying may be None."""

    induction: tuple[Tensor, ...]
    copying: tuple[Tensor, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        copying = None if self.copying is None else [layer.tolist() for layer in self.copying]
        return {"induction": [layer.tolist() for layer in self.induction], "copying": copying}

    def _repr_html_(self) -> str:
        figures = []
        for name, layers in (("Induction", self.induction), ("Copying", self.copying)):
            if layers is not None:
                columns = [f"head {head}" for head in range(max(map(len, layers)))]
                grid = [[*layer.tolist(), *[0.0] * (len(columns) - len(layer))] for layer in layers]
                rows = [f"layer {layer}" for layer in range(len(layers))]
                figures.append(cell_map(grid, rows, columns, title=f"{name} scores"))
        return NotebookFigure("<br>".join(figures), note="Self-attention of the decoder.")._repr_html_()


def head_scores(inside: Inside, *, length: int = LENGTH, rows: int = ROWS, seed: int = 0) -> HeadScores:
    """Induction, mean a(i, i - n + 1), and copying, Σ λ / Σ |λ| (None where a stack does not predict what it reads)."""
    return HeadScores(induction_scores(inside, length=length, rows=rows, seed=seed), copying_scores(inside))


def random_repeats(inside: Inside, length: int = LENGTH, rows: int = ROWS, seed: int = 0) -> Tensor:
    """[rows, 2 · length] random tokens, twice; no special ones."""
    tokenizer, limit = inside.bundle.target, inside.bundle.limits.positions
    ids = torch.tensor(sorted(set(range(len(tokenizer))) - tokenizer.specials))
    if limit is not None:
        length = min(length, limit // 2)
    if length < 2 or len(ids) < 2:
        raise UserError(f"length = {length}: an induction score needs two tokens or more, repeated")
    some = ids[torch.randint(len(ids), (rows, length), generator=torch.Generator().manual_seed(seed))]
    return torch.cat((some, some), dim=1).to(inside.device)


@torch.inference_mode()
def induction_scores(
    inside: Inside, tokens: Tensor | None = None, *, length: int = LENGTH, rows: int = ROWS, seed: int = 0
) -> tuple[Tensor, ...]:
    """mean a(i, i - n + 1) over the second half of r_1 … r_n r_1 … r_n, for the heads of every layer.

    `tokens` [rows, 2n] replace the random ones. The source of an encoder-decoder is the same for all: its first token.
    """
    if inside.config.architecture == "recurrent" or "decoder" not in inside.anatomy.parts:
        raise UserError("induction: needs causal self-attention, which this model does not have")
    if inside.config.output_head == "values":
        raise UserError("output_head = 'values': the model reads numbers, and an induction score needs tokens")
    tokens = random_repeats(inside, length, rows, seed) if tokens is None else tokens.to(inside.device)
    n = tokens.shape[1] // 2
    source, target = tokens, None
    if inside.reader.writes:
        source, target = _any_source(inside, len(tokens)), tokens
    with inside.lock, trace(inside.model, only="decoder.*.attention.weights") as seen:
        inside.forward(Input(source, (), target=target))
    scores = []
    for path, heads in inside.anatomy.parts["decoder"]:
        if not heads:
            scores.append(torch.zeros(0))
            continue
        diagonal = seen[f"{path}.weights"].diagonal(1 - n, dim1=-2, dim2=-1)  # [B, H, n + 1]: queries n - 1 to 2n - 1
        scores.append(diagonal.float().mean(dim=(0, 2)).cpu())
    return tuple(scores)


def _any_source(inside: Inside, rows: int) -> Tensor:
    config, like = inside.config, next(inside.model.parameters())
    match config.input:
        case "patches":
            shape: tuple[int, ...] = (rows, config.channels, config.image_size, config.image_size)
        case "features":
            shape = (rows, 1, config.feature_dim)
        case _:
            return torch.full((rows, 1), inside.bundle.source.special_id("eos"), device=inside.device)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


@torch.inference_mode()
def copying_scores(inside: Inside) -> tuple[Tensor, ...] | None:
    """Σ λ / Σ |λ| of the map from tokens to logits of every head; None where there is no such map."""
    config, model = inside.config, inside.model
    readout = Readout.of(inside)
    if config.output_head != "tokens" or config.head_layer or "decoder" not in inside.anatomy.parts:
        return None
    embedding = model.target_embedding if inside.reader.writes else model.embedding  # type: ignore[union-attr]
    embed, (unembed, _) = cast(Any, embedding).tokens.weight.double(), readout.matrix()
    both = (embed.T @ unembed.double()).cpu() @ linear_part(readout.stack.norm, config.dim)  # once for all heads
    scores = []
    for block in readout.blocks:
        if not isinstance(block.attention, MultiHead):
            scores.append(torch.zeros(0))
            continue
        norm = linear_part(block.attention_norm if config.norm_order == "pre" else nn.Identity(), config.dim)
        attention = block.attention
        scores.append(torch.stack([_copying(attention, head, norm @ both) for head in range(attention.heads)]))
    return tuple(scores)


def _copying(attention: MultiHead, head: int, middle: Tensor) -> Tensor:
    """Σ λ / Σ |λ| of W_v,h · middle · W_o,h, which is head_dim by head_dim."""
    _, _, v = attention.qkv.weight.cpu().split(attention.sizes)
    size = v.shape[0] // attention.key_heads
    own = attention.key_of[head]
    value = v[own * size : (own + 1) * size].double()  # [Dv, dim]
    out = attention.out.weight.cpu()[:, head * size : (head + 1) * size].double()  # [dim, Dv]
    eigenvalues = torch.linalg.eigvals(value @ middle @ out)
    return (eigenvalues.sum().real / eigenvalues.abs().sum().clamp_min(1e-30)).float()


def linear_part(norm: nn.Module, dim: int) -> Tensor:
    """The matrix A of x -> A x that a norm applies, apart from its scale: diag(g) C."""
    if isinstance(norm, nn.LayerNorm):
        centre = torch.eye(dim, dtype=torch.float64) - 1 / dim
        return norm.weight.double()[:, None].cpu() * centre
    if isinstance(norm, nn.RMSNorm):
        return torch.diag(norm.weight.double().cpu())
    return torch.eye(dim, dtype=torch.float64)
