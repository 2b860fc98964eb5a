"""Plausible mistakes in the exercises of lesson 7."""

RNN = "import torch\ndef run_rnn(x, W, U, b):\n    h, states = torch.zeros(len(b)), []\n    for word in x:\n        {step}\n        states.append(h)\n    return {result}"  # noqa: E501

MISTAKES = {
    1: [
        ("not divided", "import torch\ndef context(s, h): return torch.softmax(h @ s / len(s) ** 0.5, 0) @ h"),
        ("sum to 1", "def context(s, h): return (h @ s) @ h"),
        ("weighted sum", "import torch\ndef context(s, h): return torch.softmax(h @ s, 0)"),
    ],
    2: [
        ("tanh is missing", "def additive_score(s, h, U, W, v): return (U @ s + h @ W.T) @ v"),
        (
            "inside the tanh",
            "import torch\ndef additive_score(s, h, U, W, v): return (torch.tanh(U @ s) + torch.tanh(h @ W.T)) @ v",
        ),
        ("n scores", "import torch\ndef additive_score(s, h, U, W, v): return torch.tanh(U @ s + h @ W.T)"),
    ],
    3: [
        ("None", "def align(weights): return weights.argmax(dim=1).tolist()"),
        (
            "exactly 0.5",
            "def align(weights):\n    best, at = weights.max(dim=1)\n"
            "    return [p if w >= 0.5 else None for w, p in zip(best.tolist(), at.tolist())]",
        ),
        ("column", "def align(weights): return weights.argmax(dim=0).tolist()"),
    ],
    4: [
        ("all n states", RNN.format(step="h = torch.tanh(W @ h + U @ word + b)", result="h")),
        ("W h_{t-1}", RNN.format(step="h = torch.tanh(U @ word + b)", result="torch.stack(states)")),
        ("new h", RNN.format(step="h = W @ h + U @ word + b", result="torch.tanh(torch.stack(states))")),
    ],
}
