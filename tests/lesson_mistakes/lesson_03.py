"""Plausible mistakes in the exercises of lesson 3."""

STEP = "import torch\ndef step_mask(queries, keys, window):\n    q = torch.arange({q})[:, None]\n    k = torch.arange(keys)\n    return {mask}"  # noqa: E501

MISTAKES = {
    1: [
        ("Rows are queries", "import torch\ndef causal_mask(n): return torch.ones(n, n).triu().bool()"),
        ("may attend to itself", "import torch\ndef causal_mask(n): return torch.ones(n, n).tril(-1).bool()"),
        ("booleans", "import torch\ndef causal_mask(n): return torch.ones(n, n).tril()"),
        ("below the diagonal", "import torch\ndef causal_mask(n): return torch.ones(n, n).bool()"),
    ],
    2: [
        (
            "(2, 1, 1, 4)",
            "import torch\ndef padding_mask(lengths, n): return torch.arange(n) < torch.tensor(lengths)[:, None]",
        ),
        (
            "True means a real token",
            "import torch\ndef padding_mask(lengths, n):\n"
            "    return (torch.arange(n) >= torch.tensor(lengths)[:, None])[:, None, None]",
        ),
        (
            "position < length",
            "import torch\ndef padding_mask(lengths, n):\n"
            "    return (torch.arange(n) <= torch.tensor(lengths)[:, None])[:, None, None]",
        ),
    ],
    3: [
        ("NaN", "def masked_softmax(scores, mask): return scores.masked_fill(~mask, float('-inf')).softmax(-1)"),
        ("-1e9", "def masked_softmax(scores, mask): return scores.masked_fill(~mask, -1e9).softmax(-1)"),
        ("before the softmax", "def masked_softmax(scores, mask): return scores.softmax(-1) * mask"),
        ("must be all zero", "def masked_softmax(scores, mask): return (scores * mask).softmax(-1)"),
        (
            "0 is an ordinary score",
            "def masked_softmax(scores, mask): return (scores * mask).softmax(-1) * mask.any(-1, keepdim=True)",
        ),
    ],
    4: [
        ("keys - queries + i", STEP.format(q="queries", mask="(k <= q) & (q - k < window)")),
        ("itself included", STEP.format(q="keys - queries, keys", mask="(k <= q) & (q - k <= window)")),
        ("attends to 4 tokens", STEP.format(q="keys - queries, keys", mask="(q - k).abs() < window")),
    ],
    5: [
        (
            "change every future",
            "import torch\ndef leaks(f, n, dim):\n    x = torch.randn(n, dim)\n    y = x.clone()\n    y[1:4] += 1\n"
            "    return not torch.allclose(f(x)[:1], f(y)[:1])",
        ),
        (
            "compare every past",
            "import torch\ndef leaks(f, n, dim):\n    x = torch.randn(n, dim)\n    y = x.clone()\n    y[-1] += 1\n"
            "    return not torch.allclose(f(x)[:-1], f(y)[:-1], atol=1e-5)",
        ),
        (
            "causal attention does not leak",
            "import torch\ndef leaks(f, n, dim):\n    x = torch.randn(n, dim)\n    y = x.clone()\n    y[-1] += 1\n"
            "    return not torch.allclose(f(x), f(y))",
        ),
        ("attention without a mask leaks", "def leaks(f, n, dim): return False"),
    ],
}
