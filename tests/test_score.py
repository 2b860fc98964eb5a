"""Scores with parameters: each against its formula written with loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.nn.attention import attention_stages
from regard.nn.score import LearnedScore, additive, concat, multiplicative

B, H, NQ, NK, D, E, A = 2, 3, 4, 5, 3, 2, 6


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    shapes = {"q": (B, H, NQ, D), "k": (B, H, NK, E), "u": (H, D, A), "w": (H, E, A), "v": (H, A), "m": (H, D, E)}
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def pair_by_pair(t: dict[str, Tensor], formula: object) -> Tensor:
    """formula(q_i, k_j, head) for every pair."""
    indices = torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(NQ), torch.arange(NK)).tolist()
    cells = [formula(t["q"][b, h, i], t["k"][b, h, j], h) for b, h, i, j in indices]
    return torch.stack(cells).view(B, H, NQ, NK)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs)
    for own, other in zip(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other)


def test_multiplicative_is_luong_general(tensors: dict[str, Tensor]) -> None:
    """Luong et al. 2015, eq. 8: score = qᵀ W k."""
    m = tensors["m"]
    expected = pair_by_pair(tensors, lambda q, k, h: q @ m[h] @ k)
    assert_same(multiplicative(tensors["q"], tensors["k"], m), expected, [tensors["q"], tensors["k"], m])


def test_additive_is_bahdanau(tensors: dict[str, Tensor]) -> None:
    """Bahdanau et al. 2015, appendix A.1.2: score = vᵀ tanh(W k + U q)."""
    q, k, u, w, v = (tensors[name] for name in "qkuwv")
    expected = pair_by_pair(tensors, lambda q, k, h: v[h] @ torch.tanh(w[h].T @ k + u[h].T @ q))
    assert_same(additive(q, k, u, w, v), expected, [q, k, u, w, v])


def test_concat_is_luong_concat(tensors: dict[str, Tensor]) -> None:
    """Luong et al. 2015, eq. 8: score = vᵀ tanh(W [q; k])."""
    q, k, u, w, v = (tensors[name] for name in "qkuwv")
    joined = torch.cat((u, w), dim=1)
    expected = pair_by_pair(tensors, lambda q, k, h: v[h] @ torch.tanh(joined[h].T @ torch.cat((q, k))))
    assert_same(concat(q, k, joined, v), expected, [q, k, u, w, v])


def test_additive_and_concat_are_one_formula(tensors: dict[str, Tensor]) -> None:
    """W [q; k] = U q + W' k when W = [U W']."""
    q, k, u, w, v = (tensors[name] for name in "qkuwv")
    assert_same(concat(q, k, torch.cat((u, w), dim=1), v), additive(q, k, u, w, v), [q, k, u, w, v])


def test_multiplicative_with_the_identity_is_the_dot_product() -> None:
    q, k = torch.randn(B, H, NQ, D), torch.randn(B, H, NK, D)
    torch.testing.assert_close(multiplicative(q, k, torch.eye(D).expand(H, D, D)), q @ k.transpose(-2, -1))


@pytest.mark.parametrize("kind", ["multiplicative", "additive", "concat"])
def test_a_learned_score_takes_the_dot_product_s_place(kind: str) -> None:
    """The rest of attention stays: rows of weights sum to one, hidden keys get none, parameters get gradients."""
    score = LearnedScore(kind, H, D)
    q, k, v = torch.randn(B, H, NQ, D), torch.randn(B, H, NK, D), torch.randn(B, H, NK, 7)
    visible = torch.ones(NQ, NK, dtype=torch.bool).tril()
    stages = attention_stages(q, k, v, visible, scale=1.0, score=score)
    torch.testing.assert_close(stages.weights.sum(dim=-1), torch.ones(B, H, NQ))
    assert (stages.weights[..., ~visible] == 0).all()
    stages.output.sin().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in score.parameters())
