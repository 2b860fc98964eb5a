"""Analysis of activations: formulas that must hold for every kind of model, and clear refusals where they cannot."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from inside_models import SHAPES, given, opened
from regard.errors import UserError
from regard.explore import (
    Changes,
    activation_patching,
    attention_rollout,
    direct_logit_attribution,
    embedding_map,
    gradient_times_input,
    head_scores,
    logit_lens,
    neuron_activations,
    position_picture,
    token_saliency,
)
from regard.explore.patching import make_pair
from regard.explore.saliency import rollout
from regard.nn.position import KINDS, alibi_slopes
from regard.nn.trace import trace

pytestmark = pytest.mark.grid

READABLE = [name for name in SHAPES if name not in ("vectors", "recurrent")]
OTHER = "the street did not cross"


@pytest.mark.parametrize("architecture", READABLE)
def test_the_last_row_of_the_lens_is_the_output(architecture):
    look = opened(architecture).look(**given(architecture))
    lens = logit_lens(look)
    p = look.output.logits.softmax(dim=-1)
    assert lens.probabilities.shape[:2] == (3, len(p))
    assert (lens.probabilities[-1, :, 0] - p.max(dim=-1).values).abs().max() < 1e-6
    assert (lens.entropy[-1] - torch.distributions.Categorical(p).entropy()).abs().max() < 1e-5
    assert torch.equal(lens.ids[-1, :, 0], p.argmax(dim=-1))
    assert "<svg" in lens._repr_html_()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("architecture", READABLE)
def test_contributions_sum_to_the_logit(architecture, order, norm):
    inside = opened(architecture, norm_order=order, norm=norm, bias=True)
    look = inside.look(**given(architecture))
    for at in {0, len(look.output.positions) - 1}:
        terms = direct_logit_attribution(look, at)
        assert terms.logit == pytest.approx(float(look.output.logits[at].max()), abs=1e-5)
        assert terms.total == pytest.approx(terms.logit, abs=1e-5)
        assert sum(map(len, terms.heads["encoder" if "encoder" in terms.heads else "decoder"])) == 8


def test_contributions_of_changed_models_sum_to_their_logit():
    look = opened("encoder-decoder", norm_order="post").look(
        "the animal", changes=Changes(layers=(("decoder", 0),), feedforward=(("decoder", 1, "mean"),))
    )
    terms = direct_logit_attribution(look, 1, minus=5)
    logits = look.output.logits[1]
    assert terms.total == pytest.approx(float(logits.max() - logits[5]), abs=1e-5)
    assert terms.feedforward[0] == 0 and not terms.heads["cross"][0].any()


def test_a_frozen_norm_is_what_makes_a_head_removable():
    """Without the last head's term, the logit is that of the model without the head, if the norm keeps its scale."""
    inside = opened("decoder", norm="none")
    look = inside.look("the animal did not cross")
    terms = direct_logit_attribution(look, 2)
    id = int(look.output.logits[2].argmax())
    off = inside.change(look, Changes(heads=(("decoder", 1, 3),), feedforward=(("decoder", 1, "zero"),)))
    rest = terms.total - float(terms.heads["decoder"][1][3]) - terms.feedforward[1]
    assert float(off.output.logits[2, id]) == pytest.approx(rest, abs=1e-5)


@pytest.mark.parametrize("architecture", ["decoder", "masked", "encoder-decoder", "captions"])
def test_patching_everything_restores_everything(architecture):
    texts = ("the animal did not cross", OTHER)
    if architecture == "masked":
        texts = ("the animal did [MASK] cross", "the street did [MASK] it")
    for seed in range(20):  # the first random model whose outputs differ
        inside = opened(architecture, seed=seed)
        looks = [inside.look(**given(architecture, text)) for text in texts]
        try:
            make_pair(*looks)
            break
        except UserError:
            continue
    made = activation_patching(*looks)
    name = "encoder" if architecture == "masked" else "decoder"
    assert float(made.residual[name][-1, made.pair.at]) == pytest.approx(1, abs=1e-5)
    if name == "decoder" and "encoder" not in made.residual:  # tokens that are equal so far carry nothing
        assert not made.residual[name][:, 0].any()
    assert made.answers[0] != made.answers[1]
    assert "<svg" in made._repr_html_()
    same = activation_patching(looks[0], looks[1])
    assert all(torch.equal(made.residual[key], same.residual[key]) for key in made.residual)


def test_pairs_that_cannot_be_compared_are_refused():
    inside = opened("decoder")
    look = inside.look("the animal did not cross")
    for other, message in ((inside.look("the animal"), "5 and 2 tokens"), (look, "no difference")):
        with pytest.raises(UserError, match=message):
            activation_patching(look, other)
    with pytest.raises(UserError, match="at = 9"):
        activation_patching(look, inside.look(OTHER), at=9)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_a_feedforward_layer_off_is_a_trace_with_that_output(how):
    inside = opened("encoder-decoder")
    look = inside.look("the animal did not cross")
    off = inside.change(look, Changes(feedforward=(("decoder", 1, how),)))
    stage = "decoder.1.feedforward.output"
    with torch.no_grad(), trace(inside.model) as seen:
        inside.forward(look.input)
    value = seen[stage].mean(dim=1, keepdim=True) if how == "mean" else torch.zeros(1, 1, 16)
    with torch.no_grad(), trace(inside.model, {stage: lambda old: value.to(old).expand_as(old)}):
        wanted = inside.forward(look.input)[0].float()
    assert (off.output.logits - wanted).abs().max() < 1e-6
    assert (off.output.logits - look.output.logits).abs().max() > 1e-2
    assert off.output.generated is not None  # one token at a time, with the same mean
    assert Changes.from_dict(off.changes.to_dict()) == off.changes and how in str(off.changes)


def test_rollout_multiplies_the_layers():
    maps = [torch.rand(4, 4).softmax(dim=-1) for _ in range(3)]
    wanted = np.eye(4)
    for one in maps:
        wanted = (0.5 * one.double().numpy() + 0.5 * np.eye(4)) @ wanted
    assert np.abs(rollout(maps).numpy() - wanted).max() < 1e-6
    for architecture in ("encoder-decoder", "decoder", "vit"):
        rows = attention_rollout(opened(architecture).look(**given(architecture)))
        assert (rows.sum(dim=-1) - 1).abs().max() < 1e-5
        assert (rows >= 0).all()


@pytest.mark.parametrize("architecture", READABLE)
def test_gradient_times_input_is_the_slope_along_the_embedding(architecture):
    inside = opened(architecture)
    look = inside.look(**given(architecture))
    at, at_token = len(look.output.positions) - 1, 1
    values = gradient_times_input(look, at)
    stage = "encoder.embedded" if hasattr(inside.model, "encoder") else "decoder.embedded"

    def logit(step: float) -> float:
        def scaled(x):
            x = x.clone()
            x[:, at_token] *= 1 + step
            return x

        with torch.no_grad(), trace(inside.model, {stage: scaled}, only=""):
            logits = inside.forward(look.input)[0]
        return float((logits if logits.dim() == 1 else logits[at])[int(look.output.logits[at].argmax())])

    assert float(values[at_token]) == pytest.approx((logit(1e-5) - logit(-1e-5)) / 2e-5, rel=1e-4, abs=1e-6)
    made = token_saliency(look, at)
    assert len(made.labels) == len(made.rollout) == len(made.gradient) == len(made.attention)


def test_neurons_add_up_to_the_feedforward_layer():
    inside = opened("decoder")
    look = inside.look("the animal did not cross")
    made = neuron_activations(look, 1)
    layer = inside.model.decoder.blocks[1].feedforward
    with trace(inside.model, only="*.feedforward.output") as seen, torch.no_grad():
        inside.forward(look.input)
    out = made.activations.double() @ layer.down.weight.T + layer.down.bias
    assert (out - seen["decoder.1.feedforward.output"][0]).abs().max() < 1e-5
    unit, at, value = made.top_units(1)[0]
    assert abs(value) == pytest.approx(float(made.activations.abs().max()))
    assert made.activations[at, unit] == pytest.approx(value)
    assert made.top_tokens(unit, 1)[0][2] == pytest.approx(float(made.activations[:, unit].max()))
    raised, lowered = made.writes(unit)
    column = layer.down.weight[:, unit].detach()
    column = (column - column.mean()) * inside.model.decoder.norm.weight.detach()
    logits = inside.model.output_head.project.weight.detach() @ column
    assert raised[0][1] == pytest.approx(float(logits.max())) and lowered[0][1] == pytest.approx(float(logits.min()))
    raised, lowered = made.writes(unit, len(logits))  # each token is on one side
    assert [len(raised), len(lowered)] == [int((logits > 0).sum()), int((logits < 0).sum())]


def test_the_map_of_embeddings_is_their_svd():
    inside = opened("decoder")
    made = embedding_map(inside)
    vectors = inside.model.embedding.tokens.weight.detach().numpy()
    centred = vectors - vectors.mean(axis=0)
    _, singular, directions = np.linalg.svd(centred, full_matrices=False)
    wanted = centred @ directions[:2].T
    assert np.abs(np.abs(made.points.numpy()) - np.abs(wanted)).max() < 1e-4  # the sign is free
    assert made.explained == pytest.approx(singular[:2] ** 2 / (singular**2).sum(), rel=1e-4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    id = made.labels.index("animal")
    order = [at for at in np.argsort(-(unit @ unit[id])) if at != id]
    assert [at for at, _, _ in made.neighbours("animal", 4)] == order[:4]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_positions_as_pictures(kind):
    inside = opened("decoder", position=kind)
    made = position_picture(inside, length=12)
    values, position = made.values.double(), inside.model.decoder.position
    match kind:
        case "sinusoidal":
            wanted = [np.sin(7 / 10000 ** (6 / 16)), np.cos(7 / 10000 ** (6 / 16))]
            assert values[7, 6:8].tolist() == pytest.approx(wanted, abs=1e-6)
        case "learned":
            assert torch.allclose(values, position.embedding.weight[:12].double(), atol=1e-6)
        case "rope":
            assert values[5, 1].item() == pytest.approx(np.cos(5 * 10000 ** (-2 / 4)), abs=1e-6)
        case "alibi":
            assert made.column_names[0] == "-11"
            assert values[2, 3].item() == pytest.approx(-8 * alibi_slopes(4)[2].item(), abs=1e-6)
        case "t5":
            bucket = position.bucket(torch.tensor([-8]))
            assert values[:, 3].tolist() == pytest.approx(position.embedding.weight[bucket[0]].tolist(), abs=1e-6)
        case "relative":
            assert torch.allclose(values, position.embedding.weight.double(), atol=1e-6)
    assert "<svg" in made._repr_html_()


def test_what_does_not_exist_is_refused_with_the_reason():
    cases = {
        ("vectors", logit_lens): "outputs vectors",
        ("recurrent", logit_lens): "no residual stream",
        ("recurrent", token_saliency): "self-attention in the decoder",
        ("vectors", direct_logit_attribution): "outputs vectors",
    }
    for (architecture, function), message in cases.items():
        with pytest.raises(UserError, match=message):
            function(opened(architecture).look("the animal"))
    look = opened("masked", head_layer=True).look("the animal")
    assert logit_lens(look).applied.endswith("norm of the output head")
    with pytest.raises(UserError, match="head_layer"):
        direct_logit_attribution(look)
    with pytest.raises(UserError, match="causal self-attention"):
        head_scores(opened("masked"))
    with pytest.raises(UserError, match="position = 'none'"):
        position_picture(opened("decoder", position="none"))
    with pytest.raises(UserError, match="unit = 99"):
        neuron_activations(look, 0).top_tokens(99)
    with pytest.raises(UserError, match="layers 0 to 1"):
        neuron_activations(look, 2)
    with pytest.raises(UserError, match="positions 0 to"):
        logit_lens(look, [40])


def test_every_analysis_has_a_formula_and_a_notebook_view():
    from regard import explore
    from regard.predict.config import SearchConfig

    look = opened("decoder").look(**given("decoder"))
    made = {
        "logit_lens": explore.logit_lens(look),
        "direct_logit_attribution": explore.direct_logit_attribution(look),
        "neuron_activations": explore.neuron_activations(look, 0),
        "token_saliency": explore.token_saliency(look),
        "embedding_map": explore.embedding_map(look.inside),
        "position_picture": explore.position_picture(look.inside),
        "head_scores": explore.head_scores(look.inside, length=4, rows=1),
        "heads_off": explore.heads_off(look),
        "generate_steps": explore.generate_steps(look, SearchConfig(sample=True), count=2),
        "Flow.of": explore.Flow.of(look),
    }
    for name, result in made.items():
        html = result._repr_html_()
        assert "<svg" in html or "<table" in html, name
    numbers = ("attention_rollout", "gradient_times_input", "induction_scores", "copying_scores", "activation_patching")
    for name in (*made, *numbers):
        function = explore.Flow.of if name == "Flow.of" else getattr(explore, name)
        assert re.search(r"[=·Σ∂∝]|mean a\(", function.__doc__), name  # its formula
    assert all(callable(getattr(explore, name)) for name in explore.__all__)  # no module hides a function
