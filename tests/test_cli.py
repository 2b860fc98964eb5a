"""The command line: lazy imports, and the message and exit code of every kind of failure."""

from __future__ import annotations

import argparse
import ast
import errno
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import regard
from regard import cli
from regard.errors import UserError

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors")


def fake_command(run) -> types.ModuleType:
    """A module with the three names a command has."""
    help_text = "A command for the tests.\n\nexamples:\n  regard fake --steps 3    three steps\n"
    module = types.ModuleType("regard.commands.fake", help_text)
    module.ARGUMENTS = {"--steps N": ("how many", {"type": int, "default": 1})}
    module.run = run
    return module


@pytest.fixture
def command(monkeypatch):
    """Call with a function of `args`: it becomes the command `regard fake`."""

    def install(run) -> None:
        monkeypatch.setitem(sys.modules, "regard.commands.fake", fake_command(run))
        monkeypatch.setitem(cli.COMMANDS, "fake", ("regard.commands.fake", "a command for the tests"))

    monkeypatch.delenv("REGARD_DEBUG", raising=False)
    return install


def raising(error: BaseException):
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def run_python(code: str, *, stdout=subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a separate process."""
    command = [sys.executable, "-c", code]
    env = os.environ | environment
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=60)


def run_lightly(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `regard` in a separate process that fails if it imports a slow package."""
    return run_python(
        f"import sys; from regard.cli import main; code = main({arguments!r}); "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; "
        "sys.exit(f'imported {loaded}' if loaded else code)"
    )


# Code for a separate process in which `regard fake` does what the function `run`, defined after it, does.
FAKE = """
import sys, time, types
from regard import cli
fake = sys.modules["fake"] = types.ModuleType("fake")
fake.ARGUMENTS = {}
fake.run = lambda args: run()
cli.COMMANDS["fake"] = ("fake", "")
"""


# --- finding and running a command


def test_arguments_reach_the_command_and_its_result_is_the_exit_code(command):
    command(lambda args: args.steps)
    assert cli.main(["fake", "--steps", "7"]) == 7
    assert cli.main(["--debug", "fake", "--steps=4"]) == 4
    assert cli.main(["fake", "--debug"]) == 1


@pytest.mark.parametrize(
    "words", ["RUN one two --beam 5", "RUN --beam 5 one two", "--beam 5 RUN one two", "RUN one --beam 5 two"]
)
def test_options_may_precede_the_texts(words):
    from regard.commands import translate

    parser = cli.Parser("regard translate", "", translate.ARGUMENTS)
    parsed = parser.parse_all(words.split())
    assert (parsed.run, parsed.inputs, parsed.beam) == ("RUN", ["one", "two"], 5)
    assert parser.parse_all(["--beam", "5", "RUN", "--", "-one"]).inputs == ["-one"]
    assert parser.parse_all(["RUN", "--beam", "5", "--", "-one", "--json"]).inputs == ["-one", "--json"]
    assert parser.parse_all(["RUN", "--beam", "5", "-3 below zero", "-1", "5"]).inputs == ["-3 below zero", "-1", "5"]
    with pytest.raises(UserError, match="has no option '--bean'"):
        parser.parse_all(["RUN", "--bean", "5", "one"])


def test_help_lists_every_command_with_its_summary(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert f"  {name} " in text and summary in text
    assert cli.main([]) == 0
    assert capsys.readouterr().out == text


def test_help_of_a_command_shows_description_options_and_examples(command, capsys):
    command(raising(AssertionError("--help must not run the command")))
    assert cli.main(["fake", "--help"]) == 0
    text = capsys.readouterr().out
    assert "A command for the tests." in text and "--steps" in text
    assert text.endswith("examples:\n  regard fake --steps 3    three steps\n")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"regard {regard.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["cost", "base"]])
def test_help_and_version_are_quick_and_import_nothing_heavy(arguments):
    start = time.perf_counter()
    done = run_lightly(arguments)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 5.0  # 0.03 s idle; the rest allows for a busy machine


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_quick_help_with_examples(name):
    done = run_lightly([name, "--help"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: regard {name}")
    assert f"  regard {name}" in done.stdout.partition("examples:\n")[2]


# --- what the user got wrong: one line, exit code 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["fkae"], ["unknown command 'fkae'", "did you mean 'fake'?"]),
        (["--verison"], ["no option '--verison'", "did you mean '--version'?"]),
        (["fake", "--step", "3"], ["no option '--step'", "did you mean '--steps'?"]),
        (["fake", "--step=3"], ["no option '--step'", "did you mean '--steps'?"]),
        (["fake", "--steps", "many"], ["--steps", "'many'", "regard fake --help"]),
        (["fake", "--steps"], ["--steps", "regard fake --help"]),
        (["fake", "extra"], ["unexpected argument 'extra'"]),
        ([""], ["unknown command ''"]),
    ],
)
def test_a_wrong_argument_is_named_with_the_remedy(command, capsys, arguments, parts):
    command(raising(AssertionError("must not run")))
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_user_error_is_printed_unchanged(command, capsys):
    command(raising(UserError("heads is 3 and does not divide dim 64; take 2 or 4")))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "error: heads is 3 and does not divide dim 64; take 2 or 4\n"


# --- what the machine refused, and our own faults: one line, exit code 1


def test_missing_file_is_named(command, capsys, tmp_path):
    missing = tmp_path / "missing.json"
    command(lambda args: len(missing.read_text()))
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == f"error: {os.strerror(errno.ENOENT)}: {str(missing)!r}\n"


def test_both_files_of_a_rename_are_named(command, capsys, tmp_path):
    command(lambda args: os.rename(tmp_path / "from", tmp_path / "to"))
    assert cli.main(["fake"]) == 1
    error = capsys.readouterr().err
    assert repr(str(tmp_path / "from")) in error and repr(str(tmp_path / "to")) in error


def test_disk_full(command, capsys):
    command(raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), Path("model.safetensors"))))
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == f"error: {os.strerror(errno.ENOSPC)}: 'model.safetensors'\n"


def test_a_bad_file_descriptor_is_named_by_its_number(command, capsys):
    command(raising(OSError(errno.EBADF, os.strerror(errno.EBADF), 99)))
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == f"error: {os.strerror(errno.EBADF)}: '99'\n"


def test_os_error_without_a_number(command, capsys):
    command(raising(OSError("the server closed the connection")))
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == "error: the server closed the connection\n"


@pytest.mark.parametrize("error", [RuntimeError("shapes differ\nand more"), MemoryError(), KeyError("x")])
def test_unexpected_error_is_one_line_and_says_how_to_see_more(command, capsys, error):
    command(raising(error))
    assert cli.main(["fake"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"error: {type(error).__name__}") and text.count("\n") == 1
    assert "--debug" in text and "Traceback" not in text


@pytest.mark.parametrize("how", ["before", "after", "environment"])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(command, capsys, monkeypatch, how):
    command(raising(UserError("wrong")))
    if how == "environment":
        monkeypatch.setenv("REGARD_DEBUG", "1")
    arguments = {"before": ["--debug", "fake"], "after": ["fake", "--debug"], "environment": ["fake"]}[how]
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert "Traceback" in text and text.endswith("error: wrong\n")


# --- signals and pipes


def test_ctrl_c(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_ctrl_c_in_a_process():
    code = FAKE + "def run(): print('ready', flush=True); time.sleep(60)\nsys.exit(cli.main(['fake']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and error == b"\ninterrupted\n"


@pytest.mark.skipif(os.name != "posix", reason="POSIX pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from regard.cli import main; sys.exit(main(['--help']))"
    done = run_python(code, stdout=writing, PYTHONUNBUFFERED=unbuffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output(unbuffered):
    code = "import sys; from regard.cli import main; sys.exit(main(['--help']))"
    with open("/dev/full", "w") as full:
        done = run_python(code, stdout=full, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, f"error: {os.strerror(errno.ENOSPC)}\n")


def test_unprintable_characters_do_not_fail():
    code = FAKE + "def run(): return print('\\uc5b4\\ud150\\uc158') or 0\nsys.exit(cli.main(['fake']))"
    done = run_python(code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "???\n"), done.stderr


# --- the package


def test_import_regard_is_light_and_knows_its_names():
    code = f"import sys, regard; sys.exit([name for name in {HEAVY!r} if name in sys.modules] or None)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert {"build", "trace", "load", "ModelConfig", "preset", "Mask", "causal"} <= set(dir(regard))
    assert not hasattr(regard, "no_such_name")


def test_type_checkers_see_the_same_public_names():
    """The imports under TYPE_CHECKING and the table of lazy names are one list, written twice."""
    tree = ast.parse(Path(regard.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == regard._LAZY


@pytest.mark.parametrize("name", sorted(regard._LAZY))
def test_every_public_name_can_be_imported(name):
    assert getattr(regard, name) is getattr(sys.modules[regard._LAZY[name]], name)


def test_the_name_of_the_program_can_be_called_by_the_shell(monkeypatch, tmp_path):
    from regard.errors import program

    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() != "regard" and program().strip("'").endswith("/regard")
    script = tmp_path / "regard"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert program() == "regard"
