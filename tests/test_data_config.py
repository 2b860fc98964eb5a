"""The [data] table of a recipe: what it may say, where its names start, and `regard data check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard import cli
from regard.api import open_recipe
from regard.data.pairs import PairData
from regard.errors import UserError
from regard.settings import from_dict, read_toml, to_dict, write_toml


def write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def texts(of: PairData) -> list[tuple[str, str]]:
    return [pair[:2] for pair in of.read(of.train)]


def read_data(recipe: Path, data: Path | None = None) -> PairData:
    """As a command reads the [data] table of a recipe."""
    tables, _ = open_recipe(str(recipe), data and str(data))
    return from_dict(PairData, tables["data"], "data.")


def test_recipe_round_trip(tmp_path) -> None:
    given_table = {"train": ["a.en", "a.de"], "valid": ["v.tsv"], "test": {"x": ["x.en", "x.de"], "y": ["y.tsv"]}}
    of = from_dict(PairData, {**given_table, "source": "en", "target": "de"}, "data.")
    assert of.train == ("a.en", "a.de") and of.test == {"x": ("x.en", "x.de"), "y": ("y.tsv",)}
    write_toml(tmp_path / "recipe.toml", {"data": to_dict(of)})
    assert from_dict(PairData, read_toml(tmp_path / "recipe.toml")["data"]) == of


def test_relative_names_start_beside_the_recipe_or_in_data(tmp_path) -> None:
    (tmp_path / "recipe.toml").write_text('[data]\ntrain = ["t.tsv"]\n')
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "t.tsv", ["here\tx"])
    write(tmp_path / "elsewhere" / "t.tsv", ["there\tx"])
    assert texts(read_data(tmp_path / "recipe.toml")) == [("here", "x")]
    assert texts(read_data(tmp_path / "recipe.toml", tmp_path / "elsewhere")) == [("there", "x")]
    (tmp_path / "recipe.toml").write_text('[data]\ntrain = ["t.tsv"]\nfolder = "elsewhere"\n')
    assert texts(read_data(tmp_path)) == [("there", "x")]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('train = "t.tsv"', "data.train = 't.tsv': write a list"),
        ("train = []", "train = []: no files"),
        ("", "train = []: no files"),
        ("train = [1]", "expected a list of file names"),
        ('train = ["a\\u0000.tsv"]', "expected a list of file names"),
        ('train = ["a.tsv"]\nfolder = "\\u0000"', "not a folder name"),
        ('train = ["a.tsv"]\ntest = ["a.tsv"]', "give each set a name"),
        ('train = ["a.tsv"]\ntest = { x = "a.tsv" }', "data.test.x = 'a.tsv': write a list"),
        ('train = ["a.tsv"]\nsource = "en"', "without target"),
        ('train = ["a.tsv"]\nsource = "en"\ntarget = "en"', "two columns"),
        ('train = ["a.tsv"]\nmax_length = 1', "must be 2 or more"),
        ('train = ["a.tsv"]\nmax_length = "9"', "expected an integer"),
        ('train = ["a.tsv"]\nvaild = ["a.tsv"]', "did you mean 'valid'"),
    ],
)
def test_wrong_tables(tmp_path, table, message) -> None:
    (tmp_path / "recipe.toml").write_text(f"[data]\n{table}\n")
    with pytest.raises(UserError) as caught:
        read_data(tmp_path / "recipe.toml")
    assert message in str(caught.value)


def test_the_command(tmp_path, capsys) -> None:
    (tmp_path / "recipe.toml").write_text('[data]\ntrain = ["t.tsv"]\ntest = { x = ["x.en", "x.de"] }\n')
    write(tmp_path / "t.tsv", ["one\teins", "two\t"])
    write(tmp_path / "x.en", ["one"])
    write(tmp_path / "x.de", ["eins"])
    assert cli.main(["data", "check", str(tmp_path)]) == 2
    assert "t.tsv, line 2: column 'target' is empty" in capsys.readouterr().err
    assert cli.main(["data", "check", str(tmp_path), "--skip-bad-lines"]) == 0
    assert capsys.readouterr().out.startswith("train: 1 pairs, 1 skipped\n")
    assert cli.main(["data", "check", str(tmp_path), "--skip-bad-lines", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["x"]["pairs"] == 1


def test_data_of_a_generator_is_checked_by_preparing_it(tmp_path, capsys) -> None:
    (tmp_path / "recipe.toml").write_text(
        'task = "translation"\n[data.generator]\nname = "korean-dates"\ntrain = 50\ntest = 10\n'
        '[text]\nkind = "char"\n[model]\ndim = 16\nlayers = 1\nheads = 2\nff_dim = 16\n[train]\nsteps = 1\n'
    )
    assert cli.main(["data", "check", str(tmp_path / "recipe.toml")]) == 0
    assert "all files of [data] can be read" in capsys.readouterr().out
