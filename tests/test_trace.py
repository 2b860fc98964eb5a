"""Tracing: every activation under its name, nothing changed by looking, and edits that do what they say."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, build
from regard.nn.block import Stack
from regard.nn.mask import Mask, Positions, causal, everything, padding, window
from regard.nn.trace import Trace, Traceable, drop, replace, trace, zero_heads

KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
ATTENTION = ("q", "k", "v", "mask", "scores", "scaled", "masked", "weights", "heads", "output")


def make(seed: int = 0, **changes: object) -> Decoder | Encoder | EncoderDecoder:
    values = {
        "dim": 16,
        "layers": 2,
        "heads": 4,
        "ff_dim": 24,
        "vocab_size": 11,
        "architecture": "decoder",
        "max_length": 32,
    }
    torch.manual_seed(seed)
    return build(ModelConfig(**{**values, **changes})).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape or (2, 6))


def padded() -> Tensor:
    return torch.tensor([[True] * 6, [False, False, True, True, True, True]])


# Names


def sublayer(name: str, *stages: str) -> list[str]:
    """The names of one sub-layer: the residual stream around its own stages."""
    return [f"{name}.{stage}" for stage in ("before", "norm", *stages, "sum", "after")]


def test_names_are_complete_and_ordered() -> None:
    """What is promised is what is seen, for every shape and kind of layer."""
    block = [*sublayer("attention", *ATTENTION), *sublayer("feedforward", "up", "hidden", "output"), "output"]
    cross = sublayer("cross", *ATTENTION)
    expected = {
        f"{stack}.{layer}.{name}"
        for stack, inner in (("encoder", block), ("decoder", block + cross))
        for layer in (0, 1)
        for name in inner
    }
    stages = ("embedding", "positions", "position_encoding", "embedded", "output")
    expected |= {f"{stack}.{stage}" for stack in ("encoder", "decoder") for stage in stages} | {"logits"}
    model = make(architecture="encoder-decoder")
    with trace(model) as t:
        model(tokens(2, 5), tokens(2, 3))
    assert set(t) == set(t.names) == expected
    assert len(t.names) == len(expected)


ARCHITECTURES = {
    "gpt": {"norm_order": "pre", "position": "learned"},
    "llama": {"norm_order": "pre", "norm": "rms", "position": "rope", "activation": "swiglu", "kv_heads": 2},
    "experts": {"experts": 3, "norm_order": "pre"},
    "no residual": {"residual": False},
    "bert": {"architecture": "encoder", "embed_norm": True, "token_types": 2, "head_layer": True},
    "classifier": {"architecture": "encoder", "output_head": "classes", "classes": 3, "pooler": True, "position": "t5"},
    "tagger": {"architecture": "encoder", "output_head": "classes", "classes": 3, "pooling": "none"},
    "sentence": {"architecture": "encoder", "output_head": "pooled", "pooling": "mean"},
    "states": {"architecture": "encoder", "output_head": "none"},
    "mixers": {"architecture": "encoder", "mixer": "linear, fourier", "embed_dropout": 0.0},
    "translator": {"architecture": "encoder-decoder", "norm_order": "pre"},
    "vit": {
        "architecture": "encoder",
        "input": "patches",
        "output_head": "classes",
        "classes": 3,
        "position": "learned",
    },
    "captioner": {"architecture": "encoder-decoder", "input": "patches"},
    "recurrent": {"architecture": "recurrent", "cell": "lstm"},
    "regression": {"architecture": "encoder-decoder", "input": "features", "output_head": "values", "feature_dim": 3},
}


def run(model: Any) -> Tensor:
    """The output for random inputs of the kind that the model reads."""
    config = model.config
    match config.input:
        case "tokens":
            source = tokens()
        case "patches":
            source = torch.rand(2, 3, 8, 8).double()
        case _:
            source = torch.randn(2, 6, 3).double()
    if config.architecture in ("decoder", "encoder"):
        return model(source)
    return model(source, torch.randn(2, 4, 3).double() if config.output_head == "values" else tokens(2, 4))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_stage_of_a_pass_follows_from_those_before(name: str) -> None:
    """Names, residual stream, norms, feed-forward and output of every architecture, against PyTorch's functions."""
    model = make(**{"image_size": 8, "patch_size": 4, **ARCHITECTURES[name]})
    torch.manual_seed(1)
    with torch.no_grad():
        plain = run(model)
        torch.manual_seed(1)
        with trace(model) as t:
            output = run(model)
    torch.testing.assert_close(output, plain, atol=1e-12, rtol=0)
    assert set(t) == set(t.names) or name == "experts"  # a token may choose no expert
    last = next((stage for stage in ("logits", "values", "pooled") if stage in t), "encoder.output")
    assert torch.equal(t[last], output)
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        check_stack(t, "decoder" if stack is getattr(model, "decoder", None) else "encoder", stack)
    states = t["decoder.output" if hasattr(model, "decoder") else "encoder.output"]
    if getattr(model, "output_head", None) is not None:
        head = model.output_head
        torch.testing.assert_close(
            t[last], head.transform(states) @ head.project.weight.T + (0 if head.bias is None else head.bias)
        )
    if "pooled" in t:
        one = states.mean(dim=1) if model.config.pooling == "mean" else states[:, 0]
        torch.testing.assert_close(t["pooled"], model.pooler(one).tanh() if model.pooler else one)


def check_stack(t: Trace, name: str, stack: Stack) -> None:
    """Embedding + position = stream; after = before + output, normalised before or after; hidden = act(up)."""
    config, adds = stack.config, f"{name}.position_encoding" in t
    assert adds == (config.position in ("sinusoidal", "learned"))
    stream = t[f"{name}.embedding"] + (t[f"{name}.position_encoding"] if adds else 0)
    torch.testing.assert_close(t[f"{name}.embedded"], norm(stream, stack.embed_norm))
    stream = t[f"{name}.embedded"]
    for layer, block in enumerate(stack.blocks):
        for part in ("attention", "cross", "feedforward") if block.cross is not None else ("attention", "feedforward"):
            at, own = f"{name}.{layer}.{part}", getattr(block, f"{part}_norm")
            before, total, after = (t[f"{at}.{stage}"] for stage in ("before", "sum", "after"))
            assert torch.equal(before, stream)
            torch.testing.assert_close(total, t[f"{at}.output"] + (before if config.residual else 0))
            is_pre = config.norm_order == "pre"
            torch.testing.assert_close(t[f"{at}.norm"], norm(before if is_pre else total, own))
            assert torch.equal(after, total if is_pre else t[f"{at}.norm"])
            stream = after
        assert torch.equal(t[f"{name}.{layer}.output"], stream)
        if not config.experts:
            up, hidden = t[f"{name}.{layer}.feedforward.up"], t[f"{name}.{layer}.feedforward.hidden"]
            assert up.shape[-1] == config.ff_dim * (2 if config.activation == "swiglu" else 1)
            gate, value = up.chunk(2, dim=-1) if config.activation == "swiglu" else (up, 1)
            expected = gate * gate.sigmoid() * value if config.activation == "swiglu" else gate.clamp_min(0)
            torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(t[f"{name}.output"], norm(stream, stack.norm))


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """The formula of the module's norm."""
    match module:
        case nn.LayerNorm():
            return torch.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)
        case nn.RMSNorm():
            return x / (x.square().mean(dim=-1, keepdim=True) + module.eps).sqrt() * module.weight
        case _:
            return x


def test_shapes() -> None:
    model = make(architecture="encoder-decoder", kv_heads=2, value_dim=3)
    with trace(model) as t:
        model(tokens(2, 5), tokens(2, 3))
    at = "decoder.1.cross"
    sizes = {"q": (4, 3, 4), "k": (2, 5, 4), "v": (2, 5, 3), "weights": (4, 3, 5), "heads": (4, 3, 3)}
    for stage, size in sizes.items():
        assert t[f"{at}.{stage}"].shape == (2, *size)
    assert t[f"{at}.output"].shape == t["decoder.embedded"].shape == (2, 3, 16)
    assert t.stack("encoder.*.attention.weights").shape == (2, 2, 4, 5, 5)


def test_only_keeps_what_is_asked_for() -> None:
    model = make()
    with trace(model, only="decoder.*.attention.weights") as t:
        model(tokens())
    assert list(t) == ["decoder.0.attention.weights", "decoder.1.attention.weights"]
    assert "decoder.0.attention.q" not in t


def test_a_part_of_a_model_can_be_traced() -> None:
    model = make()
    with trace(model.decoder.blocks[1].attention) as t:
        model(tokens())
    assert set(t) == set(ATTENTION)


# Looking changes nothing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["encoder", "decoder", "encoder-decoder"])
def test_a_traced_model_computes_the_same(kind: str, architecture: str) -> None:
    model = make(position=kind, architecture=architecture, kv_heads=2, window=4)
    given = (tokens(), tokens(), padded(), padded()) if architecture == "encoder-decoder" else (tokens(), padded())
    plain = model(*given)
    with trace(model):
        traced = model(*given)
    torch.testing.assert_close(traced, plain, atol=1e-12, rtol=0)
    slopes = [torch.autograd.grad(out.sin().sum(), list(model.parameters())) for out in (plain, traced)]
    for own, other in zip(*slopes, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_follow_from_each_other(kind: str) -> None:
    model = make(position=kind)
    with torch.no_grad(), trace(model) as t:
        model(tokens(), padded())
    for layer in (0, 1):
        q, k, v, mask, scores, scaled, masked, weights, heads, output = (
            t[f"decoder.{layer}.attention.{stage}"] for stage in ATTENTION
        )
        torch.testing.assert_close(scores, torch.einsum("bhid,bhjd->bhij", q, k))
        if kind not in ("relative", "t5", "alibi"):
            torch.testing.assert_close(scaled, scores / math.sqrt(4))
        assert causal in mask and padding in mask
        seen = masked != float("-inf")
        torch.testing.assert_close(masked[seen], scaled[seen])
        blind = ~seen.any(dim=-1)
        torch.testing.assert_close(weights.sum(dim=-1), (~blind).double())
        torch.testing.assert_close(weights[~blind], masked[~blind].softmax(dim=-1))
        torch.testing.assert_close(heads, weights @ v)
        attention = model.decoder.blocks[layer].attention
        torch.testing.assert_close(output, attention.out(torch.cat(heads.unbind(dim=1), dim=-1)))


def test_nothing_is_left_behind() -> None:
    model = make()
    keys, plain = list(model.state_dict()), model(tokens(1, 4) * 0)
    with pytest.raises(ZeroDivisionError), trace(model):
        assert list(model.state_dict()) == keys
        model(tokens())
        raise ZeroDivisionError
    assert all(module.tap is None for module in model.modules() if isinstance(module, Traceable))
    assert list(model.state_dict()) == keys
    assert torch.equal(model(tokens(1, 4) * 0), plain)


def test_a_copy_made_inside_a_trace_is_not_traced() -> None:
    model = make()
    with trace(model) as t:
        twin = copy.deepcopy(model)
        twin(tokens())
    assert not list(t) and all(module.tap is None for module in twin.modules() if isinstance(module, Traceable))
    given = tokens()
    assert torch.equal(twin(given), model(given))


def test_one_trace_at_a_time() -> None:
    model = make()
    with trace(model) as outer:
        for part in (model, model.decoder.blocks[0]):
            with pytest.raises(UserError, match="already being traced"), trace(part):
                pass
        model(tokens())
    assert "decoder.0.attention.weights" in outer
    with trace(model):
        pass


def test_two_models_are_traced_in_two_threads() -> None:
    models, seen = [make(seed) for seed in (1, 2)], {}
    given, gate = tokens(), threading.Barrier(2)

    def work(index: int) -> None:
        with torch.no_grad(), trace(models[index]) as t:
            gate.wait()
            for _ in range(5):
                models[index](given)
            gate.wait()
        seen[index] = t.history("decoder.1.attention.weights")

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, model in enumerate(models):
        with torch.no_grad(), trace(model) as alone:
            model(given)
        assert len(seen[index]) == 5
        assert all(torch.equal(value, alone["decoder.1.attention.weights"]) for value in seen[index])


def test_history_with_a_cache() -> None:
    """One value a step; side by side the rows of the whole causal matrix."""
    model, given = make(), tokens(2, 5)
    with torch.no_grad(), trace(model) as whole:
        model(given)
    state = model.start()
    with torch.no_grad(), trace(model) as t:
        for i in range(5):
            model.step(given[:, i : i + 1], state)
    steps = t.history("decoder.1.attention.weights")
    assert [step.shape[-2:] for step in steps] == [(1, n) for n in range(1, 6)]
    for i, step in enumerate(steps):
        torch.testing.assert_close(step[:, :, 0], whole["decoder.1.attention.weights"][:, :, i, : i + 1])


def test_gradients_flow_through_what_was_seen() -> None:
    """d loss / d weights = (d loss / d heads) vᵀ."""
    model = make()
    with trace(model) as t:
        loss = model(tokens()).sin().sum()
    at = "decoder.0.attention"
    by_weights, by_heads = torch.autograd.grad(loss, [t[f"{at}.weights"], t[f"{at}.heads"]])
    torch.testing.assert_close(by_weights, by_heads @ t[f"{at}.v"].transpose(-2, -1))
    assert by_weights.abs().sum() > 0


def test_under_no_grad_nothing_holds_a_graph() -> None:
    model = make()
    with torch.no_grad(), trace(model) as t:
        model(tokens())
    assert not any(t[name].requires_grad for name in t if isinstance(t[name], Tensor))


def test_checkpointing_rests_while_traced() -> None:
    """Each activation is seen once, and the backward pass may come after the trace."""
    model = make()
    model.decoder.checkpoint = True
    with trace(model) as t:
        loss = model(tokens()).sin().sum()
    loss.backward()
    assert len(t.history("decoder.0.attention.weights")) == 1


# Interventions


@pytest.mark.parametrize("heads", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_a_switched_off_head_is_a_removed_column(heads: tuple[int, ...]) -> None:
    model, given = make(), tokens()
    with trace(model, {"decoder.1.attention.heads": zero_heads(*heads)}):
        edited = model(given)
    for head in heads:
        model.decoder.blocks[1].attention.out.weight.data[:, 4 * head : 4 * head + 4] = 0
    torch.testing.assert_close(edited, model(given))


def test_uniform_weights_are_the_mean_of_the_values() -> None:
    model = make(architecture="encoder", output_head="none")
    with trace(model, {"encoder.0.attention.weights": replace(torch.tensor(1 / 6))}) as t:
        model(tokens())
    mean = t["encoder.0.attention.v"].mean(dim=2, keepdim=True)
    torch.testing.assert_close(t["encoder.0.attention.heads"], mean.expand(-1, -1, 6, -1), atol=1e-7, rtol=1e-6)


def test_dropping_the_causal_mask_makes_a_two_way_stack() -> None:
    model, given = make(), tokens()
    with trace(model, {"decoder.*.attention.mask": drop(causal)}):
        edited = model(given)
    both_ways = Stack(model.config, causal=False).double().eval()
    both_ways.load_state_dict(model.decoder.state_dict())
    states = both_ways(model.embedding(given), Positions.of(6, given.device))
    torch.testing.assert_close(edited, model.output_head(states))
    assert (edited - model(given)).abs().max() > 1e-3


def test_dropping_a_mask_never_shows_padding() -> None:
    model, given = make(window=3), tokens()
    with trace(model, {"*.mask": drop(causal)}) as t:
        model(given, padded())
    weights = t["decoder.0.attention.weights"]
    assert (weights[1, :, :, :2] == 0).all() and (weights[0, :, 0, 1:3] > 0).all() and (weights[0, :, 0, 3:] == 0).all()
    assert window(3) in t["decoder.0.attention.mask"] and causal not in t["decoder.0.attention.mask"]


def test_an_own_mask_can_be_put_in() -> None:
    model, diagonal = make(), Mask("self", lambda q, k: q.pos == k.pos)
    with trace(model, {"decoder.0.attention.mask": lambda mask: mask & diagonal}) as t:
        model(tokens())
    torch.testing.assert_close(t["decoder.0.attention.weights"], torch.eye(6).double().expand(2, 4, 6, 6))


def test_an_edited_activation_is_what_later_layers_see() -> None:
    model, given = make(), tokens()
    with trace(model) as before:
        model(given)
    patch = torch.randn_like(before["decoder.0.output"])
    with trace(model, {"decoder.0.output": replace(patch)}) as after:
        out = model(given)
    assert torch.equal(after["decoder.0.output"], patch)
    positions = Positions.of(6, given.device)
    context, *_ = model.decoder._contexts(positions, positions, positions.pos, None, None, everything)
    torch.testing.assert_close(out, model.output_head(model.decoder.blocks[1](patch, context)))


def test_edits_apply_in_the_order_given() -> None:
    model, given = make(), tokens()
    with trace(model) as plain:
        model(given)
    with trace(model, {"decoder.0.output": lambda x: x + 1, "decoder.?.output": lambda x: x * 2}) as t:
        model(given)
    torch.testing.assert_close(t["decoder.0.output"], (plain["decoder.0.output"] + 1) * 2)


# What is refused


@pytest.mark.parametrize("edit", [lambda x: x[:, :2], lambda x: None, lambda x: x.float(), replace(torch.zeros(3, 3))])
def test_an_edit_of_another_shape_or_kind_is_refused(edit: object) -> None:
    model, plain = make(), make()(tokens(1, 1) * 0)
    with (
        pytest.raises(UserError, match=r"instead of|cannot replace"),
        trace(model, {"decoder.0.attention.weights": edit}),
    ):
        model(tokens())
    assert torch.equal(model(tokens(1, 1) * 0), plain)  # and the trace is gone


def test_wrong_names_are_refused_with_the_nearest_right_one() -> None:
    model = make()
    with pytest.raises(UserError, match=r"did you mean 'decoder\.0\.attention\.weights'"):
        trace(model, {"decoder.0.attention.weight": replace(torch.zeros(1))})
    with pytest.raises(UserError, match="no activation is called 'encoder"):
        trace(model, only="encoder.*")
    with trace(model, only="decoder.0.*") as t:
        model(tokens())
    with pytest.raises(UserError, match="was not computed in this trace"):
        t["decoder.1.output"]
    with pytest.raises(UserError, match="is not the name of an activation"):
        t["decoder.0.wights"]
    with pytest.raises(UserError, match="different shapes"):
        t.stack("decoder.0.attention.*")
    with pytest.raises(UserError, match="no recorded activation"):
        t.stack("decoder.7.*")
    with trace(model, only="") as t:
        model(tokens())
    assert not list(t)
    with (
        pytest.raises(UserError, match="no head 4: this layer has heads 0 to 3"),
        trace(model, {"decoder.0.attention.heads": zero_heads(4)}),
    ):
        model(tokens())


def test_a_model_without_names_is_refused() -> None:
    with pytest.raises(UserError, match="no activation"):
        trace(nn.Linear(2, 2))
