"""Web folders: an ONNX folder with a page, so that the model runs in a browser.

    index.html, assets/…           the page, and ONNX Runtime as WebAssembly
    page.json                      what the page needs to know of the model
    onnx/…, tokenizer.json, …      as in an ONNX folder (`regard.interop.onnx_folder`), with attention weights

Any static server serves it. Nothing is sent anywhere: the page loads its own files alone, which its
Content-Security-Policy enforces. The page is built from web/ by Vite (`regard.page`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.interop.family import Json
from regard.interop.folder import write_json
from regard.models.folder import weights_of
from regard.page import EXPORTED, page_missing
from regard.predict.bundle import Bundle
from regard.predict.captioner import Captioner
from regard.predict.config import SearchConfig
from regard.predict.generator import Generator
from regard.predict.onnx import FOLDER
from regard.predict.regressor import Regressor
from regard.predict.translator import Translator

# What web/src/browser/tokenizer.ts computes, by the part of tokenizer.json.
PARTS = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Sequence", "BertNormalizer"),
    "pre_tokenizer": (
        "Sequence", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits", "FixedLength", "Metaspace",
        "ByteLevel",
    ),
    "model": ("WordLevel", "WordPiece", "BPE", "Unigram"),
    "decoder": (
        "Sequence", "Fuse", "ByteLevel", "Metaspace", "Replace", "Strip", "ByteFallback", "WordPiece"
    ),
}  # fmt: skip


def check_page(bundle: Bundle) -> None:
    """An error, before anything is computed, for what the page cannot do."""
    if (reason := page_missing(folder=EXPORTED)) is not None:
        raise UserError(f"--web: {reason}")
    config = bundle.config
    if bundle.predictor_class is None or (config.input == "features" and config.output_head == "tokens"):
        raise UserError(
            f"--web: the page has no input for architecture = {config.architecture!r}, input = {config.input!r}, "
            f"output_head = {config.output_head!r}; export with --onnx"
        )
    for name, tokenizer in bundle.tokenizers.items():
        content = json.loads(tokenizer.json)
        for part, known in PARTS.items():
            if unknown := [kind for kind in _kinds(content.get(part)) if kind not in known]:
                raise UserError(
                    f"--web: the {name} has the {part} {unknown[0]}, which the page does not compute; "
                    "export with --onnx, or train with text.kind"
                )


def add_page(bundle: Bundle, folder: Path, *, int8: bool) -> None:
    """Add the page to the ONNX folder of a model."""
    shutil.copytree(EXPORTED, folder, dirs_exist_ok=True)
    write_json(folder / "page.json", page_info(bundle, folder, int8=int8))


def _kinds(part: Any) -> Iterator[str]:
    """The types of a part of tokenizer.json, and of the parts of a sequence."""
    if part is not None:
        yield part["type"]
        for inner in part.get("normalizers", part.get("pretokenizers", part.get("decoders", ()))):
            yield from _kinds(inner)


def page_info(bundle: Bundle, folder: Path, *, int8: bool) -> Json:
    """page.json: the fields of `Info` in web/src/browser/info.ts."""
    config, limits, predictor = bundle.config, bundle.limits, bundle.predictor
    graphs = sorted(path.name.removesuffix(".onnx").removesuffix("_quantized") for path in folder.glob("onnx/*.onnx"))
    graphs.sort(reverse=True)  # encoder_model before decoder_model_merged
    info: Json = {
        "name": bundle.path.resolve().name if bundle.path else "model", "task": predictor.COMMAND,
        "note": "", "input": config.input, "int8": int8, "graphs": graphs,
        "parameters": sum(weight.numel() for weight in weights_of(bundle.model).values()),
        "bytes": sum(path.stat().st_size for path in (folder / FOLDER).iterdir()),
        "target": "target" in bundle.tokenizers, "source": limits.positions, "context": limits.context,
        "classes": list(bundle.classes) if config.output_head == "classes" else [],
        "punctuation": bundle.tables["data"].get("punctuation", "attached"),
        "begin": None, "end": None, "source_end": None, "mask": None, "image": None, "numbers": None, "layer": 0,
    }  # fmt: skip
    search = SearchConfig()
    match predictor:
        case Translator() | Captioner():
            info["begin"], info["end"] = bundle.target_frame
            info["source_end"] = bundle.source.eos if config.input == "tokens" else None
            search = predictor.configured()
        case Generator():
            info["end"], search = bundle.tokenizer.eos, predictor.configured()
        case Regressor():
            data = predictor.data
            mean, std = (part.flatten().tolist() for part in data.scale)
            info["numbers"] = {"mean": mean, "std": std, "context": data.context, "horizon": data.horizon}
        case _ if config.input == "tokens":
            info |= {"begin": bundle.tokenizer.bos, "end": bundle.tokenizer.eos, "mask": bundle.tokenizer.mask}
            info["source"] = limits.source or limits.context
    names = ("beam", "length_penalty", "min_length", "max_length", "max_ratio", "temperature", "top_k", "sample")
    info["decode"] = {name: getattr(search, name) for name in names}
    if config.input == "patches":
        grid = config.image_size // config.patch_size
        info["image"] = {
            "size": config.image_size, "channels": config.channels, "grid": grid, "first": int(config.has_cls)
        }  # fmt: skip
    layers = config.layers if config.decoder_layers is None else config.decoder_layers
    info["layer"] = layers - (2 if config.architecture == "encoder-decoder" and layers > 2 else 1)
    return info
