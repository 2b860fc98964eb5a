"""`regard generate`: a language model goes on with a text.

Tokens appear as they are drawn. Several samples are drawn together: the first one is shown while it grows, the
others wait their turn, and whatever of them is ready by then appears at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.predict.generator import Generator, Sample, Token

DESCRIPTION = """
Go on with a text. The prompt is given, or read from a file or from standard input, and taken as it stands, line
ends included. What no option says comes from the table [decode] of the run's recipe.toml. Works with models that
`regard train` has made (task = "language-modeling") and with those of `regard import`, such as GPT-2.
"""

EXAMPLES = """
regard generate runs/shakespeare-char "ROMEO: But soft,"
regard generate runs/gpt2 "The attention mechanism" --temperature 0.8 --top-k 50 --samples 3 --seed 1
regard generate runs/gpt2 "Once upon a time" --max-tokens 3000 --overflow slide
regard generate runs/gpt2 "Q: Why is the sky blue? A:" --stop "Q:" --json
regard generate runs/gpt2 --prompt-file start.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to go on with (default: standard input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="take the prompt from a file")
    parser.add_argument(
        "--begin", action="store_true", help="start where a document does; the prompt may be empty then"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="how many continuations (1)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a continuation (200)")
    parser.add_argument("--temperature", type=float, metavar="T", help="below 1: likelier tokens; above: rarer (1)")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="only the K likeliest tokens; 1: always the likeliest (0)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that hold a share P (1)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same text (1)")
    parser.add_argument(
        "--no-repeat-ngram", type=int, metavar="N", help="no N tokens in a row occur twice (0: they may)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens seen at once (default: as many as in training)"
    )
    parser.add_argument(
        "--overflow",
        default="stop",
        metavar="HOW",
        help="where the context is full: stop there, or slide: forget the older half and go on (default: stop)",
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a sample: text, tokens with log-probabilities, why it ended",
    )


def run(args: argparse.Namespace) -> int:
    from regard.commands import predictor_of
    from regard.errors import UserError
    from regard.models.folder import find_device
    from regard.predict.generator import Generator

    for text in args.stop:
        if not text:
            raise UserError("--stop '': every text contains nothing; give at least one letter")
    for option, number in (("--samples", args.samples), ("--max-tokens", args.max_tokens)):
        if number is not None and number < 1:
            raise UserError(f"{option} {number}: give 1 or more")
    options = {
        "n_best": args.samples, "max_length": args.max_tokens, "temperature": args.temperature, "top_k": args.top_k,
        "top_p": args.top_p, "seed": args.seed, "no_repeat_ngram": args.no_repeat_ngram,
    }  # fmt: skip
    changes = {name: value for name, value in options.items() if value is not None}
    generator = predictor_of(args.run, find_device(args.device), Generator)
    config = generator.configured(**changes)
    prompt = read_prompt(args)
    unknown = (
        0 if generator.tokenizer.unk is None else generator.tokenizer.encode(prompt).count(generator.tokenizer.unk)
    )
    if unknown:
        some = "1 token of the prompt is" if unknown == 1 else f"{unknown} tokens of the prompt are"
        print(f"note: {some} not in the model's vocabulary", file=sys.stderr)
    tokens = generator.stream(
        [prompt], config=config, stops=args.stop, overflow=args.overflow, begin=args.begin, context=args.context
    )
    samples = None if args.json else Shown(prompt, config.n_best)
    found = collect(tokens, config.n_best, samples)
    if args.json:
        for number, sample in enumerate(found, 1):
            print(json.dumps(describe(generator, prompt, number, sample), ensure_ascii=False))
    elif any(sample.ended == "context" for sample in found):
        print("note: the context is full; --overflow slide goes on, forgetting the beginning", file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    from pathlib import Path

    from regard.errors import UserError

    if args.prompt is not None and args.prompt_file is not None:
        raise UserError(f"--prompt-file {args.prompt_file}: there is a PROMPT too; give one of them")
    if args.prompt is not None:
        try:
            args.prompt.encode()
        except UnicodeEncodeError as error:  # the shell has handed over bytes of another encoding
            raise UserError(f"PROMPT: place {error.start + 1} is not UTF-8 text; convert it first") from None
        return str(args.prompt)
    if args.prompt_file is None and (args.begin or sys.stdin is None or sys.stdin.isatty()):
        return ""
    name = args.prompt_file or "standard input"
    try:
        raw = Path(args.prompt_file).read_bytes() if args.prompt_file else sys.stdin.buffer.read()
        return raw.decode("utf-8")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start + 1} is not UTF-8 text; convert it first") from None


class Shown:
    """Samples on standard output, one after the other."""

    def __init__(self, prompt: str, count: int) -> None:
        self.prompt, self.count, self.current = prompt, count, 0
        self.waiting = [""] * count
        self.ended = [False] * count
        self._begin()

    def _begin(self) -> None:
        if self.count > 1:
            print(f"--- sample {self.current + 1} of {self.count}")
        print(self.prompt, end="", flush=True)

    def take(self, token: Token) -> None:
        self.waiting[token.sample] += token.text
        self.ended[token.sample] = token.ended is not None
        while self.current < self.count:
            print(self.waiting[self.current], end="", flush=True)
            self.waiting[self.current] = ""
            if not self.ended[self.current]:
                return
            print(flush=True)
            self.current += 1
            if self.current < self.count:
                self._begin()


def collect(tokens: Iterable[Token], count: int, shown: Shown | None) -> list[Sample]:
    from regard.predict.generator import Sample

    samples = [Sample() for _ in range(count)]
    for token in tokens:
        samples[token.sample].take(token)
        if shown is not None:
            shown.take(token)
    return samples


def describe(generator: Generator, prompt: str, number: int, sample: Sample) -> dict[str, Any]:
    tokens = [
        {"id": id, "token": generator.tokenizer.token(id), "log_probability": value}
        for id, value in zip(sample.ids, sample.log_probabilities, strict=True)
    ]
    total = sum(sample.log_probabilities)
    return {
        "sample": number, "prompt": prompt, "text": sample.text, "ended": sample.ended,
        "log_probability": total, "tokens": tokens,
    }  # fmt: skip
