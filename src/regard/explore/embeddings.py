"""Embeddings: the vectors of tokens and of positions, as pictures.

map          the two directions in which the embedding vectors vary most: with E - mean = U S Vᵀ, the points are
             (E - mean) V₁₂ (principal component analysis); `explained` is S² of each over the sum of all
neighbours   cosine similarity e · e' / (|e| |e'|) in all dimensions: two dimensions distort distances

positions    what position information looks like, by kind (`regard.nn.position`):
             sinusoidal, learned   the vector of each position          [positions, dim]
             rope                  cos of the angle of each pair        [positions, head_dim / 2]
             alibi, t5             the bias of each head by distance    [heads, distances]
             relative              the vector of each distance          [distances, head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore import svg
from regard.explore.changes import PartName
from regard.explore.heatmap import heat_map
from regard.explore.html import token_label
from regard.explore.inside import Inside, NotebookFigure
from regard.nn.embedding import Tokens
from regard.nn.position import T5, ALiBi, Learned, Position, Relative, Rotary, Sinusoidal, angles

NEIGHBOURS = 10
SIDE = 520  # pixels per side of a map
LABELLED = 80  # tokens that get a label in a figure
REACH = 64  # distances and positions that are shown


@dataclass(frozen=True)
class EmbeddingMap:
    """Token embeddings in two dimensions."""

    labels: tuple[str, ...]
    points: Tensor  # [tokens, 2]
    explained: tuple[float, float]  # fraction of the variance of each axis
    vectors: Tensor  # [tokens, dim]

    def neighbours(self, token: int | str, count: int = NEIGHBOURS) -> list[tuple[int, str, float]]:
        """The most similar tokens: (id, label, cosine), largest first."""
        id = self.id(token)
        unit = torch.nn.functional.normalize(self.vectors, dim=-1)
        cosine = unit @ unit[id]
        cosine[id] = -2  # not the token itself
        values, ids = cosine.topk(min(count, len(self.labels) - 1))
        return [(at, self.labels[at], value) for at, value in zip(ids.tolist(), values.tolist(), strict=True)]

    def id(self, token: int | str) -> int:
        if isinstance(token, int):
            if not 0 <= token < len(self.labels):
                raise UserError(f"token = {token}: the vocabulary has ids 0 to {len(self.labels) - 1}")
            return token
        for name in (token, f"▁{token}", f" {token}", f"Ġ{token}"):
            if name in self.labels:
                return self.labels.index(name)
        raise UserError(f"token = {token!r}: is not a token of this vocabulary; give one of its tokens")

    def _repr_html_(self) -> str:
        low, high = self.points.min(dim=0).values, self.points.max(dim=0).values
        places = (self.points - low) / (high - low).clamp_min(1e-30) * (SIDE - 60) + 20
        step = max(1, len(self.labels) // LABELLED)
        parts = []
        for at, (x, y) in enumerate(places.tolist()):
            parts.append(f'<circle cx="{x:.1f}" cy="{y + 40:.1f}" r="1.6" class="k20"/>')
            if at % step == 0:
                parts.append(svg.label(x + 3, y + 43, token_label(self.labels[at], 70), "small"))
        fractions = ", ".join(f"{fraction:.1%}" for fraction in self.explained)
        about = f"{len(self.labels)} tokens; the axes explain {fractions} of the variance."
        figure = svg.frame(SIDE + 40, SIDE + 20, "Token embeddings, two principal components", about, "".join(parts))
        return NotebookFigure(figure, note=about)._repr_html_()


@torch.inference_mode()
def embedding_map(inside: Inside, side: str | None = None) -> EmbeddingMap:
    """(E - mean) V₁₂ with E - mean = U S Vᵀ, of the token embeddings E.

    `side` is "source" or "target", by default what the model reads.
    """
    matrix, tokenizer = _matrix(inside, side)
    vectors = matrix[: len(tokenizer)].float().cpu()  # a matrix may be padded beyond the vocabulary
    centred = (vectors - vectors.mean(dim=0)).double()
    values, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    chosen = directions[:, -2:].flip(1)  # [dim, 2]
    chosen = chosen * chosen.gather(0, chosen.abs().argmax(dim=0)[None]).sign()  # the sign is arbitrary: fix it
    total = values.clamp_min(0).sum().clamp_min(1e-30)
    explained = tuple((values[-2:].flip(0).clamp_min(0) / total).tolist())
    labels = tuple(tokenizer.token(id) for id in range(len(tokenizer)))
    return EmbeddingMap(labels, (centred @ chosen).float(), cast(Any, explained), vectors)


def _matrix(inside: Inside, side: str | None) -> tuple[Tensor, Any]:
    """The embedding matrix of a side, and its tokenizer."""
    model, writes = inside.model, inside.reader.writes
    if side not in (None, "source", "target"):
        raise UserError(f"side = {side!r}: give 'source' or 'target'")
    if side == "target" and not writes:
        raise UserError("side = 'target': this model has one vocabulary; give 'source'")
    if side is None:
        side = "target" if writes and inside.config.input != "tokens" else "source"
    source: Any = getattr(model, "source_embedding", getattr(model, "embedding", None))
    module: Any = getattr(model, "target_embedding", None) if side == "target" else source
    tokens = module.tokens if isinstance(module, Tokens) else module if isinstance(module, torch.nn.Embedding) else None
    if tokens is None:
        raise UserError(f"side = {side!r}: the model reads {inside.config.input} there, which have no embedding matrix")
    return tokens.weight, inside.bundle.target if side == "target" else inside.bundle.source


@dataclass(frozen=True)
class PositionPicture:
    """Position information as a matrix; `rows` and `columns` name its axes."""

    kind: str
    rows: str
    columns: str
    row_names: tuple[str, ...]
    column_names: tuple[str, ...]
    values: Tensor

    def _repr_html_(self) -> str:
        figure = heat_map(
            self.values, self.row_names, self.column_names,
            title=f"Position: {self.kind}", row_label=self.rows, column_label=self.columns,
        )  # fmt: skip
        return NotebookFigure(figure, note="The scale is that of the legend.")._repr_html_()


@torch.inference_mode()
def position_picture(inside: Inside, stack: PartName | None = None, length: int = REACH) -> PositionPicture:
    """The vectors P[pos] that are added, cos(pos · θ_i) of a rotation, or b[head, distance]: up to `length`."""
    names = [name for name in ("encoder", "decoder") if hasattr(getattr(inside.model, name, None), "position")]
    if not names:
        raise UserError("architecture = 'recurrent': has no position encoding; the order is that of the steps")
    name = names[0] if stack is None else stack
    if name not in names:
        raise UserError(f"stack = {name!r}: this model has {' and '.join(names)}")
    if length < 1:
        raise UserError(f"length = {length}: must be 1 or more")
    position = cast(Position, getattr(inside.model, name).position)
    grid = inside.config.grid if name == "encoder" else None
    limit = inside.bundle.limits.positions if grid is None else grid[0] ** 2 + grid[1]  # the patches of an image
    return _picture(position, min(length, limit or length), inside)


def _picture(position: Position, length: int, inside: Inside) -> PositionPicture:
    config, device = position.config, inside.device
    pos = torch.arange(length, device=device)[None]

    def picture(rows: str, columns: str, values: Tensor, first: int = 0) -> PositionPicture:
        values = values.float().cpu()
        row_names, column_names = (
            tuple(str(at + start) for at in range(n)) for n, start in zip(values.shape, (0, first), strict=True)
        )
        return PositionPicture(config.position, rows, columns, row_names, column_names, values)

    match position:
        case Sinusoidal() | Learned():
            embedded = position.embed(pos)
            return picture("position", "dimension", embedded[0])
        case Rotary():
            return picture("position", "pair", angles(pos, config.key_dim, config.rope_base, position.grid)[0].cos())
        case T5() | ALiBi():
            middle = torch.tensor([[length - 1]], device=device)
            ends = torch.arange(length if position.causal else 2 * length - 1, device=device)[None]
            bias = position.bias(middle, ends)
            assert bias is not None
            like = next(inside.model.parameters()).new_zeros(1)
            return picture("head", "distance", bias.dense(like)[0, :, 0], first=1 - length)
        case Relative():
            return picture("distance", "dimension", position.embedding.weight)
        case _:
            raise UserError("position = 'none': this model has no position encoding, so there is nothing to show")
