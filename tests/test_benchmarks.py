"""The benchmarks: they run at minute size, count the right tokens, and give every tool the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

pytest.importorskip("transformers", reason="the benchmarks' peers: pip install 'regard[bench]'")

import decoding
import exported
import language
import learners
import lengths
import long_training
import measure
import packing
import parts
import peer_models
import recall
import sentences
import table
import traffic
import training
import translators
import versions

from regard.data.batch import PairBatch, Pairs
from regard.data.pack import Packs
from regard.data.streams import Batches
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer

JOEY = ["--joey", os.environ["REGARD_JOEY"]] if "REGARD_JOEY" in os.environ else []
CONFIG = ModelConfig(dim=16, layers=2, heads=2, ff_dim=24, vocab_size=50, max_length=64)


def run(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [script.__file__, "--smoke", *JOEY, "-o", str(out), *arguments])
    script.main()
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["machine"]["versions"]["torch"] == torch.__version__
    assert str(out.parent) not in result["machine"]["command"]
    assert table.table(out).count("\n") >= 4
    return result


def test_traffic_is_counted_by_hand() -> None:
    """x wᵀ reads both and writes its output; a transposed or expanded tensor costs nothing by itself."""
    with torch.device("meta"):
        x, w, b = torch.empty(10, 8), torch.empty(6, 8), torch.empty(1)
    with traffic.Traffic() as counts:
        out = x @ w.T
        out + b.expand(10, 6)
    assert counts.kernels == 2 and counts.bytes == 4 * (80 + 48 + 60) + 4 * (60 + 1 + 60)


def test_traffic_of_mixers_grows_with_the_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = run(traffic, monkeypatch, tmp_path / "result.json", "--lengths", "65536", "131072")["rows"]
    few, many = ({row["mixer"]: row for row in rows if row["length"] == length} for length in (65536, 131072))
    for mixer in traffic.MIXERS:
        assert 1.9 < many[mixer]["stored_gb"] / few[mixer]["stored_gb"] < 2.1


def test_packed_and_padded_texts_are_the_same_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packing, "SIZES", {"tiny": (16, 2)})
    rows = run(packing, monkeypatch, tmp_path / "out.json", "--rounds", "1", "--least", "0.001")["rows"]
    assert [row["row"] for row in rows] == [512, 512, 2048]
    for row in rows:  # `measured` has compared the outputs
        assert 0.9 * packing.TOKENS < row["tokens"] <= packing.TOKENS and {*row["passes"]} > {"texts", "padded"}


def test_long_rows_are_trained_with_every_kind_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = run(long_training, monkeypatch, tmp_path / "out.json")["rows"]
    assert [row["checkpointing"] for row in rows] == [False, True] * 2
    for stored, recomputed in zip(rows[::2], rows[1::2], strict=True):
        assert stored["loss"] < stored["first_loss"]
        assert stored["valid_loss"] == pytest.approx(recomputed["valid_loss"], rel=1e-4)


def test_training_runs_and_all_learn_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = run(training, monkeypatch, tmp_path / "out.json", "--profile", "--repeats", "1")["rows"][0]
    tools = {name: tool for name, tool in row["tools"].items() if "tokens_per_second" in tool}
    assert {"regard", "regard-packed", "torch", "marian"} <= tools.keys()
    assert ("joeynmt" in tools) == bool(JOEY) and not any("failed" in tool for tool in row["tools"].values())
    assert len({tool["tokens"] for name, tool in tools.items() if name != "regard-packed"}) == 1
    for tool in tools.values():
        speed = tool["tokens_per_second"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
    assert tools["marian"]["parameters"] == tools["regard"]["parameters"]
    assert len(row["profile"]) == 2


def test_language_models_run_and_are_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--repeats", "1", "--profile", "--tools", "regard", "huggingface")
    row = run(language, monkeypatch, tmp_path / "out.json", *arguments)["rows"][0]
    assert not any("failed" in tool for tool in row["tools"].values())
    assert row["tools"]["regard"]["parameters"] == row["tools"]["huggingface"]["parameters"]
    assert all(tool["tokens_per_second"]["median"] > 0 for tool in row["tools"].values()) and len(row["profile"]) == 2


@pytest.mark.slow
def test_the_operations_of_gpt2_are_nanogpts() -> None:
    """Its N: every matrix, bias and norm of 12 blocks, the last norm, the table; then 12 · L · H · Q · T."""
    block = 12 * 768**2 + 13 * 768
    wanted = 6 * (12 * block + 2 * 768 + 50304 * 768) + 12 * 12 * 12 * 64 * 1024
    assert language.operations_per_token(language.SIZES["gpt2"].config) == wanted


def test_losses_by_position_beyond_the_training_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be, or not to be, that is the question.\n" * 400)
    figure = tmp_path / "lengths.svg"
    arguments = ("--data", str(tmp_path), "--figure", str(figure))
    result = run(lengths, monkeypatch, tmp_path / "out.json", *arguments)
    assert [row["model"] for row in result["rows"]] == ["rope", "rope-window", "alibi"]
    assert all(len(row["by_position"]) == 512 / 16 for row in result["rows"])
    assert figure.read_text().startswith("<svg")


def test_recall_is_learned_by_layers_of_equal_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = tmp_path / "recall.svg"
    rows = run(recall, monkeypatch, tmp_path / "out.json", "--figure", str(figure))["rows"]
    assert {row["layer"] for row in rows} == set(recall.KINDS) and len(rows) == 2 * len(recall.KINDS)
    assert max(row["parameters"] for row in rows) < 1.1 * min(row["parameters"] for row in rows)
    assert figure.read_text().startswith("<svg")


@pytest.mark.parametrize("kind", recall.KINDS)
def test_recall_models_see_as_far_back_as_they_say(kind: str) -> None:
    torch.manual_seed(0)
    model = recall.Model(kind, 16).double()
    same, changed = torch.zeros(1, recall.LENGTH, dtype=torch.long), torch.eye(recall.LENGTH, dtype=torch.long)
    difference = (model(changed) - model(same))[:, 40].abs().amax(dim=-1)  # of output 40 by the position changed
    seen = (difference > 1e-12).nonzero().flatten().tolist()
    reach = recall.reach(kind)
    assert seen[0] >= 0 and seen[-1] == 40  # causal
    assert reach is None or seen[0] == 40 - reach


@pytest.mark.slow
def test_decoding_runs_and_the_tools_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(decoding, monkeypatch, tmp_path / "out.json", "--repeats", "1")
    assert [row["search"] for row in result["rows"]] == ["greedy", "beam 5"]
    for row in result["rows"]:
        assert {"regard", "huggingface"} <= row["tools"].keys()
        assert ("joeynmt" in row["tools"]) == bool(JOEY)
        for name, tool in row["tools"].items():
            assert tool["tokens"] == 5 * tool["sentences"]  # random weights write answers of a fixed length
            assert name == "huggingface" or tool["same"] == 1.0


def test_target_tokens_are_pieces_and_ends_without_padding() -> None:
    data = Pairs([[9, 3], [9, 9, 9, 3], [9, 3]], [[2, 9, 9, 3], [2, 9, 3], [2, 9, 9, 9, 3]])
    assert sentences.target_tokens(data) == 3 + 2 + 4
    assert sentences.target_tokens(data, torch.tensor([0, 2])) == 3 + 4


def test_both_kinds_of_batches_hold_every_target_token() -> None:
    corpus = sentences.generate(sentences.MULTI30K, 300, 50)
    batches, packs = Batches(corpus.pairs, 512, 1), Packs(corpus.pairs, 4, 64, 1)
    plan = batches.plan(0)
    assert sum(sentences.target_tokens(corpus.pairs, rows) for rows in plan) == corpus.tokens
    assert sum(int(corpus.pairs.batch(rows).tokens) for rows in plan) == corpus.tokens
    assert int(packs.fill(0, packs.plan(0)).tokens) == corpus.tokens


def test_generated_sentences_have_the_promised_lengths() -> None:
    for wanted in (sentences.MULTI30K, sentences.WMT):
        pairs = sentences.generate(wanted, 20_000, 50).pairs
        tokens = (pairs.targets.lengths - 1).double()
        assert tokens.mean() == pytest.approx(wanted.mean, rel=0.03)
        assert tokens.log().std() == pytest.approx(wanted.spread, rel=0.1)
        assert int(tokens.max()) <= wanted.longest
        ids, is_real = pairs.targets.pad(torch.arange(50))
        assert bool((ids[:, 0] == sentences.BOS).all()) and bool((ids[is_real] == sentences.EOS).sum() == 50)


def test_made_up_lines_are_words_that_the_tokenizer_knows() -> None:
    tokenizer, lines = sentences.made_up_lines(20, 1000)
    assert len(tokenizer) == 1000
    ids = tokenizer.encode_batch(lines)
    assert [len(line) for line in ids] == [len(line.split()) for line in lines]
    assert all(number != tokenizer.unk for line in ids for number in line)


def test_the_batches_of_a_sample_reach_from_short_to_long() -> None:
    corpus = sentences.generate(sentences.WMT, 2000, 50)
    plan = Batches(corpus.pairs, 512, 1).plan(0)
    longest = [int(corpus.pairs.sizes[rows].max()) for rows in plan]
    chosen = [int(corpus.pairs.sizes[rows].max()) for rows in sentences.even_choice(plan, corpus.pairs, 5)]
    assert chosen == sorted(chosen)
    below = [sum(other < size for other in longest) / len(longest) for size in chosen]
    assert below == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.1)
    assert len(sentences.even_choice(plan[:2], corpus.pairs, 5)) == 2


@pytest.mark.parametrize("name", peer_models.MODELS)
def test_a_peer_sees_neither_padding_nor_the_future(name: str) -> None:
    if name == "x-transformers":
        pytest.importorskip("x_transformers", reason="pip install 'regard[bench]'")
    model = peer_models.MODELS[name](CONFIG).eval()
    data = sentences.generate(sentences.MULTI30K, 6, 50).pairs
    batch = data.batch(torch.arange(6))
    assert batch.source_is_real is not None
    with torch.no_grad():
        logits = model(batch.source, batch.source_is_real, batch.target)
        for row in range(6):
            alone = data.batch(torch.tensor([row]))
            is_real = torch.ones_like(alone.source, dtype=torch.bool)
            expected = model(alone.source, is_real, alone.target)[0]
            torch.testing.assert_close(logits[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)
        other = batch.target.clone()
        other[:, 4:] = 7
        changed = model(batch.source, batch.source_is_real, other)
    torch.testing.assert_close(changed[:, :4], logits[:, :4])
    assert not torch.equal(changed[:, 4:], logits[:, 4:])


@pytest.mark.parametrize(("name", "more"), [("marian", 0), ("torch", 2 * 2 * CONFIG.dim)])
def test_a_peer_has_our_parameters(name: str, more: int) -> None:
    """nn.Transformer ends each of its two stacks with one more norm."""
    trained = sum(p.numel() for p in peer_models.MODELS[name](CONFIG).parameters() if p.requires_grad)
    assert trained - sum(p.numel() for p in build(CONFIG).parameters()) == more


def test_operations_of_a_token_follow_the_formula() -> None:
    """Two operations forward and four backward for each number of a matrix, and the visible pairs of attention."""
    s, t, d, f, layers, vocab_size = 7, 5, CONFIG.dim, CONFIG.ff_dim, CONFIG.layers, 50
    data = Pairs([[9] * (s - 1) + [3]] * 3, [[2] + [9] * (t - 1) + [3]] * 3)
    matrices = layers * ((4 * d * d + 2 * d * f) * s + (6 * d * d + 2 * d * f) * t + 2 * d * d * s) + d * vocab_size * t
    pairs = layers * (s * s + t * (t + 1) // 2 + s * t)
    corpus = sentences.Corpus(data, vocab_size, "three alike")
    assert training.operations_per_token(CONFIG, corpus) == pytest.approx((6 * matrices + 12 * d * pairs) / t)


def test_tokens_of_an_answer_are_its_pieces_and_its_end() -> None:
    assert translators.count_tokens([0, 3, 4, 5], most=5) == 1 + 4 + 5 + 5  # the last has no end: it was cut off
    assert translators.until_end([8, 9, 3, 0, 0], 3) == [8, 9]
    assert translators.until_end([8, 9], 3) == [8, 9]
    assert translators.by_length([[1, 1], [1], [1, 1, 1]], 2) == [[1, 0], [2]]
    assert decoding.same_fraction({"a": "x", "b": "y"}, {"a": "x", "b": "z", "c": "w"}) == 0.5


@pytest.mark.parametrize(
    ("name", "shapes", "part"),
    [
        ("aten::mm", [[64, 16], [16, 50]], "vocabulary"),
        ("aten::mm", [[64, 16], [16, 16]], "matmul"),
        ("mkldnn::_linear_pointwise", [[64, 16], [16, 16]], "matmul"),
        ("autograd::engine::evaluate_function: LogSoftmaxBackward0", [], "vocabulary"),
        ("aten::embedding", [[50, 16], [8, 8]], "rest"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[2, 2, 8, 8]], "attention"),
        ("aten::_fused_adamw_", [[[50, 16]]], "optimizer"),
        ("aten::native_layer_norm", [[64, 16]], "rest"),
    ],
)
def test_each_operation_counts_in_one_part(name: str, shapes: list[Any], part: str) -> None:
    assert parts.part_of(name, shapes, vocab_size=50) == part


def test_the_shares_of_a_step_sum_to_one() -> None:
    left, right = torch.randn(64, 64), torch.randn(64, 64)
    shares = parts.shares(lambda: left @ right, vocab_size=50)
    assert sum(shares.values()) == pytest.approx(1, abs=0.01) and shares["matmul"] > 0.5


def test_turns_begin_with_another_tool_each_round() -> None:
    order: list[str] = []
    measure.take_turns({name: partial(order.append, name) for name in "abc"}, 2)
    assert "".join(order) == "abcbca"
    assert measure.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_a_peer_gets_a_mask_in_any_case() -> None:
    whole = Pairs([[9, 3]], [[2, 9, 3]]).batch(torch.tensor([0]))
    assert whole.source_is_real is None
    masked = learners.with_mask(whole)
    assert isinstance(masked, PairBatch) and masked.source_is_real is not None and bool(masked.source_is_real.all())


@pytest.mark.slow
def test_two_versions_take_turns(tmp_path: Path) -> None:
    """A version beside itself: one row per measurement of ours, both with speeds above zero."""
    root, out = Path(versions.__file__).parent.parent, tmp_path / "versions.json"
    benchmark = ["generation.py", "--smoke", "--peers", "regard", "--batches", "1", "2"]
    command = [sys.executable, versions.__file__, str(root), "--rounds", "2", "-o", str(out), "--", *benchmark]
    subprocess.run(command, check=True)
    result = json.loads(out.read_text())
    assert [(row["row"], row["tool"]) for row in result["rows"]] == [(i, "regard") for i in range(4)]
    for row in result["rows"]:
        assert min(row[side][value] for side in ("before", "after", "ratio") for value in ("low", "median")) > 0


@pytest.mark.slow
def test_a_failing_version_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, versions.__file__, str(tmp_path), "--", "generation.py", "--smoke"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 1 and "error: the benchmark ended with exit codes" in outcome.stderr


@pytest.mark.slow
def test_exported_models_are_measured_beside_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A language model with its text: the run, CTranslate2 and its int8, the ONNX formats left out."""
    pytest.importorskip("ctranslate2", reason="pip install 'regard[ctranslate2]'")
    monkeypatch.delitem(exported.FORMATS, "onnx")
    monkeypatch.delitem(exported.FORMATS, "onnx-int8")
    text = "a small model reads what stands before it\n" * 20
    (tmp_path / "input.txt").write_text(text)
    tokenizer = Tokenizer.train([text], "char", 60)
    model = build(
        ModelConfig(
            dim=16, layers=1, heads=2, ff_dim=24, vocab_size=len(tokenizer), architecture="decoder", max_length=16
        )
    )
    data = {"train": ["input.txt"], "valid_fraction": 0.5, "folder": str(tmp_path)}
    recipe = {"task": "language-modeling", "data": data, "text": {"kind": "char"}}
    save(model, tmp_path / "run", tokenizers={"tokenizer": tokenizer}, recipe=recipe)
    arguments = [str(tmp_path / "run"), "--repeats", "2", "--items", "64", "-o", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [exported.__file__, *arguments])
    exported.main()
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    models = row["models"]
    assert (row["set"], row["items"]) == ("valid", 64) and list(models) == ["torch", "ctranslate2", "ctranslate2-int8"]
    assert models["ctranslate2"]["quality"] == pytest.approx(models["torch"]["quality"], abs=1e-3)
    assert models["torch"]["speed"] == models["torch"]["size"] == 1 and models["ctranslate2"]["memory"] > 1e7
    assert table.table(tmp_path / "out.json").count("\n") == 4
