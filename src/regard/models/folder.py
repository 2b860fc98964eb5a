"""A model on disk is a folder of plain files that anything can read.

    recipe.toml         [model] is the ModelConfig; other tables ([data], [train], …) say where it came from
    model.safetensors   the weights, each tensor once: what is tied or shared has one name
    tokenizer.json      text <-> ids; or source.json and target.json where the two sides differ

`save` writes each file whole or not at all, the weights last: a folder that has weights has everything.
`load` builds the model that [model] describes and fills it; every name and shape must fit. A pickle, which
can run code when it is opened (pytorch_model.bin), is never read.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard.errors import UserError, suggest
from regard.files import make_folder, name_some
from regard.models.config import ModelConfig
from regard.models.recipe import RECIPE
from regard.models.transformer import Model, build
from regard.settings import from_dict, read_toml, to_dict, write_toml
from regard.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
TOKENIZERS = ("tokenizer", "source", "target")  # the names a tokenizer may have in a folder


def save(
    model: Model,
    folder: str | Path,
    *,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` to `folder`; `recipe` adds or replaces tables, those already there are kept."""
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # a compiled model wraps the one whose names are meant
    for name in tokenizers or {}:
        if name not in TOKENIZERS:
            raise UserError(f"tokenizers: {name!r} is no name for a tokenizer; {suggest(name, TOKENIZERS)}")
    make_folder(folder)
    tables = read_toml(folder / RECIPE) if (folder / RECIPE).exists() else {}
    tables.update({**(recipe or {}), "model": to_dict(model.config)})
    write_toml(folder / RECIPE, {"model": tables.pop("model"), **tables})
    for name, tokenizer in (tokenizers or {}).items():
        tokenizer.save(folder / f"{name}.json")
    write_weights(folder / WEIGHTS, weights_of(model))


def load(folder: str | Path, device: str | torch.device = "cpu", recipe: Mapping[str, Any] | None = None) -> Model:
    """The model in `folder`, in eval mode and in the precision it was saved in; `recipe`: its tables, if known."""
    folder = Path(folder)
    config = load_config(folder, recipe)
    tensors = read_weights(_weights_file(folder))
    with torch.random.fork_rng(devices=[]):  # the random weights it starts with must not move anyone's seed
        model = build(config)
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model = model.to(kinds.pop())
    fill(model, tensors, str(folder / WEIGHTS))
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without that kind of device
        raise UserError(f"device = {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None


def find_device(name: str | None) -> torch.device:
    """The device called `name`, tried out; None: a GPU where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without that kind of device
        raise UserError(f"device = {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def load_recipe(folder: str | Path) -> dict[str, Any]:
    """All tables of the folder's recipe."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; name one that holds {RECIPE} and {WEIGHTS}")
    if not (folder / RECIPE).is_file():
        if (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: this is a Hugging Face folder (config.json, no {RECIPE}); "
                f"read it first:  regard import {folder} -o RUN"
            )
        raise UserError(f"{folder / RECIPE}: missing, so this is not a folder that Regard saved; name another")
    return read_toml(folder / RECIPE)


def load_config(folder: str | Path, recipe: Mapping[str, Any] | None = None) -> ModelConfig:
    """What [model] in the folder's recipe describes."""
    path = Path(folder) / RECIPE
    tables = load_recipe(folder) if recipe is None else recipe
    if not isinstance(tables.get("model"), dict):
        raise UserError(f"{path}: has no table [model], which describes the model; copy the folder again")
    try:
        return from_dict(ModelConfig, tables["model"], "model.")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def load_tokenizers(folder: str | Path) -> dict[str, Tokenizer]:
    """The tokenizers in `folder` by name: {"tokenizer": …}, or {"source": …, "target": …}, or {}."""
    paths = {name: Path(folder) / f"{name}.json" for name in TOKENIZERS}
    return {name: Tokenizer.load(path) for name, path in paths.items() if path.is_file()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the model once: a tied table appears under the first of its names."""
    kept = set(model.state_dict(keep_vars=True))  # leaves out buffers that are computed, not learned
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *buffers)}


def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into `model`; names and shapes must be exactly the model's."""
    own = weights_of(model)
    if missing := [name for name in own if name not in tensors]:
        raise UserError(f"{where}: lacks {name_some(missing)}; the file belongs to another [model] or is incomplete")
    if extra := [name for name in tensors if name not in own]:
        raise UserError(f"{where}: the model has no place for {name_some(extra)}; the file belongs to another [model]")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise UserError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, but [model] asks for {tuple(tensor.shape)}; "
                f"correct [model] in {RECIPE} or take the file that belongs to it"
            )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"{path}: missing; {pickles[0]} is a pickle, which can run code when it is opened, so it is not read. "
                "Convert it where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
                f"{WEIGHTS!r})"
            )
        raise UserError(f"{path}: missing, so the model has no weights; copy the folder again or train it again")
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: damaged or incomplete ({error}); copy or download it again") from None
    except FileNotFoundError:
        raise UserError(f"{path}: missing; copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that is whole or absent, without a second copy in memory."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except SafetensorError as error:  # the library's name for a full disk and its like
        raise UserError(f"{path}: cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
