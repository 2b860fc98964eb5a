"""Mixers on a GPU: FlexAttention, compiled layers and caches compute what plain PyTorch computes on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from regard.nn import attention
from regard.nn.banded import kernels_for, prepare
from regard.nn.block import Stack, run_block
from regard.nn.cache import Cache
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Mask, Positions, causal, everything, window

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")

CAUSAL: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"mixer": "window(100)"},
    "global": {"mixer": "window(60)", "global_tokens": 3},
    "dilated": {"mixer": "window(40)", "dilation": 3},
    "bigbird": {"mixer": "bigbird(64)", "global_tokens": 32, "block_size": 32},
    "linear": {"mixer": "linear"},
    "performer": {"mixer": "performer"},
    "gated-linear": {"mixer": "gated-linear"},
    "pattern": {"mixer": "window(50), gated-linear, full"},
}
MIXERS: dict[str, dict[str, Any]] = CAUSAL | {
    "projections": {"mixer": "window(60)", "global_tokens": 3, "global_projections": True},
    "linformer": {"mixer": "linformer", "max_length": 800, "projected_length": 64},
    "fourier": {"mixer": "fourier"},
}


def make(fields: dict[str, Any], is_causal: bool = False) -> Stack:
    sizes: dict[str, Any] = {"dim": 64, "heads": 2, "ff_dim": 64, "layers": 3, "dropout": 0.0, "embed_dropout": 0.0}
    torch.manual_seed(0)
    return Stack(StackConfig(**(sizes | {"position": "none", "norm_order": "pre"} | fields)), causal=is_causal)


@pytest.fixture(autouse=True)
def compile_anew() -> None:
    torch._dynamo.reset()  # past 8 kinds of graph in one process, nothing more would be compiled
    counters.clear()


def padded(rows: int, length: int, device: str) -> Positions:
    real = torch.arange(length)[None] < torch.linspace(length, length // 2, rows)[:, None]
    return Positions.of(length, torch.device(device), real.to(device))


def passes(stack: Stack, x: Tensor, positions: Positions | None = None) -> list[Tensor]:
    """Output and gradients, without those of padding."""
    x, positions = x.detach().requires_grad_(), positions or padded(len(x), x.shape[1], x.device.type)
    stack.zero_grad(set_to_none=True)
    out = stack(x, positions)
    out = out if positions.is_real is None else out * positions.is_real[..., None]
    out.sin().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(parameter.grad for parameter in stack.parameters() if parameter.grad is not None)]


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    errors = [(a.cpu() - b.cpu()).norm() / b.cpu().norm().clamp_min(1e-3) for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_values_and_gradients_are_those_of_a_cpu(name: str, is_compiled: bool) -> None:
    stack, x = make(MIXERS[name]), torch.randn(3, 777, 64)
    expected, ours = passes(stack, x), copy.deepcopy(stack).cuda()
    ours.compute = torch.compile(run_block) if is_compiled else None
    assert relative_error(passes(ours, x.cuda()), expected) < 2e-2  # FlexAttention multiplies in TF32


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [50, 777, 1024])
def test_a_compiled_step_in_bfloat16_has_the_gradients_of_a_cpu(length: int, is_causal: bool) -> None:
    stack, x = make({}, is_causal), torch.randn(3, length, 64)
    expected, ours = passes(stack, x, Positions.of(length, x.device)), copy.deepcopy(stack).cuda()
    ours.compute = torch.compile(run_block)
    with torch.autocast("cuda", torch.bfloat16):
        found = passes(ours, x.cuda(), Positions.of(length, torch.device("cuda")))
    assert relative_error([one.float() for one in found], expected) < 0.1  # rounded: 0.05; wrong: 1


@pytest.mark.parametrize("name", ["window", "global", "bigbird"])
def test_batches_of_many_shapes_share_a_few_graphs(name: str) -> None:
    stack = make(MIXERS[name]).cuda()
    for rows, length in ((3, 600), (2, 777), (4, 640), (5, 513), (2, 1500), (3, 1024), (6, 901)):
        passes(stack, torch.randn(rows, length, 64, device="cuda"))
    assert counters["stats"]["unique_graphs"] <= 4


def test_a_window_takes_memory_in_proportion_to_the_length() -> None:
    def peak(length: int) -> int:
        stack, x = make({"mixer": "window(512)"}, True).cuda(), torch.randn(1, length, 64, device="cuda")
        for _ in range(2):  # the first pass compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes(stack, x)
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 2.3 * peak(16384)


def test_which_kernels_compute_a_long_window() -> None:
    positions = Positions.of(4096, torch.device("cuda"))
    for dtype, dropout, route in (
        (torch.bfloat16, 0.0, "flash"), (torch.float32, 0.0, "flex"), (torch.bfloat16, 0.1, "banded")
    ):  # fmt: skip
        kernels = kernels_for(dtype, 64, 64, is_plain=True)
        mask = AttentionMask(causal & window(256), positions, positions)
        assert prepare(mask, torch.device("cuda"), dropout, kernels) == route


def tokens_of(kind: str, length: int, device: torch.device = CUDA) -> Positions:
    index = torch.arange(length, device=device).expand(2, -1)
    if kind == "plain":
        return Positions.of(length, device)
    if kind == "padded":
        return Positions.of(length, device, index < torch.tensor([[length], [length // 3]], device=device))
    document = (index // torch.tensor([[250], [600]], device=device) + 1) * (index < length - 30)
    return Positions.of(length, device, document > 0, document)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mask", [everything, causal, window(100), causal & window(100)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("length", [777, 4096])
def test_flash_attention_with_bands_is_the_formula(length: int, kind: str, mask: Mask, is_compiled: bool) -> None:
    torch.manual_seed(0)
    positions = tokens_of(kind, length)
    real = 1 if positions.is_real is None else positions.is_real[..., None]
    x = torch.randn(3, 2, length, 4, 32, device="cuda", dtype=torch.bfloat16)  # q, k and v as a layer has them

    def run(q: Tensor, k: Tensor, v: Tensor, own: AttentionMask, path: str) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = attention.attend(q, k, v, own, path=path)  # type: ignore[arg-type]
        return out.transpose(1, 2).flatten(2)  # [B, N, H · D]

    found = []
    for dtype, path in ((torch.bfloat16, "fused"), (torch.float32, "reference")):
        parts = [part.clone().to(dtype).requires_grad_() for part in x]
        own = AttentionMask(mask, positions, positions)
        if path == "fused":
            route = prepare(own, torch.device("cuda"), 0.0, kernels_for(dtype, 32, 32, is_plain=True))
            assert route == ("dense" if own.kind in ("everything", "causal") else "flash")
        call = torch.compile(run) if is_compiled and path == "fused" else run
        out = call(*parts, own, path) * real
        gradients = torch.autograd.grad((out.float() ** 2).sum(), parts)
        found.append([out.detach().float(), *(gradient.float() for gradient in gradients)])
    assert relative_error(*found) < 2e-2


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [70, 777])
@pytest.mark.parametrize("name", [name for name in MIXERS if name != "full"])
def test_packed_texts_are_those_of_a_cpu(name: str, length: int, is_causal: bool) -> None:
    if is_causal and name not in CAUSAL:
        pytest.skip("for encoders")
    stack, x = make(MIXERS[name], is_causal), torch.randn(2, length, 64)
    expected = passes(stack, x, tokens_of("packed", length, x.device))
    ours = passes(copy.deepcopy(stack).cuda(), x.cuda(), tokens_of("packed", length))
    assert relative_error(ours, expected) < 2e-2


@pytest.mark.parametrize("mixer", ["window(100)", "linear", "performer", "gated-linear"])
def test_a_recorded_step_reads_no_tensors_to_find_texts(mixer: str) -> None:
    stack = make({"mixer": mixer}).cuda().bfloat16()
    x, positions = torch.randn(2, 777, 64, device="cuda", dtype=torch.bfloat16), tokens_of("packed", 777)
    expected = stack(x, positions)
    stack.is_recorded = True
    stack(x, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = stack(x, positions)
    graph.replay()
    assert positions.is_real is not None
    real = positions.is_real[..., None]
    assert relative_error([(out * real).float()], [(expected * real).detach().float()]) < 2e-2


def test_dropout_of_weights_keeps_their_mean() -> None:
    """Banded attention on a GPU: the mean over many samples of the dropout is the output without it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 2048, 16, device="cuda")
    positions = Positions.of(2048, torch.device("cuda"))
    mask = AttentionMask(causal & window(128), positions, positions)
    mean = torch.stack([attention.attend(q, k, v, mask, dropout=0.2) for _ in range(200)]).mean(dim=0)
    fresh = AttentionMask(causal & window(128), positions, positions)
    exact = attention.attend(q, k, v, fresh, path="reference")
    assert ((mean - exact).norm() / exact.norm()) < 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_gives_the_output_of_the_whole_sequence(name: str) -> None:
    stack = make(CAUSAL[name] | {"position": "rope"}, True).cuda().eval()
    x, cache, device = torch.randn(2, 700, 64, device="cuda"), Cache(), torch.device("cuda")
    pieces = x.split((600, 1, 1, 90, *[1] * 8), dim=1)
    outputs = [stack(piece, cache.next_positions(piece.shape[1], device), cache=cache) for piece in pieces]
    assert relative_error([torch.cat(outputs, dim=1)], [stack(x, Positions.of(700, device))]) < 1e-2


def test_more_masks_than_pytorch_compiles_by_default() -> None:
    """Each of nine windows is a graph of its own; without a graph, FlexAttention would store all pairs of tokens."""
    stack = make({"mixer": ", ".join(f"window({32 + 8 * i})" for i in range(9)), "layers": 9}).cuda()
    x = torch.randn(1, 16384, 64, device="cuda")
    passes(stack, x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    passes(stack, x)
    assert torch.cuda.max_memory_allocated() - before < 2 * 16384**2  # bytes: less than one row of scores per head
