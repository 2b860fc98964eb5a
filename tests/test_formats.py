"""One reader for all tasks: every format, delimiter, compression and encoding gives the same rows in each of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from prediction_models import make_run
from regard.cli import main
from regard.data.captions import CaptionData, read_captions
from regard.data.documents import TextData
from regard.data.labels import LabelData
from regard.data.numeric import NumberData, make_sets, read_number_pairs, read_series
from regard.data.pairs import PairData
from regard.errors import UserError
from regard.settings import from_dict, to_dict

pytestmark = pytest.mark.grid

zstandard = pytest.importorskip("zstandard")

ROWS = [("고양이가 왔다", 'a cat, "came"'), ("뷁 | 개; 집", "a dog; here"), ("café\u2028über", "née 1|2")]
LETTERS = [("고양이가 왔다", 'a cat, "came"'), ("개; 집 | 물", "a dog; here")]  # what CP949 has
NUMBERS = [("1 2 3", "4 5"), ("-1.5", "1e3 2"), ("7 8", "9")]


def csv_text(header: list[str], rows: list[tuple[str, ...]], delimiter: str = ",") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def write(path: Path, header: list[str], rows: list[tuple[str, ...]], form: str, encoding: str = "utf-8") -> str:
    """A table in one of FORMS; its name."""
    kind, _, packed = form.partition(".")
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        out = io.BytesIO()
        parquet.write_table(arrow.table(dict(zip(header, zip(*rows, strict=True), strict=True))), out)
        content = out.getvalue()
    elif kind == "jsonl":
        content = "".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows).encode(encoding)
    elif kind == "tsv":
        content = "".join("\t".join(row) + "\n" for row in [tuple(header), *rows]).encode(encoding)
    else:
        delimiter = {"csv": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}[kind]
        content = csv_text(header, rows, delimiter).encode(encoding)
    pack = {"": bytes, "gz": gzip.compress, "zst": zstandard.compress, "bom": lambda raw: b"\xef\xbb\xbf" + raw}
    packed_name = f".{packed}" if packed in ("gz", "zst") else ""
    name = f"t.{kind if kind in ('tsv', 'jsonl', 'parquet') else 'csv'}{packed_name}"
    (path / name).write_bytes(pack[packed](content))
    return name


FORMS = [
    "csv", "semicolon", "tab", "pipe", "tsv", "jsonl", "parquet", "csv.bom", "tsv.bom", "pipe.gz", "csv.zst", "tsv.zst",
    "jsonl.zst", "parquet.zst",
]  # fmt: skip


def pairs(folder: Path, name: str, **how: Any) -> list[tuple[str, ...]]:
    config = PairData(train=(name,), folder=str(folder), source="왼쪽 a", target="b", **how)
    return [(pair.source, pair.target) for pair in config.read(config.train)]


def labels(folder: Path, name: str, **how: Any) -> list[tuple[str, ...]]:
    config = LabelData(train=(name,), folder=str(folder), text="왼쪽 a", label="b", **how)
    return [(one.text, one.label) for one in config.read(config.train)]


def documents(folder: Path, name: str, **how: Any) -> list[tuple[str, ...]]:
    columns = []
    for column in ("왼쪽 a", "b"):
        config = TextData(train=(name,), folder=str(folder), column=column, **how)
        columns.append([piece.text for piece in config.read(config.train)])
    return list(zip(*columns, strict=True))


def captions(folder: Path, name: str, **how: Any) -> list[tuple[str, ...]]:
    for file, _ in (*ROWS, *LETTERS):
        (folder / file).touch()
    config = CaptionData(train=(name,), folder=str(folder), image="왼쪽 a", caption="b", **how)
    return [(one.file.name, one.caption) for one in read_captions((name,), config, "patches")[0]]


READERS = [pairs, labels, documents, captions]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_task_reads_every_format(tmp_path, reader, form) -> None:
    name = write(tmp_path, ["id", "왼쪽 a", "b"], [(str(i), *row) for i, row in enumerate(ROWS)], form)
    assert reader(tmp_path, name) == ROWS


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("form", ["csv", "semicolon", "tsv", "jsonl", "pipe.zst"])
@pytest.mark.parametrize("encoding", ["cp949", "utf-16", "utf-16-be", "utf-8-sig", "iso2022_kr", "utf_32"])
def test_every_task_reads_other_encodings(tmp_path, reader, form, encoding) -> None:
    name = write(tmp_path, ["왼쪽 a", "b"], LETTERS, form, encoding)
    assert reader(tmp_path, name, encoding=encoding) == LETTERS
    if encoding == "cp949" and not form.endswith("jsonl"):  # JSON escapes what is not ASCII
        with pytest.raises(UserError, match=r'looks like CP949: set  encoding = "cp949"  in \[data\]'):
            reader(tmp_path, name)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_in_every_format(tmp_path, form) -> None:
    name = write(tmp_path, ["x", "y", "z"], [(*row, "other") for row in NUMBERS], form)
    config = NumberData(train=(name,), folder=str(tmp_path), source="y", target="x")
    assert read_number_pairs((name,), config)[0] == ([4, 5], [1, 2, 3])
    name = write(tmp_path, ["load", "place", "wind"], [("1", "서울", "2.5"), ("3", "a;b", "-4")], form)
    (series,) = read_series([tmp_path / name])
    assert series.channels == ("load", "wind") and series.values.tolist() == [[1, 2.5], [3, -4]]


@pytest.mark.parametrize("encoding", ["cp949", "utf-16-le", "cp500"])
def test_series_aligned_text_and_plain_text_in_other_encodings(tmp_path, encoding) -> None:
    hangul = "" if encoding == "cp500" else "부하"
    (tmp_path / "s.csv").write_bytes(f"time;{hangul}x\n1;2\n3;4\n".encode(encoding))
    assert read_series([tmp_path / "s.csv"], encoding=encoding)[0].channels == ("time", f"{hangul}x")
    (tmp_path / "a").write_bytes(f"one{hangul}\r\ntwo\n".encode(encoding))
    (tmp_path / "b").write_bytes("1\n2".encode(encoding))
    config = PairData(train=("a", "b"), folder=str(tmp_path), encoding=encoding)
    assert [(pair.source, pair.target) for pair in config.read(config.train)] == [(f"one{hangul}", "1"), ("two", "2")]
    plain = TextData(train=("a",), folder=str(tmp_path), encoding=encoding)
    assert [piece.text for piece in plain.read(plain.train)] == [f"one{hangul}\r\ntwo\n"]


def test_wrong_encodings_are_named(tmp_path) -> None:
    (tmp_path / "a.tsv").write_text("text\tlabel\n좋아요\tgood\n나빠요\tbad\n", encoding="utf-8")
    read = {"train": ("a.tsv",), "folder": str(tmp_path)}
    config = LabelData(**read, encoding="cp949")
    with pytest.raises(UserError, match=r"line 2: is not CP949: byte 0x.*looks like UTF-8, which needs no  encoding"):
        config.read(config.train).check()
    config = LabelData(**read, encoding="latin-1")
    assert "2 x a line that would also be UTF-8" in config.read(config.train).check().notes[0]
    config = LabelData(**read, encoding="utf-16")
    with pytest.raises(UserError, match=r"a.tsv, line 1: is not UTF-16"):
        config.read(config.train).check()
    for name, near in {"cp94": "cp949", "utf8x": "utf-8", "rot13": "", "한글": "", "": ""}.items():
        with pytest.raises(UserError, match=rf"data.encoding = '{name}': unknown; .*{near}"):
            from_dict(LabelData, {**read, "encoding": name}, "data.")
    config = LabelData(**read, encoding="UTF8")
    assert config.encoding == "utf-8" and from_dict(LabelData, to_dict(config)) == config


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_its_mark_is_recognised(tmp_path, encoding) -> None:
    (tmp_path / "a.tsv").write_bytes("text\tlabel\ngood\tx\n".encode(encoding))
    for config in (LabelData(train=("a.tsv",), folder=str(tmp_path)), TextData(train=("b.txt",), folder=str(tmp_path))):
        (tmp_path / "b.txt").write_bytes("plain text\n".encode(encoding))
        with pytest.raises(UserError, match=f'line 1: .* as in UTF-16: set  encoding = "{encoding}"'):
            config.read(config.train).check()


def test_a_delimiter_is_recognised_or_named(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("Hallo, du;Hello\nHallo, ihr;Hello, you\n", encoding="utf-8")
    read = {"train": ("a.csv",), "folder": str(tmp_path)}
    config = PairData(**read)  # without a header, both give two columns
    with pytest.raises(UserError, match=r'line 1: may be separated by a comma or a semicolon: set  delimiter = "'):
        config.read(config.train).check()
    config = PairData(**read, delimiter=";")
    assert [pair.target for pair in config.read(config.train)] == ["Hello", "Hello, you"]
    (tmp_path / "a.csv").write_text('load (MW, net);temp|air;"a;b"\n1,5;2;3\n', encoding="utf-8")
    with pytest.raises(UserError, match="'1,5', not a number"):
        read_series([tmp_path / "a.csv"], ("load (MW, net)",))
    (tmp_path / "a.txt").write_text('text|label\n"quotes" stay|good\nno|bad\n', encoding="utf-8")
    config = LabelData(train=("a.txt",), folder=str(tmp_path), delimiter="|")
    assert [one.text for one in config.read(config.train)] == ['"quotes" stay', "no"]
    for wrong in ("||", "", '"', "\n"):
        with pytest.raises(UserError, match="must be one character"):
            PairData(**read, delimiter=wrong)


def test_a_document_in_csv_may_be_long(tmp_path) -> None:
    text = "word, " * 100_000
    (tmp_path / "a.csv").write_text(csv_text(["text"], [(text,)]), encoding="utf-8")
    config = TextData(train=("a.csv",), folder=str(tmp_path))
    assert "".join(piece.text for piece in config.read(config.train)) == text


@pytest.mark.parametrize("name", ["a.txt.zst", "a.jsonl.zst", "a.csv.zst"])
@pytest.mark.parametrize("damage", ["truncated", "damaged"])
def test_a_damaged_zstandard_file_is_named(tmp_path, name, damage) -> None:
    rows = "text\n" * ("csv" in name) + "".join(json.dumps({"text": str(i * i)}) + "\n" for i in range(20_000))
    content = zstandard.ZstdCompressor(write_checksum=True).compress(rows.encode())
    content = content[:-50] if damage == "truncated" else content[:-9] + b"\0" * 5 + content[-4:]
    (tmp_path / name).write_bytes(content)
    config = TextData(train=(name,), folder=str(tmp_path), skip_bad=True)
    with pytest.raises(UserError, match=f"{name}, line [0-9,]+: the Zstandard file is {damage}"):
        config.read(config.train).check()


def test_zstandard_frames_follow_each_other_and_a_name_finds_its_file(tmp_path) -> None:
    frames = b"".join(map(zstandard.compress, (b"one\n", b"", b"two\n" * 100_000)))
    (tmp_path / "a.txt.zst").write_bytes(frames)
    config = TextData(train=("a.txt",), folder=str(tmp_path))
    assert "".join(piece.text for piece in config.read(config.train)) == "one\n" + "two\n" * 100_000


def test_zstandard_needs_its_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"text"))
    config = TextData(train=("a.txt.zst",), folder=str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'regard\[zstd\]'"):
        config.read(config.train).check()


def test_columns_of_number_pairs_and_captions_are_checked(tmp_path) -> None:
    with pytest.raises(UserError, match="source = 'a' without target"):
        NumberData(train=("a.csv",), source="a")
    with pytest.raises(UserError, match="is for pairs; set columns"):
        make_sets(NumberData(train=("a.csv",), source="a", target="b", context=24))
    with pytest.raises(UserError, match="name different columns"):
        CaptionData(train=("a.csv",), image="caption")


@pytest.mark.parametrize("encoding", ["cp949", "utf-16"])
def test_commands_read_files_in_another_encoding(empty_folder, capsys, monkeypatch, encoding) -> None:
    make_run("translate")
    lines = "one two\n셋 three\n"
    Path("in.txt").write_bytes(lines.encode(encoding))
    Path("utf8.txt").write_text(lines, encoding="utf-8")
    command = ["translate", "run", "--json"]
    assert main([*command, "--files", "utf8.txt"]) == 0
    expected = capsys.readouterr().out.replace("utf8.txt", "in.txt")
    assert "셋 three" in expected and main([*command, "--encoding", encoding, "--files", "in.txt"]) == 0
    assert capsys.readouterr().out == expected
    assert main([*command, "--files", "in.txt"]) in (2, 3)
    assert f"--encoding {encoding}" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode(encoding))))
    assert main([*command, "--encoding", encoding]) == (0 if encoding == "cp949" else 2)
    out, err = capsys.readouterr()
    assert "셋 three" in out if encoding == "cp949" else "use --files" in err
    assert main([*command, "--encoding", "cp94", "x"]) == 2
    assert "--encoding 'cp94': unknown; did you mean 'cp949'?" in capsys.readouterr().err
    Path("pairs.tsv").write_bytes("one\t하나\ntwo\t둘\n".encode(encoding))
    evaluate = ["evaluate", "run", "--json"]
    assert main([*evaluate, "--files", "pairs.tsv", "--encoding", encoding]) == 0
    assert main([*evaluate, "--files", "pairs.tsv"]) == 2
    assert main([*evaluate, "--encoding", encoding]) == 2
    assert "is about --files" in capsys.readouterr().err
    assert main(["tokenizer", "train", "in.txt", "--encoding", encoding, "-o", "words", "--kind", "word"]) == 0
    assert "셋" in Path("words/tokenizer.json").read_text(encoding="utf-8")
    assert main(["tokenizer", "train", "in.txt", "--encoding", "cp94", "-o", "more"]) == 2
