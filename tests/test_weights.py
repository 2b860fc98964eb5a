"""Groups of training files with weights: how often their rows occur, the same after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commanded import training
from regard.cli import main
from regard.data.captions import CaptionData
from regard.data.images import ImageData
from regard.data.numeric import NumberData
from regard.data.pairs import PairData
from regard.data.sets import Group, file_names
from regard.data.streams import Blocks, shuffled_rows, weighted_rows
from regard.errors import UserError
from regard.settings import from_dict, read_toml, to_dict
from regard.tasks.registry import task_of
from regard.training.run import Run
from stopping import assert_same_weights, interrupt_at


def counted(weights: torch.Tensor, seed: int) -> torch.Tensor:
    return weighted_rows(weights, torch.Generator().manual_seed(seed)).bincount(minlength=len(weights))


GROUP = st.tuples(st.integers(1, 50), st.floats(0.0625, 5, width=32))


@given(groups=st.lists(GROUP, min_size=1, max_size=4, unique_by=lambda group: group[1]), seed=st.integers(0))
def test_a_row_occurs_as_often_as_its_weight_says(groups, seed) -> None:
    sizes, values = zip(*groups, strict=True)
    weights = torch.tensor(values).repeat_interleave(torch.tensor(sizes))
    times = counted(weights, seed % 2**31)
    scaled = weights.double() / min(1.0, float(weights.max()))
    assert bool(((times - scaled).abs() < 1 + 1e-6).all()) and int(times.sum()) > 0
    for size, part, total in zip(sizes, times.split(sizes), scaled.split(sizes), strict=True):
        assert abs(int(part.sum()) - float(total.sum())) < 2, size  # ± 1 in a group, and one at its edge


def test_fractions_are_other_rows_in_every_epoch_and_right_on_average() -> None:
    weights = torch.tensor([0.25] * 40 + [1.5] * 20 + [2.0] * 10)
    epochs = torch.stack([counted(weights, seed) for seed in range(400)]).double()
    torch.testing.assert_close(epochs.mean(dim=0), weights.double(), atol=0.1, rtol=0)
    assert len({tuple(row.tolist()) for row in epochs}) == 400 and bool((epochs[:, 60:] == 2).all())
    assert bool((epochs[:, :40].sum(dim=1) == 10).all())


def test_without_weights_the_order_is_that_of_before() -> None:
    one, other = (torch.Generator().manual_seed(7) for _ in range(2))
    assert torch.equal(shuffled_rows(99, None, one), torch.randperm(99, generator=other))


def test_rows_of_a_text_have_the_weight_of_the_part_they_begin_in() -> None:
    text = torch.cat([torch.zeros(800, dtype=torch.int), torch.ones(400, dtype=torch.int)])
    stream = Blocks(text, 1, 8, seed=1, groups=[(800, 1.0), (400, 3.0)])
    first = torch.stack([text[stream.starts(epoch).flatten()].bincount() for epoch in range(20)])
    assert bool((first[:, 0] <= 100).all()) and bool((first[:, 0] >= 99).all())
    assert bool((first[:, 1] <= 150).all()) and bool((first[:, 1] >= 144).all()) and bool((first[:, 1] % 3 == 0).all())


def test_groups_are_read_and_saved(tmp_path) -> None:
    table = {"train": [{"files": ["a.en", "a.de"], "weight": 2}, {"files": ["b.tsv"]}], "valid": ["c.tsv"]}
    config = from_dict(PairData, table, "data.")
    assert config.train == (Group(("a.en", "a.de"), 2.0), Group(("b.tsv",)))
    assert from_dict(PairData, to_dict(config), "data.") == config and file_names(config.train)[2] == "b.tsv"


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        (PairData, {"train": [{"files": ["a.tsv"], "weight": 0}]}, "data.train.weight = 0: must be above 0"),
        (PairData, {"train": [{"files": ["a.tsv"], "weight": "2"}]}, "data.train.weight = '2': expected a number"),
        (PairData, {"train": [{"files": ["a.tsv"], "wieght": 2}]}, "did you mean 'weight'"),
        (PairData, {"train": [{"files": "a.tsv"}]}, "write a list"),
        (PairData, {"train": [{"weight": 2}]}, "files"),
        (PairData, {"train": [{"files": []}]}, "no files"),
        (PairData, {"train": ["a.tsv", {"files": ["b.tsv"]}]}, "all files as names, or all in groups"),
        (PairData, {"train": ["a.tsv"], "valid": [{"files": ["b.tsv"]}]}, "data.valid = .*only training files have"),
        (PairData, {"train": ["a.tsv"], "test": {"new": [{"files": ["b.tsv"]}]}}, "data.test.new = .*only training"),
        (CaptionData, {"train": [{"files": ["a.tsv"]}]}, "these files have no weights"),
        (ImageData, {"train": [{"files": ["a"]}]}, "these files have no weights"),
        (NumberData, {"train": [{"files": ["a.tsv"]}]}, "these files have no weights"),
    ],
)
def test_mistakes_name_the_field(kind, table, message) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(kind, table, "data.")


GROUPS = {  # the files of the two groups of each task, with 4 and 12 rows; weights 3 and 0.5
    "translation": ('["a.en", "a.de"]', '["b.tsv"]'),
    "text-classification": ('["la.tsv"]', '["lb.tsv"]'),
    "language-modeling": ('["a.txt"]', '["b.txt"]'),
    "masked-language-modeling": ('["da.csv"]', '["db.csv"]'),
    "text-to-text": ('["a.en", "a.de"]', '["b.tsv"]'),
    "token-classification": ('["a.conll"]', '["b.conll"]'),
}
SMALL = [
    f"--set={setting}"
    for setting in (
        "text.kind=word", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=8",
        "train.warmup=2", "train.batch_tokens=64", "train.log_every=4", "train.save_every=4",
    )
]  # fmt: skip
train = training(SMALL, "mine.toml")


@pytest.fixture
def here(empty_folder: Path) -> Path:
    a, b = [f"one {n}" for n in range(4)], [f"two {n}" for n in range(12)]
    Path("a.en").write_text("".join(f"{text}\n" for text in a))
    Path("a.de").write_text("".join(f"{text}\n" for text in a))
    Path("b.tsv").write_text("".join(f"{text}\t{text}\n" for text in b))
    for name, texts in {"a": a, "b": b}.items():
        Path(f"l{name}.tsv").write_text("text\tlabel\n" + "".join(f"{t}\t{i % 2}\n" for i, t in enumerate(texts)))
        Path(f"d{name}.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
        Path(f"{name}.conll").write_text("".join(f"{text.split()[0]} B-X\n{text.split()[1]} O\n\n" for text in texts))
        Path(f"{name}.txt").write_text("".join(f"{text} " for text in texts) * 20)
    return empty_folder


def write_recipe(task: str, weights: tuple[float, float] = (3, 0.5), pack: int = 0) -> None:
    first, second = GROUPS[task]
    groups = f"train = [{{ files = {first}, weight = {weights[0]} }}, {{ files = {second}, weight = {weights[1]} }}]"
    name = "data.tasks.copy" if task == "text-to-text" else "data"
    Path("mine.toml").write_text(f'task = "{task}"\n[{name}]\n{groups}\n[train]\npack = {pack}\n')


def epoch_of(task: str) -> list[str]:
    """The words of all tokens of an epoch."""
    tables = {**read_toml("mine.toml"), "text": {"kind": "word"}, "model": {"dim": 16, "heads": 2, "layers": 1}}
    tables["train"] |= {"batch_tokens": 64}
    run = Run(task_of(tables)(tables, Path("run"), torch.device("cpu")))
    run.prepare()
    stream = run.task.stream()
    count, make = stream.open(0)
    tokenizer, words = next(iter(run.task.tokenizers.values())), []
    for number in range(count):
        batch = make(number)
        ids = next(getattr(batch, name) for name in ("source", "text", "ids") if hasattr(batch, name))
        words += [tokenizer.token(id) for id in ids.flatten().tolist()]
    return words


@pytest.mark.parametrize("pack", [0, 16])
@pytest.mark.parametrize("task", [*GROUPS])
def test_an_epoch_has_the_rows_of_each_group(here, task, pack) -> None:
    write_recipe(task, pack=pack or 16 * (task.startswith(("language", "masked"))))
    words = " ".join(epoch_of(task)).replace("▁", "")
    one, two = words.count("one"), words.count("two")
    if task == "language-modeling":  # rows of 16 tokens: 160 · 3 and 480 · 0.5 tokens, half of them words
        assert 200 <= one <= 300 and 90 <= two <= 150
    elif task == "masked-language-modeling":  # some are masked
        assert 6 <= one <= 12 and 2 <= two <= 6
    else:
        assert (one, two) == (12, 6)


@pytest.mark.parametrize("task", [*GROUPS])
def test_an_interrupted_run_continues_as_if_it_had_not_been(here, task, monkeypatch) -> None:
    write_recipe(task, (1.7, 0.3), pack=16)
    assert train("-o", "whole") == 0
    interrupt_at(monkeypatch, 5)
    assert train("-o", "parts") != 0
    assert train("-o", "parts") == 0
    assert_same_weights("whole", "parts")


def test_the_validation_fraction_of_a_text_needs_one_group(here, capsys) -> None:
    write_recipe("language-modeling", pack=16)
    assert train("--set=data.valid_fraction=0.1") == 2
    assert "name validation files with valid" in capsys.readouterr().err


def test_a_weighted_classifier_balances_the_classes_as_they_occur(here) -> None:
    write_recipe("text-classification", (4, 1))
    Path("la.tsv").write_text("text\tlabel\na\t0\nb\t0\nc\t0\nd\t1\n")
    tables = {**read_toml("mine.toml"), "text": {"kind": "word"}, "model": {"dim": 16, "heads": 2, "layers": 1}}
    tables["data"] |= {"class_weights": "balanced", "valid_fraction": 0.2}
    run = Run(task_of(tables)(tables, Path("run"), torch.device("cpu")))
    run.prepare()
    texts, weight = run.task.train_texts, run.task.class_weight()
    occurring = texts.labels.bincount(texts.weights)
    torch.testing.assert_close(occurring * weight, torch.full((2,), float(occurring.sum()) / 2))


def test_a_generator_is_a_task_of_text_to_text(empty_folder, capsys) -> None:
    Path("dates.tsv").write_text("".join(f"{n}\t{n}\n" for n in range(10)))
    Path("mine.toml").write_text(
        """task = "text-to-text"
[data.tasks.dates]
prefix = "date: "
weight = 0.5
[data.tasks.dates.generator]
name = "korean-dates"
train = 40
test = 5
[data.tasks.copy]
train = ["dates.tsv"]
"""
    )
    assert train("--set=text.kind=byte", "--set=train.batch_tokens=512", "-o", "run") == 0
    assert main(["evaluate", "run", "--json"]) == 0
    assert '"dates.test"' in capsys.readouterr().out
    assert main(["data", "check", "mine.toml"]) == 0
    assert capsys.readouterr().out.startswith("copy.train: 10 pairs")


def test_data_check_lists_groups_with_their_weights(here, capsys) -> None:
    write_recipe("translation")
    assert main(["data", "check", "mine.toml"]) == 0
    assert "train: 16 pairs\n  weight 3: a.en, a.de\n  weight 0.5: b.tsv\n" in capsys.readouterr().out
    Path("b.tsv").write_text("only one column\n")
    assert main(["data", "check", "mine.toml"]) == 2
