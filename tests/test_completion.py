"""Shell completion: the candidates for what is typed, and the script in a real bash."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard import cli
from regard.commands.completion import SCRIPTS, candidates


@pytest.fixture
def here(empty_folder) -> Path:
    """A working directory with a run, a recipe, and a name with a space."""
    for name in (
        "runs/demo/recipe.toml",
        "runs/other.txt",
        "recipes/mine.toml",
        "my data/a b.txt",
        ".hidden",
        "한국.txt",
        "my.model",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    return empty_folder


def values(line: str) -> list[str]:
    """The candidates after these words; a space at the end begins a new one."""
    return [value for value, _ in candidates(line.split(" "))]


def test_every_command_and_every_option_is_a_candidate():
    assert candidates([""]) == [(name, summary) for name, (_, summary) in cli.COMMANDS.items()]
    assert values("tra") == ["train", "translate"] and values("--ver") == ["--version"]
    for name, (module, _) in cli.COMMANDS.items():
        parser = cli.Parser("regard", "", importlib.import_module(module).ARGUMENTS)
        known = {option for action in parser._actions for option in action.option_strings}
        assert {*values(f"{name} -")} == known >= {"--debug", "--help"}
        for action in parser._actions:
            for option in action.option_strings:
                offered = values(f"{name} {option} ")
                assert action.choices is None or offered == list(map(str, action.choices))
                assert action.metavar != "FILE" or offered


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("translate ", ["runs/demo"]),
        ("translate runs/d", ["runs/demo"]),
        ("translate runs/demo --be", ["--beam"]),
        ("translate runs/demo --beam 5 ", []),  # a text
        ("--debug translate ru", ["runs/demo"]),
        ("translate my", ["my data/"]),  # a model elsewhere
        ("train ", ["recipes/mine.toml"]),
        ("train runs/", ["runs/demo/", "runs/other.txt"]),
        ("train recipes/mine.toml --device ", ["cpu", "cuda"]),
        ("train recipes/mine.toml --device = cu", ["cuda"]),  # as bash splits it
        ("train recipes/mine.toml --device=cu", ["--device=cuda"]),
        ("translate runs/demo --files a b ", ["my data/", "my.model", "recipes/", "runs/", "한국.txt"]),
        ("translate runs/demo --files .h", [".hidden"]),
        ("translate runs/demo --files no/where/", []),
        ("heads runs/demo --sort l", ["loss"]),
        ("data ", ["list", "get", "check"]),
        ("tokenizer train 한", ["한국.txt"]),
        ("tokenize my", ["my data/", "my.model"]),
        ("cost gpt2-m", ["gpt2-medium"]),
        ("completion ", list(SCRIPTS)),
        ("nonsense ", []),
    ],
)
def test_candidates(here, line, expected):
    assert values(line) == expected


def test_completion_imports_nothing_slow(here, capsys):
    code = (
        "import sys; from regard.cli import main; main(['completion', 'fish', '--', 'translate', '']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'tokenizers', 'tomllib')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "runs/demo\n"), done.stderr


def test_the_script_completes_in_bash(here):
    Path("bin").mkdir()
    command = Path("bin/regard")
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m regard "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(regard completion bash)"
        try() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _regard; IFS="|"; echo "${COMPREPLY[*]}"; unset IFS
        }
        complete -p regard
        try regard tra
        try regard translate ""
        try regard translate runs/demo --files 'my\\ da'
        try regard translate runs/demo --files '"my data/'
        try regard translate runs/demo --files '~/m'
        try regard train x --device = cu
    """
    env = os.environ | {"PATH": f"{here}/bin:{os.environ['PATH']}", "HOME": str(here)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -F _regard regard", "train|translate", "runs/demo", "my\\ data/", "my\\ data/a\\ b.txt",
        "~/my\\ data/|~/my.model", "cuda",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_valid(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script == SCRIPTS[shell] and f"completion {shell} -- " in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", "-c", script], capture_output=True).stderr == b""
    assert cli.main(["completion", "tcsh"]) == 2
    assert "unknown shell" in capsys.readouterr().err
