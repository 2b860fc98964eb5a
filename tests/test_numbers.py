"""Numbers in and out: reading, scaling, free-running decoding, forecasts beside baselines, commands, mistakes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commanded import training
from regard.cli import main
from regard.data.numbers import NumberBatch, NumbersData, Rule, Seasonal, padded, parse_numbers, read_pairs
from regard.data.scaled import Scale, make_sets
from regard.data.series import Windows, last_season, last_value, read_table, seasonal_series
from regard.decode.numbers import Predictor, write_numbers
from regard.errors import UserError
from regard.forecast import judge_pairs, judge_series
from regard.models import ModelConfig, build
from regard.settings import read_toml
from regard.train.numbers import squared_error
from smoke import smoke_run
from stopping import assert_same_weights, interrupt_at

SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=8", "train.warmup=2",
        "train.log_every=2", "train.save_every=4", "train.batch_tokens=64",
    )
]  # fmt: skip


# --- reading


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30, allow_subnormal=False), min_size=1, max_size=8), st.sampled_from([" ", ", ", "\t"])
)
def test_numbers_are_read_as_they_are_written(numbers: list[float], between: str) -> None:
    text = between.join(map(repr, numbers))
    assert parse_numbers(text) == parse_numbers(f"[{text}]") == numbers


@pytest.mark.parametrize(("text", "message"), [
    ("1 two 3", "number 2 is 'two': is no number"), ("1 nan", "number 2 is nan: only finite numbers"),
    ("inf", "number 1 is inf"), ("1 1e400", "number 2 is 1e400"), ("1 1e31", "up to 1e30"),
])  # fmt: skip
def test_what_is_no_number(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_numbers(text)


def test_pairs_are_named_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tsv").write_text("1 2\t3 4\n5\t6\n1 2 3\n7\tNaN\n\t1\n" + "1 " * 40 + "\t1\n")
    config = NumbersData(train=("a.tsv",), folder=str(tmp_path))
    with pytest.raises(UserError) as caught:
        read_pairs(config.train, config)
    told = str(caught.value)
    assert "a.tsv, line 3: has 1 columns, not 2" in told and "line 4: number 1 is NaN" in told
    assert "line 5: the source has 0 numbers" in told and "line 6: the source has 40 numbers" in told
    assert "4 problems, 2 good pairs" in told and "skip_bad" in told
    kept = read_pairs(config.train, NumbersData(train=("a.tsv",), folder=str(tmp_path), skip_bad=True))
    assert kept == [([1, 2], [3, 4]), ([5], [6])]
    told = capsys.readouterr().err
    assert "left out: 4 bad lines of a.tsv" in told and "line 4: number 1 is NaN" in told


def test_pairs_in_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": [1, 2.5], "target": [3]}\n')
    config = NumbersData(train=("a.jsonl",), folder=str(tmp_path))
    assert read_pairs(config.train, config) == [([1, 2.5], [3])]
    for line, message in (
        ("[1]", 'write  {"source"'),
        ("{", "is not JSON"),
        ('{"source": [true], "target": [1]}', "True"),
    ):
        (tmp_path / "a.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=message):
            read_pairs(config.train, config)


def test_a_series_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("time,load,wind\n00:00,1,2\n01:00,3,4.5\n\n")
    series, names = read_table(path)
    assert series.tolist() == [[1, 2], [3, 4.5]] and names == ("load", "wind")
    assert read_table(path, ("wind",))[0].tolist() == [[2], [4.5]]
    for content, message in (
        ("time,load\n0:00,1\n1:00,NaN\n", r"load.csv, line 3, column 'load': NaN: only finite numbers.*fill the gap"),
        ("time,load\n0:00,1\n1:00,\n", r"line 3, column 'load'"),
        ("time,load\n0:00,1\n1:00\n", r"line 3: has 1 columns, but the header names 2"),
        ("time,load\n0:00,x\n", "line 2: no column holds a number"),
        ("load\n", "has 1 lines"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_table(path)
    path.write_text("load,load\n1,2\n")
    with pytest.raises(UserError, match="column 'load' is twice"):
        read_table(path)
    with pytest.raises(UserError, match="column 'lod' is nowhere; did you mean 'load'"):
        read_table(path, ("lod",))


# --- sets


def test_a_rule_makes_other_sequences_for_every_set() -> None:
    rule = Rule(multiply=3.0, add=-1.0, low=-5, high=5, shortest=2, train=50, valid=20, test=20, seed=4)
    sets = make_sets(NumbersData(rule=rule, longest=6))
    scale, seen = Scale.of(sets.data), set()
    for batch in sets.rows.values():
        source, target = scale.widen(batch.source), scale.widen(batch.target)
        assert torch.allclose(target[batch.target_valid], 3 * source[batch.source_valid] - 1, atol=1e-4)
        assert source[batch.source_valid].abs().max() <= 5 and batch.source_valid.sum(dim=1).min() >= 2
        rows = {tuple(row.flatten().tolist()) for row in batch.source}
        assert not rows & seen
        seen |= rows
    learned = sets.rows["train"]
    numbers = torch.cat((learned.source[learned.source_valid], learned.target[learned.target_valid]))
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
    return build(ModelConfig(**small, source="features", head="values", feature_dim=channels)).eval()


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
    written = write_numbers(model, source, None, 4)
    read = torch.cat((torch.zeros(3, 1, 2), written[:, :-1]), dim=1)
    torch.testing.assert_close(model(source, read), written, atol=1e-5, rtol=1e-5)


def test_figures_are_those_of_the_formulas() -> None:
    source = torch.tensor([[1.0, 2.0, 3.0, 4.0]])[..., None]
    batch = NumberBatch(source, None, torch.tensor([[5.0, 7.0]])[..., None], None)
    data = NumbersData(seasonal=Seasonal(), context=4, horizon=2, period=3, mean=(0.0,), std=(1.0,))
    figures = judge_series(batch, torch.tensor([[5.0, 6.0]])[..., None], data, ("a",))
    assert figures["mae"] == 0.5 and figures["mse"] == 0.5 and figures["mae_by_step"] == [0, 1]
    assert figures["last_mae"] == 2.0 and figures["seasonal_mae"] == ((5 - 2) + (7 - 3)) / 2
    assert last_value(source, 2).flatten().tolist() == [4, 4]
    assert last_season(source, 5, 3).flatten().tolist() == [2, 3, 4, 2, 3]
    pairs = padded([([1.0, 2.0], [3.0, 4.0])], longest=3)
    data = NumbersData(rule=Rule(), longest=3, mean=(0.0,), std=(10.0,))
    wrong = pairs.target + torch.tensor([0.005, 0.02, 9.0])[None, :, None]
    figures = judge_pairs(pairs, wrong, pairs.target, data)
    assert figures["within"] == 0.5 and figures["largest"] == pytest.approx(0.2, rel=1e-4)
    assert figures["forced_mae"] == 0.0 and figures["naive_mae"] == pytest.approx(20.0)


# --- runs


@pytest.fixture
def here(empty_folder: Path) -> Path:
    rule = "[data.rule]\ntrain = 64\nvalid = 8\ntest = 8\n"
    (empty_folder / "pairs.toml").write_text(f'task = "numbers"\n[data]\nlongest = 4\n{rule}')
    rows = "\n".join(f"{t},{math.sin(t / 4):.4f},{math.cos(t / 4):.4f}" for t in range(200))
    (empty_folder / "load.csv").write_text(f"t,a,b\n{rows}\n")
    series = 'train = ["load.csv"]\ncolumns = ["a", "b"]\ncontext = 12\nhorizon = 5\nperiod = 12\n'
    (empty_folder / "series.toml").write_text(f'task = "numbers"\n[data]\n{series}')
    return empty_folder


train = training(SMALL)


def test_a_run_of_pairs_is_complete_and_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("pairs.toml", "--json") == 0
    told = json.loads(capsys.readouterr().out)["scores"]
    run = here / "runs" / "pairs"
    recipe = read_toml(run / "recipe.toml")
    assert recipe["train"]["pack"] == 4 and recipe["model"]["feature_dim"] == 1 and len(recipe["data"]["mean"]) == 1
    assert set(told) == {"valid", "test"} and told["test"]["sequences"] == 8
    assert "10.00 20.00 30.00 40.00 50.00" in (run / "report.html").read_text()
    assert main(["evaluate", "runs/pairs", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert main(["predict", "runs/pairs", "10 20 30", "[4, 5]", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(one["predicted"]) for one in answers] == [3, 2]
    predictor = Predictor.load("runs/pairs")
    assert answers[0]["predicted"] == predictor.predict([[10, 20, 30]])[0]
    assert len(predictor.predict([[1.0]], steps=5)[0]) == 5
    assert main(["runs"]) == 0 and "numbers" in capsys.readouterr().out


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
    assert "last value" in report and "what came" in report
    assert main(["predict", "runs/series", "--file", "load.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a,b" and len(lines) == 6
    predictor = Predictor.load("runs/series")
    series = read_table(Path("load.csv"), ("a", "b"))[0]
    expected = predictor.forecast(series)
    shown = torch.tensor([[float(cell) for cell in line.split(",")] for line in lines[1:]], dtype=torch.float64)
    torch.testing.assert_close(shown, expected, atol=1e-4, rtol=0)
    assert torch.equal(predictor.forecast(series[50:]), expected)  # only the last steps are read


@pytest.mark.parametrize(("settings_", "message"), [
    (["data.context=8"], "context = 8: is for a series"), (["data.longest=1"], "must be rule.shortest = 2"),
    (["train.label_smoothing=0.1"], "train.label_smoothing = 0.1: is for tokens"),
    (["model.head=tokens"], "numbers need source = 'features'|vocab is not set"),
    (["train.pack=5"], "train.pack = 5: follows from the data, 4 steps"),
    (["model.position=learned", "model.max_length=3"], "model.max_length = 3"),
    (["data.mean=[1.0]"], "std ="), (["data.rul=1"], "unknown setting; did you mean 'rule'"),
    (["train.metric=bleu"], "is no figure of a numbers run"),
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
        (["--set", "data.columns=['t', 'c']"], "column 'c' is nowhere"),
    ):
        assert train("series.toml", *options) == 2
        assert message in capsys.readouterr().err
    rows = Path("load.csv").read_text().replace("\n100,", "\n100,nan,0\n1000,", 1)
    Path("load.csv").write_text(rows)
    assert train("series.toml") == 2
    assert "load.csv, line 102, column 'a'" in capsys.readouterr().err and not Path("runs").exists()


def test_what_predict_refuses(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("pairs.toml") == 0 and train("series.toml") == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("1 2\n\n3\n"))
    assert main(["predict", "runs/pairs"]) == 0
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [2, 0, 1]  # a line for a line
    for arguments, message in (
        (["runs/pairs", "1 x"], "NUMBERS 1: number 2 is 'x'"), (["runs/pairs", " "], "holds no numbers"),
        (["runs/pairs", "1", "--steps", "0"], "--steps 0"), (["runs/pairs", "1", "--digits", "-1"], "--digits -1"),
        (["runs/series", "1 2"], "reads 2 channels"), (["runs/series", "--file", "none.csv"], "there is no such file"),
        (["runs/pairs", "1e30"], "answer is no number"),
        (["runs/pairs", "1", "--file", "load.csv"], "give one of them"), (["nowhere", "1"], "there is no such folder"),
    ):  # fmt: skip
        assert main(["predict", *arguments]) == 2
        assert message in capsys.readouterr().err
    Path("short.csv").write_text("a,b\n1,2\n")
    assert main(["predict", "runs/series", "--file", "short.csv"]) == 2
    assert "1 steps are given, but the model reads 12" in capsys.readouterr().err


# --- the recipes, in their small form


def test_the_rule_is_learned(tmp_path: Path) -> None:
    """Never seen, free-running: the error is a quarter of that of saying the source again, or less."""
    scores = smoke_run("recipes/number-sequences.toml", tmp_path / "run")["test"]
    assert scores["naive_mae"] == pytest.approx(2.0, rel=1e-4) and scores["mae"] < 0.25 * scores["naive_mae"]
    example = Predictor.load(tmp_path / "run").predict([[10, 20, 30, 40, 50]])[0]
    assert example == pytest.approx([12, 22, 32, 42, 52], abs=1.0)


def test_the_forecast_beats_both_baselines(tmp_path: Path) -> None:
    scores = smoke_run("recipes/seasonal-forecast.toml", tmp_path / "run")["test"]
    assert scores["mse"] < 0.9 * min(scores["last_mse"], scores["seasonal_mse"])


@pytest.mark.cuda
def test_a_recorded_step_learns_what_a_plain_one_does(here: Path) -> None:
    for recipe in ("pairs", "series"):
        for graph in ("false", "true"):
            options = [f"--set=train.graph={graph}", "--set=train.steps=12", "-o", f"{recipe}-{graph}"]
            assert main(["train", f"{recipe}.toml", *SMALL, *options, "--device", "cuda"]) == 0
        plain, recorded = (
            Path(f"{recipe}-{graph}/metrics.jsonl").read_text().splitlines() for graph in ("false", "true")
        )
        for one, other in zip(plain, recorded, strict=True):
            for name in {"loss", "valid_loss"} & json.loads(one).keys():
                assert json.loads(one)[name] == pytest.approx(json.loads(other)[name], rel=1e-3)
