"""Initialization from another run: `train.init_from`.

A model that was pretrained on text without labels knows the language; one that is then trained on few labels starts
with that knowledge (Dai & Le 2015; Devlin et al. 2018). Three things are copied from the folder of the other run:

    [model]    its structure; a recipe that says otherwise is refused, but for dropout and the masks of attention
    tokenizer  the same pieces of text must have the same vectors
    weights    every tensor of the same name; output heads that it lacks are initialized randomly

So encoder weights are transferred from a masked language model to a classifier, or all weights from a denoising
text-to-text model to one that translates.
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
from regard.messages import localize
from regard.models.folder import WEIGHTS, load_tokenizers, read_weights, weights_of
from regard.models.recipe import RECIPE, model_config, read_recipe, with_preset
from regard.nn.config import SOFTMAX
from regard.settings import read_toml, to_dict
from regard.text.tokenizer import Tokenizer

# Fields that may differ from the other run: they do not change what its weights mean
FREE = {
    "output_head", "classes", "pooling", "pooler", "head_layer", "logit_bias", "init",
    "dropout", "attention_dropout", "embed_dropout", "attention",
}  # fmt: skip
# Fields of masks, which may differ where every layer is softmax attention: a BERT can become a BigBird for longer texts
MASKS = {"mixer", "window", "dilation", "global_tokens", "block_size", "random_blocks", "mixer_seed"}
HEADS = ("classifier.", "pooler.", "output_head.")  # prefixes of weights that may be initialized randomly


def complete_from(
    tables: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]], folder: Path
) -> dict[str, dict[str, Any]]:
    """The tables of a recipe, completed from the run that `train.init_from` names; unchanged where none is named.

    The recipe in the `folder` of a run is already complete: it is resumed even if the other run no longer exists.
    """
    name, saved = tables.get("train", {}).get("init_from"), folder / RECIPE
    if not isinstance(name, str) or (saved.is_file() and {**read_toml(saved), "task": ""} == {**tables, "task": ""}):
        return dict(tables)
    where = f"train.init_from = {name!r}"
    if not Path(name).exists():
        raise UserError(f"{where}: there is no such folder; train that run first, or name another")
    try:
        other = read_recipe(name, saved=True)
        config = model_config(other, Path(name) / RECIPE)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    table, text, theirs = tables.get("model", {}), tables.get("text", {}), to_dict(config)
    own = {field: value for field, value in table.items() if field != "preset"}
    kinds = {kind for kind, _ in config.pattern} | {one.split("(")[0].strip() for one in _parts(own.get("mixer"))}
    free = FREE | (MASKS if kinds <= {"", *SOFTMAX} else set())
    for field, value in with_preset(table).items():
        same = value == theirs.get(field, getattr(config, field, None))
        same = same or (field == "architecture" and _contains(config.architecture, value))
        if field not in free and not same and (field in own or field != "vocab_size"):
            known = f"{field} = {theirs[field]!r}" if field in theirs else f"no {field}"
            origin = "" if field in own else f"preset = {table['preset']!r}, "
            remove = field if field in own else "preset"
            raise UserError(f"model.{origin}{field} = {value!r}: {where} has {known}; remove {remove} from [model]")
    needed = own.get("architecture", defaults.get("model", {}).get("architecture", config.architecture))
    if not _contains(config.architecture, needed):
        raise UserError(
            f"{where}: its model has architecture = {config.architecture!r}, and this task needs {needed!r}; use a run "
            "with that architecture"
        )
    kept = dict(other.get("text", {}))
    if extra := sorted(field for field in text if text[field] != kept.get(field)):
        raise UserError(f"text.{extra[0]}: the tokenizer comes from {where}; remove {extra[0]} from [text]")
    wanted = {field: value for field, value in defaults.get("model", {}).items() if field in (*FREE, "architecture")}
    theirs.pop("classes", None)
    if "mixer" in own:  # its fields are not those of the mixer there
        theirs = {field: value for field, value in theirs.items() if field not in MASKS}
    return {**tables, "model": {**theirs, **wanted, **own}, "text": {**kept, **text}}


def _parts(mixer: object) -> list[str]:
    return mixer.split(",") if isinstance(mixer, str) else []


def _contains(theirs: str, needed: object) -> bool:
    """The encoder of an encoder-decoder can initialize an encoder."""
    return theirs == needed or (needed, theirs) == ("encoder", "encoder-decoder")


def initialize_tokenizers(name: str, names: tuple[str, ...]) -> dict[str, Tokenizer]:
    """The tokenizers of the other run."""
    present = load_tokenizers(name)
    if not present.keys() >= {*names}:
        has = ", ".join(f"{one}.json" for one in present) or "none"
        raise UserError(f"train.init_from = {name!r}: needs {names[0]}.json there, and it has {has}")
    return {one: present[one] for one in names}


@torch.no_grad()
def initialize_weights(model: nn.Module, name: str, verbose: bool = True) -> None:
    """Copy the other run's weights into `model`; heads that it lacks, or of another size, stay as they are."""
    path = Path(name) / WEIGHTS
    if not path.is_file():
        raise UserError(f"train.init_from = {name!r}: has no {WEIGHTS} yet; let that run finish first")
    theirs, own = read_weights(path), weights_of(model)
    new = [one for one in own if one not in theirs or own[one].shape != theirs[one].shape]
    if unexpected := [one for one in new if not one.startswith(HEADS)]:
        first = unexpected[0]
        there = f"shape {tuple(theirs[first].shape)} there" if first in theirs else "nothing of that name there"
        raise UserError(
            f"train.init_from = {name!r}: does not fit: {name_some(unexpected)} "
            f"({tuple(own[first].shape)} here, {there}); use a run whose [model] is like this one"
        )
    for one, tensor in own.items():
        if one not in new:
            tensor.copy_(theirs[one])
    if verbose:
        random = f"; initialized randomly: {name_some(new)}" if new else ""
        print(localize(f"initialized from {name}: {len(own) - len(new)} tensors{random}"), file=sys.stderr)
