"""A saved model is a folder of files in standard formats.

    recipe.toml         [model] is the ModelConfig; other tables ([data], [train], …) describe its training
    model.safetensors   the weights, each tensor once: tied and shared weights have one name
    tokenizer.json      text <-> ids; or source.json and target.json if the two sides differ

`save` writes each file atomically and the weights last: a folder with weights is complete. `load` builds the model
that [model] describes, without its random weights, and copies the saved ones into it; every name and shape must match.
Pickles (pytorch_model.bin) are never read, because they can run code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.errors import UserError, suggest
from regard.files import make_folder, name_some, write_atomically
from regard.models.recipe import RECIPE, model_config, read_recipe
from regard.models.transformer import Model, build
from regard.settings import read_toml, to_dict, write_toml
from regard.text.sentencepiece import TOKENIZERS
from regard.text.sentencepiece import load_tokenizers as load_tokenizers
from regard.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
FILES = (RECIPE, WEIGHTS, *(f"{name}.json" for name in TOKENIZERS))  # that `save` writes


def saved_files(folder: Path) -> tuple[str, ...]:
    """What `save` has written in a folder, which may be replaced; nothing if it has not."""
    return FILES if (folder / RECIPE).is_file() and (folder / WEIGHTS).is_file() else ()


def save(
    model: Model,
    folder: str | Path,
    *,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Save `model` in `folder`; `recipe` adds or replaces tables, other tables of an existing recipe are kept."""
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # a compiled model wraps the original one
    for name in tokenizers or {}:
        if name not in TOKENIZERS:
            raise UserError(f"tokenizers: {name!r} is not the name of a tokenizer; {suggest(name, TOKENIZERS)}")
    make_folder(folder)
    tables = read_toml(folder / RECIPE) if (folder / RECIPE).exists() else {}
    tables.update({**(recipe or {}), "model": to_dict(model.config)})
    write_toml(folder / RECIPE, {"model": tables.pop("model"), **tables})
    for name, tokenizer in (tokenizers or {}).items():
        tokenizer.save(folder / f"{name}.json")
    write_weights(folder / WEIGHTS, weights_of(model))


def load(folder: str | Path, device: str | torch.device = "cpu", recipe: Mapping[str, Any] | None = None) -> Model:
    """The model in `folder`, in eval mode and in its saved precision; `recipe`: its tables, if already read."""
    folder = Path(folder)
    config = model_config(read_recipe(folder, saved=True) if recipe is None else recipe, folder / RECIPE)
    path = folder / WEIGHTS
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles and not path.is_file():
        raise UserError(
            f"{path}: missing; {pickles[0]} is a pickle, which can run code, so it is not read. If you trust it, "
            f"convert it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), {WEIGHTS!r})"
        )
    tensors = read_weights(path)
    with torch.random.fork_rng(devices=[]), WithoutRandomWeights():  # the caller's random state stays as it is
        model = build(config)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model = model.to(dtypes.pop())
    fill(model, tensors, str(path))
    return model.to(find_device(str(device))).eval()


class WithoutRandomWeights(TorchFunctionMode):
    """New parameters keep what their memory contains: `fill` replaces every one of them."""

    RANDOM = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.RANDOM:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.requires_grad:  # a parameter, and no buffer
                return tensor
        return func(*args, **kwargs)


def find_device(name: str | None) -> torch.device:
    """The device called `name`, checked; None: a GPU if there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without that device type
        raise UserError(f"device = {name!r} is not available: {str(error).splitlines()[0]}") from None
    torch.backends.cuda.enable_cudnn_sdp(False)  # but see `cudnn_attention`
    return device


@contextmanager
def cudnn_attention(allowed: bool = True) -> Iterator[None]:
    """Whether attention on a GPU may use cuDNN: the fastest kernels, which take 0.1 s to prepare for each new shape.

    So they are for training, and measurements, in which all batches have one shape.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the model once: a tied weight has the first of its names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into `model`; names and shapes must match exactly."""
    own = dict(model.named_parameters())
    if missing := [name for name in own if name not in tensors]:
        raise UserError(f"{where}: lacks {name_some(missing)}; the file belongs to another [model] or is incomplete")
    if extra := [name for name in tensors if name not in own]:
        raise UserError(f"{where}: {name_some(extra)} is not in the model; the file belongs to another [model]")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, but [model] needs {tuple(parameter.shape)}; "
                f"correct [model] in {RECIPE}, or use the matching file"
            )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: damaged or incomplete ({error}); copy or download it again") from None
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing, so the model has no weights; copy the folder or train the model again"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically, without a second copy in memory."""
    on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}

    def save(temporary: Path) -> None:
        try:
            save_file(on_cpu, temporary, {"format": "pt"})
        except SafetensorError as error:  # raised for a full disk, among others
            raise OSError(str(error)) from None

    write_atomically(path, save)
