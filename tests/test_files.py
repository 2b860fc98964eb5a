"""Folders that commands write: complete or not at all, and in the place of nothing that is not theirs."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regard import cli
from regard.errors import Terminated, UserError
from regard.files import files_in, staged
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


# --- interruptions

WRITE = """
import sys, time
from regard import cli, files
from regard.commands import COMMANDS

def run(args):
    with files.staged(sys.argv[1]) as fresh:
        (fresh / "part").write_text("half")
        print(fresh, flush=True)
        time.sleep(60)

class fake:
    __doc__, ARGUMENTS, run = "fake", {}, staticmethod(run)

COMMANDS["fake"], sys.modules["fake"] = ("fake", ""), fake
sys.exit(cli.main(["fake"]))
"""


def interrupted(target: Path, how: signal.Signals) -> tuple[int, str, Path]:
    """A process that writes `target`, and gets a signal: its exit code, its message and its temporary folder."""
    command = [sys.executable, "-c", WRITE, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    fresh = Path(process.stdout.readline().strip())
    assert (fresh / "part").is_file()
    process.send_signal(how)
    _, error = process.communicate(timeout=30)
    return process.returncode, error, fresh


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_ctrl_c_and_sigterm_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    assert interrupted(target, signal.SIGINT)[:2] == (130, "\ninterrupted\n")
    assert interrupted(target, signal.SIGTERM)[:2] == (143, "\nterminated\n")
    assert list(tmp_path.iterdir()) == []
    with staged(target):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_sigterm_is_not_an_error_of_a_library(tmp_path: Path) -> None:
    """One that catches everything, as PyTorch's exporter does, and raises an error of its own."""
    with pytest.raises(Terminated), staged(tmp_path / "out"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            raise RuntimeError("failed to export") from None
    with pytest.raises(RuntimeError), staged(tmp_path / "out"):
        raise RuntimeError("failed to export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    code, _, left = interrupted(tmp_path / "out", signal.SIGKILL)
    assert code == -signal.SIGKILL and left.is_dir()
    running = tmp_path / left.name.replace(f"-{left.name.split('-')[-2]}-", f"-{os.getpid()}-")
    elsewhere = tmp_path / left.name.replace(platform.node(), "elsewhere")
    others = [running, elsewhere, tmp_path / ".out.mine.new", tmp_path / left.name.replace(".out", ".outer")]
    for other in others:
        other.mkdir()
    with staged(tmp_path / "out"):
        assert not left.exists() and all(other.is_dir() for other in others)


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_folder_that_was_about_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    _, _, left = interrupted(tmp_path / "out", signal.SIGKILL)
    old = left.with_name(left.name.replace(".new", ".old"))
    old.mkdir()
    (old / "kept").write_text("whole")
    with pytest.raises(UserError, match="already exists"), staged(tmp_path / "out"):
        pass
    assert contents(tmp_path / "out") == {"kept": b"whole"} and os.listdir(tmp_path) == ["out"]


def test_a_folder_is_written_in_another_thread(tmp_path: Path) -> None:
    """Signals are handled in the main thread only."""

    def write() -> None:
        with staged(tmp_path / "out") as fresh:
            (fresh / "file").touch()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert files_in(tmp_path / "out") == ["file"]


# --- messages


def test_errors_name_the_folder_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write() raises it
    with pytest.raises(OSError, match="No space left on device: 'out'") as caught, staged("out"):
        raise full
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="'out/sub/file'"), staged("out") as fresh:
        (fresh / "sub" / "file").read_bytes()
    with pytest.raises(OSError, match="'/elsewhere'"), staged("out"):
        Path("/elsewhere").read_bytes()
    with pytest.raises(UserError, match=r"^out/x: is wrong$"), staged("out") as fresh:
        raise UserError(f"{fresh / 'x'}: is wrong")
    with pytest.raises(UserError, match="name of the folder to write is empty"), staged(""):
        pass
    if Path("/proc/self").exists():
        with pytest.raises(UserError, match=r"^/proc/x: cannot be created"), staged("/proc/x"):
            pass
    assert os.listdir() == []


def test_a_file_is_not_called_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.log").touch()
    assert regard("export", tmp_path / "demo.log", "--hf", tmp_path / "out") == 2
    assert "demo.log: is a file, not a folder; pass the folder of a saved model" in capsys.readouterr().err
    assert regard("export", tmp_path / "nowhere", "--hf", tmp_path / "out") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
