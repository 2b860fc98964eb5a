"""Flow and generation of the page: every number is one that a trace, the sampler or a formula gives."""

from __future__ import annotations

import math

import pytest
import torch

from inside_models import SHAPES, given, opened
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.flow import Flow
from regard.explore.generation import generate_steps
from regard.explore.inside import Look
from regard.nn.trace import trace
from regard.predict.bundle import Bundle
from regard.predict.config import SearchConfig
from regard.predict.generator import Generator
from regard.predict.sampling import sample


def looked(name: str, **changes: object) -> Look:
    torch.manual_seed(3)
    return opened(name, **changes).look(**given(name))


@pytest.mark.parametrize("name", SHAPES)
def test_a_flow_holds_the_activations_of_a_trace(name: str) -> None:
    look = looked(name)
    flow = Flow.of(look, source=1, target=2)
    assert flow.at == {
        "decoder": {"decoder": 1},
        "encoder": {"encoder": 1},
    }.get(look.inside.config.architecture, {"encoder": 1, "decoder": 2})
    with torch.no_grad(), trace(look.inside.model) as seen:
        look.inside.forward(look.input)
    names = {one for one in seen if one.rpartition(".")[2] not in ("mask", "masked", "after")}
    assert set(flow.stages) == names
    for stage, value in flow.stages.items():
        whole, last = seen[stage][0].float(), stage.rpartition(".")[2]
        at = flow.at.get("decoder", flow.at.get("encoder", 0))
        at = flow.at.get(stage.partition(".")[0], at)
        at = flow.at["encoder"] if ".cross." in stage and last in ("k", "v") else at
        assert value.shape == tuple(whole.shape)
        expected = whole if whole.dim() == 1 else whole[:, at] if whole.dim() == 3 else whole[at]
        torch.testing.assert_close(value.vector, expected)
        if last not in ("scores", "scaled", "weights", "positions"):
            torch.testing.assert_close(value.norms, whole.square().sum(dim=-1).sqrt().reshape(value.norms.shape))
    best = flow.output["best"]
    if best:
        assert [one["probability"] for one in best] == sorted((one["probability"] for one in best), reverse=True)
        assert best[0]["probability"] == pytest.approx(math.exp(best[0]["logit"] - flow.output["log_sum"]))
    assert "activation" in flow._repr_html_()


def test_a_flow_describes_what_the_model_computes() -> None:
    look = looked("encoder-decoder", kv_heads=2, norm_order="post", window=3, position="learned")
    encoder, decoder = Flow.of(look).stacks
    assert (encoder["causal"], decoder["causal"]) == (False, True)
    assert [layer["cross"] for layer in (*encoder["layers"], *decoder["layers"])] == [0, 0, 4, 4]
    assert encoder["norm_order"] == "post" and not encoder["final_norm"]
    assert [layer["cache"] for layer in encoder["layers"]] == [0, 0]
    # keys and values of 2 heads of 4 numbers of 8 bytes; the last 3 tokens
    assert [(layer["cache"], layer["reach"]) for layer in decoder["layers"]] == [(2 * 2 * 4 * 8, 3)] * 2
    block = look.inside.model.encoder.blocks[1]
    stored = Flow.of(look).parameters["encoder.1.feedforward.norm.gain"]
    torch.testing.assert_close(stored.double(), block.feedforward_norm.weight.detach(), atol=1e-6, rtol=1e-6)


def test_changes_show_in_the_flow_and_positions_are_checked() -> None:
    look = looked("decoder")
    off = look.inside.change(look, Changes(heads=(("decoder", 0, 1),)))
    heads = Flow.of(off, source=2).stages["decoder.0.attention.heads"].vector
    assert not heads[1].any() and heads[0].any()
    with pytest.raises(UserError, match="position = 99: the decoder reads positions 0 to 4"):
        Flow.of(look, source=99)


# --- generation


def sampled(**options: object) -> SearchConfig:
    return SearchConfig(sample=True, **options)  # type: ignore[arg-type]


def test_the_steps_of_a_language_model_are_those_of_regard_generate() -> None:
    look = looked("decoder")
    bundle = look.inside.bundle
    options = {"temperature": 1.4, "top_k": 9, "top_p": 0.9, "seed": 5}
    steps = generate_steps(look, sampled(**options), count=8)
    generated = Generator(Bundle(bundle.model, bundle.tokenizers)).generate(
        look.input.text, max_length=8, sample=True, **options
    )
    assert steps[-1].text.strip() == generated[0].text.strip()
    again = generate_steps(look, sampled(**options), [step.id for step in steps[:3]], count=5)
    assert [step.id for step in again] == [step.id for step in steps[3:]]


@pytest.mark.parametrize("name", ["encoder-decoder", "recurrent"])
def test_the_steps_of_an_encoder_decoder_are_those_of_sampling(name: str) -> None:
    look = looked(name)
    config = sampled(top_p=0.8, seed=2, max_length=6)
    steps = generate_steps(look, config, count=6)
    (expected,) = sample(look.inside.model, look.input.source, None, config, *look.inside.bundle.target_frame)[0]
    assert [step.id for step in steps if not step.ended] == expected.tokens


def test_the_distributions_before_and_after_the_options() -> None:
    look = looked("decoder")
    (step,) = generate_steps(look, sampled(top_k=4, temperature=0.5), count=1)
    p = look.output.logits[-1].double().softmax(dim=-1)
    best = p.topk(4)
    sharpened = best.values.square() / best.values.square().sum()  # p^(1/T) of those that are kept
    shown = {one.id: one for one in step.choices}
    assert step.count == 4 and step.cut == pytest.approx(1 - float(best.values.sum()), abs=1e-6)
    for id, before, after in zip(best.indices.tolist(), best.values.tolist(), sharpened.tolist(), strict=True):
        assert shown[id].probability == pytest.approx(before, abs=1e-6)
        assert shown[id].kept == pytest.approx(after, abs=1e-6)
    assert all(one.kept == 0 for one in step.choices if one.id not in best.indices.tolist())


def test_the_cache_grows_by_its_formula() -> None:
    look = looked("decoder", kv_heads=2, layers=3, mixer="full, window(4), linear")
    steps = generate_steps(look, sampled(seed=3), count=6)
    prompt = len(look.input.source_labels)
    state = 2 * (4 * 5 + 1) * 8  # linear attention: S of 2 heads, 4 features x (4 values + their sum), and its scale
    for number, step in enumerate(steps):
        tokens = prompt + number
        stored = step.cache.layers
        assert step.cache.tokens == tokens and stored[0] == tokens and stored[2] == 0
        assert stored[1] <= tokens
        assert step.cache.used == 2 * 2 * 4 * 8 * (stored[0] + stored[1]) + state
    (recurrent, *_, later) = generate_steps(looked("recurrent"), sampled(), count=4)
    assert recurrent.cache.used == later.cache.used == 2 * 16 * 8


def test_generation_refuses_what_it_cannot_do() -> None:
    look = looked("decoder", position="learned", max_length=7)
    assert len(generate_steps(look, sampled(seed=3), count=6)) <= 3  # 5 tokens, then 7 positions are read
    for prefix, count, message in (([-1], 1, "prefix"), ([], 0, "count = 0"), ([], 65, "count = 65")):
        with pytest.raises(UserError, match=message):
            generate_steps(look, sampled(), prefix, count)
    with pytest.raises(UserError, match="generates no tokens"):
        generate_steps(looked("masked"), sampled())
