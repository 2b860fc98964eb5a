"""Convert a Regard folder to a Hugging Face model: config.json, model.safetensors and the tokenizer, so that
transformers' from_pretrained loads it and computes the same outputs. If no architecture of transformers can represent
the model, the error lists the differences.

examples:
  regard export runs/gpt2 --hf gpt2-out             convert runs/gpt2 to gpt2-out
  regard export runs/gpt2 --hf gpt2-out --check     also load it with transformers and compare the outputs
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import show
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.models.transformer import Model

ARGUMENTS = {
    "RUN": "the Regard folder: recipe.toml and model.safetensors",
    "--hf DIR": ("the Hugging Face folder to save to", {"required": True}),
    "--check": "load DIR with transformers and compare the outputs",
    "--force": "replace DIR if it is a Hugging Face folder",
    "--json": "print the result as JSON",
}


def run(args: argparse.Namespace) -> None:
    from regard.files import staged
    from regard.interop import export_folder
    from regard.interop.check import compare_texts
    from regard.models.folder import weights_of
    from regard.tasks.registry import load

    bundle = load(args.run)
    with staged(args.hf, marker="config.json", force=args.force, keep=args.run) as fresh:
        metadata = dict(bundle.tables["hf"])
        if bundle.config.output_head == "classes":
            metadata["id2label"] = {str(number): name for number, name in enumerate(bundle.classes)}
        family = export_folder(bundle.model, fresh, bundle.tokenizers, metadata=metadata)
        difference, summary = check(args, bundle.model, fresh)
        agreement = compare_texts(bundle, fresh) if args.check else None
        if isinstance(agreement, str):
            summary = [*summary, f"outputs for texts: not compared, because {agreement}"]
        elif agreement is not None:
            summary = [*summary, agreement.summary]
            if agreement.identical < 0.9 * agreement.compared:
                text, ours, theirs = agreement.first or ("", "", "")
                raise UserError(
                    f"--check: {agreement.summary}; the first that differs: {text!r} gives {ours!r} here and "
                    f"{theirs!r} there; nothing was saved"
                )
        files = sorted(str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file())
    parameters = sum(tensor.numel() for tensor in weights_of(bundle.model).values())
    result = {"family": family, "parameters": parameters, "folder": args.hf, "files": files}
    line = f"{family}, {parameters:,} parameters: {args.run} -> {args.hf} ({', '.join(files)})"
    texts: dict[str, Any] | None = None
    if isinstance(agreement, str):
        texts = {"compared": 0, "reason": agreement}
    elif agreement is not None:
        texts = {"identical": agreement.identical, "compared": agreement.compared}
    show(args.json, {**result, "difference": difference, "texts": texts}, [line, *summary])


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
