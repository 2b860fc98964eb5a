"""Plausible mistakes in the exercises of lesson 2."""

SEARCH = """
import torch

def temperature(scores, target):
    low, high = 1e-3, {high}
    for _ in range({rounds}):
        middle = (low * high) ** 0.5
        weights = torch.softmax(scores {times} middle, dim=0)
        entropy = -torch.xlogy(weights, weights).sum().item()
        low, high = (middle, high) if entropy < target else (low, middle)
    return middle
"""

MISTAKES = {
    1: [
        ("take the root of their sum", "def score_std(key_dim, q_std, k_std): return key_dim * q_std**2 * k_std**2"),
        ("take the root of their sum", "def score_std(key_dim, q_std, k_std): return key_dim * q_std * k_std"),
        ("q_std = 0.5", "def score_std(key_dim, q_std, k_std): return key_dim**0.5"),
    ],
    2: [
        ("natural logarithm", "def entropy(weights): return -(weights * weights.log2()).sum(-1)"),
        ("H = -Σ w ln w", "def entropy(weights): return (weights * weights.log()).sum(-1)"),
        ("one number per row", "def entropy(weights): return -(weights * weights.log()).sum()"),
        ("torch.xlogy", "def entropy(weights): return -(weights * weights.log()).sum(-1)"),
    ],
    3: [
        ("every pair i, j", "def softmax_jacobian(scores):\n    w = scores.softmax(0)\n    return w * (1 - w)"),
        (
            "Outside of the diagonal",
            "import torch\ndef softmax_jacobian(scores):\n"
            "    w = scores.softmax(0)\n    return torch.diag(w * (1 - w))",
        ),
        (
            "On the diagonal",
            "import torch\ndef softmax_jacobian(scores):\n    w = scores.softmax(0)\n    return -torch.outer(w, w)",
        ),
        (
            "On the diagonal",
            "import torch\ndef softmax_jacobian(scores):\n    return torch.diag(scores) - torch.outer(scores, scores)",
        ),
    ],
    4: [
        ("the entropy is", SEARCH.format(high="1e4", rounds="3", times="/")),
        ("the entropy is", SEARCH.format(high="1e4", rounds="60", times="*")),
        ("a temperature is positive", "def temperature(scores, target): return 0.0"),
    ],
}
