"""Memory by formula, against real tensors: caches and states equal to the byte, activations within 2 %."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cost_models import CASES, drawn, sizes, small
from regard.cost import Cost, cost
from regard.cost.measure import loss_of, random_inputs
from regard.cost.shapes import stack_shapes
from regard.models.config import ModelConfig
from regard.models.recipe import preset
from regard.models.transformer import Model, build
from regard.nn import sdpa

pytestmark = pytest.mark.grid


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("name", ["decoder", "grouped queries", "own head sizes", "multi-query cross"])
def test_cache_is_as_large_as_the_real_one(name, dtype):
    config = small(name)
    found = cost(config, **sizes(config), dtype=dtype)
    kind = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
    model = build(config).to(kind).eval()
    *source, tokens = random_inputs(config, found)
    state = model.start(*source, capacity=tokens.shape[1])
    with torch.no_grad():
        model.step(tokens, state)
    assert found.kv_cache["self"] == state.cache.nbytes
    assert found.kv_cache["cross"] == sum(x.nbytes for pair in state.cache.memory.values() for x in pair)
    assert found.weights == sum(p.nbytes for p in model.parameters())


def test_published_cache():
    # 2 · 12 layers · 1024 tokens · 768 numbers · 2 bytes
    assert cost(preset("gpt2"), seq=1024, dtype="fp16").kv_cache == {"self": 37_748_736, "cross": 0}
    assert cost(preset("bert-base")).kv_cache == {"self": 0, "cross": 0}


def test_training_state_is_adams():
    config = small("decoder")
    model = build(config)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(config, model(torch.zeros(1, 3, dtype=torch.long))).backward()
    optimizer.step()
    kept = [*model.parameters(), *(p.grad for p in model.parameters())]
    kept += [moment for state in optimizer.state.values() for moment in (state["exp_avg"], state["exp_avg_sq"])]
    for dtype in ("bf16", "fp32"):  # mixed precision keeps its state in fp32
        assert cost(config, dtype=dtype).training_state == sum(x.nbytes for x in kept)


def kept_bytes(model: Model, run: Callable[[], Any]) -> int:
    """Bytes of all storages that autograd keeps, each once, without the parameters."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


def on_a_cpu(config: ModelConfig, found: Cost) -> int:
    """The formula's sum with the CPU's own ways: dropout masks as numbers, rms norms composed of two steps."""
    total = sum(found.activations.values()) + 3 * found.activations.get("dropout", 0)
    for stack in stack_shapes(config, found.seq, found.target_seq):
        norms = stack.layers * stack.sublayers + config.embed_norm + config.ends_with_norm
        total += (config.norm == "rms") * norms * found.batch * stack.length * config.dim * 4
        queries, keys = stack.length * (stack.sublayers - 1), stack.length + stack.memory
        vectors = stack.layers * found.batch * (queries * config.heads + keys * config.key_heads)
        total += config.qk_norm * vectors * config.key_dim * 4
    return total


def check_kept_on_a_cpu(config: ModelConfig) -> None:
    found, model = cost(config, **sizes(config), dtype="fp32"), build(config)
    given = random_inputs(config, found)
    kept = kept_bytes(model, lambda: loss_of(config, model(*given)))
    assert kept == pytest.approx(on_a_cpu(config, found), rel=0.02), (config, found.activations)


@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_activations_that_the_backward_pass_keeps(name, path):
    config = small(
        name, attention="reference" if "attention_score" in CASES[name] else path, dropout=0.1, embed_dropout=0.1
    )
    if config.attention == "fused" and (config.value_dim or config.position in ("relative", "t5")):
        pytest.skip("the CPU's fused kernel declines; the GPU's does not")
    check_kept_on_a_cpu(config)


@pytest.mark.parametrize("name", [name for name in CASES if "attention_score" not in CASES[name]])
def test_activations_in_bfloat16_on_a_cpu(name, monkeypatch):
    """The residual stream and what autograd stores of it are bfloat16 under autocast, as on a GPU."""
    monkeypatch.setattr(sdpa, "SHORT", 0)  # attention as well: else a CPU computes it in float32
    config = small(name, dim=128, ff_dim=256, image_size=32, max_length=64, attention="fused")
    if config.value_dim or config.position in ("relative", "t5"):
        pytest.skip("the CPU's fused kernel declines; the GPU's does not")
    if config.qk_norm or config.norm == "rms" or config.head_layer or config.stem == "conv":
        pytest.skip("the CPU composes or converts these norms in another way")
    found, model = cost(config, **sizes(config, batch=4, seq=32, target=16), dtype="bf16"), build(config)
    given = random_inputs(config, found)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(config, model(*given))

    assert kept_bytes(model, run) == pytest.approx(sum(found.activations.values()), rel=0.02), found.activations


def test_activations_of_random_configs():
    for config in drawn(60, seed=2):
        check_kept_on_a_cpu(config)
        plain = (
            config.attention_score == "dot" and config.value_dim is None and config.position not in ("relative", "t5")
        )
        if plain:
            check_kept_on_a_cpu(replace(config, attention="fused"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_activations_on_a_gpu(name, dtype):
    """Memory in use after the forward pass, bf16 by autocast; the allocator rounds each tensor up to 512 bytes."""
    path = "reference" if "attention_score" in CASES[name] else "fused"
    wide = {"dim": 128, "ff_dim": 256, "image_size": 32, "max_length": 64, "dropout": 0.1, "embed_dropout": 0.1}
    config = small(name, attention=path, **wide)
    if config.head_dim:
        config = replace(config, head_dim=48, value_dim=24)
    if dtype == "fp32" and config.kv_heads:
        pytest.skip("no fused kernel for fp32 with fewer key heads; the written-out formula runs")
    model, found = build(config).cuda(), cost(config, **sizes(config, batch=8, seq=64, target=32), dtype=dtype)
    x = random_inputs(config, found, "cuda")
    for _ in range(2):  # the first pass leaves workspaces and gradients behind
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bf16"):
            end = loss_of(config, model(*x))
        kept = torch.cuda.memory_allocated() - before
        end.backward()
    source = x[0].nbytes if config.input == "tokens" or dtype == "fp32" else 0  # was there before
    target = x[1].nbytes if len(x) > 1 else 0
    assert kept + source + target == pytest.approx(sum(found.activations.values()), rel=0.05), found.activations


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_peak_on_a_gpu(dtype):
    """The most memory of a training step, beyond weights and gradients: activations and the loss's gradients."""
    config = small("decoder", dim=128, ff_dim=256, vocab_size=5000, max_length=64)
    found, model = cost(config, **sizes(config, batch=16, seq=64), dtype=dtype), build(config).cuda()
    x, outputs = *random_inputs(config, found, "cuda"), torch.zeros(16 * 64, dtype=torch.long, device="cuda")
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bf16"):
            F.cross_entropy(model(x).flatten(0, 1), outputs, label_smoothing=0.1).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(sum(found.activations.values()) + found.loss_gradients, rel=0.05)
