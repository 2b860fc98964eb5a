"""The sums of linear attention against their recurrence: in chunks, with gates, with packed documents, with a state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.nn import sums
from regard.nn.chunks import STRONGEST, accumulate
from regard.nn.linear_attention import both_ways
from regard.nn.sums import START, Features, causal_sum, packed_sum
from test_linear_attention import inputs, spread

pytestmark = pytest.mark.grid


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40, 64, 65, 150])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_compute_the_recurrence(length: int, gated: bool, packed: bool) -> None:
    q, k, v = inputs(3, 2, 3, length, 4)[:, :, :, :, :]
    log_gate = -inputs(2, 3, length, 4).abs() if gated else None
    document = (torch.arange(length) // 13 + 1)[None, None, None, :, None] if packed else None
    state, rows = torch.zeros(2, 3, 4, 4, dtype=torch.float64), []
    for t in range(length):
        if packed and t % 13 == 0:
            state = torch.zeros_like(state)
        if log_gate is not None:
            state = state * log_gate[:, :, t, :, None].exp()
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append((q[:, :, t, :, None] * state).sum(dim=-2))
    gates = None if log_gate is None else log_gate[:, :, None]
    out, (last, _) = causal_sum(*spread(q, k, v), log_gate=gates, document=document)
    torch.testing.assert_close(out[:, :, 0], torch.stack(rows, dim=2))
    if not packed:
        torch.testing.assert_close(last[:, :, 0], state)


def test_a_state_continues_the_sum() -> None:
    q, k, v = spread(*inputs(3, 2, 3, 100, 4))
    gate = -inputs(2, 3, 1, 100, 4).abs()
    whole, last = causal_sum(q, k, v, log_gate=gate)
    parts, state = [], None
    for begin, end in ((0, 30), (30, 31), (31, 100)):
        part, state = causal_sum(*(x[..., begin:end, :] for x in (q, k, v)), log_gate=gate[..., begin:end, :],
                                 state=state)  # fmt: skip
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=-2), whole)
    assert state is not None
    torch.testing.assert_close(state[0], last[0])


def test_strong_gates_do_not_overflow_in_single_precision() -> None:
    """64 gates of e^-4 are e^-256: a product of exp(sum) and exp(-sum) would be 0 · inf."""
    gates = torch.full((1, 1, 1, 80, 4), STRONGEST)
    given = [x.requires_grad_() for x in (*spread(*inputs(3, 1, 1, 80, 4).float()), gates)]
    q, k, v, gate = given
    out, _ = causal_sum(q, k, v, log_gate=gate)
    state, expected = torch.zeros(4, 4), []
    for t in range(80):
        state = state * gate[0, 0, 0, t].exp()[:, None] + k[0, 0, 0, t, :, None] * v[0, 0, 0, t]
        expected.append(q[0, 0, 0, t] @ state)
    torch.testing.assert_close(out[0, 0, 0], torch.stack(expected), atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), given) for x in (out, torch.stack(expected)))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradients_are_those_of_the_sums(gated: bool, packed: bool) -> None:
    parts = [x.requires_grad_() for x in spread(*inputs(3, 1, 1, 20, 2).unbind())]
    gate = (-inputs(1, 1, 1, 20, 2).abs()).requires_grad_() if gated else None
    document = (torch.arange(20) // 7)[None] if packed else None
    given = [*parts, gate] if gate is not None else parts

    def run(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None = None) -> tuple[Tensor, ...]:
        number = None if document is None else document[:, None, None, :, None]
        out, _ = causal_sum(q, k, v, log_gate=log_gate, document=number)
        if log_gate is None:
            return out, packed_sum(q, k, v, number) if number is not None else out
        return out, both_ways(q, k, v, log_gate=log_gate, document=number, forward=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "chunk_size", lambda count, is_gated: 8)
        assert torch.autograd.gradcheck(run, given)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 11, 16, 23])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_blocks_of_states_give_the_recurrence(
    count: int, decays: bool, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: within blocks first, then from block to block."""
    states, decay = inputs(count + 1, 3, 2, 4), inputs(count, 3, 2, 1).sigmoid() if decays else None
    expected = states.flip(0) if backwards else states.clone()
    for c in range(count):
        factor = 1.0 if decay is None else decay[~c if backwards else c]
        expected[c + 1] += factor * expected[c]
    for compiling in (False, True):
        found = states.clone()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        accumulate(found, decay, backwards=backwards)
        torch.testing.assert_close(found, expected.flip(0) if backwards else expected)


def test_a_logarithm_of_the_keys_is_as_good_and_never_overflows() -> None:
    q, k, v = spread(*inputs(3, 2, 2, 150, 4))
    plain, _ = causal_sum(q.abs(), k, v, features=Features(lambda q: q, torch.exp))
    is_log = Features(lambda q: q, lambda k: k - 3, lambda k: 3 * torch.ones_like(k[..., :1]))
    scaled, _ = causal_sum(q.abs(), k, v, features=is_log)
    torch.testing.assert_close(scaled, plain)
    high, state = causal_sum(q.abs(), k + 5000, v, features=is_log)
    torch.testing.assert_close(high, plain)
    assert high.isfinite().all() and float(state[1].max()) > 5000 > START
