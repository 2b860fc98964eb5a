"""Plausible mistakes in the exercises of lesson 4."""

COUNT = "def count_parameters(dim, heads, kv_heads, head_dim, bias): return "
GPT2 = """
import torch

def gpt2_attention(x, c_attn, c_attn_bias, c_proj, c_proj_bias, heads):
    B, T, C = x.shape
    q, k, v = (x @ c_attn + c_attn_bias).split(C, dim=-1)
    q, k, v = (part.{split} for part in (q, k, v))
    scores = q @ k.transpose(-2, -1) / {scale}
    weights = torch.softmax(scores.masked_fill({mask}, float("-inf")), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ c_proj {bias}
"""
RIGHT = {
    "split": "view(B, T, heads, C // heads).transpose(1, 2)",
    "scale": "(C // heads) ** 0.5",
    "mask": "torch.ones(T, T).triu(1).bool()",
    "bias": "+ c_proj_bias",
}
CROSS = """
import torch

def cross_attention(x, memory, w_q, w_k, w_v, w_o, heads):
    def split(part):
        return part.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = split({q} @ w_q), split({k} @ w_k), split({v} @ w_v)
    weights = torch.softmax(q @ k.transpose(-2, -1) / {scale} ** 0.5, dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2) {out}
"""
CROSS_RIGHT = {"q": "x", "k": "memory", "v": "memory", "scale": "q.shape[-1]", "out": "@ w_o, weights"}

MISTAKES = {
    1: [
        ("mixes up words", "def split_heads(x, heads): return x.view(x.shape[0], heads, x.shape[1], -1)"),
        ("the heads come before", "def split_heads(x, heads): return x.unflatten(-1, (heads, -1))"),
        (
            "elements 4 to 7",
            "def split_heads(x, heads): return x.unflatten(-1, (-1, heads)).transpose(2, 3).transpose(1, 2)",
        ),
    ],
    2: [
        ("transpose(1, 2) back", "def merge_heads(x): return x.reshape(x.shape[0], x.shape[2], -1)"),
        ("instead of [B, T, H · D]", "def merge_heads(x): return x.transpose(1, 2)"),
        ("head 0 | head 1", "def merge_heads(x): return x.permute(0, 2, 3, 1).flatten(2)"),
    ],
    3: [
        ("for the output", COUNT + "3 * dim * heads * head_dim"),
        ("the biases", COUNT + "dim * head_dim * (2 * heads + 2 * kv_heads)"),
        ("need not be dim / heads", COUNT + "4 * dim * dim + (4 * dim if bias else 0)"),
        ("fewer heads", COUNT + "4 * dim * heads * head_dim + (3 * heads * head_dim + dim if bias else 0)"),
    ],
    4: [
        ("mask the future", GPT2.format(**RIGHT | {"mask": "torch.zeros(T, T).bool()"})),
        ("order of the transposes", GPT2.format(**RIGHT | {"split": "reshape(B, heads, T, C // heads)"})),
        ("Check the scale", GPT2.format(**RIGHT | {"scale": "C ** 0.5"})),
        ("both biases", GPT2.format(**RIGHT | {"bias": ""})),
        ("Check the scale", GPT2.format(**RIGHT | {"mask": "torch.ones(T, T).tril(-1).bool()"})),
    ],
    5: [
        ("queries come from x", CROSS.format(**CROSS_RIGHT | {"k": "x", "v": "x"})),
        ("queries come from x", CROSS.format(**CROSS_RIGHT | {"q": "memory", "k": "x", "v": "x"})),
        ("the size of a head", CROSS.format(**CROSS_RIGHT | {"scale": "x.shape[-1]"})),
        ("multiply by w_o", CROSS.format(**CROSS_RIGHT | {"out": ", weights"})),
        ("two tensors", CROSS.format(**CROSS_RIGHT | {"out": "@ w_o"})),
    ],
}
