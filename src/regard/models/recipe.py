"""Recipes: a model described in a text file, or by name.

    [model]                       [model]
    preset = "base"               architecture = "decoder"
    heads = 4                     vocab_size = 8000
                                  dim = 256

Left, a preset with changes; right, the fields of a ModelConfig. Where a model is meant, a command takes
the name of a preset, a recipe file, or a folder that holds a recipe.toml, as every saved model does. Other
tables ([data], [train], …) belong to whoever reads them and are handed through as they are.

A recipe may carry a small form of itself, which `regard train --smoke` trains: [smoke.model] stands for changes
to [model], and so on.
"""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.models.presets import PRESETS
from regard.settings import from_dict, read_toml

RECIPE = "recipe.toml"  # its name in the folder of a saved model


def read_model(given: str | Path, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model that a preset's name, a recipe file or a model folder describes, with fields changed."""
    if str(given) in PRESETS:
        return from_dict(ModelConfig, {**PRESETS[str(given)], **(changes or {})})
    path = recipe_path(given)
    table = read_toml(path).get("model")
    if not isinstance(table, dict):
        raise UserError(f'{path}: has no table [model]; write one, such as  [model]  with  preset = "base"')
    fields = {**table, **(changes or {})}
    try:
        return from_dict(ModelConfig, with_preset(fields), "model.")
    except UserError as error:
        field = str(error).removeprefix("model.").partition(" ")[0].rstrip(":")
        raise error if field in (changes or {}) else UserError(f"{path}: {error}") from None


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a [model] table, those of its `preset` included where it does not change them."""
    fields = dict(table)
    name = fields.pop("preset", None)
    if name is not None and not (isinstance(name, str) and name in PRESETS):
        raise UserError(f"model.preset = {name!r}: unknown preset; {suggest(str(name), PRESETS)}")
    return {**(PRESETS[name] if name else {}), **fields}


def read_recipe(given: str | Path) -> dict[str, Any]:
    """All tables of a recipe file, or of the one in a model's folder, as they stand."""
    return read_toml(recipe_path(given))


def recipe_path(given: str | Path) -> Path:
    """The recipe file that `given` means: itself, or the one in that folder."""
    path = Path(given)
    if path.is_dir():
        if not (path / RECIPE).is_file() and (path / "config.json").is_file():
            raise UserError(
                f"{path}: this is a Hugging Face folder (config.json, no {RECIPE}); "
                f"read it first:  regard import {path} -o RUN"
            )
        if not (path / RECIPE).is_file():
            raise UserError(f"{path / RECIPE}: missing, so this is no folder of a saved model; name another")
        return path / RECIPE
    if path.exists():
        return path
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise UserError(f"{path}: no such file or folder; pass a recipe, a model folder or a preset")
    near = difflib.get_close_matches(str(given), PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"{str(given)!r} is neither a preset nor a file or folder here; {hint}The presets are: {', '.join(PRESETS)}"
    )


def read_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """Fields of a ModelConfig from `name=value` texts, values as in TOML; text needs no quotes, none unsets."""
    hints = get_type_hints(ModelConfig)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, text = _halves(assignment, "heads=4")
        if name not in hints:
            raise UserError(f"--set {assignment}: {name!r} is no setting of a model; {suggest(name, hints)}")
        changes[name] = _value(text, hints[name])
    return changes


def override(tables: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tables of a recipe with single settings changed: `train.lr=0.001`, `model.position=rope`."""
    changed = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for assignment in assignments:
        name, text = _halves(assignment, "train.lr=0.001")
        table, dot, field = name.partition(".")
        if not dot:
            raise UserError(f"--set {assignment}: say which table it is in, such as --set model.{name}={text}")
        hints = get_type_hints(ModelConfig) if table == "model" else {}
        value = _value(text, hints.get(field, types.NoneType))  # other tables: none leaves the setting out
        changed.setdefault(table, {})
        if not isinstance(changed[table], dict):
            raise UserError(f"--set {assignment}: {table} is not a table in this recipe")
        *inner, last = field.split(".")  # data.scenes.language: a table in a table
        place = changed[table]
        for step in inner:
            place[step] = dict(place[step]) if isinstance(place.get(step), dict) else {}
            place = place[step]
        place[last] = value
        if value is None:
            del place[last]
    return changed


def smoke_form(tables: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The recipe as its table [smoke] changes it: small enough to try in under a minute, on sample data."""
    changes = tables.get("smoke")
    if not isinstance(changes, dict) or not all(isinstance(table, dict) for table in changes.values()):
        raise UserError(
            f"{path}: has no small form for --smoke; write tables [smoke.data], [smoke.model], [smoke.train] with what "
            "is to be changed, or use --set"
        )
    changed = {name: table for name, table in tables.items() if name != "smoke"}
    for name, table in changes.items():
        before = changed.get(name, {})
        changed[name] = {**(before if isinstance(before, dict) else {}), **table}
    return changed


def _halves(assignment: str, example: str) -> tuple[str, str]:
    name, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals or not name:
        raise UserError(f"--set {assignment}: write name=value, such as --set {example}")
    return name, text


def _value(text: str, kind: Any) -> Any:
    parts = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if text in [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]:
        return text
    if text == "none" and types.NoneType in parts:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text  # not a number, not true or false: a word
