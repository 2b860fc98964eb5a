"""Continue texts. Prompts are arguments, the lines of files (of a table, one column), or the lines of standard input;
with --prompt-file, one whole file, line ends included. A single prompt is continued as you watch; of several, each
gives one line (in it, line ends become spaces), with --samples  NUMBER<tab>LOG-PROBABILITY<tab>TEXT.  Settings without
an option come from the table [decode] of the run's recipe.toml. Works with language models that `regard train` has
trained (task = "language-modeling") and with those of `regard import`, such as GPT-2. A prompt that cannot be used is
reported, its output is an empty line, and the exit code is 3.

examples:
  regard generate runs/shakespeare-char "ROMEO: But soft,"
  regard generate runs/shakespeare-char             enter prompts in a terminal
  regard generate runs/gpt2 "The attention mechanism" --temperature 0.8 --top-k 50 --samples 3 --seed 1
  regard generate runs/gpt2 "Once upon a time" --max-tokens 3000 --overflow slide
  regard generate runs/gpt2 "Q: Why is the sky blue? A:" --stop "Q:" --json
  regard generate runs/gpt2 --files prompts.txt -o texts.txt
  regard generate runs/gpt2 --prompt-file start.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from regard.commands import REPEATABLE, positive
from regard.commands.inputs import Inputs, Item, check_inputs, is_prompt, note
from regard.commands.prediction import DECODING, SEARCH, Shown, input_options, open_predictor, predict_inputs
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.generator import Sample, Token

SAMPLING = ("--temperature T", "--top-k K", "--top-p P", "--seed N", "--no-repeat-ngram N")
ARGUMENTS = {
    **input_options(
        "PROMPT", "texts to continue", "sample: prompt, text, tokens with log-probabilities, why it ended"
    ),
    "--prompt-file FILE": "one prompt: the whole text of a file",
    "--begin": "start a new document; the prompt may then be empty",
    "--stop TEXT": ("end before this text; repeatable", REPEATABLE),
    "--context N": ("tokens attended to (default: as many as in training)", {"type": int}),
    "--overflow HOW": ("if the context is full: stop, or slide: drop the older half (stop)", {"default": "stop"}),
    DECODING: {
        **{name: SEARCH[name] for name in SAMPLING},
        "--samples N": ("continuations of each prompt (1)", {"type": positive, "dest": "n_best"}),
        "--max-tokens N": ("most tokens of a continuation (200)", {"type": positive, "dest": "max_length"}),
    },
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.predict.generator import Generator, Sample

    if "" in args.stop:
        raise UserError("--stop '': every text contains the empty text; pass at least one character")
    check_inputs(args)
    if args.prompt_file is not None:
        args.inputs = [read_prompt(args)]
    elif args.begin and not args.inputs and not args.files:
        args.inputs = [""]
    generator, full = open_predictor(args, Generator), False
    tokenizer, samples = generator.tokenizer, generator.config.n_best
    generator.check_options(args.overflow, args.begin, generator.context if args.context is None else args.context)
    options = {"stops": args.stop, "overflow": args.overflow, "begin": args.begin, "context": args.context}
    watched = not args.json and (len(args.inputs) == 1 or is_prompt(args))

    def predict(item: Item, out: TextIO) -> list[Sample]:
        nonlocal full
        stream = generator.stream([item.text], **options)
        if tokenizer.unk is not None and (unknown := tokenizer.encode(item.text).count(tokenizer.unk)):
            tokens = "1 token of the prompt is" if unknown == 1 else f"{unknown} tokens of the prompt are"
            note(f"{tokens} not in the model's vocabulary")
        found = [Sample() for _ in range(samples)]
        if watched:
            print_samples(item.text, found, stream, out)
        for token in stream:
            found[token.sample].take(token)
        full = full or any(sample.ended == "context" for sample in found)
        return found

    def show(item: Item, found: list[Sample]) -> Shown:
        for number, sample in enumerate(found, 1):
            rows = zip(sample.ids, sample.log_probabilities, strict=True)
            tokens = [{"id": id, "token": tokenizer.token(id), "log_probability": value} for id, value in rows]
            total, text = sum(sample.log_probabilities), item.text + sample.text
            value = {
                "sample": number, "prompt": item.text, "text": sample.text, "ended": sample.ended,
                "log_probability": total, "tokens": tokens, **item.origin,
            }  # fmt: skip
            yield value, [] if watched else [(text,) if samples == 1 else (item.number, total, text)]

    def after() -> None:
        nonlocal full
        if full and not args.json:
            note("the context is full; --overflow slide drops the older half and continues")
        full = False

    inputs = Inputs("prompt", argument="PROMPT", column=str(generator.bundle.tables["data"].get("column", "text")))
    return predict_inputs(
        args, inputs, lambda chunk: chunk.each(lambda item: predict(item, chunk.out)), show, after=after,
        empty=lambda item: ("",) if samples == 1 or watched else (item.number, "", ""),
    )  # fmt: skip


def read_prompt(args: argparse.Namespace) -> str:
    """The whole text of a file, line ends included."""
    file = args.prompt_file
    if args.inputs or args.files:
        raise UserError(f"--prompt-file {file}: there is a PROMPT too; pass one of them")
    try:
        return Path(file).read_bytes().decode()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start + 1} is not UTF-8 text; convert it first") from None


def print_samples(prompt: str, samples: Sequence[Sample], stream: Iterable[Token], out: TextIO) -> None:
    """Print tokens as they are sampled.

    Several samples are generated together: the first is shown while it grows, the others follow, and whatever of them
    is ready by then appears at once.
    """
    count = len(samples)
    headings = [f"--- sample {number} of {count}\n" * (count > 1) + prompt for number in range(1, count + 1)]
    print(headings[0], end="", file=out, flush=True)
    current = printed = 0  # the sample that is shown, and how many characters of it
    for token in stream:
        samples[token.sample].take(token)
        while current < count:
            print(samples[current].text[printed:], end="", file=out, flush=True)
            printed = len(samples[current].text)
            if samples[current].ended is None:
                break
            current, printed = current + 1, 0
            print("\n" + "".join(headings[current : current + 1]), end="", file=out, flush=True)
