"""Folders that commands write: complete or not at all, and in the place of nothing that is not theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from regard import cli
from regard.files import files_in
from regard.models import folder as runs
from regard.models.recipe import preset
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small Transformer of 2017, which every format can represent."""
    tokenizer = Tokenizer.train(["the cat sat on the mat", "고양이가 매트 위에 앉았다"], "unigram", vocab_size=60)
    model = build(preset("tiny", dim=12, heads=3, layers=1, ff_dim=10, max_length=40, vocab_size=len(tokenizer)))
    runs.save(model, tmp_path / "run", tokenizers={"tokenizer": tokenizer})
    return tmp_path / "run"


def regard(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


# --- --force


@pytest.mark.parametrize("format", ["--hf", "--onnx", "--web", "--ctranslate2"])
@pytest.mark.parametrize("export", [None, "{}", "[]", '{"format": "hf", "files": []}', '{"format": "hf", "files": 3}'])
def test_an_export_replaces_no_folder_of_somebody_else(
    format: str, export: str | None, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.json").write_text("{}")
    (project / "thesis.txt").write_text("three years")
    if export is not None:
        (project / "export.json").write_text(export)
    before = contents(project)
    assert regard("export", run, format, project, "--force") == 2
    assert "was not written by this command" in capsys.readouterr().err and contents(project) == before


def test_an_export_with_other_files_is_kept(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert regard("export", run, "--hf", out, "--json") == 0
    listed = json.loads(capsys.readouterr().out)["files"]
    saved = json.loads((out / "export.json").read_text())
    assert saved["format"] == "hf" and saved["files"] == listed == files_in(out)
    (out / "notes").mkdir()
    (out / "notes" / "thesis.txt").write_text("three years")
    (out / "link").symlink_to(tmp_path)
    before = contents(out / "notes")
    assert regard("export", run, "--hf", out, "--force") == 2
    assert "contains link and notes/thesis.txt, not written by this command" in capsys.readouterr().err
    assert contents(out / "notes") == before
    (out / "notes" / "thesis.txt").unlink()
    (out / "link").unlink()
    assert regard("export", run, "--hf", out, "--force") == 0 and files_in(out) == listed
    assert regard("export", out / "..", "--hf", out) == 2


def test_a_model_folder_with_other_files_is_kept(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`prune` and `import` replace saved models, but neither a recipe that somebody has written nor a training run."""
    assert regard("export", run, "--hf", tmp_path / "hf") == 0
    project = tmp_path / "project"
    project.mkdir()
    (project / "recipe.toml").write_text("# mine")
    commands = (
        ["prune", run, "--heads", "encoder.0.1", "-o", project, "--force"],
        ["import", tmp_path / "hf", "-o", project, "--force"],
    )
    for command in commands:
        assert regard(*command) == 2 and "was not written by this command" in capsys.readouterr().err
        assert contents(project) == {"recipe.toml": b"# mine"}
    (project / "recipe.toml").unlink()
    for command in commands:
        assert regard(*command) == 0
    (project / "checkpoints").mkdir()
    (project / "checkpoints" / "state.json").write_text("{}")
    capsys.readouterr()
    for command in commands:
        assert regard(*command) == 2 and "contains checkpoints/state.json" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "project", "run"]
