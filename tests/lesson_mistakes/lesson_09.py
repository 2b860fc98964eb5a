"""Plausible mistakes in the exercises of lesson 9."""

SPLIT = """
def split_qkv(x, weight, bias, heads):
    B, T, C = x.shape
    {body}
"""
STEP = """
import torch
def cached_step(q, k, v, cache):
    {body}
    scores = q @ cache["k"].transpose(-1, -2) {scale}
    return scores.softmax(dim=-1) @ cache["v"]
"""
APPEND = (
    'for name, new in (("k", k), ("v", v)): cache[name] = torch.cat([cache[name], new], 2) if name in cache else new'
)

MISTAKES = {
    1: [
        (
            "Half of it is missing",
            "def cache_bytes(layers, kv_heads, head_dim, length, batch, bytes_per_number):\n"
            "    return layers * kv_heads * head_dim * length * batch * bytes_per_number",
        ),
        (
            "all six sizes",
            "def cache_bytes(layers, kv_heads, head_dim, length, batch, bytes_per_number):\n"
            "    return 2 * layers * kv_heads * head_dim * length * batch",
        ),
    ],
    2: [
        (
            "a view as [B, heads, T, D] mixes tokens",
            SPLIT.format(body="return [p.reshape(B, heads, T, C // heads) for p in (x @ weight + bias).split(C, -1)]"),
        ),
        (
            "first split into q, k, v",
            SPLIT.format(
                body="y = (x @ weight + bias).view(B, T, heads, 3, C // heads).permute(3, 0, 2, 1, 4); return "
                "y.unbind()"
            ),
        ),
        (
            "Three tensors",
            SPLIT.format(body="return [p.view(B, T, heads, C // heads) for p in (x @ weight + bias).split(C, -1)]"),
        ),
    ],
    3: [
        (
            "masked keys must be left out",
            "def top_keys(weights, tokens, k):\n    return [[tokens[i] for i in row.topk(k).indices] for row in "
            "weights]",
        ),
        (
            "For every row",
            "def top_keys(weights, tokens, k):\n"
            "    return [[tokens[i] for i in row.argsort()[:k] if row[i] > 0] or ['R'] for row in weights]",
        ),
        (
            "At most k keys",
            "def top_keys(weights, tokens, k):\n    return [[tokens[i] for i in row.argsort(descending=True)] for "
            "row in weights]",
        ),
    ],
    4: [
        ("append, do not replace", STEP.format(body='cache["k"], cache["v"] = k, v', scale="/ q.shape[-1] ** 0.5")),
        ("divide the scores", STEP.format(body=APPEND, scale="")),
        ("divide the scores", STEP.format(body=APPEND, scale="/ q.shape[-1]")),
    ],
}
