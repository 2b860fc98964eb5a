"""Recipes: TOML files that describe a model and its training; presets: configs with published sizes (presets.toml).

    [model]                       [model]
    preset = "base"               architecture = "decoder"
    heads = 4                     vocab_size = 8000
                                  dim = 256

Left, a preset with changes; right, the fields of a ModelConfig. Commands accept the name of a preset, a recipe file,
or a folder with a recipe.toml, such as a saved model. Other tables ([data], [train], …) are passed on unchanged.

A recipe may define a small version of itself for `regard train --smoke`: [smoke.model] contains changes to [model],
and so on.
"""

from __future__ import annotations

import copy
import tomllib
import types
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.settings import field_types, from_dict, read_toml

RECIPE = "recipe.toml"  # its name in the folder of a saved model
EXAMPLES = "examples.json"  # a few test inputs of a run, beside it
_tables = tomllib.loads((resources.files("regard.models") / "presets.toml").read_text(encoding="utf-8"))
_likes = {name: _tables.get(table.pop("like", None), {}) for name, table in _tables.items()}
PRESETS: dict[str, dict[str, Any]] = {name: {**_likes[name], **table} for name, table in _tables.items()}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The preset called `name`, with these fields changed: `preset("gpt2", layers=6, position="rope")`."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} does not exist; {suggest(name, PRESETS)}")
    return from_dict(ModelConfig, with_preset({**changes, "preset": name}))


def read_model(recipe: str | Path, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a preset, a recipe file or a model folder, with these fields changed."""
    if str(recipe) in PRESETS:
        return preset(str(recipe), **(changes or {}))
    return model_config(read_recipe(recipe), recipe, changes)


def model_config(tables: Mapping[str, Any], where: str | Path, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """The table [model] of a recipe, with these fields changed; `where` it was read, for messages."""
    table, changes = tables.get("model"), changes or {}
    if not isinstance(table, dict):
        raise UserError(f'{where}: has no table [model]; write one, such as  [model]  with  preset = "base"')
    try:
        fields = {**table, **changes}
        return from_dict(ModelConfig, with_preset(fields) if "preset" in fields else fields, "model.")
    except UserError as error:
        field = str(error).removeprefix("model.").partition(" ")[0].rstrip(":")
        raise error if field in changes else UserError(f"{where}: {error}") from None


def with_preset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a [model] table, completed from its `preset`; of `dim` alone, ff_dim is scaled with it."""
    fields = dict(table)
    name = fields.pop("preset", None)
    if name is not None and not (isinstance(name, str) and name in PRESETS):
        raise UserError(f"model.preset = {name!r}: unknown preset; {suggest(str(name), PRESETS)}")
    base = dict(PRESETS[name]) if name else {}
    if type(fields.get("dim")) is int and "ff_dim" in base:
        base["ff_dim"] = base["ff_dim"] * fields["dim"] // base["dim"]
    return {**base, **fields}


def read_recipe(recipe: str | Path, *, saved: bool = False) -> dict[str, Any]:
    """All tables of a recipe file, or of the recipe in a model folder; `saved`: only a folder will do."""
    path = Path(recipe)
    if path.is_dir():
        if not (path / RECIPE).is_file() and (path / "config.json").is_file():
            raise UserError(
                f"{path}: this is a Hugging Face folder (config.json, no {RECIPE}); "
                f"convert it first:  regard import {path} -o RUN"
            )
        if not (path / RECIPE).is_file():
            raise UserError(f"{path / RECIPE}: missing, so this is not a saved model; pass another folder")
        return read_toml(path / RECIPE)
    if saved:
        what = "is a file, not a folder" if path.exists() else "no such folder"
        raise UserError(f"{path}: {what}; pass the folder of a saved model, with {RECIPE}")
    if path.exists():
        return read_toml(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise UserError(f"{path}: no such file or folder; pass a recipe, a model folder or a preset")
    raise UserError(f"{str(recipe)!r} is neither a preset nor a file or folder; {suggest(str(recipe), PRESETS)}")


def read_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """Fields of a ModelConfig from `name=value` strings, values as in TOML; strings need no quotes, none is None."""
    hints = field_types(ModelConfig)
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, text = _split_assignment(assignment, "heads=4")
        if name not in hints:
            raise UserError(f"--set {assignment}: {name!r} is not a setting of a model; {suggest(name, hints)}")
        changes[name] = _value(text, hints[name])
    return changes


def override(tables: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tables of a recipe with settings changed: `train.lr=0.001`, `model.position=rope`."""
    changed = copy.deepcopy(dict(tables))
    for assignment in assignments:
        name, text = _split_assignment(assignment, "train.lr=0.001")
        *path, field = name.split(".")  # data.scenes.language: a table in a table
        if not path:
            homes = [key for key, table in tables.items() if isinstance(table, dict) and name in table]
            home = (*homes, "model" if name in field_types(ModelConfig) else "train")[0]
            raise UserError(f"--set {assignment}: name its table, such as --set {home}.{name}={text}")
        hints = field_types(ModelConfig) if path == ["model"] else {}
        value = _value(text, hints.get(field, types.NoneType))  # other tables: none removes the setting
        table = changed
        for key in path:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {assignment}: {key} is not a table in this recipe")
        table[field] = value
        if value is None:
            del table[field]
    return changed


def smoke_form(tables: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The recipe with the changes in its table [smoke]: it trains in less than a minute, on sample data."""
    changes = tables.get("smoke")
    if not isinstance(changes, dict) or not all(isinstance(table, dict) for table in changes.values()):
        raise UserError(
            f"{path}: has no tables for --smoke; add [smoke.data], [smoke.model], [smoke.train] with the changes, "
            "or use --set"
        )
    changed = {name: table for name, table in tables.items() if name != "smoke"}
    for name, table in changes.items():
        before = changed.get(name, {})
        changed[name] = {**(before if isinstance(before, dict) else {}), **table}
    return changed


def _split_assignment(assignment: str, example: str) -> tuple[str, str]:
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
        return text  # neither a number nor a boolean: a string
