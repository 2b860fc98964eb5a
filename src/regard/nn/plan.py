"""Which calls of scaled_dot_product_attention compute a sparse mask: the plan of `regard.nn.banded`.

Queries and keys are cut into blocks of c tokens; which blocks of keys a block of queries sees is known from the bounds
of the mask (`regard.nn.blocks`), without looking at all pairs. A plan has one of two kinds of calls:

    Piece   a block of queries and the keys that it sees, read where they are. Where all pairs are visible it has no
            mask; the first queries of a causal mask, as far as its window does not cut anything off, are one piece
    Group   blocks of queries that see as many blocks of keys, copied together: few calls, for a GPU

Where a mask depends on distances alone, blocks in the middle of a band share one mask. Tokens of a dilated window are
rearranged first, so that those that attend to each other are neighbours. Each row of a packed batch has other texts, so
the rows are planned as one long row, and a block reads no more than the texts that its tokens are of.

Small blocks fit the mask closely, large ones are fewer calls. On a CPU a piece of n queries and m keys takes about

    (n + 32) · m            times as long as a pair; the 32 are for the memory of keys, values and their gradients

from which `cheapest` chooses c. One block that contains all tokens is dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.blocks import Span, cut
from regard.nn.mask import AttentionMask, Token, causal, padding, same_document
from regard.nn.tokens import Positions

SIZES = (64, 128, 256, 512, 1024)  # tokens of a block
CAUSAL = 0.56  # time of a causal piece, relative to one without a mask
CALL = 32.0  # queries whose pairs take as long as the memory of the keys and values of a call
WORTH = 0.8  # the cost of a plan for packed texts, relative to dense attention, up to which it is used
COPIED = 16.0  # the same, in addition, if they are copied together

Range = tuple[int, int]  # the first, and the one after the last


class Pairs:
    """Which pairs of some queries and keys are visible."""

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible  # bool [B|1, R, c, keys]
        self._added: dict[torch.dtype, Tensor] = {}

    def additive(self, dtype: torch.dtype, batch: int) -> Tensor:
        """[B · R | R | 1, 1, c, keys], 0 for visible pairs and -inf for others."""
        if dtype not in self._added:
            visible = self.visible
            if visible.shape[0] < batch and visible.shape[1] > 1:
                visible = visible.expand(batch, -1, -1, -1)
            flat = visible.flatten(0, 1)[:, None]
            zero, hidden = (torch.tensor(value, dtype=dtype, device=flat.device) for value in (0.0, float("-inf")))
            self._added[dtype] = torch.where(flat, zero, hidden)
        return self._added[dtype]


@dataclass
class Piece:
    """Queries that follow each other, and their keys: a call of scaled_dot_product_attention."""

    queries: Range
    keys: list[Range]
    masked: bool = True  # False: all pairs are visible, or with `is_causal` all that are not later
    is_causal: bool = False
    pairs: Pairs | None = None
    shared: int = -1  # number of a mask that other pieces have too, as a bias that depends on distances alone is

    @property
    def cost(self) -> float:
        queries, count = self.queries[1] - self.queries[0], sum(end - first for first, end in self.keys)
        return count * (queries * (CAUSAL if self.is_causal else 1.0) + CALL + COPIED * (len(self.keys) > 1))


@dataclass
class Group:
    """Query blocks that see as many key blocks: one call of scaled_dot_product_attention."""

    rows: Tensor  # [R] query blocks
    keys: Tensor  # [R, m] key blocks of each
    queries: Tensor  # [R, c] indices of the queries
    tokens: Tensor  # [R, m · c] indices of the keys
    pairs: Pairs  # [B|1, R, c, m · c]; one row if `shared`
    shared: bool


@dataclass
class Plan:
    size: int  # c, the tokens of a block
    pieces: list[Piece]
    groups: list[Group]
    order: Tensor | None  # of the tokens, if they are rearranged
    undo: Tensor | None
    rows: int = 1  # of the batch, if they are one row here

    @property
    def cost(self) -> float:
        return sum(piece.cost for piece in self.pieces)


def cheapest(attention_mask: AttentionMask) -> Plan:
    """The plan of pieces with the lowest cost: with larger blocks as long as they are cheaper."""
    own = attention_mask.rearranged() or attention_mask
    best = _with_pieces(own, SIZES[0])
    for size in SIZES[1:]:
        other = _with_pieces(own, size)
        if other.cost > best.cost:
            break
        best = other
    return _add_masks(best, own)


def plan_texts(attention_mask: AttentionMask) -> Plan | None:
    """The plan of a packed batch as one row; None where dense attention costs about as much."""
    rows, length = attention_mask.q.rows, attention_mask.q.length
    own = _join_rows(attention_mask)
    if own is None:
        return None
    plan = cheapest(own)
    plan.rows = rows
    return plan if plan.cost < WORTH * rows * Piece((0, length), [(0, length)]).cost else None


def _join_rows(own: AttentionMask) -> AttentionMask | None:
    """The rows of packed texts as one row, in which every text has a number of its own; None: it would differ."""
    mask, texts = own.mask.without(padding).without(same_document), own.q.document
    if texts is None or not texts.numel() or own.q is not own.k or own.first:
        return None
    if not mask.relative or mask.dilation > 1:
        return None
    numbers = texts - texts.min()
    count = numbers.max() + 1
    if own.q.is_real is not None:  # padding, which has no key, comes last in its row
        numbers = torch.where(own.q.is_real, numbers, count)
    numbers = numbers + (count + 1) * torch.arange(own.q.rows, device=texts.device)[:, None]
    rows = Positions(own.q.pos, own.q.is_real, numbers).apply(lambda x: x.expand(own.q.rows, -1).reshape(1, -1))
    tokens = Positions(*rows)
    return AttentionMask(own.mask, tokens, tokens)


def make_plan(attention_mask: AttentionMask, size: int, pieces: bool) -> Plan:
    """Which blocks of `size` tokens to compute, and their masks; it reads tensors, and serves all layers."""
    own = attention_mask.rearranged() or attention_mask
    if pieces:
        return _add_masks(_with_pieces(own, size), own)
    seen = [row.nonzero().flatten().tolist() for row in _bounds(own, size)[0]]
    return Plan(size, [], _groups(own, size, seen), own.order, None if own.order is None else own.order.argsort())


def _bounds(own: AttentionMask, size: int) -> tuple[Tensor, Tensor]:
    """[query blocks, key blocks]: which are visible for some row of the batch, and which are so as a whole for all."""
    some, every = own.bounds(size)
    shape = -(-own.q.length // size), -(-own.k.length // size)
    return some.any(dim=0).expand(shape).cpu(), every.all(dim=0).expand(shape).cpu()


Offsets = tuple[list[int | None], list[int | None]]


def _offsets(own: AttentionMask, size: int) -> Offsets | None:
    """The first position of each block whose positions have the same step; None for others, and where it is no help."""
    if not own.mask.relative or max(own.mask.rows, own.q.rows, own.k.rows) > 1:
        return None
    step = own.mask.dilation if own.order is not None else 1
    sides = []
    for side in (own.q, own.k):
        pos = cut(side.pos, size)[0]  # [blocks, size]; an incomplete block repeats a position, so its step is not even
        even = (pos.diff(dim=-1) == step).all(dim=-1).tolist()
        sides.append([first if is_even else None for first, is_even in zip(pos[:, 0].tolist(), even, strict=True)])
    return sides[0], sides[1]


def _distances(offsets: Offsets | None, row: int, keys: list[int]) -> tuple[int, ...] | None:
    """How far a query block is from each of its key blocks: where these are the same, so is a relative mask."""
    if offsets is None or (first := offsets[0][row]) is None:
        return None
    distances = [first - k_first for key in keys if (k_first := offsets[1][key]) is not None]
    return tuple(distances) if len(distances) == len(keys) else None


# --- pieces


def _with_pieces(own: AttentionMask, size: int) -> Plan:
    """A plan, but for its masks."""
    lengths, (some, every) = (own.q.length, own.k.length), _bounds(own, size)
    first, pieces = _causal_blocks(own, size), list[Piece]()
    if first:
        end = min(first * size, lengths[0])
        pieces.append(Piece((0, end), [(0, end)], masked=False, is_causal=True))
    # where runs of visible blocks begin and end
    edges = F.pad(some.byte(), (1, 1)).diff(dim=1).nonzero()
    ends: list[list[int]] = [[] for _ in some]
    for row, column in edges.tolist():
        ends[row].append(column)
    whole = (every | ~some).all(dim=1).tolist()
    for row in range(first, len(ends)):
        queries = row * size, min((row + 1) * size, lengths[0])
        runs = list(zip(ends[row][::2], ends[row][1::2], strict=True)) or [(0, 1)]  # one, where nothing is visible
        keys = [(begin * size, min(end * size, lengths[1])) for begin, end in runs]
        one = Piece(queries, keys, masked=not whole[row] or not ends[row])
        together = Piece(queries, [(keys[0][0], keys[-1][1])])
        if len(keys) > 1 and together.cost <= one.cost:
            one = together
        before = pieces[-1] if pieces else together
        if not (one.masked or before.masked or before.is_causal) and one.keys == before.keys:
            before.queries = before.queries[0], queries[1]
        else:
            pieces.append(one)
    return Plan(size, pieces, [], own.order, None if own.order is None else own.order.argsort())


def _add_masks(plan: Plan, own: AttentionMask) -> Plan:
    offsets, size, (_, every) = _offsets(own, plan.size), plan.size, _bounds(own, plan.size)
    known: dict[tuple[int, ...], tuple[int, Pairs]] = {}  # by the distances to the key blocks
    for piece in plan.pieces:
        if not piece.masked:
            continue
        row = piece.queries[0] // size
        blocks = [block for first, end in piece.keys for block in range(first // size, -(-end // size))]
        distances = _distances(offsets, row, blocks)
        if distances is not None and distances in known:
            piece.shared, piece.pairs = known[distances]
            continue
        piece.pairs = Pairs(_visible(own, size, piece, [not whole for whole in every[row, blocks].tolist()]))
        if distances is not None:
            piece.shared = len(known)
            known[distances] = piece.shared, piece.pairs
    return plan


def _visible(own: AttentionMask, size: int, piece: Piece, unknown: list[bool]) -> Tensor:
    """bool [B|1, 1, c, m]: the predicate decides in the `unknown` of the key blocks, all else is visible."""
    device, keys = own.q.pos.device, indices(piece.keys, own.q.pos.device)
    queries = indices([piece.queries], device)
    chosen = torch.tensor(unknown, device=device).repeat_interleave(size)[: keys.shape[1]]
    decided = own.mask.predicate(_tokens(own, True, queries, 3), _tokens(own, False, keys[:, chosen], 2))
    decided = decided.expand(-1, -1, queries.shape[1], -1)
    if decided.shape[3] == keys.shape[1]:
        return decided
    visible = torch.ones(*decided.shape[:3], keys.shape[1], dtype=torch.bool, device=device)
    visible[..., chosen] = decided
    return visible


def indices(ranges: list[Range], device: torch.device) -> Tensor:
    """[1, n]"""
    return torch.cat([torch.arange(first, end, device=device) for first, end in ranges])[None]


def _causal_blocks(own: AttentionMask, size: int) -> int:
    """How many of the first blocks attend to all tokens that are not later, and to no others."""
    q, k = own.q, own.k
    if q is not k or not own.mask.implies(causal) or max(own.mask.rows, q.rows) > 1:
        return 0
    if not bool((q.pos.diff(dim=-1) > 0).all()):
        return 0
    parts = q.apply(lambda x: cut(x, size))
    # where a pair is not later, the mask without `causal` says whether it is visible
    every = own.mask.without(causal).bounds(Span(*parts, axis=1), Span(*parts, axis=2))[1]
    count = parts[0].shape[1]
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    whole = (every.all(dim=0).expand(count, count) | later).all(dim=1)
    return int(whole.long().cumprod(dim=0).sum())


# --- groups


def _groups(own: AttentionMask, size: int, seen: list[list[int]]) -> list[Group]:
    groups, rows, offsets = list[Group](), range(len(seen)), _offsets(own, size)
    alike: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        distances = _distances(offsets, row, seen[row])
        if distances is not None:
            alike.setdefault(distances, []).append(row)
    single = set(rows)
    for together in alike.values():
        if len(together) > 3 and seen[together[0]]:
            groups.append(_group(own, size, together, [seen[row] for row in together], shared=True))
            single -= {*together}
    for together in _buckets({row: max(1, len(seen[row])) for row in sorted(single)}):
        groups.append(_group(own, size, together, [seen[row] for row in together], shared=False))
    return groups


def _buckets(counts: dict[int, int]) -> list[list[int]]:
    """Rows by their number of key blocks; padding to the largest number of a bucket adds little work."""
    buckets: list[list[int]] = []
    for row in sorted(counts, key=lambda row: counts[row]):
        if buckets:
            least = sum(counts[other] for other in buckets[-1])  # of the bucket without padding
            if counts[row] * (len(buckets[-1]) + 1) <= max(1.25 * (least + counts[row]), 16):
                buckets[-1].append(row)
                continue
        buckets.append([row])
    return buckets


def _group(own: AttentionMask, size: int, rows: list[int], seen: list[list[int]], shared: bool) -> Group:
    device, most = own.q.pos.device, max(1, *map(len, seen))
    keys = torch.tensor([[*blocks, *[-1] * (most - len(blocks))] for blocks in seen], device=device)  # -1: none
    block = torch.tensor(rows, device=device)
    inside = torch.arange(size, device=device)
    queries = block[:, None] * size + inside  # [R, c]
    tokens = (keys[:, :, None] * size + inside).flatten(1)  # [R, m · c]
    exists = (tokens >= 0) & (tokens < own.k.length)
    queries, tokens = queries.clamp_max(own.q.length - 1), tokens.clamp(0, own.k.length - 1)
    few = slice(0, 1) if shared else slice(None)
    q = _tokens(own, True, queries[few], 3)
    k = _tokens(own, False, tokens[few], 2)
    visible = own.mask.predicate(q, k) & exists[few][None, :, None]  # [B|1, R, c, m · c]
    return Group(block, keys.clamp_min(0), queries, tokens, Pairs(visible.expand(-1, -1, size, -1)), shared)


def _tokens(own: AttentionMask, are_queries: bool, at: Tensor, axis: int) -> Token:
    """The queries or keys at these indices [R, n], as [B|1, R, c, 1] or [B|1, R, 1, m · c]."""
    side = own.q if are_queries else own.k
    index = own.index(side)[at][None].unsqueeze(axis)
    batch = torch.arange(max(own.mask.rows, side.rows), device=at.device).view(-1, 1, 1, 1)
    return Token(batch, index, *side.apply(lambda x: x[:, at].unsqueeze(axis)), in_blocks=True)
