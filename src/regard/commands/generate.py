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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from regard.commands.inputs import GPU, add_run, add_search, open_predictor, read_prompt, search_options
from regard.commands.outputs import note, write_json
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.generator import Sample, Token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, GPU, "sample: text, tokens with log-probabilities, why it ended")
    add = parser.add_argument
    add("prompt", metavar="PROMPT", nargs="?", help="the text to continue (default: standard input)")
    add("--prompt-file", metavar="FILE", help="read the prompt from a file")
    add("--begin", action="store_true", help="start a new document; the prompt may then be empty")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--context", type=int, metavar="N", help="tokens attended to (default: as many as in training)")
    text = "when the context is full: stop, or slide: drop the older half and continue (default: stop)"
    add("--overflow", default="stop", metavar="HOW", help=text)
    names = ("temperature", "top_k", "top_p", "seed", "no_repeat_ngram")
    add_search(parser, *names, n_best="samples", max_length="max_tokens")


def run(args: argparse.Namespace) -> None:
    from regard.predict.generator import Generator, Sample

    if "" in args.stop:
        raise UserError("--stop '': every text contains the empty text; pass at least one character")
    generator = open_predictor(args, Generator)
    config, tokenizer = generator.configured(**search_options(args)), generator.tokenizer
    prompt = read_prompt(args.prompt, args.prompt_file, args.begin)
    if tokenizer.unk is not None and (unknown := tokenizer.encode(prompt).count(tokenizer.unk)):
        tokens = "1 token of the prompt is" if unknown == 1 else f"{unknown} tokens of the prompt are"
        note(f"{tokens} not in the model's vocabulary")
    stream = generator.stream(
        [prompt], config=config, stops=args.stop, overflow=args.overflow, begin=args.begin, context=args.context
    )
    samples = [Sample() for _ in range(config.n_best)]
    if not args.json:
        print_samples(prompt, samples, stream)
        if any(sample.ended == "context" for sample in samples):
            note("the context is full; --overflow slide drops the older half and continues")
        return
    for token in stream:
        samples[token.sample].take(token)
    for number, sample in enumerate(samples, 1):
        rows = zip(sample.ids, sample.log_probabilities, strict=True)
        tokens_of = [{"id": id, "token": tokenizer.token(id), "log_probability": value} for id, value in rows]
        write_json({
            "sample": number, "prompt": prompt, "text": sample.text, "ended": sample.ended,
            "log_probability": sum(sample.log_probabilities), "tokens": tokens_of,
        })  # fmt: skip


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
