"""Show the tokens of text: those of a trained model, or of a tokenizer. Each input line gives one line of tokens with
spaces between them; a space inside a token is shown as ▁. With --ids these are numbers, and --decode turns numbers
back into text. A model with two tokenizers reads with the source's and generates with the target's.

examples:
  regard tokenize runs/demo "July 4th, 1976"
  regard tokenize runs/demo "1976년 7월 4일" --side target --ids
  regard tokenize runs/demo --decode "12 7 31"
  regard tokenize tokenizers/en-de --files train.en.gz --json -o tokens.jsonl
  regard tokenize spm.model < in.txt
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands.inputs import ROWS, Inputs, Item, check_inputs
from regard.commands.prediction import Chunk, Shown, input_options, predict_inputs
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.text.tokenizer import Tokenizer

TOKENIZER = {"TOKENIZER": "folder of a model or of a tokenizer, a tokenizer.json, or a SentencePiece model"}
ARGUMENTS = {
    **input_options(
        "TEXT", "texts", "text: text, tokens, ids, offsets (first and last character + 1 of each token)",
        column="column of a table (default: text)", runs=TOKENIZER, device={},
    ),
    "--ids": "print the ids of the tokens",
    "--decode": "the inputs are ids, with spaces between them: print their text",
    "--side": ("which tokenizer, if a model has two (default: source)", {"choices": ("source", "target")}),
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    check_inputs(args)
    if args.ids and args.decode:
        raise UserError("--ids prints ids, --decode reads them: pass one of them")
    tokenizer = open_tokenizer(args.tokenizer, args.side)
    token = functools.cache(tokenizer.token)  # the same ones come again and again

    def encode(chunk: Chunk) -> list[Any]:
        offsets = tokenizer.offsets(chunk.texts) if args.json else [None] * len(chunk.texts)
        return list(zip(tokenizer.encode_batch(chunk.texts), offsets, strict=True))

    def decode(item: Item) -> tuple[list[int], str]:
        try:
            ids = [int(id) for id in item.text.split()]
        except ValueError:
            raise UserError(f"{item.text!r}: --decode reads ids, such as  12 7 31") from None
        return ids, tokenizer.decode(ids)

    def show_tokens(item: Item, output: tuple[list[int], list[Any] | None]) -> Shown:
        ids, offsets = output
        tokens = [token(id) for id in ids]
        value = {"text": item.text, "tokens": tokens, "ids": ids, "offsets": offsets, **item.origin}
        yield value, [(" ".join(map(str, ids) if args.ids else tokens),)]

    def show_text(item: Item, output: tuple[list[int], str]) -> Shown:
        ids, text = output
        yield {"ids": ids, "tokens": [token(id) for id in ids], "text": text, **item.origin}, [(text,)]

    if args.decode:
        return predict_inputs(args, Inputs("ids", "ids", "IDS"), lambda chunk: chunk.each(decode), show_text, size=ROWS)
    return predict_inputs(args, Inputs("text"), encode, show_tokens, size=ROWS)


def open_tokenizer(name: str, side: str | None) -> Tokenizer:
    """The tokenizer in a file or in the folder of a model; of two, that of `side`."""
    from regard.text.gpt2 import find_files, read_gpt2
    from regard.text.sentencepiece import load_tokenizer, load_tokenizers

    path = Path(name)
    if not path.exists():
        raise UserError(f"{name}: no such file or folder; pass the folder of a model or a tokenizer file")
    if not path.is_dir():
        return load_tokenizer(path)
    tokenizers = load_tokenizers(path)
    if not tokenizers and find_files(path) is not None:
        return read_gpt2(path)
    found = tokenizers.get("tokenizer") or tokenizers.get(side or "source")
    if found is None:
        raise UserError(f"{name}: has no tokenizer.json; pass the folder of a model that reads text, or of a tokenizer")
    return found
