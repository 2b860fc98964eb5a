"""Exercises of lesson 9: the size of the KV cache, GPT-2's fused projection, the largest weights, a cached step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "cache_bytes")
def cache_bytes(answer: Callable[..., Any]) -> None:
    result, right = answer(12, 12, 64, 1024, 1, 4), 72 * 2**20  # GPT-2, 32 bits
    if result * 2 == right:
        raise Hint(
            "Half of it is missing: the cache has a key and a value for every token.",
            "절반이 빠졌습니다. 캐시는 토큰마다 키와 값을 하나씩 저장합니다.",
        )
    expect(
        [result, answer(2, 3, 5, 7, 11, 13)],
        [right, 2 * 2 * 3 * 5 * 7 * 11 * 13],
        "Multiply 2 (keys and values) by all six sizes; GPT-2 needs 72 MiB for one sequence of 1,024 tokens in 32 "
        "bits.",
        "2(키와 값)에 여섯 값을 모두 곱합니다. GPT-2는 1,024 토큰 시퀀스 하나에 32비트로 72 MiB가 필요합니다.",
    )


@exercise(2, "split_qkv")
def split_qkv(answer: Callable[..., Any]) -> None:
    linear, x = nn.Linear(12, 36), torch.randn(2, 5, 12)
    parts = [part.detach() for part in answer(x, linear.weight.detach().T, linear.bias.detach(), heads=3)]
    if len(parts) != 3 or any(part.shape != (2, 3, 5, 4) for part in parts):
        shapes = [list(part.shape) for part in parts]
        raise Hint(
            f"Three tensors [B, H, T, D] = [2, 3, 5, 4] are needed; yours are {shapes}. Split 3C, then view C as "
            "[heads, D], then move the heads before T.",
            f"[B, H, T, D] = [2, 3, 5, 4]인 텐서 세 개가 필요하지만 결과는 {shapes}입니다. 3C를 나누고, C를 [heads, "
            "D]로 보고, 헤드를 T 앞으로 옮깁니다.",
        )
    columns = linear(x).detach().reshape(2, 5, 3, 3, 4)  # [B, T, part, head, D]
    for part, name in enumerate("qkv"):
        for head in range(3):
            expect(
                parts[part][:, head],
                columns[:, :, part, head],
                f"Head {head} of {name} has other numbers: first split into q, k, v (the first C columns are q), then "
                "view as [B, T, heads, D] and transpose; a view as [B, heads, T, D] mixes tokens.",
                f"{name}의 헤드 {head}에 다른 숫자가 들어 있습니다. 먼저 q, k, v로 나누고(처음 C개의 열이 q), "
                "[B, T, heads, D]로 본 뒤 전치합니다. 바로 [B, heads, T, D]로 보면 토큰이 섞입니다.",
            )


@exercise(3, "top_keys")
def top_keys(answer: Callable[..., Any]) -> None:
    tokens = ["R", "O", "M"]
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [0.5, 0.1, 0.4]])
    result = [list(row) for row in answer(weights, tokens, 2)]
    if any(len(row) > 2 for row in result):
        raise Hint("At most k keys per query are asked for.", "쿼리마다 최대 k개의 키만 반환합니다.")
    if len(result[0]) != 1:
        raise Hint(
            "The first query of a causal map has one key with a weight above 0; masked keys must be left out.",
            "인과 마스크를 쓴 맵에서 첫 쿼리에는 가중치가 0보다 큰 키가 하나뿐입니다. 마스크된 키는 빼야 합니다.",
        )
    if result != [["R"], ["O", "R"], ["R", "M"]]:
        raise Hint(
            "For every row (query), sort the keys by weight, the largest first, and name the key's token.",
            "행(쿼리)마다 가중치가 큰 키부터 정렬하고, 그 키의 토큰을 적습니다.",
        )


@exercise(4, "cached_step")
def cached_step(answer: Callable[..., Any]) -> None:
    q, k, v = (torch.randn(1, 2, 4, 3) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    cache: dict[str, Tensor] = {}
    for step in range(4):
        at = slice(step, step + 1)
        output = answer(q[:, :, at], k[:, :, at], v[:, :, at], cache)
        if cache.get("k") is None or cache["k"].shape[2] != step + 1:
            raise Hint(
                f"After step {step} the cache must have {step + 1} keys along dimension 2: append, do not replace.",
                f"{step}번째 스텝 뒤에는 캐시의 2번 차원에 키가 {step + 1}개 있어야 합니다. 바꾸지 말고 덧붙이세요.",
            )
        expect(
            output,
            whole[:, :, at],
            f"Step {step} differs from the causal attention over the whole sequence: divide the scores by √D, take the "
            "softmax over the keys, and use all cached values, the new one included.",
            f"{step}번째 스텝이 전체 시퀀스의 인과 어텐션과 다릅니다. 점수를 √D로 나누고, 키 방향으로 소프트맥스를 "
            "취하고, 새 값을 포함한 캐시의 모든 값을 사용해야 합니다.",
        )
