"""Exercises of lesson 12: tokens of an image, receptive fields, patches, Swin's windows, the contrastive loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.mask import AttentionMask, Positions
from regard.nn.patterns import tiles


@exercise(1, "tokens")
def tokens(answer: Callable[..., Any]) -> None:
    for size, patch, cls, exact in ((28, 4, False, 49), (224, 16, True, 197), (32, 8, False, 16)):
        result = answer(size, patch, cls)
        if result == size // patch + cls:
            raise Hint(
                "The image has rows and columns of patches: square it.", "패치에는 행과 열이 있습니다: 제곱해야 합니다."
            )
        if cls and result == exact - 1:
            raise Hint("[CLS] is one more token.", "[CLS]는 토큰 하나를 더합니다.")
        expect(
            result,
            exact,
            f"For an image of {size} and patches of {patch} pixels it is {exact}.",
            f"이미지가 {size}, 패치가 {patch}픽셀이면 {exact}개입니다.",
        )


@exercise(2, "layers_needed")
def layers_needed(answer: Callable[..., Any]) -> None:
    for side, kernel in ((15, 3), (15, 5), (1, 3), (17, 7)):
        exact = math.ceil((side - 1) / (kernel - 1))
        result = answer(side, kernel)
        if result == math.ceil(side / kernel) != exact:
            raise Hint(
                f"Each layer adds kernel - 1 = {kernel - 1} positions, not {kernel}.",
                f"레이어마다 {kernel}이 아니라 kernel - 1 = {kernel - 1}칸이 늘어납니다.",
            )
        expect(
            result,
            exact,
            f"For side {side} and kernel {kernel} it is {exact}: l layers see 1 + l · (kernel - 1) positions.",
            f"side {side}, kernel {kernel}이면 {exact}개입니다. 레이어 l개는 1 + l · (kernel - 1)칸을 봅니다.",
        )


@exercise(3, "to_patches")
def to_patches(answer: Callable[..., Any]) -> None:
    images = torch.randn(2, 3, 8, 12)
    exact = F.unfold(images, kernel_size=4, stride=4).transpose(1, 2)  # channel, row, column inside a patch
    result = torch.as_tensor(answer(images, 4))
    if result.shape == exact.transpose(1, 2).shape and result.shape != exact.shape:
        raise Hint(
            "The patches are the second axis, their numbers the last: [B, patches, C · size · size].",
            "둘째 축이 패치, 마지막 축이 패치의 숫자들입니다: [B, 패치 수, C · size · size].",
        )
    if result.shape == exact.shape and torch.allclose(result, images.reshape(exact.shape)):
        raise Hint(
            "A plain reshape cuts rows of pixels, not squares: separate the rows of patches first, then permute.",
            "reshape만 하면 정사각형이 아니라 픽셀의 줄을 자릅니다. 축을 나눈 뒤 permute하세요.",
        )
    expect(
        result,
        exact,
        "Patches in reading order; inside each first the channel, then the row, then the column.",
        "패치는 읽는 순서이고, 패치 안에서는 채널, 행, 열 순서입니다.",
    )


@exercise(4, "window_of")
def window_of(answer: Callable[..., Any]) -> None:
    positions = Positions.of(36, torch.device("cpu"))
    for size, shift in ((2, 0), (3, 0), (2, 1), (3, 1)):
        same = AttentionMask(tiles(size, (6, 0), shift), positions, positions).dense()[0, 0]
        named = [answer(i // 6, i % 6, size, shift) for i in range(36)]
        result = torch.tensor([[one == other for other in named] for one in named])
        if shift and torch.equal(result, AttentionMask(tiles(size, (6, 0), 0), positions, positions).dense()[0, 0]):
            raise Hint("The shift changes nothing here.", "shift를 바꾸어도 결과가 같습니다.")
        expect(
            result,
            same,
            f"With size {size} and shift {shift}: windows begin at {shift}, {shift + size}, …, and what is before "
            f"{shift} is a window of its own.",
            f"크기 {size}, 이동 {shift}: 윈도우는 {shift}, {shift + size}, …에서 시작하고, {shift}보다 앞은 "
            "따로 한 윈도우입니다.",
        )


@exercise(5, "contrastive_loss")
def contrastive_loss(answer: Callable[..., Any]) -> None:
    images, texts = 3 * torch.randn(6, 4), torch.randn(6, 4)
    one, other = F.normalize(images, dim=-1), F.normalize(texts, dim=-1)
    pair = torch.arange(6)

    def loss(similarity: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(similarity, pair) + F.cross_entropy(similarity.T, pair)) / 2

    result = torch.as_tensor(answer(images, texts, 5.0))
    if result.dim() == 0 and torch.isclose(result, loss(5.0 * images @ texts.T), atol=1e-4):
        raise Hint("The vectors have to be normalised to length 1 first.", "먼저 벡터를 길이 1로 정규화해야 합니다.")
    if result.dim() == 0 and torch.isclose(result, F.cross_entropy(5.0 * one @ other.T, pair), atol=1e-4):
        raise Hint(
            "Both directions count: texts for an image, and images for a text.",
            "양방향 모두 필요합니다. 이미지마다 텍스트를, 텍스트마다 이미지를 고릅니다.",
        )
    expect(
        result,
        loss(5.0 * one @ other.T),
        "The mean of two cross-entropies, whose labels are 0, 1, 2, …: the diagonal is correct.",
        "정답이 0, 1, 2, …인 두 교차 엔트로피의 평균입니다. 대각선이 정답입니다.",
    )
