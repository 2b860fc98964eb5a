"""Models with mixers other than softmax attention: decoding with a state, search, saving, training, refusals."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from commanded import training
from inside_models import given, opened
from prediction_models import KINDS, make_run
from regard.cli import main
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.figures import draw
from regard.explore.heads import measure
from regard.explore.importance import least_important
from regard.explore.server.responses import look_response
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, EncoderDecoder, build
from regard.nn.mask import causal, from_tensor
from regard.predict import SearchConfig
from regard.predict.beam import beam
from regard.predict.engine import lean
from regard.predict.recorded import recordable

CAUSAL = ("linear", "performer", "gated-linear")
PATTERN = "linear, window(3), performer, full, gated-linear"
ENCODER = ("linformer", "fourier", "linformer, full", "fourier, linear")
SMALL: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "vocab_size": 12, "max_length": 64}


def model_of(architecture: str, mixer: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    layers = 5 if mixer == PATTERN else 2
    config = ModelConfig(**(SMALL | {"layers": layers} | fields), architecture=architecture, mixer=mixer)  # type: ignore[arg-type]
    return build(config).double().eval()


@pytest.mark.parametrize("mixer", [*CAUSAL, PATTERN])
def test_a_decoder_computes_the_same_step_by_step(mixer: str) -> None:
    model: Decoder = model_of("decoder", mixer, position="rope", kv_heads=1)
    tokens = torch.randint(12, (3, 20))
    state, logits = model.start(), []
    for part in tokens.split((9, 1, 1, 9), dim=1):
        logits.append(model.step(part, state))
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens))


@pytest.mark.parametrize("mixer", CAUSAL)
def test_padded_prompts_are_continued_as_they_are_alone(mixer: str) -> None:
    model: Decoder = model_of("decoder", mixer)
    tokens, state = torch.randint(12, (2, 9)), model.start()
    is_real = torch.ones(2, 6, dtype=torch.bool)
    is_real[1, :4] = False  # padding on the left
    model.step(tokens[:, :6], state, is_real)
    out = model.step(tokens[:, 6:], state)
    torch.testing.assert_close(out[1], model(tokens[1:, 4:])[0, -3:])


@dataclass
class Read:
    """The state of `Uncached`: everything that was read."""

    source: Tensor
    tokens: Tensor

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.source, self.tokens = self.source[rows], self.tokens[rows]


class Uncached(torch.nn.Module):
    """A model that computes every step from the first token on."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def start(self, source: Tensor, is_real: Tensor | None = None, capacity: int = 0) -> Read:
        return Read(source, source.new_zeros(len(source), 0))

    def step(self, tokens: Tensor, state: Read) -> Tensor:
        state.tokens = torch.cat((state.tokens, tokens), dim=1)
        return self.model(state.source, state.tokens)[:, -tokens.shape[1] :]


@pytest.mark.parametrize("mixer", [*CAUSAL, PATTERN])
def test_beam_search_with_a_state_finds_what_it_finds_without(mixer: str) -> None:
    model: EncoderDecoder = model_of("encoder-decoder", mixer)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    source, config = torch.randint(4, 12, (3, 7)), SearchConfig(beam=4, max_length=12)
    with torch.inference_mode():
        results = [beam(one, source, None, config, 1, 2) for one in (model, Uncached(model))]
    for cached, uncached in zip(*results, strict=True):
        assert [one.tokens for one in cached] == [one.tokens for one in uncached]
        torch.testing.assert_close([one.score for one in cached], [one.score for one in uncached])


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "recurrent"])
def test_every_predictor(kind: str, empty_folder: Path) -> None:
    fields = KINDS[kind][0]
    mixers = (*CAUSAL, *ENCODER) if fields.get("architecture") == "encoder" else CAUSAL
    for mixer in mixers:
        shutil.rmtree("run", ignore_errors=True)
        make_run(kind, mixer=mixer, layers=2)
        inputs = KINDS[kind][4]
        one, other = (regard.load("run").predict(inputs) for _ in range(2))
        assert len(one) == len(inputs) and repr(one) == repr(other)


def test_random_features_are_saved_with_the_weights(empty_folder: Path) -> None:
    model = model_of("decoder", "performer", features=7, mixer_seed=3)
    other = model_of("decoder", "performer", features=7, mixer_seed=4)
    features = [module.features for module in model.modules() if hasattr(module, "features")]
    assert [tuple(one.shape) for one in features] == [(7, 8)] * 2 and not torch.equal(*features)
    regard.save(model, "run")
    loaded = regard.load("run").model.double()
    tokens = torch.randint(12, (1, 9))
    torch.testing.assert_close(loaded(tokens), model(tokens))
    assert not torch.allclose(other(tokens), model(tokens))


@pytest.mark.parametrize("mixer", CAUSAL)
def test_engines_leave_the_model_to_itself(mixer: str) -> None:
    for architecture in ("decoder", "encoder-decoder"):
        model = model_of(architecture, mixer)
        assert lean(model) is model and not recordable(model)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_a_mask_that_a_sum_cannot_have_is_refused(mixer: str) -> None:
    model = model_of("decoder", mixer)
    tokens = torch.randint(12, (1, 4))
    with pytest.raises(UserError, match=f"mixer = '{mixer}' knows no masks.*mixer = 'full'"):
        model(tokens, mask=from_tensor(torch.ones(4, 4, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("kind", "mixer"), [("generate", "linear"), ("translate", "gated-linear"), ("classify", "fourier")]
)
def test_what_cannot_be_exported_is_refused_by_name(
    kind: str, mixer: str, empty_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.interop.web_folder.page_missing", lambda **_: None)  # in checkouts where it is
    make_run(kind, mixer=mixer)
    for option in ("--onnx", "--web", "--ctranslate2", "--hf"):
        assert main(["export", "run", option, "out"]) == 2
        assert f"mixer = '{mixer}'" in capsys.readouterr().err


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixer": "fourier"}, "fourier mixes tokens with later ones.*architecture = 'encoder'"),
    ({"mixer": "linformer", "architecture": "decoder"}, "linformer mixes tokens with later ones"),
    ({"mixer": "linformer", "position": "rope"}, "linformer mixes tokens with later ones"),
    ({"window": 3, "global_tokens": 1, "global_projections": True}, "global tokens of a decoder cannot attend"),
    ({"mixer": "performer", "mixer_seed": 2**31}, "mixer_seed = 2147483648: must be an integer from 0 to 2147483647"),
    (
        {"mixer": "linformer", "architecture": "encoder", "output_head": "none", "input": "patches", "max_length": 196},
        "max_length = 196 is too short for 197 patches",
    ),
    ({"mixer": "linear", "causal": False}, "always causal"),
    ({"mixer": "linear", "position": "t5"}, "position = 't5' is added to the scores.*'learned'"),
    ({"mixer": "full, linear", "position": "alibi"}, "position = 'alibi'"),
    ({"mixer": "linformer", "architecture": "encoder", "position": "rope"}, "'linformer' adds the keys.*'learned'"),
    ({"mixer": "performer", "architecture": "decoder", "attention_dropout": 0.1}, "no attention weights; set it to 0"),
    ({"mixer": "linear, full", "pruned": {"encoder.0.attention": (1,)}}, "mixer = 'linear', whose heads cannot be"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**(SMALL | fields))


@pytest.mark.parametrize("mixer", [*CAUSAL, PATTERN])
def test_activation_checkpointing_gives_the_same_gradients(mixer: str) -> None:
    model, tokens = model_of("decoder", mixer).train(), torch.randint(12, (2, 70))
    gradients = []
    for is_on in (False, True):
        model.decoder.checkpoint = is_on
        torch.manual_seed(1)
        model.zero_grad()
        model(tokens).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


LANGUAGE = """task = "language-modeling"
[data]
train = ["input.txt"]
valid_fraction = 0.1
[text]
kind = "char"
[model]
dim = 16
layers = 2
heads = 2
ff_dim = 32
max_length = 24
norm_order = "pre"
[train]
steps = 120
batch_tokens = 200
warmup = 10
lr = 0.02
"""


@pytest.mark.parametrize(
    "mixer", [mixer if mixer == "linear" else pytest.param(mixer, marks=pytest.mark.slow) for mixer in CAUSAL]
)
def test_it_learns(mixer: str, empty_folder: Path) -> None:
    """Alternating letters: after a few steps the next one is known."""
    Path("input.txt").write_text("abcdefgh\n" * 300)
    Path("mine.toml").write_text(LANGUAGE)
    assert training([], "mine.toml")(f"--set=model.mixer={mixer}", "-o", "run") == 0
    generator = regard.load("run").predictor
    assert generator.generate("abc", sample=False, max_length=12)[0].text.startswith("defgh\nabc")


# --- what is shown of them


def test_a_model_without_weights_says_so_by_name() -> None:
    message = "mixer = 'gated-linear': the layers of this model compute no attention weights.*regard.trace"
    inside = opened("decoder", mixer="gated-linear")
    assert inside.anatomy.heads == []
    for call in (
        lambda: inside.look("the animal"),
        lambda: measure(inside, []),
        lambda: least_important(inside, [], 1),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_layers_with_weights_are_shown_under_their_own_number() -> None:
    inside = opened("decoder", mixer="linear, full", layers=4)
    look = inside.look("the animal did not")
    assert [len(weights) for weights in look.parts["decoder"].weights] == [0, 4, 0, 4]
    torch.testing.assert_close(look.parts["decoder"].weights[3].sum(dim=-1), torch.ones(4, 4))
    assert {layer for _, layer, _ in inside.anatomy.heads} == {1, 3}
    assert "layer 3" in draw(look) and "layer 1" in draw(look, grid=True)
    with pytest.raises(UserError, match=r"layer = 2: this layer of the decoder has mixer = 'linear', which"):
        draw(look, layer=2)
    with pytest.raises(UserError, match=r"future: decoder.0.attention has mixer = 'linear'"):
        inside.look("the animal", changes=Changes(future=True))
    changed = inside.look("the animal did not", changes=Changes(layers=(("decoder", 2),)))
    assert not torch.equal(changed.output.logits, look.output.logits)
    assert look_response("run", look, changed)


@pytest.mark.parametrize("mixer", ["fourier", "linformer", "linear"])
def test_cross_attention_and_other_parts_are_shown(mixer: str) -> None:
    inside = opened("vit", mixer=f"full, {mixer}")
    assert list(inside.look(**given("vit")).parts) == ["encoder"]
    if mixer == "linear":
        look = opened("encoder-decoder", mixer=mixer).look("the animal did not")
        assert list(look.parts) == ["cross"] and "Cross-attention" in draw(look)


def test_causal_is_a_mask_that_a_trace_cannot_remove() -> None:
    """Tracing changes nothing; a mask has no name, because a sum has none."""
    model, tokens = model_of("decoder", "linear"), torch.randint(12, (1, 6))
    plain = model(tokens)
    with regard.trace(model) as seen:
        torch.testing.assert_close(model(tokens), plain)
    assert "decoder.0.attention.heads" in seen and "decoder.0.attention.weights" not in seen.names
    with pytest.raises(UserError, match=r"decoder.0.attention.mask"):
        regard.trace(model, {"decoder.0.attention.mask": lambda mask: mask.without(causal)})
