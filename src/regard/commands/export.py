"""Export a Regard folder for other programs: as a Hugging Face model (--hf), which transformers' from_pretrained loads,
as ONNX graphs (--onnx) for ONNX Runtime and transformers.js, which run in Python, in Node and in a browser, as a web
page (--web) that computes the model in the browser, or for CTranslate2 (--ctranslate2), an engine in C++ that
translates and generates text fast on CPUs.

A Hugging Face folder has config.json, model.safetensors and the tokenizer. If no architecture of transformers can
represent the model, the error lists the differences. ONNX represents every Transformer; the graphs take any batch size
and length and hand on the keys and values of the tokens that they have read. CTranslate2 has encoder-decoders and
language models; what it would compute differently is refused. Before it is called done, every folder is compared with
the run on 32 inputs of its test data; if it differs, nothing is saved. With --hf this needs transformers; without it
the folder is saved, and the output says that it was not compared. A folder for ONNX or CTranslate2 is used like a run:
regard translate DIR, regard generate DIR, regard classify DIR … A web folder is such a folder with a page and with
ONNX Runtime as WebAssembly: any static server serves it, and nothing that is typed there leaves the browser.

examples:
  regard export runs/gpt2 --hf gpt2-out             convert runs/gpt2 to gpt2-out
  regard export runs/gpt2 --hf gpt2-out --check     an error if transformers, to compare with, is not installed
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
from regard.errors import MissingExtra, UserError
from regard.messages import localize

if TYPE_CHECKING:
    from regard.interop.check import Agreement, Difference
    from regard.interop.peer import Peer
    from regard.predict.bundle import Bundle

ARGUMENTS = {
    "RUN": "the Regard folder: recipe.toml and model.safetensors",
    "--hf DIR": "save a Hugging Face folder",
    "--onnx DIR": "save a folder of ONNX graphs",
    "--web DIR": "save a page that runs the model in the browser",
    "--ctranslate2 DIR": "save a folder for CTranslate2",
    "--int8": "with --onnx or --ctranslate2: weights in 8 bits",
    "--fp32": "with --web: weights in 32 bits instead of 8",
    "--check": "with --hf: an error if transformers, to compare with, is not installed",
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
    content = {**result, "parameters": parameters, "folder": folder, "files": files}
    show(args.json, content, [line, *map(localize, summary)])


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

    metadata = dict(bundle.tables["hf"])
    if bundle.config.output_head == "classes":
        metadata["id2label"] = {str(number): name for number, name in enumerate(bundle.classes)}
    longest = bundle.limits.source
    family = export_folder(bundle.model, fresh, bundle.tokenizers, metadata=metadata, max_length=longest)
    bundle.model.float()  # as transformers computes
    try:
        result, summary = _verify_hf(bundle, fresh)
    except MissingExtra as missing:
        if args.check:
            raise
        result = {"values": 0, "compared": 0, "reason": str(missing)}
        summary = [f"not compared with the run: {missing}, and export again with --check"]
    if "target" in bundle.tokenizers:
        target = str(Path(args.hf) / "target")
        summary = [*summary, f"decode outputs with the target's tokenizer:  AutoTokenizer.from_pretrained({target!r})"]
    return {"family": family, **result}, family, summary


def _verify_hf(bundle: Bundle, fresh: Path) -> tuple[dict[str, Any], list[str]]:
    """`verify` with transformers; on random ids or pixels where there are no inputs that both can read."""
    from regard.interop import compare
    from regard.interop.check import Agreement
    from regard.interop.peer import Peer, unreadable

    if reason := unreadable(bundle):
        return _verified(compare(bundle.model, fresh), Agreement(0, 0, None, reason=reason), "random")
    return verify(bundle, Peer(bundle, fresh))


def _save_onnx(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.onnx_folder import export_onnx
    from regard.tasks.registry import load

    export_onnx(bundle, fresh, int8=args.int8)
    result, summary = verify(bundle, load(fresh), int8=args.int8)
    return {"int8": args.int8, **result}, "ONNX, int8" if args.int8 else "ONNX", summary


def _save_web(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.onnx_folder import export_onnx
    from regard.interop.web_folder import add_page, check_page
    from regard.tasks.registry import load

    int8 = not args.fp32
    check_page(bundle)
    export_onnx(bundle, fresh, int8=int8, attention=True)
    result, summary = verify(bundle, load(fresh), int8=int8)
    add_page(bundle, fresh, int8=int8)
    served = f"open it with any static server:  python -m http.server -d {shlex.quote(args.web)}"
    return {"int8": int8, **result}, "page with the model", [*summary, served]


def _save_ctranslate2(args: argparse.Namespace, bundle: Bundle, fresh: Path) -> Result:
    from regard.interop.ctranslate2 import export_ctranslate2
    from regard.tasks.registry import load

    export_ctranslate2(bundle, fresh, int8=args.int8)
    result, summary = verify(bundle, load(fresh), int8=args.int8)
    title = "CTranslate2, int8" if args.int8 else "CTranslate2"
    return {"int8": args.int8, **result}, title, summary


FORMATS = {
    "hf": Format(_save_hf, ("check",)),
    "onnx": Format(_save_onnx, ("int8",)),
    "web": Format(_save_web, ("fp32",)),
    "ctranslate2": Format(_save_ctranslate2, ("int8",)),
}


def verify(bundle: Bundle, exported: Bundle | Peer, *, int8: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Compare an exported folder with the run, on its own data if possible; an error if they differ."""
    from regard.interop.verify import INPUTS, compare_outputs, compare_values, fitting, generated_inputs
    from regard.tasks.registry import task_for, task_of
    from regard.training.task import run_inputs

    task = bundle.recipe.get("task") or task_for(bundle.config)
    name, inputs = run_inputs(task_of({"task": task}), bundle, INPUTS) if task else ("", [])
    inputs = fitting(bundle, inputs) or fitting(bundle, generated_inputs(bundle, INPUTS))
    kind = f"inputs from {name}" if name else "generated inputs"
    difference = compare_values(bundle, exported, inputs, int8=int8, peer="the run")
    agreement = compare_outputs(bundle, exported, inputs, int8=int8, peer="the run", kind=kind)
    return _verified(difference, agreement, name or "generated", int8=int8)


def _verified(
    difference: Difference, agreement: Agreement, inputs: str, *, int8: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """The result of a comparison, for export.json and as lines; an error if it is not good enough.

    In float32 the values must agree up to rounding, and the outputs must be identical too.
    """
    if not difference.within_tolerance or not (int8 or agreement.enough):
        text, ours, theirs = agreement.first or ("", "", "")
        first = f"; the first that differs: {text!r} gives {ours!r} in the run and {theirs!r} exported" if text else ""
        kind = "on average" if difference.on_average else "of the largest value"
        raise UserError(
            f"the exported model differs from the run: {difference.summary} (tolerance {difference.tolerance:g} "
            f"{kind}); {agreement.summary}{first}; nothing was saved"
        )
    result = {
        "inputs": inputs, "values": difference.count, "difference": difference.largest,
        "mean_difference": difference.mean, "largest_value": difference.scale, "tolerance": difference.tolerance,
        "identical": agreement.identical, "compared": agreement.compared,
        **({"reason": agreement.reason} if agreement.reason else {}),
    }  # fmt: skip
    return result, [difference.summary, agreement.summary]
