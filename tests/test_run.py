"""A model on disk: what is saved comes back identical, and a damaged folder says what is wrong with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.errors import UserError
from regard.files import staged
from regard.models import folder as run
from regard.models.recipe import preset, read_recipe
from regard.models.transformer import build
from regard.settings import read_toml, write_toml
from regard.text.tokenizer import Tokenizer

TINY = {"dim": 12, "heads": 3, "layers": 2, "ff_dim": 10, "vocab_size": 31, "max_length": 40}
CONFIGS = {
    "paper": preset("base", **TINY),
    "untied": preset("base", **TINY, share_embeddings=False, tie_embeddings=False, target_vocab_size=17),
    "rope": preset("gpt2", **TINY, position="rope", activation="swiglu", kv_heads=1),
    "alibi": preset("gpt2", **TINY, position="alibi", norm="rms", bias=False),
    "experts": preset("gpt2", **TINY, experts=3),
    "vit": preset("vit-tiny", **{**TINY, "vocab_size": None}, image_size=8, patch_size=4, classes=3),
}


@pytest.fixture
def model():
    return build(CONFIGS["paper"])


@pytest.fixture
def folder(model, tmp_path) -> Path:
    run.save(model, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat", "고양이가 앉았다"], "char")


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_reloaded_means_identical(name, tmp_path):
    model = build(CONFIGS[name]).eval()
    run.save(model, tmp_path)
    again = run.load(tmp_path)
    assert again.config == model.config and not again.training
    ids = torch.randint(17, (2, 7))
    given = {"encoder": (torch.randn(2, 3, 8, 8),), "decoder": (ids,), "encoder-decoder": (ids, ids)}
    with torch.no_grad():
        assert torch.equal(again(*given[model.config.architecture]), model(*given[model.config.architecture]))


def test_tied_tables_are_stored_once_and_stay_tied(model, folder):
    stored = load_file(folder / "model.safetensors")
    assert sum(tensor.shape == (31, 12) for tensor in stored.values()) == 1
    assert sum(tensor.numel() for tensor in stored.values()) == sum(tensor.numel() for tensor in model.parameters())
    again = run.load(folder)
    assert (
        again.output_head.project.weight is again.source_embedding.tokens.weight
        and again.target_embedding.tokens is again.source_embedding.tokens
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_kept(model, tmp_path, dtype):
    run.save(model.to(dtype), tmp_path)
    again = run.load(tmp_path)
    assert {tensor.dtype for tensor in again.parameters()} == {dtype}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), model.parameters(), strict=True))


def test_a_device_that_is_not_there(folder):
    with pytest.raises(UserError, match="device = 'cuda:99' is not available"):
        run.load(folder, device="cuda:99")
    with pytest.raises(UserError, match="device = 'abacus' is not available"):
        run.load(folder, device="abacus")


def test_a_compiled_model_is_saved_under_its_own_names(model, folder, tmp_path):
    run.save(torch.compile(model), tmp_path / "compiled")
    assert (
        load_file(tmp_path / "compiled" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    )
    assert run.load(tmp_path / "compiled").config == model.config


def test_loading_leaves_the_random_state_alone(folder):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    run.load(folder)
    assert torch.equal(torch.rand(3), expected)


def test_other_tables_of_the_recipe_are_kept(model, tmp_path):
    run.save(model, tmp_path, recipe={"data": {"name": "toy"}, "train": {"steps": 3}})
    run.save(model, tmp_path, recipe={"train": {"steps": 5}, "model": {"dim": 7}})
    tables = read_recipe(tmp_path)
    assert tables["data"] == {"name": "toy"} and tables["train"] == {"steps": 5}
    assert tables["model"]["dim"] == 12 and next(iter(tables)) == "model"
    assert run.load(tmp_path).config == model.config


def test_tokenizers_travel_along(model, tmp_path, tokenizer):
    run.save(model, tmp_path / "one", tokenizers={"tokenizer": tokenizer})
    run.save(model, tmp_path / "two", tokenizers={"source": tokenizer, "target": tokenizer})
    assert run.load_tokenizers(tmp_path / "one").keys() == {"tokenizer"}
    found = run.load_tokenizers(tmp_path / "two")
    assert found.keys() == {"source", "target"} and found["target"].encode("고양이") == tokenizer.encode("고양이")
    with pytest.raises(UserError, match="'vocab_size'"):
        run.save(model, tmp_path / "three", tokenizers={"vocab_size": tokenizer})
    assert not (tmp_path / "three").exists()


def test_weights_are_written_last_and_whole(model, folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()
    order = []
    replace_file = os.replace

    def note(source, target):
        order.append(Path(target).name)
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", note)
    run.save(model, folder)
    assert order == ["recipe.toml", "model.safetensors"]

    def fail(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="No space left on device"):
        run.write_weights(folder / "model.safetensors", run.weights_of(model))
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(folder)) == ["model.safetensors", "recipe.toml"]


# --- damaged folders


def test_no_folder_and_no_recipe(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        run.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"recipe\.toml: missing"):
        run.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="regard import"):
        run.load(tmp_path)
    with pytest.raises(UserError, match="is a file"):
        run.save(build(CONFIGS["paper"]), tmp_path / "config.json")


def test_a_missing_or_wrong_model_table(folder):
    write_toml(folder / "recipe.toml", {"data": {}})
    with pytest.raises(UserError, match=r"recipe\.toml: has no table \[model\]"):
        run.load(folder)
    write_toml(folder / "recipe.toml", {"model": {"vocab_size": 31, "output_head": 3}})
    with pytest.raises(UserError, match=r"recipe\.toml: model\.output_head = 3"):
        run.load(folder)
    (folder / "recipe.toml").write_text("[model\n")
    with pytest.raises(UserError, match="not readable as TOML"):
        run.load(folder)


def test_missing_weights_and_pickles(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: missing.*train"):
        run.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is a pickle.*convert"):
        run.load(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 4000, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or incomplete"):
        run.load(folder)


def test_corrupt_headers(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    wrong_size = b'{"a":{"dtype":"F32","shape":[99],"data_offsets":[0,4]}}'
    for start, junk in ((0, b"\xff" * 8), (8, b"\x00" * 20), (8, wrong_size)):
        path.write_bytes(content[:start] + junk + content[start + len(junk) :])
        with pytest.raises(UserError, match="damaged or incomplete"):
            run.load(folder)


def test_weights_of_another_model_name_the_tensor(folder):
    tables = read_toml(folder / "recipe.toml")
    for changes, words in (
        ({"layers": 3}, r"lacks encoder\.blocks\.2"),
        ({"layers": 1}, r"decoder\.blocks\.1\..* is not in the model"),
        ({"ff_dim": 11}, r"encoder\.blocks\.0\.feedforward\.up\.weight has shape \(10, 12\).*\(11, 12\)"),
        ({"tie_embeddings": False}, r"lacks output_head\.project\.weight"),
    ):
        write_toml(folder / "recipe.toml", {"model": {**tables["model"], **changes}})
        with pytest.raises(UserError, match=words):
            run.load(folder)


def test_an_extra_tensor_is_not_ignored(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "stranger": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="stranger is not in the model"):
        run.load(folder)


def test_filling_changes_nothing_when_something_does_not_fit(model):
    other = build(replace(model.config, ff_dim=11))
    before = {name: tensor.clone() for name, tensor in run.weights_of(model).items()}
    with pytest.raises(UserError):
        run.fill(model, run.weights_of(other), "weights")
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights_of(model).items())


# --- staged folders


def stage(folder, **options):
    def own(target):
        return ["recipe.toml"] if (target / "recipe.toml").is_file() else []

    return staged(folder, **{"own": own, "keep": "elsewhere", **options})


def test_a_staged_folder_appears_whole_or_not_at_all(tmp_path):
    with stage(tmp_path / "deep" / "run") as fresh:
        (fresh / "recipe.toml").write_text("new")
        assert not (tmp_path / "deep" / "run").exists()
    assert (tmp_path / "deep" / "run" / "recipe.toml").read_text() == "new"
    with pytest.raises(KeyboardInterrupt), stage(tmp_path / "deep" / "run", force=True) as fresh:
        (fresh / "recipe.toml").write_text("newer")
        raise KeyboardInterrupt
    assert (tmp_path / "deep" / "run" / "recipe.toml").read_text() == "new"
    with stage(tmp_path / "deep" / "run", force=True) as fresh:
        (fresh / "recipe.toml").write_text("newest")
    assert (tmp_path / "deep" / "run" / "recipe.toml").read_text() == "newest"
    assert os.listdir(tmp_path / "deep") == ["run"]
    with pytest.raises(ValueError), stage(tmp_path / "other" / "run"):
        raise ValueError
    assert os.listdir(tmp_path) == ["deep"]


def test_what_a_staged_folder_never_replaces(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_text("")
    (tmp_path / "run" / "inside").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, options, words in (
        ("run", {}, "--force"),
        ("photos", {"force": True}, "not written by this command"),
        ("file", {"force": True}, "not written by this command"),
        ("run", {"force": True, "keep": tmp_path / "run" / "inside"}, "is being read"),
    ):
        with pytest.raises(UserError, match=words), stage(tmp_path / name, **options):
            raise AssertionError("must not come this far")
    with stage(tmp_path / "empty") as fresh:
        (fresh / "recipe.toml").write_text("")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "photos", "run"]
