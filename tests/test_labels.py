"""Labelled texts from every kind of table, and every way in which a table can be wrong."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from regard.data.labels import Example, LabelData
from regard.errors import UserError

ROWS = [
    ("아 더빙.. 진짜 짜증나네요", "0"),
    ('그는 "최고"라고, 했다', "1"),
    ("👍👍 좋다; 아주", "1"),
    ("", "0"),
]


def write(folder: Path, kind: str) -> str:
    """ROWS as a table with a column to be passed over; gives the file's name."""
    path = folder / f"reviews.{kind}"
    match kind:
        case "tsv" | "txt":
            path.write_text("id\tdocument\tlabel\n" + "".join(f"7\t{text}\t{label}\n" for text, label in ROWS))
        case "csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([("id", "document", "label"), *((7, *row) for row in ROWS)])
        case "jsonl":
            path.write_text("".join(json.dumps({"document": text, "label": int(label)}) + "\n" for text, label in ROWS))
        case "parquet":
            arrow = pytest.importorskip("pyarrow")
            texts, labels = zip(*ROWS, strict=True)
            table = arrow.table({"document": texts, "label": arrow.array([int(label) for label in labels])})
            arrow.parquet.write_table(table, path)
    return path.name


def config(folder: Path, *names: str, **settings) -> LabelData:
    return LabelData(train=names, folder=str(folder), **{"text": "document", **settings})


@pytest.mark.parametrize("kind", ["tsv", "txt", "csv", "jsonl", "parquet"])
def test_every_kind_of_table_gives_the_same_rows(tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet")
    name = write(tmp_path, kind)
    found = list(config(tmp_path, name).read((name,)))
    assert [(one.text, one.label) for one in found] == ROWS
    assert all(one.file.endswith(name) for one in found)
    report = config(tmp_path, name).read((name,)).check()
    assert report.totals == {"0": 2, "1": 2} and any("empty text, kept" in note for note in report.notes)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    (tmp_path / name).unlink()
    assert [(one.text, one.label) for one in config(tmp_path, name).read((name,))] == ROWS


def test_csv_keeps_what_stands_in_quotes(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"two\nlines, a ""quote""",x\nplain,y\n\nlast,x\n')
    (tmp_path / "b.csv").write_text("text;label\r\na, b;x\r\n")
    found = list(config(tmp_path, "a.csv", text="text").read(("a.csv", "b.csv")))
    assert [(one.text, one.label) for one in found] == [
        ('two\nlines, a "quote"', "x"), ("plain", "y"), ("last", "x"), ("a, b", "x")
    ]  # fmt: skip
    assert [one.row for one in found] == [3, 4, 6, 2]


def test_labels_get_names_and_classes_an_order(tmp_path):
    name = write(tmp_path, "tsv")
    data = config(tmp_path, name, names={"0": "negative", "1": "positive"})
    assert [one.label for one in data.read((name,))] == ["negative", "positive", "positive", "negative"]
    report = data.read((name,)).check()
    assert data.with_classes(report).classes == ("negative", "positive")
    wished = config(tmp_path, name, names=data.names, classes=("positive", "negative"))
    assert wished.with_classes(report).classes == ("positive", "negative")
    (tmp_path / "n.tsv").write_text("text\tlabel\n" + "".join(f"a\t{n}\n" for n in (10, 9, -1, 9)))
    data = config(tmp_path, "n.tsv", text="text")
    assert data.with_classes(data.read(data.train).check()).classes == ("-1", "9", "10")


def test_without_a_header_columns_are_counted(tmp_path):
    (tmp_path / "a.tsv").write_text("good\tx\nbad\ty\n")
    (tmp_path / "a.csv").write_text("good,x\nbad,y\n")
    data = config(tmp_path, "a.tsv", "a.csv", text="1", label="2", header=False)
    assert [tuple(one)[:2] for one in data.read(data.train)] == [("good", "x"), ("bad", "y")] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"text\tlabels\na\tx\n", "line 1: column 'label' is missing; did you mean 'labels'"),
        (b"text\tlabel\na\tx\nb\n", "line 3: has 1 column, 2 needed"),
        (b"text\tlabel\na\tx\nb\tc\td\n", "line 3: has 3 columns instead of 2: is there a tab in the text"),
        (b"text\tlabel\na\tx\nb\t \n", "line 3: column 'label' is empty"),
        (b"text\tlabel\na\tx\nb\0\ty\n", "line 3: column 'text' contains a NUL"),
        (b"text\tlabel\na\tx\n\xff\ty\n", "line 3: is not UTF-8"),
        (b"text\tlabel\na\tx\nb\tneutral\n", "line 3: label 'neutral' is not a class of the training data"),
        (b"text\tlabel\n", "no labelled texts"),
        (b"", "is empty"),
    ],
)
def test_a_bad_row_is_named_with_its_file(tmp_path, content, said):
    (tmp_path / "a.tsv").write_bytes(content)
    data = config(tmp_path, "a.tsv", text="text", classes=("x", "y"))
    with pytest.raises(UserError) as error:
        data.read(data.train).check()
    assert said in str(error.value) and "a.tsv" in str(error.value)


def test_bad_rows_can_be_left_out(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"text\tlabel\na\tx\n\xff\ty\nb\tq\nc\ty\n")
    data = config(tmp_path, "a.tsv", text="text", skip_bad=True, classes=("x", "y"))
    report = data.read(data.train).check()
    assert report.count == 2 and report.bad_count == 2 and [problem.line for problem in report.bad] == [3, 4]
    assert [one.text for one in data.read(data.train)] == ["a", "c"]


@pytest.mark.parametrize(
    ("content", "said"),
    [('text,label\n"a,x\n', "is not CSV"), ('text,label\n"a"b,x\n', "is not CSV"), ("\xff", "is not UTF-8")],
)
def test_bad_csv_is_named(tmp_path, content, said):
    (tmp_path / "a.csv").write_bytes(content.encode("latin-1"))
    data = config(tmp_path, "a.csv", text="text")
    with pytest.raises(UserError, match=said):
        data.read(data.train).check()


def test_one_label_or_a_thousand_are_no_classes(tmp_path):
    (tmp_path / "one.tsv").write_text("text\tlabel\na\tx\nb\tx\n")
    data = config(tmp_path, "one.tsv", text="text")
    with pytest.raises(UserError, match="needs texts of two classes or more"):
        data.with_classes(data.read(data.train).check())
    (tmp_path / "many.tsv").write_text("text\tlabel\n" + "".join(f"a\t{n}\n" for n in range(1001)))
    with pytest.raises(UserError, match="more than 1,000 different labels"):
        data.read(("many.tsv",)).check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"valid_fraction": 1.0}, "valid_fraction = 1.0"),
        ({"valid_fraction": 0.1, "valid": ("v.tsv",)}, "choose one"),
        ({"text": "label"}, "name two different columns"),
        ({"header": False}, "columns are counted"),
        ({"fraction": 0.0}, "fraction = 0.0"),
        ({"max_length": 2}, "max_length = 2"),
        ({"classes": ("a",)}, "name two or more"),
        ({"classes": ("a", "a")}, "each once"),
        ({"classes": ("a", "b"), "names": {"0": "c"}}, "'c' is not one of classes"),
        ({"class_weights": {"a": 0}}, "must be above 0"),
        ({"class_weights": "half"}, "class_weights = 'half'"),
        ({"test": ["a.tsv"]}, "give each set a name"),
    ],
)
def test_mistakes_in_the_table_are_told(settings, said):
    with pytest.raises(UserError, match=said):
        LabelData(train=("a.tsv",), **settings)


def test_an_example_knows_where_it_stands(tmp_path):
    name = write(tmp_path, "tsv")
    assert next(iter(config(tmp_path, name).read((name,)))) == Example(*ROWS[0], str(tmp_path / name), 2)
