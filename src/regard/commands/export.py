"""Export a Regard folder for other programs: as a Hugging Face model (--hf), which transformers' from_pretrained loads,
as ONNX graphs (--onnx) for ONNX Runtime and transformers.js, which run in Python, in Node and in a browser, as a web
page (--web) that computes the model in the browser, or for CTranslate2 (--ctranslate2), an engine in C++ that
translates and generates text fast on CPUs.

A Hugging Face folder has config.json, model.safetensors and the tokenizer. If no architecture of transformers can
represent the model, the error lists the differences. ONNX represents every Transformer; the graphs take any batch size
and length and hand on the keys and values of the tokens that they have read. CTranslate2 has encoder-decoders and
language models; what it would compute differently is refused. Before it is called done, every ONNX or CTranslate2
folder is compared with the run on 32 inputs of its test data; if it differs, nothing is saved. The folder is used like
a run: regard translate DIR, regard generate DIR, regard classify DIR … A web folder is such a folder with a page and
with ONNX Runtime as WebAssembly: any static server serves it, and nothing that is typed there leaves the browser.

examples:
  regard export runs/gpt2 --hf gpt2-out             convert runs/gpt2 to gpt2-out
  regard export runs/gpt2 --hf gpt2-out --check     also load it with transformers and compare the outputs
  regard export runs/mine --onnx mine-onnx          ONNX graphs in mine-onnx/onnx
  regard export runs/mine --onnx mine-onnx --int8   with weights in 8 bits: a quarter of the size
  regard export runs/mine --web site                a page; look at it with  python -m http.server -d site
  regard export runs/mine --ctranslate2 fast --int8 for CTranslate2, the fastest on a CPU
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.commands import show
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.models.transformer import Model
    from regard.predict.bundle import Bundle

ARGUMENTS = {
    "RUN": "the Regard folder: recipe.toml and model.safetensors",
    "--hf DIR": "save a Hugging Face folder",
    "--onnx DIR": "save a folder of ONNX graphs",
    "--web DIR": "save a page that runs the model in the browser",
    "--ctranslate2 DIR": "save a folder for CTranslate2",
    "--int8": "with --onnx or --ctranslate2: weights in 8 bits",
    "--fp32": "with --web: weights in 32 bits instead of 8",
    "--check": "with --hf: load DIR with transformers and compare the outputs",
    "--force": "replace DIR if an export has written all of its files",
    "--json": "print the result as JSON",
}

Result = tuple[dict[str, Any], str, list[str]]  # for --json, the name of the format, and further lines


class Format(NamedTuple):
    save: Callable[[argparse.Namespace, Bundle, Path], Result]
    options: tuple[str, ...]  # those that not every format has


def run(args: argparse.Namespace) -> None:
    from regard.files import files_in, staged
    from regard.interop.folder import write_json
    from regard.models.folder import weights_of
    from regard.tasks.registry import VERIFICATION, load_run

    name, folder = _chosen(args)
    bundle = load_run(args.run)
    with staged(folder, force=args.force, own=exported_files, keep=args.run) as fresh:
        result, title, summary = FORMATS[name].save(args, bundle, fresh)
        result = {"format": name, **result}
        files = sorted([*files_in(fresh), VERIFICATION])
        write_json(fresh / VERIFICATION, {**result, "files": files})
    parameters = sum(tensor.numel() for tensor in weights_of(bundle.model).values())
    line = f"{title}, {parameters:,} parameters: {args.run} -> {folder} ({', '.join(files)})"
    show(args.json, {**result, "parameters": parameters, "folder": folder, "files": files}, [line, *summary])


def exported_files(folder: Path) -> list[str]:
    """What an export has written into a folder, which may be replaced; nothing if it has not."""
    from regard.files import read_json
    from regard.tasks.registry import VERIFICATION

    saved = read_json(folder / VERIFICATION)
    files = saved.get("files") if saved.get("format") in (*FORMATS,) else None
    return [*map(str, files)] if isinstance(files, list) else []


def _chosen(args: argparse.Namespace) -> tuple[str, str]:
    """The format that was asked for, and its folder."""
    chosen = [(name, folder) for name in FORMATS if (folder := getattr(args, name)) is not None]
    options = " or ".join(f"--{name} DIR" for name in FORMATS)
    if len(chosen) != 1:
        raise UserError(f"{'no format' if not chosen else 'several formats'} to export to: pass one of {options}")
    ((name, folder),) = chosen
    for option in {option for format in FORMATS.values() for option in format.options}:
        if getattr(args, option) and option not in FORMATS[name].options:
            raise UserError(f"--{option}: has no effect with --{name}; remove it")
    return name, folder


def _save_hf(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop import export_folder
    from regard.interop.check import compare_texts

    metadata = dict(bundle.tables["hf"])
    if bundle.config.output_head == "classes":
        metadata["id2label"] = {str(number): name for number, name in enumerate(bundle.classes)}
    longest = bundle.limits.source
    family = export_folder(bundle.model, fresh, bundle.tokenizers, metadata=metadata, max_length=longest)
    difference, summary = check(args, bundle.model, fresh)
    agreement = compare_texts(bundle, fresh) if args.check else None
    texts: dict[str, Any] | None = None
    if isinstance(agreement, str):
        summary = [*summary, f"outputs for texts: not compared, because {agreement}"]
        texts = {"compared": 0, "reason": agreement}
    elif agreement is not None:
        summary = [*summary, agreement.summary]
        texts = {"identical": agreement.identical, "compared": agreement.compared}
        if not agreement.enough:
            text, ours, theirs = agreement.first or ("", "", "")
            raise UserError(
                f"--check: {agreement.summary}; the first that differs: {text!r} gives {ours!r} here and "
                f"{theirs!r} there; nothing was saved"
            )
    return {"family": family, "difference": difference, "texts": texts}, family, summary


def _save_onnx(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.onnx_folder import export_onnx

    export_onnx(bundle, fresh, int8=args.int8)
    result, summary = verify(bundle, fresh, int8=args.int8)
    return {"int8": args.int8, **result}, "ONNX, int8" if args.int8 else "ONNX", summary


def _save_web(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.onnx_folder import export_onnx
    from regard.interop.web_folder import add_page, check_page

    int8 = not args.fp32
    check_page(bundle)
    export_onnx(bundle, fresh, int8=int8, attention=True)
    result, summary = verify(bundle, fresh, int8=int8)
    add_page(bundle, fresh, int8=int8)
    served = f"open it with any static server:  python -m http.server -d {shlex.quote(args.web)}"
    return {"int8": int8, **result}, "page with the model", [*summary, served]


def _save_ctranslate2(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.ctranslate2 import export_ctranslate2

    export_ctranslate2(bundle, fresh, int8=args.int8)
    result, summary = verify(bundle, fresh, int8=args.int8)
    title = "CTranslate2, int8" if args.int8 else "CTranslate2"
    return {"int8": args.int8, **result}, title, summary


FORMATS = {
    "hf": Format(_save_hf, ("check",)),
    "onnx": Format(_save_onnx, ("int8",)),
    "web": Format(_save_web, ("fp32",)),
    "ctranslate2": Format(_save_ctranslate2, ("int8",)),
}


def verify(bundle: Bundle, fresh: Path, *, int8: bool) -> tuple[dict[str, Any], list[str]]:
    """Compare an exported folder with the run; an error if they differ.

    In float32 the values must agree up to rounding, and the outputs must be identical too.
    """
    from regard.interop.verify import INPUTS, compare_outputs, compare_values, fitting, generated_inputs
    from regard.tasks.registry import load, task_for, task_of
    from regard.training.task import run_inputs

    task = bundle.recipe.get("task") or task_for(bundle.config)
    name, inputs = run_inputs(task_of({"task": task}), bundle, INPUTS) if task else ("", [])
    inputs = fitting(bundle, inputs) or fitting(bundle, generated_inputs(bundle, INPUTS))
    exported = load(fresh)
    difference = compare_values(bundle, exported, inputs, int8=int8, peer="the run")
    agreement = compare_outputs(
        bundle, exported, inputs, peer="the run", kind=f"inputs from {name}" if name else "generated inputs"
    )
    if not difference.within_tolerance or not (int8 or agreement.enough):
        text, ours, theirs = agreement.first or ("", "", "")
        first = f"; the first that differs: {text!r} gives {ours!r} in the run and {theirs!r} exported" if text else ""
        kind = "on average" if difference.on_average else "of the largest value"
        raise UserError(
            f"the exported model differs from the run: {difference.summary} (tolerance {difference.tolerance:g} "
            f"{kind}); {agreement.summary}{first}; nothing was saved"
        )
    result = {
        "inputs": name or "generated", "values": difference.count, "difference": difference.largest,
        "mean_difference": difference.mean, "largest_value": difference.scale, "tolerance": difference.tolerance,
        "identical": agreement.identical, "compared": agreement.compared,
    }  # fmt: skip
    return result, [difference.summary, agreement.summary]


def check(args: argparse.Namespace, model: Model, folder: str | Path) -> tuple[float | None, list[str]]:
    """With --check: the largest difference from transformers; an error if it is larger than rounding errors."""
    from regard.interop import compare

    if not args.check:
        return None, []
    difference = compare(model, folder)
    if not difference.within_tolerance:
        raise UserError(
            f"--check: the outputs differ from those of transformers by up to {difference.largest:.2g} (largest value "
            f"{difference.scale:.2g}), more than rounding explains; nothing was saved"
        )
    return difference.largest, [difference.summary]
