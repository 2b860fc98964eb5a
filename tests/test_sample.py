"""Versions of the training pairs: the same sentences in every version, another version every epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from corpus import train, write_corpus
from regard.cli import main
from regard.data import store as module
from regard.data.batch import Batches, Pairs
from regard.data.config import DataConfig
from regard.data.pack import Packs
from regard.data.sample import Sampling
from regard.data.store import INDEX, Store, prepare
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer
from regard.train.trainer import Trainer

LINES = [(f"the number {n} is here", f"{n} ist die Zahl" + " hier" * (n % 7)) for n in range(300)]
SAMPLING = Sampling(dropout=0.3, versions=4, seed=5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train((text for line in LINES for text in line), "bpe", 300)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("data")
    (folder / "t.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in LINES))
    return DataConfig(train=("t.tsv",), folder=str(folder))


@pytest.fixture(scope="module")
def made(config, tokenizer, tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("store") / "s"
    return prepare(config.train, config, folder, tokenizer, tokenizer, sampling=SAMPLING)


def texts(tokenizer: Tokenizer, pairs: Pairs) -> list[tuple[str, str]]:
    rows = [torch.tensor([i]) for i in range(len(pairs))]
    return [
        (
            tokenizer.decode(pairs.sources.pad(row)[0][0].tolist()),
            tokenizer.decode(pairs.targets.pad(row)[0][0].tolist()),
        )
        for row in rows
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_versions_hold_the_same_sentences(made, tokenizer, config, tmp_path) -> None:
    versions = made.pairs().versions
    assert len(versions) == 4
    for pairs in versions:
        assert texts(tokenizer, pairs) == LINES
        assert (pairs.targets.flat[pairs.targets.starts] == tokenizer.bos).all()
        for side in (pairs.sources, pairs.targets):
            assert (side.flat[side.starts + side.lengths - 1] == tokenizer.eos).all()
    plain = prepare(config.train, config, tmp_path / "plain", tokenizer, tokenizer)
    alone, first = contents(plain.folder), contents(made.folder)
    assert plain.sampled == () and set(alone) < set(first)
    assert all(alone[name] == first[name] for name in alone if name != INDEX)
    sampled = [first[f"source.{version}.ids"] for version in (1, 2, 3)]
    assert len({first["source.ids"], *sampled}) == 4


def test_the_seed_decides(made, config, tokenizer, tmp_path) -> None:
    def other(**changes) -> dict[str, bytes]:
        sampling = Sampling(**{**vars(SAMPLING), **changes})
        folder = tmp_path / "-".join(map(str, changes.values()))
        return contents(prepare(config.train, config, folder, tokenizer, tokenizer, sampling=sampling).folder)

    base = contents(made.folder)
    assert other(seed=5) == base
    assert other(seed=6)["source.1.ids"] != base["source.1.ids"]
    fewer = other(versions=2)  # version 1 does not depend on how many there are
    assert "source.2.ids" not in fewer and fewer["target.1.ids"] == base["target.1.ids"]


def test_source_and_target_are_cut_independently(tokenizer, tmp_path) -> None:
    (tmp_path / "t.tsv").write_text("".join(f"{source}\t{source}\n" for source, _ in LINES))
    config = DataConfig(train=("t.tsv",), folder=str(tmp_path))
    made = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, sampling=SAMPLING).pairs()
    same = [(pairs.sources.lengths == pairs.targets.lengths - 1).float().mean().item() for pairs in made.versions]
    assert same[0] == 1 and max(same[1:]) < 0.5


def test_a_store_is_made_again_when_the_sampling_changes(config, tokenizer, tmp_path) -> None:
    def inode(sampling: Sampling | None) -> int:
        prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, sampling=sampling)
        return (tmp_path / "s" / INDEX).stat().st_ino

    first = inode(SAMPLING)
    assert inode(SAMPLING) == first
    assert inode(Sampling(0.2, 4, 5)) != first
    inode(None)
    assert "source.1.ids" not in contents(tmp_path / "s")


def test_no_version_is_longer_than_allowed(config, tokenizer, tmp_path) -> None:
    sizes = [1 + max(len(tokenizer.encode(text)) for text in line) for line in LINES]
    limit = max(sizes)
    made = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, max_length=limit,
                   sampling=Sampling(0.5, 4, 1)).pairs()  # fmt: skip
    assert len(made) == len(LINES) and made.longest == limit
    for pairs in made.versions:
        assert texts(tokenizer, pairs) == LINES  # a side that became too long is plain, not cut off
    free = prepare(config.train, config, tmp_path / "free", tokenizer, tokenizer, sampling=Sampling(0.5, 4, 1)).pairs()
    assert free.longest > limit


def test_chunks_do_not_lose_or_mix_rows(config, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    made = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, sampling=SAMPLING)
    assert all(texts(tokenizer, pairs) == LINES for pairs in made.pairs().versions)


def test_a_damaged_version_is_noticed(config, tokenizer, tmp_path) -> None:
    made = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, sampling=SAMPLING)
    with (made.folder / "target.2.ids").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match=r"target\.2\.ids has 10 bytes"):
        Store.open(made.folder)
    again = prepare(config.train, config, tmp_path / "s", tokenizer, tokenizer, sampling=SAMPLING)
    assert all(texts(tokenizer, pairs) == LINES for pairs in again.pairs().versions)
    index = json.loads((made.folder / INDEX).read_text())
    (made.folder / INDEX).write_text(json.dumps({**index, "tokens": index["tokens"][:3]}))
    with pytest.raises(UserError, match="damaged"):
        Store.open(made.folder)


def streams(pairs: Pairs) -> list[Batches | Packs]:
    return [Batches(pairs, 256, seed=3), Packs(pairs, 4, 64, seed=3)]


def ids_of(batch) -> list[list[int]]:
    return batch.source.tolist() + batch.target.tolist()


@pytest.mark.parametrize("kind", [0, 1], ids=["padded", "packed"])
def test_epoch_e_reads_version_e_mod_k(made, kind) -> None:
    pairs = made.pairs()
    stream = streams(pairs)[kind]
    for epoch in (0, 1, 3, 4, 6):
        stream.seek({"epoch": epoch, "index": 0})
        alone = streams(pairs.versions[epoch % 4])[kind]
        alone.seek({"epoch": epoch, "index": 0})
        for got, expected, _ in zip(stream, alone, range(5), strict=False):
            assert ids_of(got) == ids_of(expected)


@pytest.mark.parametrize("kind", [0, 1], ids=["padded", "packed"])
def test_a_stream_goes_on_in_the_middle_of_any_version(made, kind) -> None:
    stream = streams(made.pairs())[kind]
    walk, seen, positions = iter(stream), [], []
    while stream.epoch < 5:
        positions.append(stream.position)
        seen.append(ids_of(next(walk)))
    for at in range(3, len(seen), len(seen) // 7):
        later = streams(made.pairs())[kind]
        later.seek(positions[at])
        assert ids_of(next(iter(later))) == seen[at]


def test_versions_of_different_size_are_refused() -> None:
    with pytest.raises(UserError, match="another number of pairs"):
        Pairs([[3], [3]], [[2, 3], [2, 3]], [Pairs([[3]], [[2, 3]])])


@pytest.mark.parametrize(
    "sampling",
    [["--set=text.dropout=0.2"], ["--set=text.kind=unigram", "--set=text.vocab_size=120", "--set=text.alpha=0.3"]],
)
def test_a_run_with_sampling_that_is_stopped_ends_as_if_it_had_not(tmp_path, monkeypatch, sampling) -> None:
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = [*sampling, "--set=text.segmentations=3", "--set=train.steps=12"]
    assert train("mine.toml", "-o", "whole", *settings) == 0
    real = Trainer._update

    def stop(self, batches):
        if self.step == 7:
            raise KeyboardInterrupt
        return real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", stop)
        train("mine.toml", "-o", "stopped", *settings)
    assert main(["resume", "stopped", "--device", "cpu"]) == 0
    for name in ("source.2.ids", "target.1.ids"):
        whole, stopped = ((tmp_path / run / "data" / "train" / name).read_bytes() for run in ("whole", "stopped"))
        assert whole == stopped
    whole, stopped = ((tmp_path / run / "checkpoints" / "step-00000012") for run in ("whole", "stopped"))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes()
    assert json.loads((whole / "state.json").read_text())["data"]["epoch"] >= 3  # every version has been read
