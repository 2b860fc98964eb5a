"""Numbers in and out: scaling, free-running decoding, forecasts beside baselines, commands, mistakes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from commanded import training
from regard.cli import main
from regard.data.numeric import (
    NumberBatch,
    NumberData,
    Rule,
    Seasonal,
    Windows,
    last_season,
    last_value,
    make_sets,
    padded,
    read_series,
    seasonal_series,
)
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.predict.regressor import Regressor, autoregress
from regard.settings import read_toml, to_dict
from regard.tasks.regression import evaluate_pairs, evaluate_series, squared_error
from smoke import smoke_run
from stopping import assert_same_weights, interrupt_at

SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=8", "train.warmup=2",
        "train.log_every=2", "train.save_every=4", "train.batch_tokens=64",
    )
]  # fmt: skip


# --- sets


def test_a_rule_makes_other_sequences_for_every_set() -> None:
    rule = Rule(multiply=3.0, add=-1.0, low=-5, high=5, shortest=2, train=50, valid=20, test=20, seed=4)
    sets = make_sets(NumberData(rule=rule, longest=6))
    seen = set()
    for batch in sets.rows.values():
        source, target = sets.data.denormalize(batch.source), sets.data.denormalize(batch.target)
        assert torch.allclose(target[batch.target_is_real], 3 * source[batch.source_is_real] - 1, atol=1e-4)
        assert source[batch.source_is_real].abs().max() <= 5 and batch.source_is_real.sum(dim=1).min() >= 2
        rows = {tuple(row.flatten().tolist()) for row in batch.source}
        assert not rows & seen
        seen |= rows
    learned = sets.rows["train"]
    numbers = torch.cat((learned.source[learned.source_is_real], learned.target[learned.target_is_real]))
    assert abs(float(numbers.mean())) < 1e-3 and abs(float(numbers.std(correction=0)) - 1) < 1e-3
    assert make_sets(sets.data).data == sets.data  # as a resumed run reads it


def test_windows_are_divided_in_time() -> None:
    series = [torch.arange(100.0)[:, None], torch.arange(1000.0, 1060.0)[:, None]]
    windows = Windows(series, context=8, horizon=4)
    parts = [windows.batch(windows.starts(*share)) for share in ((0.0, 0.7), (0.7, 0.8), (0.8, 1.0))]
    for batch in parts:
        assert torch.equal(batch.source[:, :, 0], batch.target[:, :1, 0] - torch.arange(8, 0, -1))
        assert torch.equal(batch.target[:, :, 0], batch.target[:, :1, 0] + torch.arange(4))  # never across two series
    steps = [set(batch.target.flatten().tolist()) for batch in parts]
    assert not (steps[0] & steps[1] or steps[1] & steps[2] or steps[0] & steps[2])
    assert len(parts[0].target) == (70 - 8 - 4 + 1) + (42 - 8 - 4 + 1)


def test_a_seasonal_series_has_its_season() -> None:
    series = seasonal_series(Seasonal(steps=2400, channels=2, noise=0.0))
    assert series.shape == (2400, 2)
    day = (series[:-24] - series[24:]).square().mean() / (series[:-12] - series[12:]).square().mean()
    assert day < 0.05  # a day later it is nearly the same, half a day later it is not
    assert torch.equal(series, seasonal_series(Seasonal(steps=2400, channels=2, noise=0.0)))
    noisy = seasonal_series(Seasonal(steps=2400, channels=2, noise=0.5)) - series
    assert noisy.std() == pytest.approx(0.5, rel=0.15)
    assert torch.corrcoef(noisy.T)[0, 1] == pytest.approx(0.5, abs=0.15)  # half of it is shared


# --- training and decoding


def numbers_model(channels: int = 1) -> torch.nn.Module:
    small = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 24, "dropout": 0.0, "embed_dropout": 0.0}
    return build(ModelConfig(**small, input="features", output_head="values", feature_dim=channels)).eval()


def test_the_loss_is_the_squared_error_of_real_numbers() -> None:
    model = numbers_model()
    batch = padded([([1.0, 2.0], [3.0]), ([4.0], [5.0, 6.0, 7.0])], longest=4)
    total, count = squared_error(model, batch)
    expected = 0.0
    for source, target in (([1.0, 2.0], [3.0]), ([4.0], [5.0, 6.0, 7.0])):
        read = torch.tensor([[0.0, *target[:-1]]])[..., None]
        found = model(torch.tensor([source])[..., None], read)[0, :, 0]
        expected += (found - torch.tensor(target)).square().sum().item()
    assert int(count) == 4 and total.item() == pytest.approx(expected, rel=1e-5)


def test_free_running_reads_what_it_wrote() -> None:
    model, source = numbers_model(2), torch.randn(3, 5, 2)
    written = autoregress(model, source, None, 4)
    read = torch.cat((torch.zeros(3, 1, 2), written[:, :-1]), dim=1)
    torch.testing.assert_close(model(source, read), written, atol=1e-5, rtol=1e-5)


def test_figures_are_those_of_the_formulas() -> None:
    source = torch.tensor([[1.0, 2.0, 3.0, 4.0]])[..., None]
    batch = NumberBatch(source, None, torch.tensor([[5.0, 7.0]])[..., None], None)
    data = NumberData(seasonal=Seasonal(), context=4, horizon=2, period=3, mean=(0.0,), std=(1.0,))
    figures = evaluate_series(batch, torch.tensor([[5.0, 6.0]])[..., None], data, ("a",))
    assert figures["mae"] == 0.5 and figures["mse"] == 0.5 and figures["mae_by_step"] == [0, 1]
    assert figures["last_mae"] == 2.0 and figures["seasonal_mae"] == ((5 - 2) + (7 - 3)) / 2
    assert last_value(source, 2).flatten().tolist() == [4, 4]
    assert last_season(source, 5, 3).flatten().tolist() == [2, 3, 4, 2, 3]
    pairs = padded([([1.0, 2.0], [3.0, 4.0])], longest=3)
    data = NumberData(rule=Rule(), longest=3, mean=(0.0,), std=(10.0,))
    wrong = pairs.target + torch.tensor([0.005, 0.02, 9.0])[None, :, None]
    figures = evaluate_pairs(pairs, wrong, pairs.target, data)
    assert figures["within"] == 0.5 and figures["largest"] == pytest.approx(0.2, rel=1e-4)
    assert figures["forced_mae"] == 0.0 and figures["naive_mae"] == pytest.approx(20.0)


# --- runs


@pytest.fixture
def here(empty_folder: Path) -> Path:
    rule = "[data.rule]\ntrain = 64\nvalid = 8\ntest = 8\n"
    (empty_folder / "pairs.toml").write_text(f'task = "regression"\n[data]\nlongest = 4\n{rule}')
    rows = "\n".join(f"{t},{math.sin(t / 4):.4f},{math.cos(t / 4):.4f}" for t in range(200))
    (empty_folder / "load.csv").write_text(f"t,a,b\n{rows}\n")
    series = 'train = ["load.csv"]\ncolumns = ["a", "b"]\ncontext = 12\nhorizon = 5\nperiod = 12\n'
    (empty_folder / "series.toml").write_text(f'task = "regression"\n[data]\n{series}')
    return empty_folder


train = training(SMALL)


def test_a_run_of_pairs_is_complete_and_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("pairs.toml", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)["scores"]
    assert " numbers/s" in err and "tokens/s" not in err
    run = here / "runs" / "pairs"
    recipe = read_toml(run / "recipe.toml")
    assert recipe["train"]["pack"] == 4 and recipe["model"]["feature_dim"] == 1 and len(recipe["data"]["mean"]) == 1
    assert set(result) == {"valid", "test"} and result["test"]["sequences"] == 8
    assert "10.00 20.00 30.00 40.00 50.00" in (run / "report.html").read_text()
    assert main(["evaluate", "runs/pairs", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert main(["predict", "runs/pairs", "10 20 30", "[4, 5]", "--json"]) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(one["predicted"]) for one in outputs] == [3, 2]
    predictor = regard.load("runs/pairs").predictor
    assert outputs[0]["predicted"] == predictor.predict([[10, 20, 30]])[0].series
    assert len(predictor.predict([[1.0]], steps=5)[0].values) == 5
    assert main(["runs"]) == 0 and "regression" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["pairs.toml", "series.toml"])
def test_a_stopped_run_goes_on_as_if_it_had_not(here: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    dropout = "--set=model.dropout=0.1"
    assert train(recipe, dropout, "-o", "whole") == 0
    interrupt_at(monkeypatch, 3)
    assert train(recipe, dropout, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


def test_a_run_of_a_series_foretells(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("series.toml") == 0
    out = capsys.readouterr()
    assert "channels: a, b" in out.err and "last season" in out.out
    report = (here / "runs/series/report.html").read_text()
    assert "last value" in report and "actual" in report
    assert main(["predict", "runs/series", "--files", "load.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a,b" and len(lines) == 6
    predictor = regard.load("runs/series").predictor
    series = read_series([Path("load.csv")], ("a", "b"))[0].values
    expected = predictor.forecast(series)
    shown = torch.tensor([[float(cell) for cell in line.split(",")] for line in lines[1:]], dtype=torch.float64)
    torch.testing.assert_close(shown, expected, atol=1e-4, rtol=0)
    assert torch.equal(predictor.forecast(series[50:]), expected)  # only the last steps are read


@pytest.mark.parametrize(("settings_", "message"), [
    (["data.context=8"], "context = 8: is for a series"), (["data.longest=1"], "must be rule.shortest = 2"),
    (["train.label_smoothing=0.1"], "train.label_smoothing = 0.1: has no effect in regression"),
    (["model.output_head=tokens"], "regression needs input|vocab_size is not set"),
    (["train.pack=5"], "train.pack = 5: the data decides this"),
    (["model.position=learned", "model.max_length=3"], "model.max_length = 3"),
    (["data.mean=[1.0]"], "std ="), (["data.rul=1"], "unknown setting; did you mean 'rule'"),
    (["train.metric=bleu"], "is not a metric of regression"),
])  # fmt: skip
def test_a_mistake_is_told_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], settings_, message
) -> None:
    import re

    assert train("pairs.toml", *[f"--set={one}" for one in settings_]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("runs").exists()


def test_mistakes_of_a_series(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--set", "data.period=20"], "period = 20: the seasonal forecast needs a whole season"),
        (["--set", "data.horizon=300"], "no window of 12 + 300 steps fits"),
        (["--set", "data.columns=['t', 'c']"], "column 'c' is missing"),
    ):
        assert train("series.toml", *options) == 2
        assert message in capsys.readouterr().err
    rows = Path("load.csv").read_text().replace("\n100,", "\n100,nan,0\n1000,", 1)
    Path("load.csv").write_text(rows)
    assert train("series.toml") == 2
    assert "load.csv, line 102: column 'a'" in capsys.readouterr().err and not Path("runs").exists()


def test_what_predict_refuses(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("pairs.toml") == 0 and train("series.toml") == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1 2\n\n3\n")))
    assert main(["predict", "runs/pairs"]) == 0
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [2, 0, 1]  # a line for a line
    for arguments, message in (
        (["runs/pairs", "1 x"], "NUMBERS 1: number 2 is 'x'"), (["runs/pairs", " "], "holds no numbers"),
        (["runs/pairs", "1", "--steps", "0"], "--steps: 0"),
        (["runs/pairs", "1", "--digits", "-1"], "--digits: invalid choice: -1"),
        (["runs/series", "1 2"], "reads 2 channels"), (["runs/series", "--files", "none.csv"], "no such file"),
        (["runs/pairs", "1e30"], "the prediction is not a number"),
        (["runs/pairs", "1", "--files", "load.csv"], "pass one of them"), (["nowhere", "1"], "no such folder"),
    ):  # fmt: skip
        assert main(["predict", *arguments]) == 2
        assert message in capsys.readouterr().err
    Path("short.csv").write_text("a,b\n1,2\n")
    assert main(["predict", "runs/series", "--files", "short.csv"]) == 2
    assert "short.csv: 1 steps are too few: the model reads 12" in capsys.readouterr().err


@settings(max_examples=50)
@given(numbers=st.lists(st.floats(-100, 100), min_size=1, max_size=8))
def test_what_lies_outside_the_training_data_is_known(numbers: list[float]) -> None:
    rule = NumberData(rule=Rule(low=-10, high=20), mean=(5.0,), std=(9.0,))
    series = NumberData(train=("a.csv",), context=3, period=1, mean=(5.0,), std=(9.0,))
    steps = torch.tensor(numbers, dtype=torch.float64)[:, None]
    for data, read, low, high in ((rule, numbers, -10, 20), (series, numbers[-3:], 5 - 4 * 9, 5 + 4 * 9)):
        predictor = Regressor(Bundle(numbers_model(), recipe={"data": to_dict(data)}))
        assert predictor.out_of_range(steps) == [[x for x in read if not low <= x <= high]]


def test_predict_tells_once_what_it_was_not_trained_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("pairs.toml") == 0 and train("series.toml") == 0
    capsys.readouterr()
    assert main(["predict", "runs/pairs", "0 100", "50"]) == 0 and capsys.readouterr().err == ""
    assert main(["predict", "runs/pairs", "100.5 7", "-3 100.5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["source"] for line in out.splitlines()] == [[100.5, 7], [-3, 100.5]]
    assert err.startswith("note: 100.5 and -3: outside 0 to 100, the range") and err.count("\n") == 1
    assert main(["predict", "runs/pairs", "1 2", "x"]) == 3 and capsys.readouterr().out.count("\n") == 2
    assert main(["predict", "runs/pairs", "1 2 3 4", "5 6"]) == 0 and capsys.readouterr().err == ""
    for arguments in (["1 2", "1 2 3 4 5"], ["1 2", "--steps", "5"]):
        assert main(["predict", "runs/pairs", *arguments]) == 0
        err = capsys.readouterr().err
        assert err.startswith("note: 5 numbers are read or predicted, but") and "at most 4 (data.longest)" in err
    assert main(["predict", "runs/series", "--files", "load.csv"]) == 0 and capsys.readouterr().err == ""
    Path("far.csv").write_text("a,b\n" + "0,0\n" * 20 + "0,999\n" * 2)
    assert main(["predict", "runs/series", "--files", "far.csv", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["channels"] == ["a", "b"] and err.count("\n") == 1
    assert err.startswith("note: column 'b': 999: outside -") and "(mean ± 4 standard deviations)" in err


# --- the recipes, in their small form


@pytest.mark.slow
def test_the_rule_is_learned(tmp_path: Path) -> None:
    """Never seen, free-running: the error is a quarter of that of saying the source again, or less."""
    scores = smoke_run("recipes/number-sequences.toml", tmp_path / "run")["test"]
    assert scores["naive_mae"] == pytest.approx(2.0, rel=1e-4) and scores["mae"] < 0.25 * scores["naive_mae"]
    example = regard.load(tmp_path / "run").predictor.predict([[10, 20, 30, 40, 50]])[0].series
    assert example == pytest.approx([12, 22, 32, 42, 52], abs=1.0)


@pytest.mark.slow
def test_the_forecast_beats_both_baselines(tmp_path: Path) -> None:
    scores = smoke_run("recipes/seasonal-forecast.toml", tmp_path / "run")["test"]
    assert scores["mse"] < 0.9 * min(scores["last_mse"], scores["seasonal_mse"])


@pytest.mark.cuda
@pytest.mark.parametrize("position", ["sinusoidal", "alibi"])
def test_a_recorded_step_learns_what_a_plain_one_does(here: Path, position: str) -> None:
    for recipe in ("pairs", "series"):
        for graph in ("false", "true"):
            options = [f"--set=train.cuda_graph={graph}", "--set=train.steps=12", "-o", f"{recipe}-{graph}"]
            options.append(f"--set=model.position={position}")
            assert main(["train", f"{recipe}.toml", *SMALL, *options, "--device", "cuda"]) == 0
        plain, recorded = (
            Path(f"{recipe}-{graph}/metrics.jsonl").read_text().splitlines() for graph in ("false", "true")
        )
        for one, other in zip(plain, recorded, strict=True):
            for name in {"loss", "valid_loss"} & json.loads(one).keys():
                assert json.loads(one)[name] == pytest.approx(json.loads(other)[name], rel=1e-3)
