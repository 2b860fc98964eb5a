"""`regard import`: a Hugging Face folder becomes a Regard folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = """
Read a Hugging Face model (GPT-2, BERT, ViT, Marian, BART, T5) from a local folder and write it as a Regard
folder: recipe.toml, model.safetensors and, where there is one, tokenizer.json. Only safetensors files are
read, never a pickle.
"""

EXAMPLES = """
regard import gpt2                     ./gpt2 becomes runs/gpt2
regard import gpt2 -o my-run --check   also compare the answers with those of transformers
hf download gpt2 --local-dir gpt2      how to get such a folder from the hub
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the Hugging Face folder: config.json and model.safetensors")
    parser.add_argument("-o", "--out", metavar="RUN", help="the folder to write (default: runs/NAME of DIR)")
    parser.add_argument("--check", action="store_true", help="load DIR with transformers too and compare the answers")
    parser.add_argument("--force", action="store_true", help="replace RUN if it is a Regard folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.commands.export import report_check
    from regard.files import staged
    from regard.interop import compare, read_folder
    from regard.models import folder as runs

    found = read_folder(args.folder)
    output = Path(args.out) if args.out else Path("runs") / Path(args.folder).resolve().name
    with staged(output, marker=runs.RECIPE, force=args.force, keep=args.folder) as fresh:
        difference = compare(found.model, args.folder) if args.check else None
        report_check(difference)
        runs.save(found.model, fresh, tokenizers=found.tokenizers, recipe={"hf": found.notes} if found.notes else None)
        files = sorted(path.name for path in fresh.iterdir())
    parameters = sum(tensor.numel() for tensor in runs.weights_of(found.model).values())
    if args.json:
        result = {
            "family": found.family, "parameters": parameters, "folder": str(output), "files": files,
            "unused": found.unused, "difference": None if difference is None else difference.largest,
        }  # fmt: skip
        print(json.dumps(result, ensure_ascii=False))
        return 0
    print(f"{found.family}, {parameters:,} parameters: {args.folder} -> {output} ({', '.join(files)})")
    if found.unused:
        print(f"left out, since the model does not use them: {', '.join(found.unused)}")
    if not found.tokenizers and found.model.config.input == "tokens":
        print("there is no tokenizer.json in that folder, so the model reads and writes ids")
    if difference is not None:
        print(difference.sentence)
    return 0
