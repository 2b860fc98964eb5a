"""The loss in chunks is PyTorch's loss over all scores at once, and so are its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard.data.streams import BlockBatch
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder
from regard.tasks.language_modeling import next_token
from regard.training.objective import cross_entropy, score, token_loss

CONFIG = ModelConfig(
    architecture="decoder", vocab_size=50, dim=16, layers=2, heads=2, ff_dim=32, norm_order="pre", position="rope",
    dropout=0.0,
    embed_dropout=0.0,
)  # fmt: skip


def make(dtype=torch.float64, **changes) -> tuple[Decoder, BlockBatch]:
    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, **changes)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, BlockBatch(torch.randint(50, (3, 8)))


def gradients(model: Decoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False}, {"logit_bias": True, "logit_scale": 0.5}, {"head_layer": True}], ids=str
)
def test_loss_and_gradients_are_those_of_cross_entropy(chunk, smoothing, changes):
    model, batch = make(**changes)
    logits, expected = model(batch.read).flatten(0, 1), batch.labels.flatten()
    plain = F.cross_entropy(logits, expected, label_smoothing=smoothing, reduction="sum")
    ours, count = next_token(model, batch, smoothing, loss_chunk=chunk)
    torch.testing.assert_close(ours, plain)
    assert int(count) == 21
    wanted, found = gradients(model, plain / 21), gradients(model, ours / 21)
    assert wanted.keys() == found.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=name)


def test_what_is_ignored_teaches_nothing():
    model, batch = make()
    states = model.states(batch.read).detach().requires_grad_()
    expected = batch.labels.clone()
    expected[0] = -100
    ours = token_loss(states, model.output_head, expected, 0.1, 0.0, 5)
    plain = F.cross_entropy(
        model.output_head(states).flatten(0, 1),
        expected.flatten(),
        label_smoothing=0.1,
        reduction="sum",
        ignore_index=-100,
    )
    torch.testing.assert_close(ours, plain)
    (found,) = torch.autograd.grad(ours, states)
    assert not found[0].any() and found[1:].any()
    torch.testing.assert_close(found, torch.autograd.grad(plain, states)[0])


def test_under_autocast_as_the_plain_loss():
    """bf16 scores in both; sums in float32. The gradients differ by no more than two runs in bf16 may."""
    model, batch = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain, _ = next_token(model, batch)
        ours, _ = next_token(model, batch, loss_chunk=7)
    torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-2)
    assert ours.dtype == torch.float32
    wanted, found = gradients(model, plain), gradients(model, ours)
    for name in wanted:
        assert found[name].dtype == torch.float32
        assert (found[name] - wanted[name]).norm() <= 0.03 * wanted[name].norm() + 1e-6, name


def test_the_scores_are_never_all_there():
    model, batch = make(torch.float32)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == 50 and out.shape[0] != CONFIG.dim:
                sizes.append(out.numel())  # scores, not the weights
            return out

    with Watch():
        next_token(model, batch, 0.1, loss_chunk=4)[0].backward()
    assert max(sizes) == 4 * 50


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("alpha", [0.5, 4.0])
def test_r_drop_in_chunks(chunk, alpha):
    """Rows 0 to 2 and 3 to 5 stand for the same tokens; some of them teach nothing."""
    model, _ = make(logit_bias=True)
    states = torch.randn(6, 8, 16, dtype=torch.float64, requires_grad=True)
    expected = torch.randint(50, (3, 8)).masked_fill(torch.rand(3, 8) < 0.3, -100).repeat(2, 1)
    given = [states, *model.output_head.parameters()]
    plain = cross_entropy(model.output_head(states), expected, 0.1, alpha)
    ours = token_loss(states, model.output_head, expected, 0.1, alpha, chunk)
    torch.testing.assert_close(ours, plain)
    for found, wanted in zip(*(torch.autograd.grad(loss, given) for loss in (ours, plain)), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("vocab_size", [37, 5000, 10000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 4.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_kernel_computes_the_formulas(vocab_size, dtype, alpha, smoothing):
    from regard.training import kernel

    torch.manual_seed(0)
    logits = (3 * torch.randn(128, vocab_size, device="cuda")).to(dtype)
    expected = torch.randint(vocab_size, (64,), device="cuda").masked_fill(torch.rand(64, device="cuda") < 0.2, -100)
    expected = expected.repeat(2)
    wanted = score(logits.double(), expected, smoothing, alpha)
    found = kernel.score(logits.clone(), expected, smoothing, alpha)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=1e-3)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(found[1].double(), wanted[1], **close)
