"""The model in the package is the one that its recipe trains."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.samples import sample_folder

ROOT = Path(__file__).parent.parent


def test_the_installed_model_is_that_of_its_recipe():
    tables = tomllib.loads((ROOT / "recipes" / "korean-small.toml").read_text())
    saved = tomllib.loads((sample_folder("sample:korean-small") / "recipe.toml").read_text())
    for table in ("model", "train", "mask", "text"):
        assert tables[table].items() <= saved[table].items(), table
    bundle = regard.load("sample:korean-small")
    assert sum(weight.numel() for weight in bundle.model.parameters()) == 572_065
    assert bundle.predict(["최고의 [MASK]"])[0].masks[0][0].token == "▁영화"  # the best … film


@pytest.mark.parametrize("command", [["fill", "sample:korean", "[MASK]"], ["explore", "sample:korean", "--no-browser"]])
def test_an_unknown_sample_is_named(command, capsys):
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "sample:korean: unknown sample" in error and "korean-small" in error
