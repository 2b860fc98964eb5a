"""Plausible mistakes in the exercises of lesson 6."""

NORM = """
def layer_norm(x, gain, bias, eps=1e-5):
    mean = x.mean(dim={dim}, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim={dim}, keepdim=True)
    return {result}
"""
COUNT = "def block_parameters(dim, ff_dim, memory):\n    return "

MISTAKES = {
    1: [
        (
            "dim - 1",
            "def layer_norm(x, gain, bias, eps=1e-5):\n"
            "    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * gain + bias",
        ),
        ("over the last axis", NORM.format(dim="0", result="(x - mean) / (variance + eps).sqrt() * gain + bias")),
        ("Multiply by the gain", NORM.format(dim="-1", result="(x - mean) / (variance + eps).sqrt()")),
        ("inside of the root", NORM.format(dim="-1", result="(x - mean) / variance.sqrt() * gain + bias")),
        ("before the root", NORM.format(dim="-1", result="(x - mean) / (variance.sqrt() + eps) * gain + bias")),
    ],
    2: [
        (
            "swapped",
            "def sublayer(x, f, norm, order): return norm(x + f(x)) if order == 'pre' else x + f(norm(x))",
        ),
        (
            "adds x itself",
            "def sublayer(x, f, norm, order):\n    if order == 'post': return norm(x + f(x))\n"
            "    x = norm(x)\n    return x + f(x)",
        ),
        (
            "after the addition",
            "def sublayer(x, f, norm, order): return x + f(norm(x)) if order == 'pre' else x + norm(f(x))",
        ),
    ],
    3: [
        ("Without a gate", "def feed_forward(x, w1, w2, w_gate=None): return (x @ w1 @ w2).relu()"),
        ("Without a gate", "def feed_forward(x, w1, w2, w_gate=None): return x @ w1 @ w2"),
        (
            "With a gate",
            "def feed_forward(x, w1, w2, w_gate=None):\n    h = (x @ w1).relu()\n"
            "    return h @ w2 if w_gate is None else (h * (x @ w_gate).sigmoid()) @ w2",
        ),
        (
            "With a gate",
            "import torch\ndef feed_forward(x, w1, w2, w_gate=None):\n    h = x @ w1\n"
            "    return h.relu() @ w2 if w_gate is None else (torch.nn.functional.silu(h) * (x @ w_gate)) @ w2",
        ),
    ],
    4: [
        ("two norms of 2 dim", COUNT + "4 * dim * dim + 2 * dim * ff_dim"),
        ("two norms of 2 dim", COUNT + "4 * dim * dim + 4 * dim + 2 * dim * ff_dim + ff_dim + dim"),
        (
            "a norm of its own",
            COUNT + "(4 * dim * dim + 4 * dim) * (1 + memory) + 2 * dim * ff_dim + ff_dim + dim + 4 * dim",
        ),
        ("cross-attention has four", COUNT + "4 * dim * dim + 9 * dim + 2 * dim * ff_dim + ff_dim"),
    ],
}
