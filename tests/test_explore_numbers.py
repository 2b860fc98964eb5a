"""Models of numbers in the page: what they read and predict, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import ask, ask_frame, make_numbers, refusal, served
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.inside import Inside
from regard.predict.regressor import Regressor


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_numbers(folder / "numbers", rule={"multiply": 1.0, "add": 2.0, "low": 0.0, "high": 100.0})
    make_numbers(folder / "series", 2, context=6, horizon=3, period=3, train=["series.csv"])
    return folder


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.page.PAGE", page)
        with served(runs) as listener:
            yield listener.address


def test_a_look_predicts_what_regard_predict_does(runs):
    inside = Inside.open(runs / "numbers")
    look = inside.look("10 20, 30 40")
    forecast = Regressor(inside.bundle).predict([[10, 20, 30, 40]])[0].series
    assert [float(text) for text in look.output.generated.split(", ")] == pytest.approx(forecast, rel=1e-3)
    # the decoder reads its own outputs, so one pass over them predicts them again
    assert look.output.logits[:, 0].tolist() == pytest.approx(forecast, rel=1e-3)
    assert look.parts["cross"].columns == ("10", "20", "30", "40")
    assert look.parts["decoder"].rows == ("start", *(f"{value:.4g}" for value in forecast[:-1]))
    weights = look.parts["cross"].weights[0]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(3, 4))
    # with a target, the decoder reads that
    told = inside.look("10 20 30 40", target="1 2 3 4")
    assert told.parts["decoder"].rows == ("start", "1", "2", "3")
    off = inside.change(look, Changes(heads=(("cross", 0, 0), ("cross", 1, 2))))
    assert off.output.generated != look.output.generated
    both = inside.compare("10 20 30 40", changes=off.changes)
    assert both.difference.divergence == pytest.approx(
        (off.output.logits - look.output.logits).abs()[:, 0].tolist(), rel=1e-4
    )


def test_a_series_reads_its_context(runs):
    inside = Inside.open(runs / "series")
    steps = torch.arange(16.0).view(8, 2)
    look = inside.look(" ".join(f"{value:g}" for value in steps.flatten()))
    torch.testing.assert_close(look.input.source[0].double(), (steps[-6:].double() - 50) / 25, atol=1e-5, rtol=0)
    assert look.output.logits.shape == (3, 2)
    for text, message in (("1 2 3", "3 numbers"), ("1 2", "reads 6"), ("", "0 numbers"), ("one two", "not a number")):
        with pytest.raises(UserError, match=message):
            inside.look(text)


def test_the_page_gets_numbers_and_every_other_request_a_sentence(address, runs):
    listed = {one["name"]: one for one in json.loads(ask(address, "api/runs")[1])["runs"]}
    assert listed["numbers"]["examples"][0]["text"] == "10 20 30 40 50"
    assert len(listed["series"]["examples"][0]["text"].split(",")) == 6
    for name in ("numbers", "series"):
        body = {"run": name, "text": listed[name]["examples"][0]["text"], "changes": {"heads": [["cross", 0, 1]]}}
        header, _ = ask_frame(address, "api/look", body)
        look = Inside.open(runs / name).compare(body["text"], changes=Changes(heads=(("cross", 0, 1),)))
        for state, one in (("before", look.before), ("after", look.after)):
            shown = torch.tensor(header["output"]["values"][state])
            torch.testing.assert_close(shown, one.output.logits, rtol=1e-4, atol=1e-4)
        flow, arrays = ask_frame(address, "api/flow", {**body, "at": {"source": 1, "target": 2}})
        assert "v:values" in arrays and flow["output"]["kind"] == "values"
        more = {"part": "cross", "layer": 0, "head": 0, "query": 0}
        assert ask(address, "api/steps", {**body, **more})[0] == 200
        for path in (
            "search",
            "generate",
            "lens",
            "attribution",
            "saliency",
            "scores",
            "embeddings",
            "neighbours",
            "roles",
        ):
            status, content = ask(address, f"api/{path}", body)
            assert status in (200, 422), (path, content)
            if status == 422:
                assert len(refusal((status, content))[1]) > 10
    assert refusal(ask(address, "api/look", {"run": "numbers", "text": "ten"}))[1].startswith("number 1 is 'ten'")
