"""`regard cost`: the values of the formulas as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from regard.cli import main
from regard.cost import cost
from regard.models.recipe import PRESETS, preset
from regard.settings import to_dict, write_toml
from regard.terminal import count, size


def run(capsys, *arguments: str) -> str:
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


def row(text: str, label: str) -> str:
    """The value in the row `label`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return "  ".join(line.strip().removeprefix(label).split())


def test_the_table_shows_the_values_of_the_formulas(capsys):
    text = run(capsys, "base", "--seq", "512", "--batch", "32")
    assert text.startswith("base: encoder-decoder, 6+6 layers, dim 512, 8 heads, ff_dim 2048, vocab_size 37000\n")
    assert "batch: 32 x (512 source tokens, 512 target tokens)" in text
    assert row(text, "total") == "63.08  M  63,082,496"
    # 2 · 6 layers · 32 rows · 512 tokens · 512 numbers · 2 bytes = 192 MiB, for self and cross attention each
    assert row(text, "key/value cache") == "384.00  MiB  self  192.00  MiB,  cross  192.00  MiB"
    assert row(text, "training: weights, gradients, Adam").startswith("962.56  MiB")  # 16 bytes a parameter
    assert row(text, "rule of thumb 6·N").startswith("378.49  M")
    assert "assumptions: attention = 'fused'" in text


def test_columns_are_aligned(capsys):
    lines = run(capsys, "gpt2").splitlines()
    ends = {line.index(" M", 30) for line in lines if line.startswith("  ") and " M " in line + " "}
    assert len(ends) == 1


def test_settings_can_be_changed(capsys):
    plain, grouped = (
        json.loads(run(capsys, "gpt2", "--json", *more))
        for more in ([], ["--set", "kv_heads=4", "--set", "position=rope"])
    )
    assert grouped["memory"]["kv_cache"] * 3 == plain["memory"]["kv_cache"]  # 4 of 12 heads
    assert "positions" in plain["parameters"]["parts"] and "positions" not in grouped["parameters"]["parts"]


@pytest.mark.parametrize("name", PRESETS)
def test_json_is_complete_and_consistent(capsys, name):
    result = json.loads(run(capsys, name, "--batch", "2", "--dtype", "fp32", "--json"))
    assert result.pop("model") == name
    assert result == cost(preset(name), batch=2, dtype="fp32").to_dict()
    assert set(result) == {"workload", "tokens", "parameters", "operations", "memory"}
    memory = result["memory"]
    assert result["parameters"]["total"] == sum(result["parameters"]["parts"].values())
    assert result["operations"]["forward"] == sum(result["operations"]["parts"].values())
    assert memory["training"] == memory["training_state"] + memory["activations"] + memory["loss_gradients"]
    assert memory["kv_cache"] == sum(memory["kv_cache_parts"].values())


def test_a_recipe_and_a_folder(capsys, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npreset = "small"\nheads = 8\n[train]\nsteps = 10\n')
    write_toml(tmp_path / "recipe.toml", {"model": to_dict(preset("small", heads=8))})
    by_file, by_folder = (json.loads(run(capsys, str(path), "--json")) for path in (recipe, tmp_path))
    assert {**by_file, "model": ""} == {**by_folder, "model": ""}


def test_the_list_of_presets(capsys):
    lines = run(capsys, "--list").splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *PRESETS]
    assert lines[5].split() == ["gpt2", "decoder", "12", "768", "12", "3072", "50257", "124,439,808"]
    assert json.loads(run(capsys, "--list", "--json"))["bert-base"]["total"] == 109_482_240


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["no model: pass", "gpt2"]),
        (["gtp2"], ["did you mean 'gpt2'?"]),
        (["missing.toml"], ["missing.toml: no such file"]),
        (["gpt2", "--seq", "1025"], ["seq = 1025", "max_length = 1024"]),
        (["base", "--seq", "0"], ["seq = 0: must be 1 or more"]),
        (["base", "--seq", "many"], ["--seq", "'many'"]),
        (["base", "--batch", "-1"], ["batch = -1: must be 1 or more"]),
        (["base", "--dtype", "int8"], ["--dtype", "'int8'", "bf16"]),
        (["base", "--set", "heads=3"], ["heads = 3 does not divide dim = 512"]),
        (["base", "--list"], ["remove either 'base' or --list"]),
    ],
)
def test_errors_are_one_line_with_the_remedy(capsys, monkeypatch, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    assert main(["cost", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_units():
    assert [count(x) for x in (0, 999, 1000, 63_082_496, 2.5e12, 1e30)] == [
        "0",
        "999",
        "1.00 K",
        "63.08 M",
        "2.50 T",
        "1.00e+12 E",
    ]
    assert [size(x) for x in (512, 1536, 36 * 2**20, 2**40)] == ["512 B", "1.50 KiB", "36.00 MiB", "1.00 TiB"]


def test_a_recipe_has_the_vocabulary_size_of_its_tokenizer(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    text, model = "[text]\nvocab_size = 8000\n", '[model]\npreset = "tiny"\n'
    expected = {size: cost(preset("tiny", vocab_size=size)).to_dict()["parameters"] for size in (500, 700, 8000)}
    recipe.write_text(text + model)
    assert json.loads(run(capsys, str(recipe), "--json"))["parameters"] == expected[8000]
    assert json.loads(run(capsys, str(recipe), "--set", "vocab_size=500", "--json"))["parameters"] == expected[500]
    recipe.write_text(text + model + "vocab_size = 700\n")
    assert json.loads(run(capsys, str(recipe), "--json"))["parameters"] == expected[700]
    recipe.write_text('task = "language-modeling"\n' + text + '[model]\npreset = "gpt2"\n')
    assert ", vocab_size 8000\n" in run(capsys, str(recipe))
