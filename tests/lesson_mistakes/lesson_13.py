"""Plausible mistakes in the exercises of lesson 13."""

LENS = """
def lens(embedded, added, norm, matrix):
    stream, logits = embedded, [{first}]
    for one in added:
        stream = {stream}
        logits.append({read})
    return {result}
"""
CORRECT = {
    "first": "norm(embedded) @ matrix.T",
    "stream": "stream + one",
    "read": "norm(stream) @ matrix.T",
    "result": "logits",
}

MISTAKES = {
    1: [
        ("clamp the weights", "def entropy(weights): return -(weights * weights.log()).sum(dim=-1)"),
        ("not negative", "def entropy(weights): return (weights * weights.clamp_min(1e-30).log()).sum(dim=-1)"),
        (
            "One number per query",
            "def entropy(weights): return -(weights * weights.clamp_min(1e-30).log()).sum(dim=-2)",
        ),
    ],
    2: [
        (
            "divide by N - 1",
            "def previous_score(weights): return weights.diagonal(-1, -2, -1).sum(-1) / weights.shape[-1]",
        ),
        ("the diagonal below", "def previous_score(weights): return weights.diagonal(1, -2, -1).mean(-1)"),
        ("the diagonal below", "def previous_score(weights): return weights.diagonal(0, -2, -1).mean(-1)"),
    ],
    3: [
        ("three readings", LENS.format(**CORRECT | {"result": "logits[1:]"})),
        (
            "final norm is missing",
            LENS.format(**CORRECT | {"first": "embedded @ matrix.T", "read": "stream @ matrix.T"}),
        ),
        ("the whole residual stream", LENS.format(**CORRECT | {"stream": "one"})),
        ("does not change the stream", LENS.format(**CORRECT | {"stream": "norm(stream) + one"})),
    ],
    4: [
        (
            "One number per head",
            "def head_contributions(heads, output, direction): return direction @ (output @ heads.flatten())",
        ),
        (
            "have to sum to",
            "def head_contributions(heads, output, direction):\n    H, D = heads.shape\n"
            "    return direction @ (output.view(-1, D, H) * heads.T).sum(1)",
        ),
        (
            "uses the columns",
            "def head_contributions(heads, output, direction):\n    H, D = heads.shape\n"
            "    return (direction @ (output.view(-1, H, D) * heads).sum(-1)).flip(0)",
        ),
    ],
}
