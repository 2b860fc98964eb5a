"""Recipes: a model from a name, a file or a folder, and errors that say whose mistake it is."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import PRESETS, preset, read_changes, read_model, read_recipe, with_preset
from regard.settings import to_dict, write_toml


@pytest.fixture
def recipe(tmp_path):
    """Write the text of a recipe; gives its path."""

    def write(text: str):
        path = tmp_path / "translate.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_its_name(name):
    assert read_model(name) == preset(name)
    assert read_model(name, {"layers": 1}) == preset(name, layers=1)


def test_a_recipe_holds_the_fields_or_a_preset_with_changes(recipe):
    assert read_model(recipe('[model]\narchitecture = "decoder"\nvocab_size = 8000\n')) == ModelConfig(
        architecture="decoder", vocab_size=8000
    )
    path = recipe('[model]\npreset = "base"\nheads = 4\n')
    assert read_model(path) == preset("base", heads=4)
    assert read_model(str(path), {"heads": 16, "position": "rope"}) == preset("base", heads=16, position="rope")


def test_what_a_recipe_leaves_open_can_be_set(recipe):
    path = recipe("[model]\ndim = 64\n")
    with pytest.raises(UserError, match=r"translate\.toml: .*vocab_size is not set"):
        read_model(path)
    assert read_model(path, {"vocab_size": 100}) == ModelConfig(dim=64, vocab_size=100)


def test_other_tables_pass_through(recipe):
    path = recipe('[model]\npreset = "tiny"\n[data]\npath = "x.tsv"\n[train]\nsteps = 3\n')
    assert read_model(path) == preset("tiny")
    assert read_recipe(path)["data"] == {"path": "x.tsv"}


def test_the_folder_of_a_saved_model(tmp_path):
    config = preset("gpt2", kv_heads=4, window=64)
    write_toml(tmp_path / "recipe.toml", {"model": to_dict(config), "train": {"steps": 3}})
    assert read_model(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nsteps = 3\n", r"translate\.toml: has no table \[model\]"),
        ("model = 3\n", r"translate\.toml: has no table \[model\]"),
        ('[model]\npreset = "bse"\n', r"translate\.toml: model\.preset = 'bse'.*did you mean 'base'"),
        ("[model]\npreset = 3\n", r"translate\.toml: model\.preset = 3"),
        ("[model]\npreset = [1]\n", r"translate\.toml: model\.preset = \[1\]"),
        ('[model]\npreset = "base"\nhaeds = 4\n', r"translate\.toml: model\.haeds: .*did you mean 'heads'"),
        ('[model]\npreset = "base"\nheads = "4"\n', r"translate\.toml: model\.heads = '4': expected an integer"),
        ("[model\n", r"translate\.toml: not readable as TOML"),
    ],
)
def test_a_wrong_recipe_is_named_with_the_field(recipe, text, message):
    with pytest.raises(UserError, match=message):
        read_model(recipe(text))


def test_a_wrong_change_is_not_blamed_on_the_file(recipe):
    with pytest.raises(UserError, match=r"^model\.heads = 3 does not divide dim = 512"):
        read_model(recipe('[model]\npreset = "base"\n'), {"heads": 3})


def test_names_that_mean_nothing(tmp_path):
    with pytest.raises(UserError, match=r"'gtp2' is neither .* did you mean 'gpt2'\? Choose one of: base, "):
        read_model("gtp2")
    with pytest.raises(UserError, match="no such file or folder"):
        read_model(tmp_path / "missing.toml")
    with pytest.raises(UserError, match=r"recipe\.toml: missing"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"Hugging Face folder .* regard import"):
        read_model(tmp_path)


def test_changes_are_read_as_the_field_wants_them():
    texts = [
        "heads=4",
        "position=rope",
        "norm=none",
        "window = none",
        "tie_embeddings=false",
        'architecture="decoder"',
        "dropout=1e-2",
    ]
    assert read_changes(texts) == {
        "heads": 4, "position": "rope", "norm": "none", "window": None, "tie_embeddings": False,
        "architecture": "decoder",
        "dropout": 0.01,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads", "write name=value"),
        ("haeds=4", "did you mean 'heads'"),
        ("=4", "write name=value"),
        ("", "write name=value"),
    ],
)
def test_changes_that_cannot_be_read(text, message):
    with pytest.raises(UserError, match=message):
        read_changes([text])


@pytest.mark.parametrize(
    "text", ["heads=four", "heads=4.5", "heads=[4]", "heads=", "heads=none", "heads=" + "9" * 5000]
)
def test_changes_of_the_wrong_type(text):
    with pytest.raises(UserError, match=r"heads = .*expected an integer"):
        read_model("base", read_changes([text]))


def test_a_preset_scales_its_feed_forward_layers_with_dim():
    assert preset("base", dim=256).ff_dim == 1024 and preset("base").ff_dim == 2048
    assert preset("base", dim=256, ff_dim=300).ff_dim == 300
    assert with_preset({"preset": "gpt2", "dim": 64})["ff_dim"] == 256
