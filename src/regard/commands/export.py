"""`regard export`: a Regard folder becomes a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.interop import Difference

DESCRIPTION = """
Write a Regard folder as a Hugging Face model: config.json, model.safetensors and the tokenizer, so that
transformers' from_pretrained loads it and gives the same answers. A model that no family of transformers can
hold is refused, with the reasons.
"""

EXAMPLES = """
regard export runs/gpt2 --hf gpt2-out             runs/gpt2 becomes gpt2-out
regard export runs/gpt2 --hf gpt2-out --check     also load it with transformers and compare the answers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="the Regard folder: recipe.toml and model.safetensors")
    parser.add_argument("--hf", metavar="DIR", required=True, help="the Hugging Face folder to write")
    parser.add_argument("--check", action="store_true", help="load DIR with transformers and compare the answers")
    parser.add_argument("--force", action="store_true", help="replace DIR if it is a Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.files import staged
    from regard.interop import compare, export_folder
    from regard.models import folder as runs

    model = runs.load(args.folder)
    tokenizers, notes = runs.load_tokenizers(args.folder), runs.load_recipe(args.folder).get("hf", {})
    with staged(args.hf, marker="config.json", force=args.force, keep=args.folder) as fresh:
        family = export_folder(model, fresh, tokenizers, notes=notes)
        difference = compare(model, fresh) if args.check else None
        report_check(difference)
        files = sorted(str(path.relative_to(fresh)) for path in fresh.rglob("*") if path.is_file())
    parameters = sum(tensor.numel() for tensor in runs.weights_of(model).values())
    if args.json:
        result = {
            "family": family, "parameters": parameters, "folder": args.hf, "files": files,
            "difference": None if difference is None else difference.largest,
        }  # fmt: skip
        print(json.dumps(result, ensure_ascii=False))
        return 0
    print(f"{family}, {parameters:,} parameters: {args.folder} -> {args.hf} ({', '.join(files)})")
    if difference is not None:
        print(difference.sentence)
    return 0


def report_check(difference: Difference | None) -> None:
    """A check that fails stops the command before anything is written."""
    if difference is not None and not difference.fits:
        raise UserError(
            f"--check: the largest difference from transformers is {difference.largest:.2g} in numbers up to "
            f"{difference.size:.2g}, too much for rounding, so nothing was written"
        )
