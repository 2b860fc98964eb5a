"""Stores of tokenised pairs: what goes in comes out, and a store is whole, fresh, or made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data import store as module
from regard.data.batch import Batches, Pairs, Ragged
from regard.data.pairs import PairData
from regard.data.store import INDEX, Store, fingerprint, prepare
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


@per_example
@given(data=st.data(), vocab_size=st.sampled_from([1, 2**16, 2**16 + 1, 2**32]), chunk=st.integers(1, 4))
def test_round_trip(tmp_path_factory, data, vocab_size, chunk) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1), max_size=5)
    rows = data.draw(st.lists(st.tuples(ids, ids), max_size=9))
    folder = tmp_path_factory.mktemp("store") / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        store = Store.write(
            folder, iter(rows), vocab_size=(vocab_size, vocab_size), fingerprint="x", notes={"why": "a test"}
        )
    again = Store.open(folder)
    for one in (store, again):
        assert len(one) == len(rows) and one.index["why"] == "a test"
        assert rows_of(one.sources) == [source for source, _ in rows]
        assert rows_of(one.targets) == [target for _, target in rows]
    tokens = sum(len(source) for source, _ in rows)
    assert (folder / "source.ids").stat().st_size == tokens * (2 if vocab_size <= 2**16 else 4)
    assert [path.name for path in folder.parent.iterdir()] == ["s"]


@per_example
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1), st.lists(st.integers(0, 99), min_size=2)),
                     min_size=1, max_size=20))  # fmt: skip
def test_mapped_and_in_memory_give_the_same_batches(tmp_path_factory, rows) -> None:
    mapped = Store.write(tmp_path_factory.mktemp("store") / "s", rows, vocab_size=(100, 100)).pairs()
    plain = Pairs([source for source, _ in rows], [target for _, target in rows])
    for one, other in zip(*(Batches(data, 1000, seed=3) for data in (mapped, plain)), strict=True):
        for name in ("source", "source_is_real", "target", "labels"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype)
        break


@pytest.mark.parametrize("row", [([70_000], [1]), ([1], [-1])])
def test_ids_outside_the_vocabulary(tmp_path, row) -> None:
    with pytest.raises(UserError, match="outside the vocabulary"):
        Store.write(tmp_path / "s", [([1], [1]), row], vocab_size=(100, 100))
    assert not list(tmp_path.iterdir())


def test_prepare_frames_encodes_and_drops(config, tokenizer, tmp_path) -> None:
    store = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer)
    assert len(store) == len(LINES) and store.index["dropped"] == 0
    for at in (0, 77, 499):
        source = store.sources.pad(torch.tensor([at]))[0][0].tolist()
        target = store.targets.pad(torch.tensor([at]))[0][0].tolist()
        assert source == [*tokenizer.encode(LINES[at][0]), tokenizer.eos]
        assert target == [tokenizer.bos, *tokenizer.encode(LINES[at][1]), tokenizer.eos]
    sizes = [1 + max(len(tokenizer.encode(text)) for text in line) for line in LINES]  # a sentence and its end
    limit = sorted(sizes)[len(sizes) // 2]
    short = prepare(config.train, config, tmp_path / "short", tokenizer, tokenizer, max_length=limit)
    kept = sum(size <= limit for size in sizes)
    assert 0 < kept < len(LINES)
    assert (len(short), short.index["dropped"]) == (kept, len(LINES) - kept)
    batch = short.pairs().batch(torch.arange(kept))
    assert max(batch.source.shape[1], batch.target.shape[1]) <= limit
    with pytest.raises(UserError, match="all 500 are longer than max_length = 2"):
        prepare(config.train, config, tmp_path / "none", tokenizer, tokenizer, max_length=2)
    assert not (tmp_path / "none").exists()


def test_a_fresh_store_is_reused_and_a_stale_one_is_not(config, tokenizer, tmp_path) -> None:
    folder, table = tmp_path / "s", tmp_path / "t.tsv"
    made = prepare(config.train, config, folder, tokenizer, tokenizer)
    stamp = (folder / INDEX).stat()

    def same() -> bool:
        prepare(config.train, config, folder, tokenizer, tokenizer)
        return (folder / INDEX).stat().st_ino == stamp.st_ino

    assert same()
    table.write_text(table.read_text() + "one more\teine mehr\n")
    assert not same() and len(Store.open(folder)) == len(LINES) + 1
    assert len(made) == len(LINES) and rows_of(made.sources)  # mapped before: still readable
    stamp = (folder / INDEX).stat()
    time = table.stat().st_mtime_ns
    table.write_text(table.read_text().replace("one more", "two more"))  # the same size
    os.utime(table, ns=(time + 1, time + 1))
    assert not same()


def test_everything_that_matters_is_in_the_fingerprint(config, tokenizer, tmp_path) -> None:
    other = Tokenizer.train(["something else entirely"], "bpe", 280)
    base = fingerprint(config.train, config, tokenizer, tokenizer, None)
    assert base == fingerprint(config.train, config, Tokenizer(tokenizer.json), tokenizer, None)
    columns = PairData(train=config.train, folder=config.folder, source="a", target="b")
    skipping = PairData(train=config.train, folder=config.folder, skip_bad=True)
    others = [
        fingerprint(config.train, config, tokenizer, other, None),
        fingerprint(config.train, config, other, tokenizer, None),
        fingerprint(config.train, config, tokenizer, tokenizer, 100),
        fingerprint(config.train, columns, tokenizer, tokenizer, None),
        fingerprint(config.train, skipping, tokenizer, tokenizer, None),
    ]
    assert len({base, *others}) == 6


@pytest.mark.parametrize("name", ["source.ids", "source.offsets", "target.ids", "target.offsets", INDEX])
@pytest.mark.parametrize("damage", ["missing", "cut", "longer"])
def test_a_damaged_store_is_refused_and_made_again(config, tokenizer, tmp_path, name, damage) -> None:
    folder = tmp_path / "s"
    whole = rows_of(prepare(config.train, config, folder, tokenizer, tokenizer).targets)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage != "missing":
        (folder / name).write_bytes(content[:-3] if damage == "cut" else content + b"xx")
    with pytest.raises(UserError):
        Store.open(folder)
    if name == INDEX and damage == "missing":  # it could be anybody's folder
        with pytest.raises(UserError, match="not replaced"):
            prepare(config.train, config, folder, tokenizer, tokenizer)
    else:
        assert rows_of(prepare(config.train, config, folder, tokenizer, tokenizer).targets) == whole


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"version": 1}', '{"version": 1, "rows": 3, "types": "xy", "tokens": 4}']
)
def test_nonsense_in_the_index(tmp_path, index) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError):
        Store.open(tmp_path)


def test_object_arrays_are_never_mapped(tmp_path) -> None:
    Store.write(tmp_path / "s", [([1, 2, 3, 4], [1])], vocab_size=(9, 9))
    index = json.loads((tmp_path / "s" / INDEX).read_text())
    index |= {"types": ["O", "<u2"], "tokens": [1, 1]}  # eight bytes: one pointer to anywhere
    (tmp_path / "s" / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="damaged"):
        Store.open(tmp_path / "s")


def test_offsets_that_do_not_rise(tmp_path) -> None:
    Store.write(tmp_path / "s", [([1, 2], [1]), ([3], [1])], vocab_size=(9, 9))
    offsets = torch.tensor([0, 7, 3], dtype=torch.long).numpy().tobytes()
    (tmp_path / "s" / "source.offsets").write_bytes(offsets)
    with pytest.raises(UserError, match="does not rise"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_writing_leaves_what_was_there(tmp_path, error) -> None:
    Store.write(tmp_path / "s", [([1], [2])], vocab_size=(9, 9), fingerprint="old")

    def rows():
        yield from [([5], [6])] * 10_000
        raise error

    with pytest.raises((KeyboardInterrupt, OSError)):
        Store.write(tmp_path / "s", rows(), vocab_size=(9, 9), fingerprint="new")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert Store.open(tmp_path / "s").index["fingerprint"] == "old"


def test_a_folder_that_is_no_store_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not replaced"):
        Store.write(tmp_path / "thesis", [([1], [2])], vocab_size=(9, 9))
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_input_that_changes_meanwhile_is_noticed(config, tokenizer, tmp_path, monkeypatch) -> None:
    real = Tokenizer.encode_batch

    def slow(*args, **options):
        with (tmp_path / "t.tsv").open("a") as file:
            file.write("late\tspät\n")
        return real(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", slow)
    with pytest.raises(UserError, match="changed while being read"):
        prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer)
    assert not (tmp_path / "s").exists()


def test_several_at_once_end_with_one_good_store(config, tokenizer, tmp_path) -> None:
    def work(_: int) -> int:
        return len(prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [len(LINES)] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "t.tsv"]


CHILD = """
import sys
from pathlib import Path
import torch
from regard.data.batch import Batches
from regard.data.store import Store

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

rows = 200_000
Store.write(Path(sys.argv[1]) / "warm", [([1, 2], [1, 2])] * 5000, vocab_size=(9, 9)).pairs().batch(torch.arange(3))
before = peak()
stream = (([i % 60000] * 100, [1, i % 60000, 2]) for i in range(rows))
store = Store.write(Path(sys.argv[1]) / "s", stream, vocab_size=(60000, 60000))
batches = iter(Batches(store.pairs(), 4000, seed=1))
for _ in range(20):
    batch = next(batches)
    assert bool((batch.source == batch.target[:, 1:2]).all())
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell the peak of memory")
def test_memory_while_writing_and_reading(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # 200,000 rows of 103 ids: 165 MB as int64 alone. Allowed: a chunk as Python lists, the lengths and the order
    # of an epoch (some 8-byte numbers a row), the mapped pages that were touched.
    assert int(done.stdout) < 100_000_000
