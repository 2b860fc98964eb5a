"""Metrics of heads and their importance: constructed attention, losses by PyTorch, gradients by differences."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard
from inside_models import LINES, TEXTS, WORDS, opened
from regard.cli import main
from regard.errors import UserError
from regard.explore.examples import IGNORE, Example, in_batches, read_examples
from regard.explore.forward import Grid
from regard.explore.heads import (
    HeadMetrics,
    Sums,
    View,
    add_weights,
    align,
    is_punctuation,
    learn_lexicon,
    measure,
    summarise,
)
from regard.explore.importance import gradients, least_important, losses_when_off, mean_loss
from regard.explore.inside import Inside
from regard.nn.trace import trace

PAIRS = [
    ("the animal did not cross .", "동물 이 길 !"),
    ("it was tired", "a b"),
    ("a b c d", "d c b a e"),
    ("the street", "길"),
]


def figures_of(weights: torch.Tensor, causal: bool = False, **known: object) -> HeadMetrics:
    """Of one head whose weights [Q, K] are given."""
    queries, keys = weights.shape
    visible = torch.ones(1, queries, keys, dtype=torch.bool)
    view = View(torch.ones(1, queries).bool(), torch.ones(1, keys).bool(), **known)
    sums = Sums()
    add_weights(sums, weights[None, None].double(), visible.tril() if causal else visible, view)
    return summarise(sums, "encoder", 0, 0)


def shifted(count: int, offset: int) -> torch.Tensor:
    """All attention at one distance; where that lies outside, at the query itself."""
    weights = torch.zeros(count, count)
    for i in range(count):
        j = i + offset
        weights[i, j if 0 <= j < count else i] = 1
    return weights


# Patterns


@pytest.mark.parametrize(
    ("offset", "pattern"),
    [(-1, "previous token"), (1, "next token"), (0, "self"), (-3, "-3 tokens"), (2, "+2 tokens")],
)
def test_a_head_with_a_fixed_offset_is_recognised(offset: int, pattern: str) -> None:
    found = figures_of(shifted(12, offset))
    assert found.pattern == (pattern, 1.0)
    assert found.entropy == 0 and found.breadth == 0
    assert found.distance == pytest.approx(abs(offset) * (12 - abs(offset)) / 12)


@pytest.mark.parametrize(("column", "pattern"), [(0, "first token"), (11, "last token")])
def test_the_first_and_the_last_token_are_recognised(column: int, pattern: str) -> None:
    weights = torch.zeros(12, 12)
    weights[:, column] = 1
    assert figures_of(weights).pattern == (pattern, 1.0)


def test_a_uniform_head_is_broad() -> None:
    found = figures_of(torch.full((12, 12), 1 / 12))
    assert found.pattern == ("broad", pytest.approx(1)) and found.entropy == pytest.approx(math.log(12))
    past = torch.ones(12, 12).tril()
    found = figures_of(past / past.sum(dim=1, keepdim=True), causal=True)
    assert found.breadth == pytest.approx(1)
    # the first query has no choice, and says nothing about the head
    assert found.entropy == pytest.approx(sum(math.log(n) for n in range(2, 13)) / 11)
    assert "next" not in found.fractions and "last" not in found.fractions


def test_fractions_and_entropy_equal_a_loop() -> None:
    weights = torch.rand(9, 9).mul(3).softmax(dim=-1).double()
    signs = torch.rand(1, 9) < 0.4
    found = figures_of(weights, punctuation=signs)
    w = weights.numpy()
    wanted = {
        "previous": np.mean([w[i, i - 1] for i in range(1, 9)]),
        "next": np.mean([w[i, i + 1] for i in range(8)]),
        "self": np.mean([w[i, i] for i in range(9)]),
        "first": w[:, 0].mean(),
        "last": w[:, 8].mean(),
        "punctuation": w[:, signs[0].numpy()].sum(axis=1).mean(),
    }
    for name, value in wanted.items():
        assert found.fractions[name] == pytest.approx(value), name
    assert found.entropy == pytest.approx(-(w * np.log(w)).sum(axis=1).mean())
    assert found.distance == pytest.approx(sum(w[i, j] * abs(i - j) for i in range(9) for j in range(9)) / 9)
    far = {o: np.mean([w[i, i + o] for i in range(9) if 0 <= i + o < 9]) for o in range(-8, 9) if 1 < abs(o) <= 4}
    assert found.offset == max(far, key=far.get) and found.fractions["positional"] == pytest.approx(max(far.values()))


def test_distances_over_an_image_are_in_patches() -> None:
    """Token 5 of a 3 x 4 image after [CLS] is row 1, column 0; position 12 is row 2, column 3: distance sqrt(10)."""
    weights = torch.eye(13)
    weights[5] = 0
    weights[5, 12] = 1
    found = figures_of(weights, grid=Grid(3, 4, 1))
    assert found.distance == pytest.approx(math.sqrt(10) / 13)
    assert set(found.fractions) == {"first", "self"}


def test_punctuation_of_any_script_is_recognised() -> None:
    assert all(map(is_punctuation, [".", "▁,", "##!", "。", "…", "«", "()"]))
    assert not any(map(is_punctuation, ["a", "</s>", "<unk>", "▁", "", "3", "동", "a."]))


# The witness for alignments


def brute_model_1(pairs: list[tuple[list[int], list[int]]], rounds: int) -> dict[tuple[int, int], float]:
    """IBM model 1 as the textbook writes it (Koehn 2010, figure 4.3); a source word counts once a sentence."""
    t: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        count: dict[tuple[int, int], float] = defaultdict(float)
        total: dict[int, float] = defaultdict(float)
        for source, target in pairs:
            for f in target:
                whole = sum(t[e, f] for e in set(source))
                for e in set(source):
                    count[e, f] += t[e, f] / whole
                    total[e] += t[e, f] / whole
        t = defaultdict(float, {(e, f): value / total[e] for (e, f), value in count.items()})
    return t


def test_counts_alone_find_the_translation() -> None:
    """das Haus / the house, das Buch / the book, ein Buch / a book: Koehn's example."""
    das, haus, buch, ein = range(4)
    the, house, book, a = range(4)
    pairs = [([das, haus], [the, house]), ([das, buch], [the, book]), ([ein, buch], [a, book])]
    lexicon = learn_lexicon(pairs, rounds=10)
    wanted = brute_model_1(pairs, 10)
    for e in range(4):
        for f in range(4):
            assert lexicon.get((e, f), 0.0) == pytest.approx(wanted[e, f])
    assert align(lexicon, [das, buch], [the, book]).tolist() == [[True, False], [False, True]]
    assert align(lexicon, [haus, das, haus], [house]).tolist() == [[True, False, True]]  # both positions of a word
    assert not align(lexicon, [das], [99]).any()  # never seen


def test_the_lexicon_is_the_textbook_on_random_pairs() -> None:
    generator = np.random.default_rng(1)
    pairs = [(generator.integers(0, 6, 4).tolist(), generator.integers(0, 7, 5).tolist()) for _ in range(30)]
    lexicon, wanted = learn_lexicon(pairs, rounds=4), brute_model_1(pairs, 4)
    for (e, f), value in wanted.items():
        assert lexicon[e, f] == pytest.approx(value)


# Over examples


def write_data(inside: Inside, folder: Path) -> list[str]:
    """Files that the model's kind reads."""
    path = folder / "data.txt"
    if inside.reader.writes:
        path = folder / "data.tsv"
        path.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")
    elif inside.reader.tags:
        rows = ("".join(f"{word}\t{at % 3}\n" for at, word in enumerate(line.split())) for line in LINES)
        path.write_text("\n".join(rows), encoding="utf-8")
    elif inside.config.output_head == "classes":
        path = folder / "data.tsv"
        rows = "".join(f"{line}\t{at % 3}\n" for at, line in enumerate(LINES))
        path.write_text("text\tlabel\n" + rows, encoding="utf-8")
    else:
        path.write_text("\n".join(LINES * 4), encoding="utf-8")
    return [str(path)]


def one_by_one(inside: Inside, examples: list[Example]) -> list:
    return [in_batches([example], inside.device)[0] for example in examples]


@pytest.mark.parametrize("architecture", TEXTS)
def test_padding_changes_nothing(architecture: str, tmp_path: Path) -> None:
    """Padded batches give the metrics, losses and gradients of examples one by one."""
    inside = opened(architecture)
    examples = read_examples(inside, write_data(inside, tmp_path), 10)
    together, alone = in_batches(examples, inside.device), one_by_one(inside, examples)
    assert len(together) < len(alone) or len(alone) == 1
    for own, other in zip(measure(inside, together), measure(inside, alone), strict=True):
        assert own.entropy == pytest.approx(other.entropy) and own.fractions == pytest.approx(other.fractions)
    off, by_gradient = losses_when_off(inside, together), gradients(inside, together)
    assert off == pytest.approx(losses_when_off(inside, alone), abs=1e-9)
    assert by_gradient == pytest.approx(gradients(inside, alone), abs=1e-9)
    assert set(off) == set(inside.anatomy.heads) and (set(by_gradient) == set(off) or architecture == "vectors")


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "masked", "classes", "tags"])
def test_importance_is_the_loss_without_the_head(architecture: str, tmp_path: Path) -> None:
    """The head's columns of the output matrix are zero, the loss is PyTorch's, one example at a time."""
    inside = opened(architecture)
    examples = read_examples(inside, write_data(inside, tmp_path), 10)
    off = losses_when_off(inside, in_batches(examples, inside.device))

    def loss() -> float:
        total, count = 0.0, 0
        for example in examples:
            given = (example.source[None],) if example.target is None else (example.source[None], example.target[None])
            with torch.no_grad():
                logits = inside.model(*given)[0]
            logits, expected = torch.atleast_2d(logits), torch.atleast_1d(example.expected)
            total += F.cross_entropy(logits, expected, ignore_index=IGNORE, reduction="sum").item()
            count += int((expected != IGNORE).sum())
        return total / count

    whole = loss()
    assert mean_loss(inside, in_batches(examples, inside.device)) == pytest.approx(whole)
    for part, layer, head in inside.anatomy.heads[::3]:
        weight = inside.attention(inside.anatomy.path(part, layer)).out.weight
        before = weight.detach().clone()
        weight.data[:, 4 * head : 4 * head + 4] = 0
        assert off[part, layer, head] == pytest.approx(loss() - whole, abs=1e-6)
        weight.data = before


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "classes", "recurrent"])
def test_gradients_equal_finite_differences(architecture: str, tmp_path: Path) -> None:
    """I_h = mean |L(1 + ε) - L(1 - ε)| / 2ε, each example by itself."""
    inside = opened(architecture)
    examples = read_examples(inside, write_data(inside, tmp_path), 4)
    by_gradient, step = gradients(inside, in_batches(examples, inside.device)), 1e-5
    for part, layer, head in inside.anatomy.heads[::5]:
        path, total = inside.anatomy.path(part, layer), 0.0
        for batch in one_by_one(inside, examples):
            losses = []
            for gate in (1 + step, 1 - step):

                def scale(value: torch.Tensor, gate: float = gate, head: int = head) -> torch.Tensor:
                    value = value.clone()
                    value[:, head] *= gate
                    return value

                with torch.no_grad(), trace(inside.model, {f"{path}.heads": scale}):
                    logits = batch.output(inside.model)[0]
                expected = batch.expected.flatten()
                losses.append(F.cross_entropy(torch.atleast_2d(logits), expected, ignore_index=IGNORE).item())
            total += abs(losses[0] - losses[1]) / (2 * step)
        assert by_gradient[part, layer, head] == pytest.approx(total / len(examples), rel=1e-4, abs=1e-8)


def test_alignment_is_seen_in_cross_attention(tmp_path: Path) -> None:
    """Sentences written word for word: the word that is aligned is the one with the same number."""
    inside = opened("encoder-decoder")
    path = tmp_path / "same.tsv"
    lines = ["a b c", "b a d", "c d a", "d b c a", "a c", "b d"]
    path.write_text("".join(f"{line}\t{line}\n" for line in lines))
    batches = in_batches(read_examples(inside, [str(path)], 10), inside.device)
    found = {one.name: one for one in measure(inside, batches)}
    total, count = torch.zeros(4), 0
    for line in lines:
        look = inside.look(line, target=line, generate=False)
        total += look.parts["cross"].weights[1].diagonal(dim1=1, dim2=2).sum(dim=1)
        count += len(line.split()) + 1
    for head in range(4):
        assert found[f"cross.1.{head}"].fractions["alignment"] == pytest.approx(float(total[head]) / count, rel=1e-4)


def test_the_least_important_are_removed_first_and_every_layer_keeps_one(tmp_path: Path) -> None:
    inside = opened("decoder")
    for layer, head in ((0, 2), (1, 1), (1, 3)):  # heads that say nothing: nothing is lost without them
        inside.model.decoder.blocks[layer].attention.out.weight.data[:, 4 * head : 4 * head + 4] = 0
    batches = in_batches(read_examples(inside, write_data(inside, tmp_path), 10), inside.device)
    idle = {("decoder", 0, 2), ("decoder", 1, 1), ("decoder", 1, 3)}
    assert all(abs(change) < 1e-12 for head, change in losses_when_off(inside, batches).items() if head in idle)
    for by in ("loss", "gradient"):
        chosen = least_important(inside, batches, 3, by=by, rounds=2)
        assert set(chosen) == idle or by == "loss"  # by loss, a head that does harm may go before an idle one
        most = least_important(inside, batches, 6, by=by, rounds=3)
        assert len(set(most)) == 6 and all(sum(one[1] == layer for one in most) == 3 for layer in (0, 1))
    with pytest.raises(UserError, match="at most 6 can be removed"):
        least_important(inside, batches, 7)


def test_data_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    inside = opened("classes")
    (tmp_path / "a.tsv").write_text("text\tlabel\nthe animal\twhat\n")
    with pytest.raises(UserError, match=r"a\.tsv, row \d: 'what' is not a class"):
        read_examples(inside, [str(tmp_path / "a.tsv")], 5)
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(UserError, match="no example that the model can read"):
        read_examples(opened("masked"), [str(tmp_path / "a.txt")], 5)
    with pytest.raises(UserError, match="must be 1 or more"):
        read_examples(inside, [str(tmp_path / "a.tsv")], 0)
    with pytest.raises(UserError, match="no-such"):
        read_examples(opened("decoder"), [str(tmp_path / "no-such.txt")], 5)


# Commands


def test_heads_and_prune_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("resvg_py")
    inside = opened("encoder-decoder")
    run, data = str(tmp_path / "run"), write_data(inside, tmp_path)
    regard.save(inside.model.float(), run, tokenizers={"tokenizer": WORDS})
    assert main(["heads", run, "--data", *data, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in result["heads"]][::4] == [
        f"{part}.{layer}.0" for part in inside.anatomy.parts for layer in (0, 1)
    ]
    assert all(isinstance(one[name], float) for one in result["heads"] for name in ("loss_change", "gradient", "score"))
    for name in ("a.html", "a.svg", "a.png", "a.json"):
        assert main(["heads", run, "--data", *data, "--no-loss", "--sort", "pattern", "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 500
    assert "alignment" in capsys.readouterr().out
    assert main(["prune", run, "--least", "40%", "--data", *data, "-o", str(tmp_path / "less")]) == 0
    out = capsys.readouterr().out
    assert "heads: 24 -> 14" in out and "not used to choose the heads" in out
    assert len(Inside.open(tmp_path / "less").anatomy.heads) == 14
    assert main(["prune", run, "--heads", "cross.0.1", "-o", str(tmp_path / "less")]) == 2  # is there already
    assert main(["prune", run, "--least", "3", "-o", str(tmp_path / "no")]) == 2
    assert main(["prune", run, "--heads", *(f"cross.0.{head}" for head in range(4)), "-o", str(tmp_path / "no")]) == 2
    assert "keep at least one" in capsys.readouterr().err and not (tmp_path / "no").exists()
