"""The benchmark of generation: it runs at minute size, and every tool writes what was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

pytest.importorskip("transformers", reason="the benchmarks' peers: pip install 'regard[bench]'")

import generation
import table
import writers

from regard.models.config import ModelConfig
from regard.models.transformer import Decoder


def test_it_runs_and_the_likeliest_tokens_are_those_of_transformers(monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [generation.__file__, "--smoke", "--curve", "--repeats", "1", "-o", str(out)])
    generation.main()
    result = json.loads(out.read_text())
    assert [(row["batch"], row["draw"]) for row in result["rows"]] == [
        (1, "likeliest"), (1, "sample"), (2, "likeliest"), (2, "sample"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert {"regard", "huggingface"} <= row["tools"].keys() | result["left_out"].keys()
        for tool in row["tools"].values():
            speed = tool["tokens_per_second"]
            assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert row["draw"] == "sample" or row["tools"]["regard"]["same"] == 1.0
    assert [point["tokens"] for point in result["curve"]] == [16, 32]
    assert str(tmp_path) not in out.read_text() and table.table(out).count("\n") > 10


def test_a_tool_that_stops_early_is_not_counted():
    wish = writers.Wish("a", rows=2, count=3, greedy=True)
    generation.check("good", writers.Generated([[1, 2, 3], [1, 2, 3]], 1.0), wish)
    for ids in ([[1, 2, 3]], [[1, 2, 3], [1, 2]]):
        with pytest.raises(RuntimeError, match="bad generated"):
            generation.check("bad", writers.Generated(ids, 1.0), wish)
    assert writers.Generated([[1, 2, 3], [1, 2, 3]], 2.0).rate == 3.0


def test_tokens_agree_up_to_the_first_that_differs():
    assert writers.same_fraction([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert writers.same_fraction([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0


def test_a_prompt_has_as_many_tokens_as_asked_for():
    tokenizer, text = writers.letters_tokenizer()
    assert len(tokenizer.encode(generation.cut_prompt(tokenizer, text, 32))) == 32


def test_the_large_vocabulary_is_as_large_as_that_of_gpt2(tmp_path):
    tokenizer, text = writers.large_tokenizer(tmp_path)
    assert len(tokenizer) == 50257 and tokenizer.byte_level and tokenizer.eos == 50256
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(generation.cut_prompt(tokenizer, text, 32))) == 32


def test_a_step_reads_weights_and_cache():
    config = ModelConfig(
        architecture="decoder", vocab_size=50, dim=16, layers=3, heads=4, kv_heads=2, ff_dim=24, position="learned"
    )
    model = Decoder(config).to(torch.bfloat16)
    weights = sum(weight.numel() for weight in model.parameters()) - config.max_length * 16
    assert writers.bytes_per_step(model, rows=5, tokens=7) == 2 * (weights + 5 * 7 * 3 * 2 * 2 * 4)
