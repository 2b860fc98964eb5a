"""ListOps: values by an independent evaluator, trees as the published rule grows them, baselines as published."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from itertools import accumulate, islice

import pytest

from regard.data.labels import LabelData
from regard.data.listops import OPERATORS, ListOps, root_baseline
from regard.errors import UserError
from smoke import smoke_run

SMALL = ListOps(train=400, valid=50, test=50, above=5, below=120, depth=5, arguments=6)
FUNCTIONS = {
    "MIN": min, "MAX": max, "SM": lambda numbers: sum(numbers) % 10,
    "MED": lambda numbers: int(statistics.median(numbers)),
}  # fmt: skip


def evaluated(text: str) -> tuple[int, int, int]:
    """(value, depth, most arguments) of an expression, by recursive descent; all of it must be read."""
    words = iter(text.split())

    def node(word: str) -> tuple[int, int, int]:
        if word.isdecimal():
            return int(word), 1, 0
        children = []
        while (following := next(words)) != "]":
            children.append(node(following))
        values, depths, arguments = zip(*children, strict=True)
        return FUNCTIONS[word](values), 1 + max(depths), max(len(values), *arguments)

    found = node(next(words))
    assert next(words, None) is None
    return found


@pytest.mark.parametrize("config", [SMALL, ListOps(train=150)], ids=["small", "published"])
def test_values_lengths_depths_and_arguments(config):
    found = list(config.expressions("train"))
    assert len(found) == config.train == len({*found})
    lengths = [len(one.text.split()) for one in found]
    assert config.above < min(lengths) and max(lengths) < config.below
    read = [evaluated(one.text) for one in found]
    assert [str(value) for value, _, _ in read] == [one.value for one in found]
    assert max(depth for _, depth, _ in read) == config.depth
    assert max(arguments for _, _, arguments in read) == config.arguments
    assert {one.text.partition(" ")[0] for one in found} == {*OPERATORS}


def grown(depth: int, source: random.Random) -> list[str]:
    """A tree by the published rule, node by node: depth 10, 2 to 10 arguments, an operator with probability 1/4."""
    if depth == 10 or source.random() > 0.25:
        return [str(source.randrange(10))]
    arguments = [word for _ in range(source.randint(2, 10)) for word in grown(depth + 1, source)]
    return [source.choice(OPERATORS), *arguments, "]"]


def test_trees_are_distributed_as_by_the_published_rule():
    source, published = random.Random(1), list[list[str]]()
    while len(published) < 120:
        if 500 < len(tree := grown(1, source)) < 2000:
            published.append(tree)
    ours = [one.text.split() for one in ListOps(train=1200).expressions("train")]

    def describe(trees: list[list[str]]) -> list[list[float]]:
        """Of each: tokens, fraction of operators, arguments of the first operator, mean depth."""
        rows = []
        for tree in trees:
            steps = [(word in OPERATORS) - (word == "]") for word in tree]
            before = [0, *accumulate(steps)]
            arguments = sum(level == 1 and word != "]" for word, level in zip(tree, before, strict=False))
            operators = sum(word in OPERATORS for word in tree)
            rows.append([len(tree), operators / len(tree), arguments, statistics.fmean(before)])
        return [list(column) for column in zip(*rows, strict=True)]

    for mine, other in zip(describe(ours), describe(published), strict=True):
        error = (statistics.variance(mine) / len(mine) + statistics.variance(other) / len(other)) ** 0.5
        assert abs(statistics.fmean(mine) - statistics.fmean(other)) < 4 * error
    words = Counter(word for tree in ours for word in tree)
    assert max(abs(words[one] / sum(words[name] for name in OPERATORS) - 0.25) for one in OPERATORS) < 0.01
    assert max(abs(words[str(n)] / sum(words[str(m)] for m in range(10)) - 0.1) for n in range(10)) < 0.005


def test_the_baselines_are_about_those_of_the_published_data():
    """Of its 2,000 test expressions, 16.6 % have the most frequent value, and 37.0 % follow from the first operator."""
    config = ListOps(train=4000)
    train, test = (list(config.expressions(split)) for split in ("train", "test"))
    values = Counter(one.value for one in test)
    assert len(test) == 2000 and abs(values.most_common(1)[0][1] / 2000 - 0.166) < 0.03
    assert abs(root_baseline(train, test) - 0.37) < 0.04
    assert root_baseline([("MAX 1 9 ]", "9")], [("MAX 3 3 ]", "3"), ("MAX 9 ]", "9"), ("MIN 9 ]", "9")]) == 1 / 3


def test_the_same_seed_gives_the_same_data_and_sets_differ():
    first = {split: list(SMALL.expressions(split)) for split in ("train", "valid", "test")}
    assert {split: list(SMALL.expressions(split)) for split in first} == first
    longer = ListOps(train=500, above=5, below=120, depth=5, arguments=6)
    assert list(islice(longer.expressions("train"), 400)) == first["train"]
    other = ListOps(train=400, above=5, below=120, depth=5, arguments=6, seed=2)
    assert list(other.expressions("train")) != first["train"]
    assert not {*first["valid"]} & {*first["test"]}
    published = ListOps()
    texts = {split: {one.text for one in islice(published.expressions(split), 300)} for split in ("train", "test")}
    assert not texts["train"] & texts["test"]


def test_shorter_expressions_follow_those_of_the_training_set():
    more = replace(SMALL, above=40, shorter=300)
    assert [list(more.expressions(split)) for split in ("valid", "test")] == [
        list(replace(SMALL, above=40).expressions(split)) for split in ("valid", "test")
    ]
    found = list(more.expressions("train"))
    assert found[:400] == list(replace(SMALL, above=40).expressions("train")) and len(found) == 700
    lengths = [len(one.text.split()) for one in found]
    assert min(lengths[:400]) > 40 >= max(lengths[400:]) and min(lengths[400:]) == 4
    assert all(int(one.value) == evaluated(one.text)[0] for one in found[400:])
    assert sum(size < 8 for size in lengths[400:]) > 150 and sum(size >= 16 for size in lengths[400:]) > 30


def test_shorter_expressions_have_as_many_tokens_of_each_octave():
    tokens = Counter[int]()
    for one in islice(ListOps(train=1, shorter=5000).expressions("train"), 1, None):
        size = len(one.text.split())
        tokens[size.bit_length()] += size
    assert tokens.total() > 90_000 and {*tokens} == set(range(3, 10))
    assert max(tokens.values()) < 1.3 * min(tokens.values())
    for above in (4, 7, 8, 11, 16, 40):  # where the limit is no power of two
        found = list(replace(SMALL, train=1, above=above, shorter=99).expressions("train"))
        assert len(found) == 100 and max(len(one.text.split()) for one in found[1:]) <= above


def test_shorter_expressions_exist_where_operators_have_few_arguments():
    few = ListOps(train=1, valid=1, test=1, above=8, below=12, depth=3, arguments=2, shorter=20)
    assert {len(one.text.split()) for one in islice(few.expressions("train"), 1, None)} == {4, 7}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"above": 10, "below": 11}, "above = 10, below = 11: no number of tokens is between them"),
        ({"depth": 1}, "depth = 1"),
        ({"above": 3, "shorter": 5}, "shorter = 5: no expression has at most above = 3 tokens"),
        ({"depth": 2, "arguments": 3}, r"data\.listops\.above = 500, below = 2000: .* raise depth or arguments"),
    ],
)
def test_limits_that_no_tree_has(settings, message):
    with pytest.raises(UserError, match=message):
        next(ListOps(**settings).expressions("train"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 119}, r"max_length = 119: .* listops\.below \+ 1 = 121 or more"),
        ({"max_length": 200, "train": ("a.tsv",)}, "train and listops: choose one"),
        ({"max_length": 200, "valid": ("a.tsv",)}, r"valid and test: \[data\.listops\] generates its own"),
        ({"max_length": 200, "valid_fraction": 0.1}, "valid_fraction: is for files"),
        ({"max_length": 200, "fraction": 0.1}, "fraction < 1: is for files"),
    ],
)
def test_what_generated_texts_cannot_be_combined_with(settings, message):
    with pytest.raises(UserError, match=message):
        LabelData(listops=SMALL, **settings)


@pytest.mark.slow
def test_the_small_form_beats_its_baselines_which_are_printed(tmp_path, capsys):
    from regard.cli import main

    test = smoke_run("recipes/listops.toml", tmp_path / "run")["test"]
    assert test["accuracy"] > test["root_operator"] + 0.12 and test["root_operator"] > test["majority"] + 0.05
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--test", "test"]) == 0
    printed = capsys.readouterr().out
    assert f"most frequent class: {test['majority']:.2%}; by the first operator alone: {test['root_operator']:.2%}" in (
        printed
    )
