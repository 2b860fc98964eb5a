"""The server of the page: its numbers are the model's, and invalid requests are refused."""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import regard
from explorer import TEXT, ask, ask_frame, make_captioner, make_decoder, make_translator, refusal, served
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.inside import Inside
from regard.explore.server.models import Models, find_runs
from regard.models.folder import load, load_tokenizers, save
from regard.nn.trace import trace, zero_heads
from regard.text.labels import label


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


# --- the numbers


def test_a_look_holds_the_weights_of_a_trace(address, runs):
    header, arrays = ask_frame(address, "api/look", {"run": "decoder", "text": TEXT})
    model, tokenizer = load(runs / "decoder"), load_tokenizers(runs / "decoder")["tokenizer"]
    ids = tokenizer.encode(TEXT)
    with trace(model, only="*.weights") as seen, torch.no_grad():
        logits = model(torch.tensor([ids]))[0]
    assert [(part["part"], part["layer"], part["heads"]) for part in header["parts"]] == [
        ("decoder", 0, 3),
        ("decoder", 1, 3),
    ]
    for layer in (0, 1):
        weights = seen[f"decoder.{layer}.attention.weights"][0].numpy()
        assert np.abs(arrays[f"decoder.{layer}"] / 65535 - weights).max() < 1e-5
    assert header["labels"]["source"] == [tokenizer.token(id) for id in ids]
    last = header["output"]["positions"][-1]["choices"]
    p = logits[-1].softmax(dim=-1)
    best = p.topk(len(last))
    assert [choice["before"] for choice in last] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert [choice["label"] for choice in last] == [label(tokenizer, id) for id in best.indices.tolist()]
    assert [choice["text"] for choice in last] == [tokenizer.decode([id]) for id in best.indices.tolist()]


def test_a_head_switched_off_gives_the_probabilities_that_a_trace_gives(address, runs):
    asked = {"run": "decoder", "text": TEXT, "changes": {"heads": [["decoder", 0, 1]]}}
    header, _ = ask_frame(address, "api/look", asked)
    model, tokenizer = load(runs / "decoder"), load_tokenizers(runs / "decoder")["tokenizer"]
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        before = model(ids)[0].softmax(dim=-1)
        with trace(model, {"decoder.0.attention.heads": zero_heads(1)}):
            after = model(ids)[0].softmax(dim=-1)
    names = [label(tokenizer, id) for id in range(len(tokenizer))]
    for at, place in enumerate(header["output"]["positions"]):
        for choice in place["choices"]:
            id = names.index(choice["label"])
            assert choice["before"] == pytest.approx(before[at, id].item(), abs=1e-5)
            assert choice["after"] == pytest.approx(after[at, id].item(), abs=1e-5)
        kl = (before[at] * (before[at].log() - after[at].log())).sum().item()
        assert place["divergence"] == pytest.approx(kl, abs=1e-4)
        assert place["flipped"] == (before[at].argmax() != after[at].argmax()).item()
    right = ids[0, 1:]
    loss = -after[:-1].gather(1, right[:, None]).log().mean().item()
    assert header["output"]["after"]["loss"] == pytest.approx(loss, abs=1e-4)


def test_maps_of_a_long_text_are_reduced_and_fetched_one_by_one(address, runs, monkeypatch):
    from regard.explore.server import responses

    monkeypatch.setattr(responses, "WHOLE", 10)
    monkeypatch.setattr(responses, "SIDE", 4)
    asked = {"run": "decoder", "text": TEXT}
    header, thin = ask_frame(address, "api/look", asked)
    assert not any(part["whole"] for part in header["parts"])
    _, whole = ask_frame(address, "api/maps", {**asked, "part": "decoder", "layer": 1, "heads": [2, 0]})
    look = Inside.open(runs / "decoder").look(TEXT)
    weights = look.parts["decoder"].weights[1]
    assert np.abs(whole["maps"] / 65535 - weights[[2, 0]].numpy()).max() < 1e-5
    count = weights.shape[-1]
    edges = [(i * count // 4, -(-(i + 1) * count // 4)) for i in range(4)]  # the blocks of adaptive pooling
    for row, (top, bottom) in enumerate(edges):
        for column, (left, right) in enumerate(edges):
            block = weights[:, top:bottom, left:right].amax(dim=(1, 2)).numpy()
            assert np.abs(thin["decoder.1"][:, row, column] / 65535 - block).max() < 1e-5


def test_steps_follow_the_formula(address, runs):
    asked = {"run": "decoder", "text": TEXT, "part": "decoder", "layer": 1, "head": 2, "query": 5}
    header, found = ask_frame(address, "api/steps", asked)
    scores = found["k"] @ found["q"]
    assert np.allclose(found["scores"], scores, atol=1e-4)
    assert header["scale"] == pytest.approx(8**-0.5)
    assert np.allclose(found["scaled"], scores * header["scale"], atol=1e-4)
    assert np.all(found["masked"][6:] == -np.inf) and np.allclose(found["masked"][:6], found["scaled"][:6])
    exponents = np.exp(found["masked"] - found["masked"].max())
    assert np.allclose(found["weights"], exponents / exponents.sum(), atol=1e-5)
    assert np.allclose(found["output"], found["weights"] @ found["v"], atol=1e-4)


def test_a_dragged_row_replaces_the_weights_of_the_head(address, runs):
    look = Inside.open(runs / "translator").look(TEXT)
    count = len(look.parts["cross"].columns)
    weights = [0.0] * count
    weights[3] = 1.0
    asked = {"run": "translator", "text": TEXT, "changes": {"rows": [["cross", 1, 0, 2, weights]]}}
    _, arrays = ask_frame(address, "api/look", asked)
    assert arrays["cross.1"][0, 2].tolist() == [65535 if key == 3 else 0 for key in range(count)]
    changed = look.inside.change(look, Changes(rows=(("cross", 1, 0, 2, tuple(weights)),)))
    assert np.abs(arrays["decoder.1"] / 65535 - changed.parts["decoder"].weights[1].numpy()).max() < 1e-5


def test_the_search_tree_is_the_beam_search(address, runs):
    status, content = ask(address, "api/search", {"run": "translator", "text": TEXT, "beam": 3})
    assert status == 200
    tree = json.loads(content)
    found = regard.load(runs / "translator").predict([TEXT], beam=3, n_best=3)[0].n_best
    assert [one["text"] for one in tree["found"]] == [one.text for one in found]
    assert [one["score"] for one in tree["found"]] == pytest.approx([one.score for one in found], abs=1e-5)
    nodes = {node["id"]: node for node in tree["nodes"]}
    best = [node for node in tree["nodes"] if node["best"]]
    assert best[-1]["total"] == pytest.approx(found[0].log_probability, abs=1e-4)
    assert sum(math.log(node["probability"]) for node in best) == pytest.approx(best[-1]["total"], abs=1e-4)
    children: dict[int | None, float] = {}
    for node in tree["nodes"]:
        assert node["parent"] is None or nodes[node["parent"]]["kept"]
        children[node["parent"]] = children.get(node["parent"], 0.0) + node["probability"]
    assert max(children.values()) <= 1 + 1e-5


def test_images_are_stored_and_read_by_the_model(address, runs):
    pixels = bytes(random.Random(0).randbytes(32 * 32 * 3))
    name = json.loads(ask(address, "api/image", pixels)[1])["name"]
    assert ask(address, f"api/image/{name}") == (200, pixels)
    header, arrays = ask_frame(address, "api/look", {"run": "captioner", "image": name})
    assert header["grid"] == {"down": 4, "across": 4, "first": 0}
    shown = np.frombuffer(pixels, np.uint8).reshape(32, 32, 3).transpose(2, 0, 1).astype(np.float32) / 255
    look = Inside.open(runs / "captioner").look(image=torch.from_numpy(shown))
    assert np.abs(arrays["cross.0"] / 65535 - look.parts["cross"].weights[0].numpy()).max() < 1e-4
    assert refusal(ask(address, "api/look", {"run": "captioner", "image": "0" * 32}))[0] == 422
    for odd in (b"", b"12", b"1234", bytes(3 * 32 * 31)):  # no square of 3 bytes a pixel
        assert refusal(ask(address, "api/image", odd, method="POST"))[0] == 422
    small = json.loads(ask(address, "api/image", b"123")[1])["name"]
    assert "32 x 32" in refusal(ask(address, "api/look", {"run": "captioner", "image": small}))[1]


def test_weights_that_are_not_finite_are_reported(tmp_path):
    make_decoder(tmp_path / "nan")
    model = load(tmp_path / "nan")
    with torch.no_grad():
        model.decoder.blocks[0].attention.qkv.weight.fill_(math.nan)
    save(model, tmp_path / "nan")
    with served(tmp_path / "nan") as listener:
        status, sentence = refusal(ask(listener.address, "api/look", {"run": "nan", "text": TEXT}))
    assert status == 422 and "NaN" in sentence


# --- the models


def test_runs_are_listed_with_their_errors(tmp_path):
    make_decoder(tmp_path / "good")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.toml").write_text("[model\n")
    (tmp_path / "no-run").mkdir()
    with served(tmp_path) as listener:
        address = listener.address
        result = {run["name"]: run for run in json.loads(ask(address, "api/runs")[1])["runs"]}
        assert set(result) == {"good", "broken"}
        assert result["good"]["error"] is None and result["good"]["architecture"] == "decoder"
        assert "recipe.toml" in result["broken"]["error"]
        (tmp_path / "good" / "model.safetensors").write_bytes(b"no weights")
        status, sentence = refusal(ask(address, "api/look", {"run": "good", "text": TEXT}))
    assert status == 422 and "model.safetensors" in sentence


def test_a_recipe_is_parsed_once(tmp_path, monkeypatch):
    make_translator(tmp_path / "run")
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    with served(tmp_path / "run") as listener:
        for text in ("the cat", "the animal"):
            assert ask(listener.address, "api/runs")[0] == 200
            ask_frame(listener.address, "api/look", {"run": "run", "text": text})
    assert parsed == [(tmp_path / "run" / "recipe.toml").read_text(encoding="utf-8")]


def test_a_hugging_face_folder_is_opened_as_it_is(tmp_path):
    from regard.interop import export_folder

    make_decoder(tmp_path / "own", position="learned", activation="gelu-tanh", embed_scale=False)
    export_folder(load(tmp_path / "own"), tmp_path / "hf", load_tokenizers(tmp_path / "own"))
    assert find_runs(tmp_path / "hf") == {"hf": tmp_path / "hf"}
    with served(tmp_path) as listener:
        outputs = [ask_frame(listener.address, "api/look", {"run": name, "text": TEXT})[1] for name in ("own", "hf")]
    for name, weights in outputs[0].items():
        assert np.abs(weights.astype(int) - outputs[1][name].astype(int)).max() <= 2


@pytest.mark.parametrize(("content", "word"), [({}, "no such folder"), ({"empty": None}, "contains no run")])
def test_a_folder_without_runs_is_an_error_that_helps(tmp_path, content, word):
    for name in content:
        (tmp_path / "given" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=word):
        find_runs(tmp_path / "given")


def test_only_the_latest_looks_stay_in_memory(runs, monkeypatch):
    from regard.explore.server import models as module

    monkeypatch.setattr(module, "KEPT", 0)
    models = Models(find_runs(runs))
    for word in ("the cat", "the animal", "the sun"):
        models.look(("decoder", word, None, None, None), Changes())
    assert [text for (_, text, _, _, _), _ in models._looks] == ["the animal", "the sun"]
    sun = ("decoder", "the sun", None, None, None)
    first = models.look(sun, Changes())
    assert first is models.look(sun, Changes())
