"""Continue a text. The prompt is an argument, or read from a file or from standard input, and taken as it is, line ends
included. Settings without an option come from the table [decode] of the run's recipe.toml. Works with language models
that `regard train` has trained (task = "language-modeling") and with those of `regard import`, such as GPT-2.

examples:
  regard generate runs/shakespeare-char "ROMEO: But soft,"
  regard generate runs/gpt2 "The attention mechanism" --temperature 0.8 --top-k 50 --samples 3 --seed 1
  regard generate runs/gpt2 "Once upon a time" --max-tokens 3000 --overflow slide
  regard generate runs/gpt2 "Q: Why is the sky blue? A:" --stop "Q:" --json
  regard generate runs/gpt2 --prompt-file start.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands import DEVICE, REPEATABLE, RUN, positive
from regard.commands.prediction import DECODING, SEARCH, note, open_predictor, write
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.generator import Sample, Token

SAMPLING = ("--temperature T", "--top-k K", "--top-p P", "--seed N", "--no-repeat-ngram N")
ARGUMENTS = {
    **RUN,
    "PROMPT": ("the text to continue (default: standard input)", {"nargs": "?"}),
    "--prompt-file FILE": "read the prompt from a file",
    "--begin": "start a new document; the prompt may then be empty",
    "--stop TEXT": ("end before this text; repeatable", REPEATABLE),
    "--context N": ("tokens attended to (default: as many as in training)", {"type": int}),
    "--overflow HOW": ("if the context is full: stop, or slide: drop the older half (stop)", {"default": "stop"}),
    **DEVICE,
    "--json": "print one JSON object per sample: text, tokens with log-probabilities, why it ended",
    DECODING: {
        **{name: SEARCH[name] for name in SAMPLING},
        "--samples N": ("continuations of the prompt (1)", {"type": positive, "dest": "n_best"}),
        "--max-tokens N": ("most tokens of a continuation (200)", {"type": positive, "dest": "max_length"}),
    },
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.generator import Generator, Sample

    if "" in args.stop:
        raise UserError("--stop '': every text contains the empty text; pass at least one character")
    generator = open_predictor(args, Generator)
    tokenizer = generator.tokenizer
    prompt = read_prompt(args.prompt, args.prompt_file, args.begin)
    if tokenizer.unk is not None and (unknown := tokenizer.encode(prompt).count(tokenizer.unk)):
        tokens = "1 token of the prompt is" if unknown == 1 else f"{unknown} tokens of the prompt are"
        note(f"{tokens} not in the model's vocabulary")
    options = {"stops": args.stop, "overflow": args.overflow, "begin": args.begin, "context": args.context}
    if not args.json:
        samples = [Sample() for _ in range(generator.config.n_best)]
        print_samples(prompt, samples, generator.stream([prompt], **options))
        if any(sample.ended == "context" for sample in samples):
            note("the context is full; --overflow slide drops the older half and continues")
        return
    for number, sample in enumerate(generator.generate(prompt, **options), 1):
        rows = zip(sample.ids, sample.log_probabilities, strict=True)
        tokens_of = [{"id": id, "token": tokenizer.token(id), "log_probability": value} for id, value in rows]
        write(args, {
            "sample": number, "prompt": prompt, "text": sample.text, "ended": sample.ended,
            "log_probability": sum(sample.log_probabilities), "tokens": tokens_of,
        })  # fmt: skip


def read_prompt(prompt: str | None, file: str | None, may_be_empty: bool) -> str:
    """The whole text of an argument, a file or standard input, line ends included."""
    if prompt is not None and file is not None:
        raise UserError(f"--prompt-file {file}: there is a PROMPT too; pass one of them")
    if prompt is None and file is None and (may_be_empty or sys.stdin is None or sys.stdin.isatty()):
        return ""
    name = "PROMPT" if prompt is not None else file or "standard input"
    try:
        if prompt is not None:
            return prompt.encode(errors="surrogateescape").decode()  # the shell may pass bytes of another encoding
        return (Path(file).read_bytes() if file else sys.stdin.buffer.read()).decode()
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start + 1} is not UTF-8 text; convert it first") from None


def print_samples(prompt: str, samples: Sequence[Sample], stream: Iterable[Token]) -> None:
    """Print tokens as they are sampled.

    Several samples are generated together: the first is shown while it grows, the others follow, and whatever of them
    is ready by then appears at once.
    """
    count = len(samples)
    headings = [f"--- sample {number} of {count}\n" * (count > 1) + prompt for number in range(1, count + 1)]
    print(headings[0], end="", flush=True)
    current = printed = 0  # the sample that is shown, and how many characters of it
    for token in stream:
        samples[token.sample].take(token)
        while current < count:
            print(samples[current].text[printed:], end="", flush=True)
            printed = len(samples[current].text)
            if samples[current].ended is None:
                break
            current, printed = current + 1, 0
            print("\n" + "".join(headings[current : current + 1]), end="", flush=True)
