"""The routes of lens, attribution, patching, neurons and embeddings: what the page gets is what Python computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import TEXT, ask, ask_frame, make_captioner, make_decoder, make_translator, refusal, served
from regard import explore
from regard.explore.inside import Inside
from regard.explore.patching import make_pair

OTHER = TEXT.replace("tired", "sun")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_decoder(folder / "decoder")
    make_translator(folder / "translator")
    make_captioner(folder / "captioner")
    return folder


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.page.PAGE", page)  # these tests need no built page
        with served(runs) as listener:
            yield listener.address


def answer(address: str, path: str, **asked: Any) -> Any:
    status, content = ask(address, f"api/{path}", asked)
    assert status == 200, content
    return json.loads(content)


def near(got: Any, wanted: Any) -> None:
    wanted = wanted.tolist() if hasattr(wanted, "tolist") else wanted
    assert np.abs(np.array(got, dtype=float) - np.array(wanted, dtype=float)).max() < 1e-3


@pytest.mark.parametrize("run", ["decoder", "translator"])
def test_lens_attribution_and_saliency(address, runs, run):
    inside = Inside.open(runs / run)
    look = inside.look(TEXT)
    lens = explore.logit_lens(look)
    got = answer(address, "lens", run=run, text=TEXT)
    assert got["labels"] == json.loads(json.dumps(lens.labels)) and got["total"] == len(lens.positions)
    near(got["probabilities"], lens.probabilities)
    near(got["final"], lens.final)
    part = answer(address, "lens", run=run, text=TEXT, first=1, count=2)
    assert part["positions"] == [1, 2]
    near(part["entropy"], lens.entropy[:, 1:3])
    terms = explore.direct_logit_attribution(look, 1)
    got = answer(address, "attribution", run=run, text=TEXT, at=1)
    assert got["token"] == terms.token
    for name, layers in terms.heads.items():
        for shown, wanted in zip(got["heads"][name], layers, strict=True):
            near(shown, wanted)
    near(got["feedforward"], terms.feedforward)
    near([got["logit"], got["embeddings"], got["biases"]], [terms.logit, terms.embeddings, terms.biases])
    made = explore.token_saliency(look, 1)
    got = answer(address, "saliency", run=run, text=TEXT, at=1)
    assert got["labels"] == list(made.labels)
    for name in ("attention", "rollout", "gradient"):
        near(got[name], getattr(made, name))
    near(answer(address, "scores", run=run)["induction"], torch.stack(explore.induction_scores(inside)))


def test_a_patch_on_the_page_is_that_of_python(address, runs):
    inside = Inside.open(runs / "decoder")
    clean, corrupted = inside.look(TEXT), inside.look(OTHER)
    made = explore.activation_patching(clean, corrupted)
    got = answer(address, "patching", run="decoder", text=TEXT, other=OTHER)
    assert got["answers"] == list(made.answers)
    near(got["residual"]["decoder"], made.residual["decoder"])
    near(got["heads"]["decoder"], torch.stack(made.heads["decoder"]))
    layer, at = 0, len(made.labels["decoder"]) - 1
    asked = {"run": "decoder", "text": TEXT, "other": OTHER, "stack": "decoder", "layer": layer, "position": at}
    choices = {one["label"]: one for one in answer(address, "patched", **asked)["choices"]}
    p = [look.output.logits[-1].softmax(dim=-1) for look in (clean, corrupted)]
    for label, one in choices.items():
        id = [inside.reader.label(id) for id in range(len(p[0]))].index(label)
        near([one["clean"], one["corrupted"]], [p[0][id], p[1][id]])
    pair = make_pair(clean, corrupted)
    best, worst = (np.log(choices[label]["patched"]) for label in made.answers)
    restored = (best - worst - pair.differences[1]) / (pair.differences[0] - pair.differences[1])
    assert restored == pytest.approx(float(made.residual["decoder"][layer + 1, at]), abs=1e-2)  # p is rounded


def test_neurons_embeddings_and_positions(address, runs):
    inside = Inside.open(runs / "translator")
    made = explore.neuron_activations(inside.look(TEXT), 1)
    got = answer(address, "neurons", run="translator", text=TEXT, layer=1, unit=7)
    near(got["activations"], made.activations[:, 7])
    assert [unit for unit, _, _ in got["top"]] == [unit for unit, _, _ in made.top_units(24)]
    raised, _ = made.writes(7)
    assert [label for label, _ in got["writes"][0]] == [label for label, _ in raised]
    assert answer(address, "neurons", run="translator", text=TEXT, layer=1, stack="encoder")["writes"] is None
    for side in ("source", "target"):
        points = explore.embedding_map(inside, side)
        header, arrays = ask_frame(address, "api/embeddings", {"run": "translator", "side": side})
        assert header["labels"] == list(points.labels)
        near(arrays["points"], points.points)
    near_by = answer(address, "neighbours", run="translator", side="source", token="animal")["neighbours"]
    assert [one[1] for one in near_by] == [
        label for _, label, _ in explore.embedding_map(inside, "source").neighbours("animal")
    ]
    header, arrays = ask_frame(address, "api/position", {"run": "translator", "stack": "encoder", "length": 9})
    assert header["kind"] == "sinusoidal"
    near(arrays["values"], explore.position_picture(inside, "encoder", 9).values)


@pytest.mark.parametrize(
    "path, asked, message",
    [
        ("patching", {"run": "decoder", "text": TEXT, "other": "the"}, "tokens"),
        ("patching", {"run": "decoder", "text": TEXT, "other": TEXT}, "no difference"),
        ("patching", {"run": "captioner", "image": "0", "other_image": "1"}, "choose the image again"),
        ("patched", {"run": "decoder", "text": TEXT, "other": OTHER, "stack": "encoder", "layer": 0}, "encoder"),
        ("patched", {"run": "decoder", "text": TEXT, "other": OTHER, "stack": "decoder", "layer": 9}, "decoder.9"),
        (
            "patched",
            {"run": "decoder", "text": TEXT, "other": OTHER, "stack": "decoder", "layer": 0, "position": 99},
            "index 99",
        ),
        ("lens", {"run": "decoder", "text": TEXT, "count": 0}, "count"),
        ("attribution", {"run": "decoder", "text": TEXT, "at": 99}, "positions 0 to"),
        ("attribution", {"run": "decoder", "text": TEXT, "token": "nonsense!"}, "nonsense!"),
        ("neurons", {"run": "decoder", "text": TEXT, "layer": 7}, "layers 0 to 1"),
        ("neurons", {"run": "decoder", "text": TEXT, "unit": -1}, "units 0 to"),
        ("neighbours", {"run": "decoder", "token": "nonsense!"}, "nonsense!"),
        ("neighbours", {"run": "decoder"}, "token"),
        ("embeddings", {"run": "captioner", "side": "source"}, "patches"),
        ("position", {"run": "decoder", "stack": "encoder"}, "encoder"),
        ("position", {"run": "decoder", "length": 100_000}, "length"),
    ],
)
def test_requests_that_cannot_be_answered(address, path, asked, message):
    status, sentence = refusal(ask(address, f"api/{path}", asked))
    assert status == 422 and message in sentence
