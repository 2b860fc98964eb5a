"""The key/value cache: reading a sequence in pieces gives the logits of reading it at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, EncoderDecoder, State, build
from regard.nn.cache import Cache
from regard.nn.mask import Mask, everything, from_tensor, window

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
WINDOWS = (None, 3)
NORMS = (("layer", "post"), ("layer", "pre"), ("rms", "pre"), ("none", "post"))
KV_HEADS = (4, 2, 1)
VOCAB = 11


def make(**changes: object) -> Decoder | EncoderDecoder:
    values = {
        "dim": 8, "layers": 2, "heads": 4, "ff_dim": 12, "vocab_size": VOCAB, "architecture": "decoder",
        "max_length": 32,
        "position_distance": 5, "position_buckets": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    model = build(ModelConfig(**{**values, **changes})).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def start(model: Decoder | EncoderDecoder, rows: int, capacity: int = 0) -> tuple[State, tuple[Tensor, ...]]:
    """A fresh state, and what `model` takes besides the target when it reads everything at once."""
    if isinstance(model, Decoder):
        return model.start(capacity), ()
    source = torch.randint(VOCAB, (rows, 6))
    is_real = torch.ones(rows, 6, dtype=torch.bool)
    is_real[0, 4:] = False
    return model.start(source, is_real, capacity), (source, is_real)


def whole(
    model: Decoder | EncoderDecoder,
    tokens: Tensor,
    given: tuple[Tensor, ...],
    is_real: Tensor | None = None,
    mask: Mask = everything,
) -> Tensor:
    if isinstance(model, Decoder):
        return model(tokens, is_real, mask=mask)
    return model.output_head(model.states(tokens, model.encode(*given), is_real, mask=mask))


def pieces(total: int, sizes: tuple[int, ...]) -> list[slice]:
    """Slices of these sizes, the last one repeated until `total`."""
    ends = list(itertools.accumulate(sizes))
    while ends[-1] < total:
        ends.append(ends[-1] + sizes[-1])
    return [slice(a, min(b, total)) for a, b in itertools.pairwise([0, *ends])]


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("norm", "order"), NORMS)
@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_in_pieces_as_at_once(
    architecture: str, kind: str, window: int | None, norm: str, order: str, kv_heads: int
) -> None:
    """One token at a time, mixed chunks, and a batch whose rows begin with padding."""
    model = make(
        architecture=architecture, position=kind, window=window, norm=norm, norm_order=order, kv_heads=kv_heads
    )
    tokens = torch.randint(VOCAB, (3, 9))
    for sizes in ((1,), (4, 1, 3, 1)):
        state, given = start(model, 3)
        stepped = torch.cat([model.step(tokens[:, piece], state) for piece in pieces(9, sizes)], dim=1)
        assert_close(stepped, whole(model, tokens, given))

    is_real = torch.ones(3, 9, dtype=torch.bool)
    is_real[0, :3], is_real[2, :1] = False, False
    state, given = start(model, 3)
    stepped = [model.step(tokens[:, :5], state, is_real[:, :5])]
    stepped += [model.step(tokens[:, piece], state) for piece in (slice(5, 6), slice(6, 9))]
    assert_close(torch.cat(stepped, dim=1)[is_real], whole(model, tokens, given, is_real)[is_real])


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_keys_are_kept_normed(architecture: str) -> None:
    model, tokens = (
        make(architecture=architecture, position="rope", qk_norm=True, kv_heads=2),
        torch.randint(VOCAB, (3, 9)),
    )
    state, given = start(model, 3)
    stepped = torch.cat([model.step(tokens[:, piece], state) for piece in pieces(9, (4, 1))], dim=1)
    assert_close(stepped, whole(model, tokens, given))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_length_are_as_alone(kind: str) -> None:
    """A left-padded batch continues each row as if it were by itself."""
    model = make(position=kind, kv_heads=2)
    rows = [torch.randint(VOCAB, (n,)) for n in (5, 2, 1)]
    prompt, is_real = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, dtype=torch.bool)
    for b, row in enumerate(rows):
        prompt[b, 5 - len(row) :], is_real[b, 5 - len(row) :] = row, True
    state, more = model.start(), torch.randint(VOCAB, (3, 4))
    found = [model.step(prompt, state, is_real)[:, -1:]] + [model.step(more[:, i : i + 1], state) for i in range(4)]
    for b, row in enumerate(rows):
        alone = model(torch.cat((row, more[b]))[None])
        assert_close(torch.cat(found, dim=1)[b], alone[0, len(row) - 1 :])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_padding_in_a_later_step(kind: str) -> None:
    """A row that has ended can get padding: it takes no position and is never attended to."""
    model = make(position=kind)
    tokens, state = torch.randint(VOCAB, (2, 8)), model.start()
    real = torch.tensor([[True] * 8, [True, True, True, False, True, False, False, True]])
    steps = [model.step(tokens[:, :3], state)]
    steps += [model.step(tokens[:, i : i + 1], state, real[:, i : i + 1]) for i in (3, 4)]
    steps += [model.step(tokens[:, 5:], state, real[:, 5:])]
    out = torch.cat(steps, dim=1)
    for b in range(2):
        assert_close(out[b][real[b]], model(tokens[b][real[b]][None])[0])


@torch.no_grad()
@pytest.mark.parametrize("path", ["fused", "reference", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_path_reads_the_cache(path: str) -> None:
    model, tokens = make(attention=path, position="alibi", layers=1), torch.randint(VOCAB, (2, 5))
    state = model.start()
    stepped = torch.cat([model.step(tokens[:, piece], state) for piece in pieces(5, (2, 1))], dim=1)
    assert_close(stepped, make(attention="reference", position="alibi", layers=1)(tokens))


@torch.no_grad()
@pytest.mark.cuda
@pytest.mark.parametrize("path", ["fused", "flex"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_reads_the_cache(kind: str, path: str) -> None:
    torch._dynamo.reset()  # past 8 kinds of graph in one process, flex would no longer be compiled
    model, tokens = make(attention=path, position=kind, dim=64).float().cuda(), torch.randint(VOCAB, (2, 9)).cuda()
    state = model.start()
    stepped = torch.cat([model.step(tokens[:, piece], state) for piece in pieces(9, (4, 1, 3))], dim=1)
    torch.testing.assert_close(stepped, model(tokens), atol=5e-2, rtol=2e-2)


# A mask of one's own


def own_masks(rows: int, length: int) -> dict[str, Mask]:
    first = Mask("first", lambda q, k: k.pos == 0)
    table = torch.rand(rows, length, length) < 0.5
    table |= torch.eye(length, dtype=torch.bool)
    return {
        "window": window(3),
        "sink": window(2) | first,  # Xiao et al. 2023
        "not": ~(window(4) & ~window(2)),
        "table": from_tensor(table[0]),
        "tables": from_tensor(table),
        "both": from_tensor(table[1]) & window(4) | first,
    }


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", ["rope", "learned", "alibi"])
@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("name", own_masks(2, 2))
def test_a_mask_in_pieces_as_at_once(name: str, path: str, kind: str, architecture: str) -> None:
    """A table is read by the query's index in the whole sequence, a position rule by its position."""
    model = make(architecture=architecture, position=kind, attention=path, head_dim=4)
    tokens, mask = torch.randint(VOCAB, (3, 9)), own_masks(3, 9)[name]
    for sizes in ((1,), (4, 1, 3, 1), (9,), (2, 7)):
        state, given = start(model, 3)
        stepped = torch.cat([model.step(tokens[:, piece], state, mask=mask) for piece in pieces(9, sizes)], dim=1)
        expected = whole(model, tokens, given, mask=mask)
        assert_close(stepped, expected)
        assert (expected - whole(model, tokens, given)).abs().max() > 1e-3  # the mask does hide something

    is_real = torch.ones(3, 9, dtype=torch.bool)
    is_real[0, :3], is_real[2, :1], is_real[1, 6] = False, False, False
    for sizes in ((1,), (5, 1, 3)):
        state, given = start(model, 3)
        steps = [model.step(tokens[:, piece], state, is_real[:, piece], mask=mask) for piece in pieces(9, sizes)]
        assert_close(torch.cat(steps, dim=1)[is_real], whole(model, tokens, given, is_real, mask)[is_real])


@torch.no_grad()
@pytest.mark.parametrize("name", ["sink", "table", "tables"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_reads_the_cache_through_a_mask(name: str) -> None:
    model, tokens, mask = make(attention="flex", layers=1), torch.randint(VOCAB, (2, 5)), own_masks(2, 5)[name]
    state = model.start()
    stepped = torch.cat([model.step(tokens[:, piece], state, mask=mask) for piece in pieces(5, (2, 1))], dim=1)
    assert_close(stepped, make(attention="reference", layers=1)(tokens, mask=mask))


@torch.no_grad()
def test_a_mask_follows_reordered_rows() -> None:
    model, tokens = make(), torch.randint(VOCAB, (3, 6))
    mask, state, rows = own_masks(3, 6)["table"], model.start(), torch.tensor([2, 0, 0])
    model.step(tokens[:, :4], state, mask=mask)
    state.reorder(rows)
    history = torch.cat((tokens[rows, :4], tokens[:, 4:]), dim=1)
    assert_close(model.step(tokens[:, 4:], state, mask=mask), model(history, mask=mask)[:, 4:])


@torch.no_grad()
def test_a_table_that_ends_before_the_sequence_is_refused() -> None:
    model, mask = make(), from_tensor(torch.ones(4, 4, dtype=torch.bool))
    state = model.start()
    model.step(torch.zeros(1, 4, dtype=torch.long), state, mask=mask)
    with pytest.raises(UserError, match=r"mask tensor has shape \(4, 4\)"):
        model.step(torch.zeros(1, 1, dtype=torch.long), state, mask=mask)


# Beam search


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_reordered_rows_are_recomputed_rows(architecture: str, kind: str, padded: bool) -> None:
    """Rows repeated, dropped and swapped, twice: the same as reading the chosen histories afresh."""
    model = make(architecture=architecture, position=kind, window=4)
    tokens, is_real = torch.randint(VOCAB, (3, 4)), torch.ones(3, 4, dtype=torch.bool)
    is_real[1, : 2 if padded else 0] = False
    state, given = start(model, 3)
    model.step(tokens, state, is_real if padded else None)
    for rows in (torch.tensor([2, 0, 0, 1]), torch.tensor([3, 3, 0])):
        state.reorder(rows)
        new = torch.randint(VOCAB, (len(rows), 2))
        tokens, given = torch.cat((tokens[rows], new), dim=1), tuple(x[rows] for x in given)
        is_real = torch.cat((is_real[rows], torch.ones_like(new, dtype=torch.bool)), dim=1)
        out = model.step(new, state)
        assert_close(out, whole(model, tokens, given, is_real)[:, -2:])


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("padded", [False, True])
def test_one_row_becomes_many_beams(architecture: str, padded: bool) -> None:
    model, tokens = make(architecture=architecture, position="learned"), torch.randint(VOCAB, (1, 4))
    is_real = torch.tensor([[not padded, True, True, True]])
    source = torch.randint(VOCAB, (1, 5))
    state = model.start(source) if isinstance(model, EncoderDecoder) else model.start()
    model.step(tokens, state, is_real if padded else None)
    state.reorder(torch.zeros(4, dtype=torch.long))
    new = torch.randint(VOCAB, (4, 3))
    out = model.step(new, state)
    history, seen = torch.cat((tokens.expand(4, 4), new), dim=1), torch.ones(4, 7, dtype=torch.bool)
    seen[:, 0] = not padded
    given = (source.expand(4, 5), torch.ones(4, 5, dtype=torch.bool))
    assert_close(out, whole(model, history, given, seen)[:, -3:])


# Storage


@torch.no_grad()
@pytest.mark.parametrize("capacity", [0, 3, 9, 50])
def test_capacity_changes_no_number(capacity: int) -> None:
    model, tokens = make(), torch.randint(VOCAB, (2, 9))
    state = model.start(capacity)
    stepped = torch.cat([model.step(tokens[:, i : i + 1], state) for i in range(9)], dim=1)
    assert_close(stepped, model(tokens))
    assert state.cache.length == 9


def test_a_cache_takes_the_memory_of_its_formula() -> None:
    """2 · layers · batch · kv_heads · length · head_dim · bytes (Shazeer 2019)."""
    model = make(kv_heads=2, layers=3)
    state = model.start(20)
    assert state.cache.nbytes == 0
    with torch.no_grad():
        model.step(torch.zeros(5, 4, dtype=torch.long), state)
    assert state.cache.nbytes == 2 * 3 * 5 * 2 * 20 * 2 * 8


def test_buffers_grow_by_doubling() -> None:
    """n steps copy O(n) numbers in all: the buffer is replaced only log2(n) times."""
    cache, sizes = Cache(), set()
    for _ in range(100):
        cache.add(cache.next_positions(1, CPU))
        k, _ = cache.extend(0, torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
        sizes.add(cache.nbytes)
        assert k.shape[2] == cache.length
    assert len(sizes) <= 8


def test_values_of_another_size_than_keys() -> None:
    model, tokens = make(value_dim=5, head_dim=3, position="none"), torch.randint(VOCAB, (2, 6))
    state = model.start()
    with torch.no_grad():
        stepped = torch.cat([model.step(tokens[:, piece], state) for piece in pieces(6, (2,))], dim=1)
        assert_close(stepped, model(tokens))


def test_places_go_on_where_they_stopped() -> None:
    cache = Cache()
    is_real = torch.tensor([[False, True, True], [True, True, True]])
    cache.add(cache.next_positions(3, CPU, is_real))
    assert cache.next_positions(2, CPU).pos.tolist() == [[2, 3], [3, 4]]
    plain = Cache()
    plain.add(plain.next_positions(3, CPU))
    following = plain.next_positions(2, CPU)
    assert following.start == 3 and following.pos.tolist() == [[3, 4]]


def test_a_full_learned_table_is_refused_before_anything_is_stored() -> None:
    model = make(position="learned", max_length=4)
    state = model.start()
    with torch.no_grad():
        model.step(torch.zeros(1, 3, dtype=torch.long), state)
        with pytest.raises(UserError, match="max_length = 4"):
            model.step(torch.zeros(1, 2, dtype=torch.long), state)
        assert state.cache.length == 3
        assert model.step(torch.zeros(1, 1, dtype=torch.long), state).isfinite().all()


@torch.no_grad()
def test_padding_takes_no_learned_position() -> None:
    """A left-padded row may be longer than the table, in steps as at once: its texts fit."""
    model, tokens = make(position="learned", max_length=5), torch.randint(VOCAB, (2, 8))
    is_real = torch.ones(2, 8, dtype=torch.bool)
    is_real[0, :3], is_real[1, :4] = False, False
    state = model.start()
    stepped = [model.step(tokens[:, :5], state, is_real[:, :5])]
    stepped += [model.step(tokens[:, i : i + 1], state) for i in range(5, 8)]
    assert_close(torch.cat(stepped, dim=1)[is_real], model(tokens, is_real)[is_real])
    with pytest.raises(UserError, match="max_length = 5"):
        model.step(tokens[:, :1], state)
