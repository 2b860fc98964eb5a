"""Print a script that completes `regard` in a shell: commands, options, their values, run folders, recipes, files. The
script asks `regard` itself at every Tab, so it never has to be renewed.

  bash   put this into ~/.bashrc:                     eval "$(regard completion bash)"
  zsh    put this into ~/.zshrc, after compinit:      eval "$(regard completion zsh)"
  fish   run this once:    regard completion fish > ~/.config/fish/completions/regard.fish

examples:
  regard completion bash
  regard completion bash -- translate runs/de     the candidates for the last word, which the script asks for
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from regard.commands import COMMANDS, Parser, find_command
from regard.errors import UserError, suggest
from regard.messages import LANGUAGES, localize

# Each calls  regard completion SHELL -- WORD…  with the words up to the cursor, the last perhaps empty, and gets one
# candidate per line, with its description after a tab. No space follows a folder, which ends with a slash.
SCRIPTS = {
    "bash": r"""_regard() {
    local line
    COMPREPLY=()
    compopt -o nosort 2> /dev/null
    while IFS= read -r line; do
        line=${line%%$'\t'*}
        [[ $line == */ ]] && compopt -o nospace 2> /dev/null
        printf -v line %q "$line"
        COMPREPLY+=("${line/#\\~/\~}")
    done < <("${COMP_WORDS[0]}" completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)
}
complete -F _regard regard
""",
    "zsh": r"""_regard() {
    local line value
    local -a values descriptions folders
    for line in "${(@f)$("${words[1]}" completion zsh -- "${(@)words[2,CURRENT]}" 2> /dev/null)}"; do
        value=${line%%$'\t'*}
        if [[ $value == */ ]]; then
            folders+=("$value")
        elif [[ -n $value ]]; then
            values+=("$value")
            descriptions+=("${line/$'\t'/  }")
        fi
    done
    (( $#values )) && compadd -l -d descriptions -a values
    (( $#folders )) && compadd -S '' -a folders
}
compdef _regard regard
""",
    "fish": r"""function __regard_complete
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    $words[1] completion fish -- $words[2..-1] "$last" 2> /dev/null
end
complete -c regard -f -a '(__regard_complete)'
""",
}
OPTIONS = ("--help", "--version", "--debug", "--lang")  # before the command
ARGUMENTS = {
    "SHELL": "bash, zsh or fish",
    "WORD": ("words typed so far: print candidates for the last one", {"nargs": "*"}),
}


def run(args: argparse.Namespace) -> None:
    if args.shell not in SCRIPTS:
        raise UserError(f"completion {args.shell}: unknown shell; {suggest(args.shell, SCRIPTS)}")
    if not args.word:
        print(SCRIPTS[args.shell], end="")
        return
    for value, text in candidates(args.word):
        print(value, text, sep="\t" if text else "")


def candidates(words: list[str]) -> list[tuple[str, str]]:
    """(candidate, description) for the last of the words after `regard`."""
    *before, word = map(_unquoted, words)
    before, word = [one for one in before if one != "="], "" if word == "=" else word  # bash: --kind = bpe
    at = find_command(before)
    if at == len(before):
        known = {name: localize(summary) for name, (_, summary) in COMMANDS.items()}
        known |= dict.fromkeys(OPTIONS if word else (), "")
        if before[-1:] == ["--lang"]:
            known = dict.fromkeys(LANGUAGES, "")
        return [one for one in known.items() if one[0].startswith(word)]
    if before[at] not in COMMANDS:
        return []
    command = importlib.import_module(COMMANDS[before[at]][0])
    parser = Parser("regard", "", command.ARGUMENTS)
    names = {option: action for action in parser._actions for option in action.option_strings}
    positional = [action for action in parser._actions if not action.option_strings]
    option: argparse.Action | None = None  # which the next word may be a value of
    done = 0
    for one in before[at + 1 :]:
        if one in names:
            option = names[one] if names[one].nargs != 0 else None
        elif option is not None:
            option = option if option.nargs in ("+", "*") else None
        elif not one.startswith("-"):
            done += 1
    prefix, equals, value = word.partition("=")
    if word.startswith("-") and equals and prefix in names:
        return [(f"{prefix}={one}", text) for one, text in _values(names[prefix], command, value)]
    if word.startswith("-"):
        return [(name, _short(action.help)) for name, action in names.items() if name.startswith(word)]
    if option is not None:
        return _values(option, command, word)
    if not positional:
        return []
    last = positional[min(done, len(positional) - 1)]
    return _values(last, command, word) if done < len(positional) or last.nargs in ("+", "*") else []


def _unquoted(word: str) -> str:
    """A word as the shell would pass it to a command, though its last quote may be missing."""
    for end in ("", "'", '"'):
        with suppress(ValueError):
            return "".join(shlex.split(word + end)[:1])
    return word


def _short(text: str | None) -> str:
    return (text or "").partition("; ")[0].partition(" (")[0]


def _values(action: argparse.Action, command: object, word: str) -> list[tuple[str, str]]:
    """The values that an argument may have, by its choices or its metavar."""
    if action.choices is not None:
        known: Iterable[str] = map(str, action.choices)
    else:
        name = "--device" if "--device" in action.option_strings else str(action.metavar)
        known = getattr(command, "ACTIONS", ()) if name == "ACTION" else VALUES.get(name, lambda word: ())(word)
    return [(value, "") for value in known if value.startswith(word)]


def _runs(word: str) -> list[str]:
    """The runs in runs/, if one matches; otherwise folders."""
    runs = [str(path.parent) for path in sorted(Path("runs").glob("*/recipe.toml"))]
    return [run for run in runs if run.startswith(word)] or _folders(word)


def _tokenizers(word: str) -> list[str]:
    return [*_runs(word), *(path for path in _files(word) if path.endswith((".json", ".model")))]


def _recipes(word: str) -> list[str]:
    """Recipes here and in recipes/, if one matches; otherwise files."""
    recipes = [str(path) for pattern in ("*.toml", "recipes/*.toml") for path in sorted(Path().glob(pattern))]
    return [recipe for recipe in recipes if recipe.startswith(word)] or _files(word)


def _files(word: str) -> list[str]:
    """Paths that begin with a word, as it is written; folders end with a slash."""
    folder, name = os.path.split(word)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    return [
        os.path.join(folder, entry.name) + "/" * entry.is_dir()
        for entry in entries
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith("."))
    ]


def _folders(word: str) -> list[str]:
    return [path for path in _files(word) if path.endswith("/")]


def _models(word: str) -> list[str]:
    from regard.models.recipe import PRESETS

    return [*PRESETS, *_recipes(word)]


VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "RUN": _runs,
    "NEW": _folders,
    "RECIPE": _recipes,
    "MODEL": _models,
    "FILE": _files,
    "FILES": _files,
    "DIR": _folders,
    "TOKENIZER": _tokenizers,
    "--device": lambda word: ("cpu", "cuda"),
    "SHELL": lambda word: SCRIPTS,
}
