"""Exercises of lesson 4: heads, parameters, GPT-2's attention, cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.config import StackConfig
from regard.nn.multihead import MultiHead


@exercise(1, "split_heads")
def split_heads(answer: Callable[..., Any]) -> None:
    x = torch.randn(2, 5, 12)
    result = torch.as_tensor(answer(x, 3))
    if result.shape != (2, 3, 5, 4):
        raise Hint(
            f"The shape is {tuple(result.shape)} instead of [B, H, T, D] = (2, 3, 5, 4): the heads come before "
            "the words.",
            f"모양이 [B, H, T, D] = (2, 3, 5, 4)가 아니라 {tuple(result.shape)}입니다. 헤드 축이 단어 축보다 "
            "앞에 옵니다.",
        )
    expect(
        result[:, 1],
        x[:, :, 4:8],
        "Head 1 has to be the elements 4 to 7 of every word: view(B, T, H, D), then transpose(1, 2). A view "
        "straight to "
        "(B, H, T, D) mixes up words.",
        "헤드 1은 모든 단어의 4~7번 원소여야 합니다. view(B, T, H, D) 다음에 transpose(1, 2)를 하세요. "
        "곧바로 (B, H, T, D)로 view하면 단어가 섞입니다.",
    )


@exercise(2, "merge_heads")
def merge_heads(answer: Callable[..., Any]) -> None:
    x = torch.randn(2, 3, 5, 4)
    result = torch.as_tensor(answer(x))
    if result.shape != (2, 5, 12):
        raise Hint(
            f"The shape is {tuple(result.shape)} instead of [B, T, H · D] = (2, 5, 12).",
            f"모양이 [B, T, H · D] = (2, 5, 12)가 아니라 {tuple(result.shape)}입니다.",
        )
    expect(
        result,
        torch.cat([x[:, head] for head in range(3)], dim=-1),
        "A word's vector has to be [head 0 | head 1 | head 2] of that word: transpose(1, 2) back before flattening.",
        "단어 벡터는 그 단어의 [헤드 0 | 헤드 1 | 헤드 2]여야 합니다. 펼치기 전에 transpose(1, 2)로 되돌리세요.",
    )


@exercise(3, "count_parameters")
def count_parameters(answer: Callable[..., Any]) -> None:
    cases = (
        (12, 3, 3, 4, False,
         "dim · H · D for the queries, 2 · dim · Hkv · D for keys and values, H · D · dim for the output"),
        (12, 3, 3, 4, True, "the biases: one per output of each projection, so H · D + 2 · Hkv · D + dim"),
        (12, 3, 3, 8, False, "head_dim: it need not be dim / heads"),
        (24, 4, 2, 6, True, "kv_heads: keys and values have fewer heads than queries"),
    )  # fmt: skip
    korean = (
        "쿼리는 dim · H · D, 키와 값은 dim · Hkv · D의 두 배, 출력은 H · D · dim입니다",
        "편향은 투영의 출력마다 하나이므로 H · D + 2 · Hkv · D + dim입니다",
        "head_dim은 dim / heads가 아닐 수도 있습니다",
        "kv_heads: 키와 값의 헤드는 쿼리보다 적을 수 있습니다",
    )
    for (dim, heads, kv_heads, head_dim, bias, en), ko in zip(cases, korean, strict=True):
        config = StackConfig(dim=dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bias=bias)
        exact = sum(parameter.numel() for parameter in MultiHead(config).parameters())
        got = answer(dim, heads, kv_heads, head_dim, bias)
        call = f"count_parameters({dim}, {heads}, {kv_heads}, {head_dim}, {bias})"
        expect(
            got, exact, f"{call} is {exact}, not {got}. Think of {en}.", f"{call}은 {got}이 아니라 {exact}입니다. {ko}."
        )


@exercise(4, "gpt2_attention")
def gpt2_attention(answer: Callable[..., Any]) -> None:
    x, c_attn, c_proj = torch.randn(2, 5, 12), torch.randn(12, 36) * 0.3, torch.randn(12, 12) * 0.3
    c_attn_bias, c_proj_bias = torch.randn(36), torch.randn(12)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict({
        "in_proj_weight": c_attn.T, "in_proj_bias": c_attn_bias,
        "out_proj.weight": c_proj.T, "out_proj.bias": c_proj_bias,
    })  # fmt: skip
    future = torch.ones(5, 5).triu(1).bool()
    with torch.no_grad():
        exact, everything = (theirs(x, x, x, attn_mask=mask)[0] for mask in (future, None))
        result = torch.as_tensor(answer(x, c_attn, c_attn_bias, c_proj, c_proj_bias, 3))
    if result.shape != x.shape:
        raise Hint(
            f"The output has shape {tuple(result.shape)} instead of that of x, {tuple(x.shape)}.",
            f"출력의 모양이 x와 같은 {tuple(x.shape)}이 아니라 {tuple(result.shape)}입니다.",
        )
    if torch.allclose(result, everything, atol=1e-4):
        raise Hint(
            "GPT-2's attention is causal: mask the future.", "GPT-2의 어텐션은 인과적입니다. 미래를 마스킹하세요."
        )
    expect(
        result,
        exact,
        "c_attn gives [q | k | v], each with its heads side by side. Check the scale √(C / heads), both biases and the "
        "order of the transposes.",
        "c_attn의 결과는 [q | k | v]이고, 그 안에 헤드들이 나란히 있습니다. 스케일 √(C / heads), 두 편향, "
        "transpose의 순서를 "
        "확인하세요.",
    )


@exercise(5, "cross_attention")
def cross_attention(answer: Callable[..., Any]) -> None:
    x, memory = torch.randn(2, 4, 12), torch.randn(2, 7, 12)
    w_q, w_k, w_v, w_o = torch.randn(4, 12, 12) * 0.3
    theirs = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    theirs.load_state_dict({"in_proj_weight": torch.cat((w_q, w_k, w_v), dim=1).T, "out_proj.weight": w_o.T})
    with torch.no_grad():
        exact, exact_weights = theirs(x, memory, memory, average_attn_weights=False)
        results = answer(x, memory, w_q, w_k, w_v, w_o, 3)
    if not isinstance(results, tuple) or len(results) != 2:
        raise Hint("Return two tensors: (output, weights).", "텐서 두 개 (출력, 가중치)를 반환하세요.")
    output, weights = results
    if weights.shape != (2, 3, 4, 7):
        raise Hint(
            f"The weights have shape {tuple(weights.shape)} instead of [B, H, T, S] = (2, 3, 4, 7): queries come "
            "from x, "
            "keys and values from memory.",
            f"가중치의 모양이 [B, H, T, S] = (2, 3, 4, 7)이 아니라 {tuple(weights.shape)}입니다. 쿼리는 x에서, "
            "키와 값은 "
            "memory에서 옵니다.",
        )
    expect(
        weights,
        exact_weights,
        "The weights differ: queries are x @ w_q, keys memory @ w_k, and the scale is √(C / heads), the size of "
        "a head.",
        "가중치가 다릅니다. 쿼리는 x @ w_q, 키는 memory @ w_k이고, 스케일은 헤드 차원의 제곱근 √(C / heads)입니다.",
    )
    expect(
        output,
        exact,
        "The weights are correct, the output is not: merge the heads and multiply by w_o.",
        "가중치는 맞지만 출력이 다릅니다. 헤드를 합친 뒤 w_o를 곱하세요.",
    )
