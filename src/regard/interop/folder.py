"""Hugging Face folders: config.json, model.safetensors (or shards with an index), tokenizer.json.

    model, tokenizers = import_folder("gpt2")            export_folder(model, "out", tokenizers)

Imported weights are converted to float32, which represents half precision exactly (float64 stays). Special tokens and
class names of config.json are kept as `metadata` in the recipe's table [hf].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from regard.errors import UserError
from regard.files import make_folder, write_atomically
from regard.interop import convert
from regard.interop.family import Json
from regard.interop.rules import Tensors
from regard.models.config import ModelConfig
from regard.models.folder import fill, read_weights, weights_of, write_weights
from regard.models.transformer import Model, build
from regard.text.gpt2 import find_files, read_gpt2
from regard.text.sentencepiece import from_sentencepiece
from regard.text.tokenizer import MASK_NAMES, Tokenizer

PREPROCESSOR = "preprocessor_config.json"

# Special tokens with a role in transformers that Regard does not use
ROLES = {"[CLS]": "cls_token", "[SEP]": "sep_token", "[MASK]": "mask_token", "<mask>": "mask_token"}


@dataclass(frozen=True)
class Imported:
    """The content of a folder; `unused` lists the tensors that the model does not use."""

    family: str
    model: Model
    tokenizers: dict[str, Tokenizer]
    metadata: Json
    unused: list[str]


def import_folder(folder: str | Path) -> tuple[Model, dict[str, Tokenizer]]:
    """The model in a Hugging Face folder, in eval mode, and its tokenizers: "tokenizer", or "source" and "target"."""
    imported = read_folder(folder)
    return imported.model, imported.tokenizers


def read_folder(folder: str | Path) -> Imported:
    """The complete content of a Hugging Face folder."""
    folder = Path(folder)
    if not folder.is_dir():
        hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(folder))
        hint = f"; get it from the Hugging Face hub:  hf download {folder} --local-dir {folder.name}" if hub else ""
        raise UserError(f"{folder}: no such folder{hint}")
    hf = read_json(folder / "config.json")
    family = convert.family_in(hf)
    tensors = _read_tensors(folder, hf)
    try:
        config = replace(convert.config_from_hf(hf, tensors), **_pixel_statistics(folder / PREPROCESSOR))
        ours, unused = convert.weights_from_hf(config, tensors, family)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    with torch.random.fork_rng(devices=[]):
        model = build(config)
    if any(tensor.dtype == torch.float64 for tensor in ours.values()):
        model = model.double()
    fill(model, ours, str(folder))
    tokenizers = _read_tokenizers(folder, family.model_type)
    kept = [name for name in convert.METADATA if name != "id2label" or config.output_head == "classes"]
    metadata = {name: hf[name] for name in kept if hf.get(name) is not None}
    return Imported(family.name, model.eval(), tokenizers, metadata, unused)


def _read_tokenizers(folder: Path, model_type: str) -> dict[str, Tokenizer]:
    """From tokenizer.json, or from the separate vocabulary files of GPT-2 and Marian."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return {"tokenizer": Tokenizer.load(path)}
    if model_type == "marian" and (folder / "source.spm").is_file() and (folder / "target.spm").is_file():
        # The ids of both sides are in vocab.json, or those of the target in target_vocab.json.
        target = folder / "target_vocab.json"
        ids = {"source": folder / "vocab.json", "target": target if target.is_file() else folder / "vocab.json"}
        return {side: from_sentencepiece(folder / f"{side}.spm", _read_ids(path)) for side, path in ids.items()}
    return {"tokenizer": read_gpt2(folder)} if model_type == "gpt2" and find_files(folder) else {}


def _read_ids(path: Path) -> dict[str, int]:
    ids = read_json(path)
    if not ids or sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str) or "<unk>" not in ids:
        raise UserError(f"{path}: not a vocabulary, which maps tokens to the ids 0, 1, 2, …; copy it again")
    return ids


def read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing from this Hugging Face folder; copy or download it again") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains a {type(content).__name__}, not a JSON object; copy or download it again")
    return content


def _read_tensors(folder: Path, hf: Json) -> Tensors:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_weights(single)
    if index.is_file():
        return _read_shards(folder, index)
    if (folder / "pytorch_model.bin").exists() or (folder / "pytorch_model.bin.index.json").exists():
        name = (hf.get("architectures") or ["AutoModel"])[0]
        raise UserError(
            f"{folder}: the weights are a pickle (pytorch_model.bin), which can execute code when it is loaded, so "
            'they are not read. If you trust the file, convert it:  python -c "from transformers import '
            f"{name} as M; M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    raise UserError(f"{single}: missing, and so is {index.name}; copy or download the folder again")


def _read_shards(folder: Path, index: Path) -> Tensors:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index}: has no weight_map from tensor to file names; copy or download it again")
    tensors: Tensors = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: the file name {name!r} points outside of the folder, so it is not read")
        tensors.update(read_weights(folder / name))
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{index}: {missing[0]} is not in {names[missing[0]]}; copy or download the folder again")
    return tensors


def export_folder(
    model: Model,
    folder: str | Path,
    tokenizers: Mapping[str, Tokenizer] | None = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> str:
    """Save `model` for transformers' `from_pretrained(folder)`; returns the name of the family.

    Special tokens are those of the tokenizers, unless `metadata` overrides them. The exported tokenizers add the
    special tokens that the model was trained with: </s> after the source of an encoder-decoder, <s> and </s> around
    the text of an encoder. If source and target have separate tokenizers, that of the target is saved in the subfolder
    `target`. Means and standard deviations of pixels are saved in preprocessor_config.json. `max_length` is where a
    text is truncated (`tokenizer(…, truncation=True)`), by default the model's.
    """
    folder, tokenizers = Path(folder), dict(tokenizers or {})
    config = model.config
    imported = (metadata or {}).get("model_type")
    family = convert.family_of(config, imported)
    hf = convert.config_to_hf(config, {**special_ids(config, tokenizers), **(metadata or {})})
    hf, weights = family.count_positions(hf, convert.weights_to_hf(config, weights_of(model), imported))
    hf["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    make_folder(folder)
    write_tokenizers(folder, config, tokenizers, max_length)
    if config.input == "patches":
        write_json(folder / PREPROCESSOR, preprocessor_config(config))
    write_json(folder / "config.json", hf)
    write_weights(folder / "model.safetensors", weights)
    return family.name


def special_ids(config: ModelConfig, tokenizers: Mapping[str, Tokenizer]) -> Json:
    """The special tokens of the output, under the keys of config.json."""
    target = tokenizers.get("target", tokenizers.get("tokenizer"))
    ids = {f"{role}_token_id": getattr(target, role, None) for role in ("pad", "bos", "eos")}
    if config.architecture == "encoder-decoder":
        ids["decoder_start_token_id"] = ids["bos_token_id"]
    return {name: id for name, id in ids.items() if id is not None}


def write_tokenizers(
    folder: Path, config: ModelConfig, tokenizers: Mapping[str, Tokenizer], max_length: int | None = None
) -> None:
    """tokenizer.json and tokenizer_config.json; those of a separate target in the subfolder `target`."""
    source = tokenizers.get("source", tokenizers.get("tokenizer"))
    for name, tokenizer in ((".", source), ("target", tokenizers.get("target"))):
        if tokenizer is not None:
            make_folder(folder / name)
            path = folder / name / "tokenizer.json"
            write_atomically(path, _with_special_tokens(tokenizer, config.architecture).encode())
            added = {token["content"] for token in read_json(path).get("added_tokens", [])}
            content = _tokenizer_config(tokenizer, added, max_length or config.max_length)
            write_json(path.with_name("tokenizer_config.json"), content)


def _with_special_tokens(tokenizer: Tokenizer, architecture: str) -> str:
    """tokenizer.json that adds the special tokens of the training data; an imported one that adds some is kept."""
    raw = RawTokenizer.from_str(tokenizer.json)
    before = tokenizer.bos if architecture == "encoder" else None
    after = None if architecture == "decoder" else tokenizer.eos
    if raw.post_processor is not None or (before is None and after is None):
        return tokenizer.json
    tokens = [(raw.id_to_token(id), id) for id in (before, after) if id is not None]
    first, last = (raw.id_to_token(id) if id is not None else "" for id in (before, after))
    raw.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(), pair=f"{first} $A {last} $B:1 {last}:1".strip(), special_tokens=tokens
    )
    content = json.loads(raw.to_str())
    for token in content["added_tokens"]:
        if token["content"] in MASK_NAMES and tokenizer.has_spaces:
            token["lstrip"] = True  # the space before <mask> belongs to the token that it stands for
    return json.dumps(content, indent=2, ensure_ascii=False)


def preprocessor_config(config: ModelConfig) -> Json:
    """What transformers' image processor does: resize, divide by 255, normalise by the statistics of the pixels."""
    channels = 3 if config.channels == 1 else config.channels
    mean, std = (list(values) * (channels // len(values)) for values in (config.pixel_mean, config.pixel_std))
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "size": {"height": config.image_size, "width": config.image_size}, "resample": 2, "rescale_factor": 1 / 255,
        "image_mean": mean, "image_std": std, **({"do_convert_rgb": True} if channels == 3 else {}),
    }  # fmt: skip


def _pixel_statistics(path: Path) -> Json:
    """Our fields for what transformers' image processor does to pixels between 0 and 1."""
    content = read_json(path) if path.is_file() else {}
    if not content.get("do_normalize") or "image_mean" not in content or "image_std" not in content:
        return {}
    return {"pixel_mean": tuple(content["image_mean"]), "pixel_std": tuple(content["image_std"])}


def _tokenizer_config(tokenizer: Tokenizer, added: set[str], max_length: int) -> Json:
    content: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for role in ("pad", "unk", "bos", "eos"):
        id = getattr(tokenizer, role)
        if id is not None:
            content[f"{role}_token"] = tokenizer.token(id)
    return {**content, **{role: name for name, role in ROLES.items() if name in added}}


def write_json(path: Path, content: Json) -> None:
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())
