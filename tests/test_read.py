"""Reading sentence pairs: what is good arrives unchanged, what is bad is named with file and line."""

from __future__ import annotations

import builtins
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data.lines import LONGEST
from regard.data.pairs import PairData, find_pairs
from regard.errors import UserError

GOOD = [("a house", "ein Haus"), ("“two”\u2028birds", 'zwei "Vögel"\r\x0c!'), ("새 세 마리", "drei Vögel")]

# Whatever a sentence may hold: no line end, no NUL, no half surrogate pairs, not only white space.
sentences = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0")).filter(
    lambda text: bool(text.strip()) and not text.startswith("\ufeff") and not text.endswith("\r")
)
tsv_sentences = sentences.filter(lambda text: "\t" not in text)
per_example = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, lines: list[str], end: str = "\n") -> None:
    content = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def config(folder: Path, *files: str, **changes) -> PairData:
    return PairData(train=files, folder=str(folder), **changes)


def texts(of: PairData) -> list[tuple[str, str]]:
    return [pair[:2] for pair in of.read(of.train)]


def refusal(of: PairData, **options) -> str:
    """What `check` says, after making sure that reading refuses too."""
    of = replace(of, **options)
    with pytest.raises(UserError) as caught:
        of.read(of.train).check()
    with pytest.raises(UserError):
        list(of.read(of.train))
    return str(caught.value)


# What is good


@per_example
@given(rows=st.lists(st.tuples(sentences, sentences), min_size=1), packed=st.booleans(), closed=st.booleans())
def test_aligned_files_round_trip(tmp_path, rows, packed, closed) -> None:
    names = ["a.en", "a.de"]
    for side, name in enumerate(names):
        content = "\n".join(row[side] for row in rows).encode() + b"\n" * closed  # the last \n may be missing
        (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    of = config(tmp_path, *names)
    found = list(of.read(of.train))
    assert [pair[:2] for pair in found] == rows
    assert [pair.line for pair in found] == list(range(1, len(rows) + 1))
    assert of.read(of.train).check().count == len(rows)


@per_example
@given(rows=st.lists(st.tuples(tsv_sentences, tsv_sentences), min_size=1), header=st.booleans(), packed=st.booleans())
def test_tsv_round_trip(tmp_path, rows, header, packed) -> None:
    lines = [f"{target}\tx\t{source}" if header else f"{source}\t{target}" for source, target in rows]
    path = tmp_path / ("t.tsv.gz" if packed else "t.tsv")
    write(path, ["de\tnote\ten", *lines] if header else lines)
    assert texts(config(tmp_path, path.name, **({"source": "en", "target": "de"} if header else {}))) == rows


@per_example
@given(rows=st.lists(st.tuples(sentences, sentences), min_size=1), ascii_only=st.booleans())
def test_jsonl_round_trip(tmp_path, rows, ascii_only) -> None:
    lines = [json.dumps({"target": b, "source": a, "n": 1}, ensure_ascii=ascii_only) for a, b in rows]
    write(tmp_path / "t.jsonl", lines)
    assert texts(config(tmp_path, "t.jsonl")) == rows


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet(tmp_path, packed, kind) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = GOOD * 700  # more than one batch
    columns = {name: arrow.array([row[i] for row in rows]) for i, name in enumerate(("en", "de"))}
    if kind == "dictionary":
        columns = {name: column.dictionary_encode() for name, column in columns.items()}
    elif kind == "large_string":
        columns = {name: column.cast(arrow.large_string()) for name, column in columns.items()}
    parquet.write_table(arrow.table({"id": range(len(rows)), **columns}), tmp_path / "t.parquet")
    of = config(tmp_path, "t.parquet", source="en", target="de")
    if packed:
        content = (tmp_path / "t.parquet").read_bytes()
        (tmp_path / "t.parquet").unlink()
        (tmp_path / "t.parquet.gz").write_bytes(gzip.compress(content))
    assert texts(of) == rows


def test_lines_end_at_newlines_only_and_carriage_returns_are_counted_once(tmp_path) -> None:
    write(tmp_path / "a.en", [source for source, _ in GOOD], end="\r\n")
    write(tmp_path / "a.de", [target for _, target in GOOD])
    of = config(tmp_path, "a.en", "a.de")
    assert texts(of) == GOOD
    notes = of.read(of.train).check().notes
    assert len(notes) == 1 and "a.en: 3 x a carriage return" in notes[0]


def test_byte_order_mark_is_left_out(tmp_path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"\xef\xbb\xbfen\tde\na\tb\n")
    of = config(tmp_path, "t.tsv", source="en", target="de")
    assert texts(of) == [("a", "b")] and "byte order mark" in of.read(of.train).check().notes[0]


def test_shards_are_read_in_order_and_find_their_partners(tmp_path) -> None:
    for part in ("00", "01", "10"):
        write(tmp_path / f"part-{part}.en.gz", [f"en {part}"])
        write(tmp_path / f"part-{part}.de", [f"de {part}"])
        write(tmp_path / f"t{part}.tsv", [f"{part}\tx"])
    assert texts(config(tmp_path, "part-*.en.gz", "part-*.de")) == [
        (f"en {part}", f"de {part}") for part in ("00", "01", "10")
    ]
    assert [source for source, _ in texts(config(tmp_path, "t0?.tsv", "t10.tsv"))] == ["00", "01", "10"]
    (tmp_path / "part-10.de").rename(tmp_path / "part-11.de")  # as many files, but not the same parts
    message = refusal(config(tmp_path, "part-*.en.gz", "part-*.de"))
    assert "part-10.en.gz" in message and "part-11.de" in message and "part-01" not in message


def test_a_name_finds_its_gzipped_file_and_a_literal_bracket(tmp_path) -> None:
    write(tmp_path / "a.en.gz", ["one"])
    write(tmp_path / "[a].de", ["eins"])
    assert texts(config(tmp_path, "a.en", "[a].de")) == [("one", "eins")]


# What is bad

BAD = {
    "empty": (b"", "is empty, but"),
    "blank": (b" \t\xc2\xa0 ", "is empty, but"),
    "latin-1": ("Vögel".encode("latin-1"), "is not UTF-8: byte 0xf6 at position 2"),
    "surrogate": (b"\xed\xa0\x80", "is not UTF-8"),
    "NUL": (b"a\0b", "NUL"),
    "enormous": (b"x" * (LONGEST + 1), f"has {LONGEST + 1:,} bytes"),
    "more enormous": (b"x" * (3 * LONGEST + 5), f"has {3 * LONGEST + 5:,} bytes"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_bad_lines_are_named_and_skipped_together(tmp_path, kind, side) -> None:
    raw, message = BAD[kind]
    names = ("a.en", "a.de")
    for i, name in enumerate(names):
        good = [b"one", b"two", b"three", b"four"]
        if i == side:
            good[2] = raw
        (tmp_path / name).write_bytes(b"\n".join(good) + b"\n")
    of = config(tmp_path, *names)
    said = refusal(of)
    assert f"{tmp_path / names[side]}, line 3: " in said and message in said and "skip_bad = true" in said
    report = replace(of, skip_bad=True).read(of.train).check()
    assert (report.count, report.bad_count) == (3, 1) and report.bad[0].line == 3
    skipping = config(tmp_path, *names, skip_bad=True)
    assert [pair.line for pair in skipping.read(skipping.train)] == [1, 2, 4]


def test_a_line_of_the_greatest_length_is_good(tmp_path) -> None:
    write(tmp_path / "t.en", ["x" * LONGEST, "y"])
    write(tmp_path / "t.de", ["x" * (LONGEST - 1), "y"], end="\r\n")
    assert config(tmp_path, "t.en", "t.de").read(("t.en", "t.de")).check().count == 2


def test_the_first_ten_are_listed_and_all_are_counted(tmp_path) -> None:
    write(tmp_path / "t.tsv", ["good\tgut", *["\tleer"] * 25])
    said = refusal(config(tmp_path, "t.tsv"))
    assert "25 problems, 1 good sentence pair" in said and "and 15 more" in said
    assert [f"line {n}:" in said for n in (2, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("counts", [(5, 3), (3, 5), (1, 0), (4, 5)])
def test_different_lengths_are_never_skipped(tmp_path, counts) -> None:
    for name, count in zip(("a.en", "a.de"), counts, strict=True):
        write(tmp_path / name, [f"line {i}" for i in range(count)])
    short, long = ("a.en", "a.de") if counts[0] < counts[1] else ("a.de", "a.en")
    for skip_bad in (False, True):
        said = refusal(config(tmp_path, "a.en", "a.de"), skip_bad=skip_bad)
        assert f"{short}, line {min(counts)}: the file ends here, but" in said
        assert f"{long} has {max(counts)} lines" in said


@pytest.mark.parametrize("name", ["a.en.gz", "t.tsv.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_gzip(tmp_path, name, damage) -> None:
    content = gzip.compress("".join(f"{i}\tsentence {i * i}\n" for i in range(5000)).encode())
    changed = content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]  # its checksum
    (tmp_path / name).write_bytes(content[:-3000] if damage == "cut" else changed)
    write(tmp_path / "a.de", ["x"] * 5000)
    of = config(tmp_path, name) if "tsv" in name else config(tmp_path, name, "a.de")
    said = refusal(of, skip_bad=True)
    assert name in said and ("truncated" if damage == "cut" else "damaged") in said and "lacks or adds" not in said


def test_missing_files_are_all_named_with_near_ones(tmp_path) -> None:
    write(tmp_path / "train.en", ["x"])
    write(tmp_path / "train.de.txt", ["x"])
    said = refusal(config(tmp_path, "trian.en", "train.de"))
    assert "trian.en: no such file; did you mean 'train.en'" in said and "'train.de.txt'" in said
    assert "nor the folder" in refusal(config(tmp_path / "none", "a.en", "a.de"))
    assert "no file matches" in refusal(config(tmp_path, "x*.en", "train.en"))
    assert "no such file" in refusal(config(tmp_path, "~no-such-user/a.tsv"))
    assert "is a folder" in refusal(config(tmp_path.parent, tmp_path.name, "b"))


@pytest.mark.parametrize("files", [("a.en",), ("a.en", "a.de", "a.fr"), ("a.tsv", "a.de"), ()])
def test_what_is_no_pair_of_files(tmp_path, files) -> None:
    with pytest.raises(UserError, match=r"two files whose lines belong together.*\.tsv"):
        find_pairs(files, tmp_path)


@pytest.mark.parametrize(
    ("content", "names", "message"),
    [
        ("en\tde\na\tb\n", ("en", "ger"), "line 1: column 'ger' is missing; Choose one of: de, en"),
        ("english\tde\na\tb\n", ("englsh", "de"), "did you mean 'english'"),
        ("de\tde\na\tb\n", ("de", "en"), "column 'de' is there twice"),
        ("", ("en", "de"), "without even a header"),
        ("en\tde\na\tb\nc\n", ("en", "de"), "line 3: has 1 column, 2 needed"),
        ("en\tde\na\tb\tc\n", ("en", "de"), "line 2: has 3 columns instead of 2"),
        ("a\tb\na\n", (None, None), "line 2: has 1 column, 2 needed"),
        ("a\tb\na\tb\tc\n", (None, None), "line 2: has 3 columns instead of 2"),
        ("en\tde\na\t \n", ("en", "de"), "line 2: column 'de' is empty"),
        ("en\tde\n", ("en", "de"), "no sentence pairs"),
        ("\n", (None, None), "line 1: has 1 column"),
    ],
)
def test_bad_tables(tmp_path, content, names, message) -> None:
    (tmp_path / "t.tsv").write_text(content)
    of = config(tmp_path, "t.tsv", source=names[0], target=names[1])
    with pytest.raises(UserError) as caught:
        of.read(of.train).check()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "is not an object"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"source": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"source": "a"}', "column 'target' is missing; Choose one of: source"),
        ('{"source": "a", "target": 3}', "column 'target' is int, not text"),
        ('{"source": "a", "target": null}', "has no value"),
        ('{"source": "a", "target": "\\ud800"}', "half a surrogate pair"),
        ('{"source": "a\\u0000", "target": "b"}', "NUL"),
        ('{"source": "", "target": ""}', "empty on both sides"),
    ],
)
def test_bad_json_lines(tmp_path, line, message) -> None:
    write(tmp_path / "t.jsonl", ['{"source": "a", "target": "b"}', line])
    of = config(tmp_path, "t.jsonl")
    said = refusal(of)
    assert "t.jsonl, line 2: " in said and message in said
    assert replace(of, skip_bad=True).read(of.train).check().count == 1


def test_bad_parquet(tmp_path, monkeypatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    raw = arrow.array([b"good", b"\xff", None, b"x\0"], arrow.binary())
    parquet.write_table(
        arrow.table({"source": raw, "target": ["a", "b", "c", "d"], "n": [1, 2, 3, 4]}), tmp_path / "t.parquet"
    )
    of = config(tmp_path, "t.parquet")
    said = refusal(of)
    for message in ("line 2: column 'source' is not UTF-8", "line 3: column 'source' has no value", "line 4: column"):
        assert message in said
    assert replace(of, skip_bad=True).read(of.train).check().count == 1
    assert "column 'en' is missing" in refusal(config(tmp_path, "t.parquet", source="en", target="target"))
    assert "column 'n' is int, not text" in refusal(config(tmp_path, "t.parquet", source="n", target="target"))
    content = (tmp_path / "t.parquet").read_bytes()
    for damaged in (content[:-20], content[:4] + b"\0" * 100 + content[104:], b"", gzip.compress(content)[:-30]):
        (tmp_path / "t.parquet").write_bytes(damaged)
        assert "cannot be read as Parquet" in refusal(of, skip_bad=True)
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'regard[parquet]'" in refusal(of)


def test_utf16_is_recognised(tmp_path) -> None:
    for name in ("a.en", "a.de"):
        (tmp_path / name).write_bytes("words\n".encode("utf-16"))
    assert 'encoding = "utf-16"' in refusal(config(tmp_path, "a.en", "a.de"))


# Size


def peak_memory() -> int:
    """Bytes of memory this process has had at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_memory_stays_constant(tmp_path) -> None:
    count = 200_000
    for name in ("big.en", "big.de.gz"):
        write(
            tmp_path / name, [f"sentence number {i} in {name}, long enough to {'add up ' * 10}" for i in range(count)]
        )
    of = config(tmp_path, "big.en", "big.de.gz")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak_memory()
    except OSError:
        pytest.skip("this system does not tell the peak of memory")
    assert of.read(of.train).check().count == count
    assert sum(1 for _ in of.read(of.train)) == count
    assert peak_memory() - before < 10_000_000  # the two files have 44 MB
