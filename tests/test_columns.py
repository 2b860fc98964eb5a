"""Stores of tokenised pairs: what goes in comes out, and a store is whole, fresh, or made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data.batch import Pairs, Ragged
from regard.data.columns import INDEX, Column, Store, Writer, prepare, token_type
from regard.data.encode import store_pairs
from regard.data.pairs import PairData
from regard.data.streams import Batches
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

LINES = [(f"the number {n} is here", f"{n} ist die Zahl" + " hier" * (n % 7)) for n in range(500)]

per_example = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train((text for line in LINES for text in line), "bpe", 300)


@pytest.fixture
def config(tmp_path) -> PairData:
    (tmp_path / "t.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in LINES))
    return PairData(train=("t.tsv",), folder=str(tmp_path))


def rows_of(ragged: Ragged) -> list[list[int]]:
    return [ragged.pad(torch.tensor([i]))[0][0].tolist() for i in range(len(ragged))]


def write(folder: Path, rows, vocab_size: int = 100, fingerprint: str = "", chunk: int = 1000) -> Store:
    """Rows of two ragged columns as a store."""
    column = Column(token_type(vocab_size), None)

    def fill(writer: Writer) -> None:
        stream = iter(rows)
        while some := list(islice(stream, chunk)):
            writer.append(source=[source for source, _ in some], target=[target for _, target in some])
        writer.notes["why"] = "a test"

    return prepare(folder, {"source": column, "target": column}, lambda: fingerprint, fill)


def prepared(
    config: PairData, folder: Path, source: Tokenizer, target: Tokenizer, max_length: int | None = None
) -> Store:
    """The training pairs as a store."""
    return store_pairs(
        [config.read(config.train)], folder, source, target, name="t.tsv",
        state=lambda: config.fingerprint(config.train), max_length=max_length,
    )  # fmt: skip


def pairs_of(store: Store) -> Pairs:
    return Pairs(store.columns["source"], store.columns["target"])


@per_example
@given(data=st.data(), vocab_size=st.sampled_from([1, 2**16, 2**16 + 1, 2**32]), chunk=st.integers(1, 4))
def test_round_trip(tmp_path_factory, data, vocab_size, chunk) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    rows = data.draw(st.lists(st.tuples(ids, ids), max_size=9))
    folder = tmp_path_factory.mktemp("store") / "s"
    store = write(folder, rows, vocab_size, chunk=chunk)
    again = Store.open(folder)
    for one in (store, again):
        assert len(one) == len(rows) and one.index["why"] == "a test"
        assert rows_of(one.columns["source"]) == [source for source, _ in rows]
        assert rows_of(one.columns["target"]) == [target for _, target in rows]
    tokens = sum(len(source) for source, _ in rows)
    assert (folder / "source.values").stat().st_size == tokens * (2 if vocab_size <= 2**16 else 4)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".s.lock", "s"]


@pytest.mark.parametrize(("dtype", "shape"), [("|u1", (3, 2, 2)), ("<i4", ()), ("<i8", (5,))])
def test_columns_of_one_shape(tmp_path, dtype, shape) -> None:
    values = np.random.default_rng(1).integers(0, 100, (7, *shape)).astype(dtype)

    def fill(writer: Writer) -> None:
        for at in range(0, 7, 3):
            writer.append(x=values[at : at + 3], ids=[[at]] * len(values[at : at + 3]))

    columns = {"x": Column(dtype, shape), "ids": Column("<u2", None)}
    store = prepare(tmp_path / "s", columns, str, fill)
    assert np.array_equal(store.columns["x"].numpy(), values) and store.columns["x"].shape == (7, *shape)
    assert rows_of(store.columns["ids"]) == [[0], [0], [0], [3], [3], [3], [6]]


@per_example
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(0, 99), min_size=2)),
                     min_size=1, max_size=20))  # fmt: skip
def test_mapped_and_in_memory_give_the_same_batches(tmp_path_factory, rows) -> None:
    mapped = pairs_of(write(tmp_path_factory.mktemp("store") / "s", rows))
    plain = Pairs([source for source, _ in rows], [target for _, target in rows])
    for one, other in zip(*(Batches(data, 1000, seed=3) for data in (mapped, plain)), strict=True):
        for name in ("source", "source_is_real", "target", "labels"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype)
        break


@pytest.mark.parametrize("row", [([70_000], [1]), ([1], [-1])])
def test_values_outside_the_type(tmp_path, row) -> None:
    with pytest.raises(UserError, match="outside of <u2"):
        write(tmp_path / "s", [([1], [1]), row])
    assert [path.name for path in tmp_path.iterdir()] == [".s.lock"]


def test_prepare_frames_encodes_and_drops(config, tokenizer, tmp_path) -> None:
    store = prepared(config, tmp_path / "s", tokenizer, tokenizer)
    assert len(store) == len(LINES) and store.index["dropped"] == 0
    for at in (0, 77, 499):
        source = store.columns["source"].pad(torch.tensor([at]))[0][0].tolist()
        target = store.columns["target"].pad(torch.tensor([at]))[0][0].tolist()
        assert source == [*tokenizer.encode(LINES[at][0]), tokenizer.eos]
        assert target == [tokenizer.bos, *tokenizer.encode(LINES[at][1]), tokenizer.eos]
    sizes = [1 + max(len(tokenizer.encode(text)) for text in line) for line in LINES]  # a sentence and its end
    limit = sorted(sizes)[len(sizes) // 2]
    short = prepared(config, tmp_path / "short", tokenizer, tokenizer, max_length=limit)
    kept = sum(size <= limit for size in sizes)
    assert 0 < kept < len(LINES)
    assert (len(short), short.index["dropped"]) == (kept, len(LINES) - kept)
    batch = pairs_of(short).batch(torch.arange(kept))
    assert max(batch.source.shape[1], batch.target.shape[1]) <= limit
    with pytest.raises(UserError, match="all 500 are longer than max_length = 2"):
        prepared(config, tmp_path / "none", tokenizer, tokenizer, max_length=2)
    assert not (tmp_path / "none").exists()


def test_a_fresh_store_is_reused_and_a_stale_one_is_not(config, tokenizer, tmp_path) -> None:
    folder, table = tmp_path / "s", tmp_path / "t.tsv"
    made = prepared(config, folder, tokenizer, tokenizer)
    stamp = (folder / INDEX).stat()

    def same() -> bool:
        prepared(config, folder, tokenizer, tokenizer)
        return (folder / INDEX).stat().st_ino == stamp.st_ino

    assert same()
    table.write_text(table.read_text() + "one more\teine mehr\n")
    assert not same() and len(Store.open(folder)) == len(LINES) + 1
    assert len(made) == len(LINES) and rows_of(made.columns["source"])  # mapped before: still readable
    stamp = (folder / INDEX).stat()
    time = table.stat().st_mtime_ns
    table.write_text(table.read_text().replace("one more", "two more"))  # the same size
    os.utime(table, ns=(time + 1, time + 1))
    assert not same()


def test_everything_that_matters_is_in_the_fingerprint(config, tokenizer, tmp_path) -> None:
    (tmp_path / "t.tsv").write_text("a\tb\n" + (tmp_path / "t.tsv").read_text())  # a header, or one pair more
    other = Tokenizer.train(["something else entirely"], "bpe", 280)
    columns = PairData(train=config.train, folder=config.folder, source="a", target="b")
    skipping = PairData(train=config.train, folder=config.folder, skip_bad=True)

    def made(data: PairData, source: Tokenizer, target: Tokenizer, max_length: int | None = None) -> str:
        store = prepared(data, tmp_path / "s", source, target, max_length=max_length)
        return store.index["fingerprint"]

    base = made(config, tokenizer, tokenizer)
    assert base == made(config, Tokenizer(tokenizer.json), tokenizer)
    others = [made(config, tokenizer, other), made(config, other, tokenizer), made(config, tokenizer, tokenizer, 100)]
    others += [made(columns, tokenizer, tokenizer), made(skipping, tokenizer, tokenizer)]
    assert len({base, *others}) == 6


@pytest.mark.parametrize("name", ["source.values", "source.offsets", "target.values", "target.offsets", INDEX])
@pytest.mark.parametrize("damage", ["missing", "cut", "longer"])
def test_a_damaged_store_is_refused_and_made_again(config, tokenizer, tmp_path, name, damage) -> None:
    folder = tmp_path / "s"
    whole = rows_of(prepared(config, folder, tokenizer, tokenizer).columns["target"])
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "missing":
        (folder / name).write_bytes(content[:-3] if damage == "cut" else content + b"xx")
    with pytest.raises(UserError):
        Store.open(folder)
    if name == INDEX and damage == "missing":  # it could be anybody's folder
        with pytest.raises(UserError, match="not replaced"):
            prepared(config, folder, tokenizer, tokenizer)
    else:
        assert rows_of(prepared(config, folder, tokenizer, tokenizer).columns["target"]) == whole


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"version": 2}', '{"version": 2, "rows": 3, "columns": {"a": {"dtype": "xy"}}}']
)
def test_nonsense_in_the_index(tmp_path, index) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError):
        Store.open(tmp_path)


def test_object_arrays_are_never_mapped(tmp_path) -> None:
    write(tmp_path / "s", [([1, 2, 3, 4], [1])])
    index = json.loads((tmp_path / "s" / INDEX).read_text())
    index["columns"]["source"] = {"dtype": "O", "shape": None, "values": 1}  # eight bytes: one pointer to anywhere
    (tmp_path / "s" / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="has the type object"):
        Store.open(tmp_path / "s")


def test_offsets_that_do_not_rise(tmp_path) -> None:
    write(tmp_path / "s", [([1, 2], [1]), ([3], [1])])
    offsets = torch.tensor([0, 7, 3], dtype=torch.long).numpy().tobytes()
    (tmp_path / "s" / "source.offsets").write_bytes(offsets)
    with pytest.raises(UserError, match="does not rise"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_writing_leaves_what_was_there(tmp_path, error) -> None:
    before = write(tmp_path / "s", [([1], [2])], fingerprint="old").index

    def rows():
        yield from [([5], [6])] * 10_000
        raise error

    with pytest.raises((KeyboardInterrupt, UserError)):
        write(tmp_path / "s", rows(), fingerprint="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.lock", "s"]
    assert Store.open(tmp_path / "s").index == before


def test_a_folder_that_is_no_store_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not replaced"):
        write(tmp_path / "thesis", [([1], [2])])
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_input_that_changes_meanwhile_is_noticed(config, tokenizer, tmp_path, monkeypatch) -> None:
    real = Tokenizer.encode_batch

    def slow(*args, **options):
        with (tmp_path / "t.tsv").open("a") as file:
            file.write("late\tspät\n")
        return real(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)
    with pytest.raises(UserError, match="changed while being read"):
        prepared(config, tmp_path / "s", tokenizer, tokenizer)
    assert not (tmp_path / "s").exists()


def test_several_at_once_end_with_one_good_store(config, tokenizer, tmp_path) -> None:
    def work(_: int) -> int:
        return len(prepared(config, tmp_path / "s", tokenizer, tokenizer))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [len(LINES)] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s.lock", "s", "t.tsv"]


CHILD = """
import sys
from pathlib import Path
import torch
from regard.data.batch import Pairs
from regard.data.streams import Batches
from regard.data.columns import Column, prepare

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def make(name, rows):
    def fill(writer):
        for at in range(0, rows, 4096):
            some = range(at, min(at + 4096, rows))
            writer.append(source=[[i % 60000] * 100 for i in some], target=[[1, i % 60000, 2] for i in some])

    store = prepare(Path(sys.argv[1]) / name, dict.fromkeys(("source", "target"), Column("<u2", None)), str, fill)
    return Pairs(store.columns["source"], store.columns["target"])

make("warm", 5000).batch(torch.arange(3))
before = peak()
batches = iter(Batches(make("s", 200_000), 4000, seed=1))
for _ in range(20):
    batch = next(batches)
    assert bool((batch.source == batch.target[:, 1:2]).all())
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell the peak of memory")
def test_memory_while_writing_and_reading(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # 200,000 rows of 103 ids: 165 MB as int64 alone. Allowed: a chunk as Python lists, the lengths and the order
    # of an epoch (some 8-byte numbers a row), the mapped pages that were touched.
    assert int(done.stdout) < 100_000_000
