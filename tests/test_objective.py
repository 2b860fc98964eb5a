"""R-Drop against its formula (Liang et al. 2021, eq. 1 to 4), packed and padded alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard.data.pack import Packs
from regard.models.transformer import build
from regard.training.objective import target_states, translation
from reversal import MODEL, reversal_pairs


class Scripted(torch.nn.Module):
    """Gives the logits it was handed, for the batch and for the same rows again: dropout made visible."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.answers = torch.cat(outputs)

    config, output_head = MODEL, torch.nn.Identity()

    def encode(self, source, is_real=None):
        return source

    def states(self, target, source):
        half = len(source) // 2
        assert torch.equal(source[:half], source[half:]) and torch.equal(target[:half], target[half:])
        return self.answers


def written_out(first, second, expected, smoothing, alpha):
    """Token by token, with probabilities instead of log-probabilities and torch's own KL divergence."""
    total = torch.zeros((), dtype=torch.float64)
    for b, t in (expected != -100).nonzero().tolist():
        p, q = first[b, t].double().softmax(-1), second[b, t].double().softmax(-1)
        right = torch.full_like(p, smoothing / len(p))
        right[expected[b, t]] += 1 - smoothing
        surprise = -(right * p.log()).sum() - (right * q.log()).sum()
        apart = F.kl_div(q.log(), p, reduction="sum") + F.kl_div(p.log(), q, reduction="sum")
        total += surprise / 2 + alpha * apart / 4
    return total


@pytest.mark.parametrize(("smoothing", "alpha"), [(0.0, 1.0), (0.1, 5.0), (0.1, 0.5)])
def test_r_drop_is_its_formula(smoothing, alpha):
    batch = reversal_pairs().batch(torch.arange(6))
    first, second = torch.randn(2, *batch.target.shape, 12) * 2
    loss, count = translation(Scripted(first, second), batch, smoothing, alpha)
    torch.testing.assert_close(
        loss.double(), written_out(first, second, batch.labels, smoothing, alpha), rtol=1e-5, atol=1e-4
    )
    assert int(count) == int((batch.labels != -100).sum())


def test_without_a_causal_mask_padding_is_still_masked():
    """The loss of a batch is the sum of those of its rows, which have no padding; the future is visible."""
    torch.manual_seed(0)
    model, pairs = build(replace(MODEL, causal=False)).double().eval(), reversal_pairs()
    loss, _ = translation(model, pairs.batch(torch.arange(6)))
    torch.testing.assert_close(loss, sum(translation(model, pairs.batch(torch.tensor([row])))[0] for row in range(6)))
    batch = pairs.batch(torch.tensor([0]))
    changed = batch.target.clone()
    changed[0, -1] = 4 + (changed[0, -1] - 3) % 8
    states = target_states(model, batch)
    assert not torch.allclose(states[:, 0], model.states(changed, model.encode(batch.source))[:, 0])


def test_what_stands_on_padding_does_not_matter():
    batch = reversal_pairs().batch(torch.arange(6))
    first, second = torch.randn(2, *batch.target.shape, 12)
    loss, _ = translation(Scripted(first, second), batch, 0.1, 2.0)
    padding = batch.labels == -100
    assert padding.any()
    other = [torch.where(padding[..., None], torch.randn_like(x) * 9, x) for x in (first, second)]
    torch.testing.assert_close(translation(Scripted(*other), batch, 0.1, 2.0)[0], loss)


def test_without_dropout_it_is_the_plain_loss():
    """Both passes agree, so nothing is added; the gradient is the same, too."""
    config = replace(MODEL, dropout=0.0, embed_dropout=0.0)
    model, batch = build(config).train(), reversal_pairs().batch(torch.arange(6))
    losses = [translation(model, batch, 0.1, alpha)[0] for alpha in (0.0, 3.0)]
    torch.testing.assert_close(losses[1], losses[0])
    plain, twice = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    for a, b in zip(plain, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_packed_and_padded_agree():
    """Two passes through models that differ, as dropout makes them: the same sum over the same pairs."""
    pairs, models = reversal_pairs(), [build(MODEL).eval() for _ in range(2)]

    class Halves(torch.nn.Module):
        """The first half of the rows through one model, the second through the other."""

        def encode(self, *args):
            return [model.encode(*given) for model, given in zip(models, halves(args), strict=True)]

        def states(self, target, memories, *args):
            parts = zip(models, halves((target,)), memories, halves(args), strict=True)
            return torch.cat(
                [model.output_head(model.states(*read, memory, *given)) for model, read, memory, given in parts]
            )

        config, output_head = MODEL, torch.nn.Identity()

    def halves(args):
        cut = [(None, None) if x is None else x.chunk(2) for x in args]
        return [[pair[half] for pair in cut] for half in (0, 1)]

    packs = Packs(pairs, 3, 16, seed=1)
    packed, count = translation(Halves(), packs.fill(0, packs.plan(0)), 0.1, 4.0)
    padded, other = translation(Halves(), pairs.batch(torch.arange(len(pairs))), 0.1, 4.0)
    assert int(count) == int(other)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-4)
    plain, _ = translation(models[0], pairs.batch(torch.arange(len(pairs))), 0.1)
    assert packed > plain + 1  # the two models do differ


def test_dropout_makes_two_passes_differ():
    model, batch = build(MODEL).train(), reversal_pairs().batch(torch.arange(6))
    assert not torch.equal(
        model.output_head(target_states(model, batch)), model.output_head(target_states(model, batch))
    )
