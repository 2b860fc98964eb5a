"""Time stamps of a series: recognised, checked, and continued by forecasts."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commanded import training
from regard.cli import main
from regard.data.lines import Notes
from regard.data.numeric import read_series
from regard.data.times import parse_stamp, read_clock
from regard.errors import UserError


def clock_of(*texts: str, notes: Notes | None = None):
    rows = [(line, parse_stamp(text)) for line, text in enumerate(texts, 2)]
    return read_clock("t.csv", rows, Notes() if notes is None else notes)


@pytest.mark.parametrize(
    ("stamps", "step", "following"),
    [
        (["2024-03-30 22:00", "2024-03-30 23:00"], "1 hour", ["2024-03-31 00:00", "2024-03-31 01:00"]),
        (["2024-02-27", "2024-02-28"], "1 day", ["2024-02-29", "2024-03-01"]),
        (["2024-02-26", "2024-03-04"], "7 days", ["2024-03-11", "2024-03-18"]),
        (["2023-11", "2023-12"], "1 month", ["2024-01", "2024-02"]),
        (["2023-11-15", "2023-12-15", "2024-01-15"], "1 month", ["2024-02-15", "2024-03-15"]),
        (["2023-10-31", "2023-11-30", "2023-12-31"], "1 month", ["2024-01-31", "2024-02-29"]),
        (["2020-02-29", "2024-02-29"], "4 years", ["2028-02-29", "2032-02-29"]),
        (["2022-01-01", "2023-01-01"], "1 year", ["2024-01-01", "2025-01-01"]),
        (["2024-01-01T00:00:00Z", "2024-01-01T00:15:00Z"], "15 minutes",
         ["2024-01-01T00:30:00Z", "2024-01-01T00:45:00Z"]),
        (["2024-01-01T23:00+09:00", "2024-01-02T00:00+09:00"], "1 hour",
         ["2024-01-02T01:00+09:00", "2024-01-02T02:00+09:00"]),
        (["2024-01-01 00:00:00.250", "2024-01-01 00:00:00.500"], "0.25 seconds",
         ["2024-01-01 00:00:00.750", "2024-01-01 00:00:01.000"]),
        (["2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"], "1 hour",
         ["2024-03-31T04:00+02:00", "2024-03-31T05:00+02:00"]),
        (["2024-01-01", "2024-01-01 12:00"], "12 hours", ["2024-01-02 00:00", "2024-01-02 12:00"]),
    ],
)  # fmt: skip
def test_the_step_is_found_and_continued(stamps, step, following) -> None:
    clock = clock_of(*stamps)
    assert str(clock) == step and clock.following(2) == following


@given(
    start=st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(lambda at: at.replace(microsecond=0)),
    step=st.timedeltas(timedelta(seconds=1), timedelta(27)).map(
        lambda one: timedelta(seconds=int(one.total_seconds()))
    ),
    count=st.integers(2, 20),
)
def test_a_regular_series_is_continued_exactly(start, step, count) -> None:
    stamps = [str(start + n * step) for n in range(count + 3)]
    clock = clock_of(*stamps[:count])
    assert clock.step == step and clock.following(3) == stamps[count:]


@pytest.mark.parametrize(
    ("stamps", "message"),
    [
        (["2024-01-01", "2024-01-01"], "t.csv, line 3: the time 2024-01-01 is there twice"),
        (["2024-01-02", "2024-01-01"], "line 3: the time 2024-01-01 comes after 2024-01-02; sort the rows"),
        (["2024-01-01 00:00", "2024-01-01 01:00", "2024-01-01 02:00", "2024-01-01 02:30"],
         "line 5: .* is 30 minutes after the row before, but the step of the series is 1 hour"),
        (["2024-01-01T00:00", "2024-01-01T01:00Z"], "line 3: of two time stamps, only one has a time zone"),
    ],
)  # fmt: skip
def test_irregular_stamps_name_their_line(stamps, message) -> None:
    with pytest.raises(UserError, match=message):
        clock_of(*stamps)


def test_gaps_are_counted() -> None:
    notes = Notes()
    days = ["2024-01-04", "2024-01-05", "2024-01-08", "2024-01-09", "2024-01-10", "2024-01-12"]
    assert str(clock_of(*days, notes=notes)) == "1 day"
    assert notes == {("t.csv", "a gap, the first at line 4 before 2024-01-08"): 2}
    assert clock_of("2024-01-01") is None


@pytest.mark.parametrize(
    "wrong", ["", "noon", "13:00", "20240101", "31.01.2024", "2024-13-01", "2024-02-30", None, 5, True]
)
def test_what_is_not_a_stamp(wrong) -> None:
    with pytest.raises(ValueError, match="not a time stamp"):
        parse_stamp(wrong)


def test_a_column_of_stamps_is_not_a_channel(tmp_path, capsys) -> None:
    path = tmp_path / "load.csv"
    path.write_text("at;until;load\n2024-01-01;2024-01-02;1\n2024-01-02;2024-01-03;2\n2024-01-05;2024-01-06;3\n")
    (series,) = read_series([path])
    assert series.channels == ("load",) and series.time == "at" and series.values.flatten().tolist() == [1, 2, 3]
    assert "1 x a gap, the first at line 4 before 2024-01-05" in capsys.readouterr().err
    assert read_series([path], time="until")[0].clock.following(1) == ["2024-01-07"]
    for name, message in {"to": "column 'to' is missing", "load": "column 'load' is '1', not a time stamp"}.items():
        with pytest.raises(UserError, match=message):
            read_series([path], ("load",) if name == "to" else (), time=name)
    path.write_text("at,load\n2024-01-01,1\nlater,2\n")
    with pytest.raises(UserError, match="line 3: column 'at' is 'later', not a time stamp"):
        read_series([path])


def test_stamps_of_parquet(tmp_path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    days = [datetime(2024, 1, 1), datetime(2024, 1, 2)]
    for kind in (arrow.timestamp("us"), arrow.date32(), arrow.timestamp("ms", "UTC")):
        parquet.write_table(arrow.table({"at": arrow.array(days, kind), "x": [1.0, 2.0]}), tmp_path / "a.parquet")
        (series,) = read_series([tmp_path / "a.parquet"])
        assert series.channels == ("x",) and series.clock.following(1)[0].startswith("2024-01-03")


SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=3", "train.warmup=1",
        "train.batch_tokens=64", "train.log_every=1",
    )
]  # fmt: skip
train = training(SMALL, "mine.toml")


def test_a_forecast_continues_the_time_stamps(empty_folder, capsys) -> None:
    hours = [datetime(2024, 2, 28) + timedelta(hours=n) for n in range(48)]
    rows = [f"{at:%Y-%m-%d %H:%M},{at.hour},{at.hour % 5}\n" for at in hours]
    Path("load.csv").write_text("시각,부하,wind\n" + "".join(rows), encoding="cp949")
    Path("mine.toml").write_text(
        'task = "regression"\n[data]\ntrain = ["load.csv"]\ncontext = 6\nhorizon = 3\nperiod = 6\nencoding = "cp949"\n'
        "valid_fraction = 0.25\ntest_fraction = 0.25\n"
    )
    assert main(["data", "check", "mine.toml"]) == 0
    assert train() == 0
    assert "note: time stamps: 시각, a step is 1 hour" in capsys.readouterr().err
    Path("plain.csv").write_text("부하,wind\n" + "".join(f"{n},{n}\n" for n in range(8)), encoding="cp949")
    assert main(["predict", "runs/mine", "--files", "load.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "시각,부하,wind"
    assert [line.split(",")[0] for line in lines[1:]] == ["2024-03-01 00:00", "2024-03-01 01:00", "2024-03-01 02:00"]
    assert main(["predict", "runs/mine", "--files", "load.csv", "--json", "--steps", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["times"] == ["2024-03-01 00:00"]
    assert main(["predict", "runs/mine", "--files", "plain.csv", "--json"]) == 0
    assert "times" not in json.loads(capsys.readouterr().out)
    assert main(["predict", "runs/mine", "--files", "load.csv", "plain.csv", "--steps", "1"]) == 0
    table = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in table] == [4, 4, 4] and table[0][0] == "file" and table[2][:2] == ["plain.csv", ""]
    Path("load.csv").write_text("시각,부하,wind\n" + "".join([*rows[:20], rows[10], *rows[20:]]), encoding="cp949")
    assert main(["predict", "runs/mine", "--files", "load.csv"]) == 2
    assert "line 22: the time 2024-02-28 10:00 comes after" in capsys.readouterr().err
    assert main(["data", "check", "mine.toml"]) == 2
