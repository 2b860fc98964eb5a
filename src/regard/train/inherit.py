"""Starting from what another run has learned: `train.init_from`.

A model that has read much text without labels knows the language; one that is then trained on few labels begins with
that knowledge (Dai & Le 2015; Devlin et al. 2018). Three things are taken over from the folder of the other run:

    [model]    its structure: what must not differ is filled in, and refused where the recipe says otherwise
    tokenizer  the same pieces of text must have the same vectors
    weights    every tensor of the same name; heads that it does not have begin anew

So encoder weights go from a masked language model to a classifier, or all weights from a denoised text-to-text model
to one that translates.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import UserError
from regard.files import name_some
from regard.models.folder import WEIGHTS, load_config, load_recipe, load_tokenizers, read_weights, weights_of
from regard.models.recipe import RECIPE, with_preset
from regard.settings import read_toml, to_dict
from regard.text.tokenizer import Tokenizer

# What may differ from the other run without making its weights mean something else
FREE = {
    "output_head", "classes", "pooling", "pooler", "head_layer", "logit_bias", "init",
    "dropout", "attention_dropout", "embed_dropout", "attention",
}  # fmt: skip
HEADS = ("classifier.", "pooler.", "output_head.")  # names of weights that may begin anew


def inherit(
    tables: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], folder: Path
) -> dict[str, dict[str, Any]]:
    """The tables of a recipe, completed from the run that `train.init_from` names; as they are where none is named.

    The recipe in the `folder` of a run has been completed before: it must go on where that other run is gone.
    """
    name = tables.get("train", {}).get("init_from")
    if not isinstance(name, str) or _is_complete(tables, folder):
        return dict(tables)
    if not Path(name).exists():
        raise UserError(f"train.init_from = {name!r}: there is no such folder; train that run first, or name another")
    try:
        config = load_config(name)
    except UserError as error:
        raise UserError(f"train.init_from = {name!r}: {error}") from None
    table, text = tables.get("model", {}), tables.get("text", {})
    given = {field: value for field, value in table.items() if field != "preset"}
    theirs = to_dict(config)
    for field, value in with_preset(table).items():
        same = value == theirs.get(field, getattr(config, field, None))
        shape = field == "architecture" and (value, config.architecture) == (
            "encoder",
            "encoder-decoder",
        )  # its first half
        if field not in FREE and not same and not shape and (field in given or field != "vocab_size"):
            known = f"{field} = {theirs[field]!r}" if field in theirs else f"no {field}"
            asks = f"{field} = {value!r}" if field in given else f"preset = {table['preset']!r}, {field} = {value!r}"
            leave = field if field in given else "preset"
            raise UserError(f"model.{asks}: train.init_from = {name!r} has {known}; leave {leave} out")
    asked = given.get("architecture", defaults.get("model", {}).get("architecture", config.architecture))
    if asked != config.architecture and (asked, config.architecture) != ("encoder", "encoder-decoder"):
        raise UserError(
            f"train.init_from = {name!r}: its model has architecture = {config.architecture!r}, and this "
            f"task needs {asked!r}; take "
            "a run of that shape"
        )
    kept = dict(load_recipe(name).get("text", {}))
    if extra := sorted(field for field in text if text[field] != kept.get(field)):
        raise UserError(f"text.{extra[0]}: the tokenizer is that of train.init_from = {name!r}; leave {extra[0]} out")
    wanted = {field: value for field, value in defaults.get("model", {}).items() if field in (*FREE, "architecture")}
    theirs.pop("classes", None)
    return {**tables, "model": {**theirs, **wanted, **given}, "text": {**kept, **text}}


def _is_complete(tables: Mapping[str, Any], folder: Path) -> bool:
    path = folder / RECIPE
    return path.is_file() and {**read_toml(path), "task": ""} == {**tables, "task": ""}


def inherit_tokenizers(name: str, wanted: tuple[str, ...]) -> dict[str, Tokenizer]:
    """The tokenizers of the other run."""
    found = load_tokenizers(name)
    if not found.keys() >= {*wanted}:
        has = ", ".join(f"{one}.json" for one in found) or "none"
        raise UserError(f"train.init_from = {name!r}: needs {wanted[0]}.json there, and it has {has}")
    return {one: found[one] for one in wanted}


@torch.no_grad()
def inherit_weights(model: nn.Module, name: str, say: bool = True) -> None:
    """Fill `model` with the other run's weights; heads that it lacks, or of another size, stay as they are."""
    path = Path(name) / WEIGHTS
    if not path.is_file():
        raise UserError(f"train.init_from = {name!r}: has no {WEIGHTS} yet; let that run finish first")
    theirs, own = read_weights(path), weights_of(model)
    new = [one for one in own if one not in theirs or own[one].shape != theirs[one].shape]
    if strange := [one for one in new if not one.startswith(HEADS)]:
        first = strange[0]
        there = f"shape {tuple(theirs[first].shape)} there" if first in theirs else "nothing of that name there"
        raise UserError(
            f"train.init_from = {name!r}: does not fit: {name_some(strange)} "
            f"({tuple(own[first].shape)} here, {there}); take a run whose [model] is like this one"
        )
    for one, tensor in own.items():
        if one not in new:
            tensor.copy_(theirs[one])
    if say:
        anew = f"; new: {name_some(new)}" if new else ""
        print(f"starting from {name}: {len(own) - len(new)} tensors taken over{anew}", file=sys.stderr)
