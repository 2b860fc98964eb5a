"""Plausible mistakes in the exercises of lesson 1."""

LAYER = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, dim, key_dim, value_dim, bias=False):
        super().__init__()
        self.q = nn.Linear(dim, key_dim, bias={bias})
        self.k = nn.Linear(dim, key_dim, bias={bias})
        self.v = nn.Linear(dim, value_dim, bias={bias})
        self.dim = dim

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return {output}
"""

MISTAKES = {
    1: [
        ("not over their elements", "def weighted_mean(weights, values): return (weights[:, None] * values).sum()"),
        ("without dividing by n", "def weighted_mean(weights, values): return (weights[:, None] * values).mean(0)"),
        ("without dividing by n", "def weighted_mean(weights, values): return values.mean(dim=0)"),
    ],
    2: [
        ("Each row has to sum to 1", "def softmax(scores): return scores.exp() / scores.exp().sum()"),
        ("Each row has to sum to 1", "def softmax(scores): return scores.exp() / scores.exp().sum(0, keepdim=True)"),
        ("overflows", "def softmax(scores): return scores.exp() / scores.exp().sum(1, keepdim=True)"),
        (
            "underflows",
            "def softmax(scores):\n    p = (scores - scores.max()).exp()\n    return p / p.sum(1, keepdim=True)",
        ),
    ],
    3: [
        ("two tensors", "def attention(q, k, v): return (q @ k.T / 2).softmax(-1) @ v"),
        ("one row per query", "def attention(q, k, v):\n    w = (k @ q.T / 2).softmax(-1)\n    return w.T @ v, w"),
        ("over the keys", "def attention(q, k, v):\n    w = (q @ k.T / 2).softmax(0)\n    return w @ v, w"),
        ("root of d_k", "def attention(q, k, v):\n    w = (q @ k.T).softmax(-1)\n    return w @ v, w"),
        ("root of d_k", "def attention(q, k, v):\n    w = (q @ k.T / k.shape[-1]).softmax(-1)\n    return w @ v, w"),
        (
            "root of d_k",
            "def attention(q, k, v):\n    w = (q @ k.T / v.shape[-1] ** 0.5).softmax(-1)\n    return w @ v, w",
        ),
    ],
    4: [
        ("With bias=False", LAYER.format(bias="True", output="(q @ k.T / k.shape[-1] ** 0.5).softmax(-1) @ v")),
        ("With bias=True", LAYER.format(bias="False", output="(q @ k.T / k.shape[-1] ** 0.5).softmax(-1) @ v")),
        ("key_dim is 4", LAYER.format(bias="bias", output="(q @ k.T / self.dim ** 0.5).softmax(-1) @ v")),
        ("key_dim is 4", LAYER.format(bias="bias", output="(q @ k.T).softmax(-1) @ v")),
    ],
}
