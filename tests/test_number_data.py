"""Reading numbers: sequences in text, pairs in tables, a series in columns; what is wrong is named by its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.numeric import NumberData, parse_numbers, read_number_pairs, read_series
from regard.errors import UserError


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e30, 1e30, allow_subnormal=False), min_size=1, max_size=8), st.sampled_from([" ", ", ", "\t"])
)
def test_numbers_are_read_as_they_are_written(numbers: list[float], between: str) -> None:
    text = between.join(map(repr, numbers))
    assert parse_numbers(text) == parse_numbers(f"[{text}]") == numbers


@pytest.mark.parametrize(("text", "message"), [
    ("1 two 3", "number 2 is 'two', not a number"), ("1 nan", "number 2 is nan: only finite numbers"),
    ("inf", "number 1 is inf"), ("1 1e400", "number 2 is 1e400"), ("1 1e31", "up to 1e30"),
])  # fmt: skip
def test_what_is_no_number(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_numbers(text)


def test_pairs_are_named_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tsv").write_text("1 2\t3 4\n5\t6\n1 2 3\n7\tNaN\n\t1\n" + "1 " * 40 + "\t1\n")
    config = NumberData(train=("a.tsv",), folder=str(tmp_path))
    with pytest.raises(UserError) as caught:
        read_number_pairs(config.train, config)
    result = str(caught.value)
    assert "a.tsv, line 3: has 1 column, 2 needed" in result and "line 4: column 'target' is not" in result
    assert "line 5: column 'source' has 0 numbers" in result and "line 6: column 'source' has 40 numbers" in result
    assert "4 problems, 2 good pairs" in result and "skip_bad" in result
    kept = read_number_pairs(config.train, NumberData(train=("a.tsv",), folder=str(tmp_path), skip_bad=True))
    assert kept == [([1, 2], [3, 4]), ([5], [6])]
    result = capsys.readouterr().err
    assert "left out: 4 bad lines of a.tsv" in result and "number 1 is NaN" in result


def test_pairs_in_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": [1, 2.5], "target": [3]}\n')
    config = NumberData(train=("a.jsonl",), folder=str(tmp_path))
    assert read_number_pairs(config.train, config) == [([1, 2.5], [3])]
    for line, message in (
        ("[1]", 'write  {"source"'),
        ("{", "is not JSON"),
        ('{"source": [true], "target": [1]}', "True"),
    ):
        (tmp_path / "a.jsonl").write_text(line + "\n")
        with pytest.raises(UserError, match=message):
            read_number_pairs(config.train, config)


def test_a_series_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("time,load,wind\n00:00,1,2\n01:00,3,4.5\n\n")
    (series,) = read_series([path])
    assert series.values.tolist() == [[1, 2], [3, 4.5]] and series.channels == ("load", "wind") and series.time is None
    assert read_series([path], ("wind",))[0].values.tolist() == [[2], [4.5]]
    for content, message in (
        ("time,load\n0:00,1\n1:00,NaN\n", r"load.csv, line 3: column 'load' is NaN: only finite numbers.*fill the gap"),
        ("time,load\n0:00,1\n1:00,\n", r"line 3: column 'load' is ''"),
        ("time,load\n0:00,1\n1:00\n", r"line 3: has 1 column, 2 needed"),
        ("time,load\n0:00,x\n", "line 2: no column is a number"),
        ("time;load\n0:00;1,5\n", "line 2: no column is a number; the file has time, load; write 1,5 with a point"),
        ("load\n", "no rows"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            read_series([path])
    path.write_text("load,load\n1,2\n")
    with pytest.raises(UserError, match="column 'load' is there twice"):
        read_series([path])
    with pytest.raises(UserError, match="column 'lod' is missing; did you mean 'load'"):
        read_series([path], ("lod",))
