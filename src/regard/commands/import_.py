"""Convert a Hugging Face model (GPT-2, BERT, ViT, Marian, BART, T5) in a local folder to a Regard folder: recipe.toml,
model.safetensors and, if there is one, tokenizer.json. Weights are read from safetensors files, never from a pickle.

examples:
  hf download gpt2 --local-dir gpt2      download a model from the Hugging Face hub
  regard import gpt2                     convert ./gpt2 to runs/gpt2
  regard import gpt2 -o my-run --check   also compare the outputs with those of transformers
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands import show
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.models.transformer import Model

ARGUMENTS = {
    "DIR": "the Hugging Face folder",
    "-o --out RUN": "the output folder (default: runs/NAME of DIR)",
    "--check": "also load DIR with transformers and compare the outputs",
    "--force": "replace RUN if it holds a saved model and nothing else",
    "--json": "print the result as JSON",
}


def run(args: argparse.Namespace) -> None:
    from regard.files import staged
    from regard.interop import read_folder
    from regard.models import folder as runs
    from regard.tasks.registry import task_for

    imported = read_folder(args.dir)
    output = Path(args.out) if args.out else Path("runs") / Path(args.dir).resolve().name
    with staged(output, force=args.force, own=runs.saved_files, keep=args.dir) as fresh:
        difference, summary = check(imported.model, args.dir) if args.check else (None, [])
        task = task_for(imported.model.config)
        recipe = {name: value for name, value in (("task", task), ("hf", imported.metadata)) if value}
        runs.save(imported.model, fresh, tokenizers=imported.tokenizers, recipe=recipe)
        files = sorted(path.name for path in fresh.iterdir())
    parameters = sum(tensor.numel() for tensor in runs.weights_of(imported.model).values())
    family, unused = imported.family, imported.unused
    lines = [f"{family}, {parameters:,} parameters: {args.dir} -> {output} ({', '.join(files)})"]
    if unused:
        lines.append(f"skipped, since the model does not use them: {', '.join(unused)}")
    if not imported.tokenizers and imported.model.config.input == "tokens":
        lines.append("the folder has no tokenizer.json, so the model can only be used with token ids")
    result = {"family": family, "task": task, "parameters": parameters, "folder": str(output), "files": files}
    show(args.json, {**result, "unused": unused, "difference": difference}, [*lines, *summary])


def check(model: Model, folder: str) -> tuple[float, list[str]]:
    """The largest difference from transformers; an error if it is larger than rounding errors."""
    from regard.interop import compare

    difference = compare(model, folder)
    if not difference.within_tolerance:
        raise UserError(
            f"--check: the outputs differ from those of transformers by up to {difference.largest:.2g} (largest value "
            f"{difference.scale:.2g}), more than rounding explains; nothing was saved"
        )
    return difference.largest, [difference.summary]
