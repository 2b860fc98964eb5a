"""Inputs: what the page begins with, and whether an input is like the data of the model.

A run has examples of its own test data (`regard.training.examples`), or its data is generated. A model without any,
such as one from Hugging Face, gets the sentences of `SENTENCES` that its tokenizer covers best, which needs the
tokenizer: the page asks for them when the model is loaded.

    unknown     characters of the input that the tokenizer has no token for
    script      most letters belong to a script that the training data hardly has
    fertility   more tokens per character than any text of the test data, as in another language
    bytes       several tokens per character, in a tokenizer that needs few for another language
    length      far more tokens than any text of the test data
    row         more tokens than a row of a language model's training data
    numbers     more steps than a sequence of the training data
    range       numbers outside of the range of the training data
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.files import read_json
from regard.models.recipe import EXAMPLES
from regard.text.scripts import scripts

if TYPE_CHECKING:
    from regard.explore.forward import Input
    from regard.explore.inside import Inside
    from regard.explore.numbers import NumberReader
    from regard.text.tokenizer import Tokenizer

SENTENCES = (
    "The animal didn't cross the street because it was too tired.",
    "The keys that the man lost are in the kitchen.",
    "the cat sat on the mat",
    "나는 어제 친구와 함께 영화를 봤다.",
    "이 책은 정말 재미있고 감동적이다.",
    "Der Hund schläft auf dem Sofa im Wohnzimmer.",
    "Le chat dort sur le canapé du salon.",
    "今日は天気がとても良いです。",
    "今天的天气非常好。",
    "def add(a, b): return a + b",
    "12 + 7 = 19",
)
RARE = 0.02  # a script with a smaller fraction of the training data's letters is foreign to it
FERTILITY = 1.25  # times as many tokens per character as the test text with the most
LENGTH = 1.5  # times as many tokens as the longest test text
NATIVE = 0.5  # tokens per character, at most, in a language that a tokenizer was trained on
BYTES = 2  # times as many tokens per character as in the language that a tokenizer covers best
COUNT = 3
LONGEST = 40  # letters of a word in a hint


def read_examples(folder: Path) -> dict[str, Any]:
    """The content of RUN/examples.json; {} if there is none, or one that is not ours."""
    content = read_json(folder / EXAMPLES)
    inputs = content.get("inputs")
    return content if isinstance(inputs, list) and all(isinstance(one, dict) for one in inputs) else {}


def decode_pixels(example: dict[str, Any]) -> tuple[bytes, int] | None:
    """The RGB bytes [side, side, 3] of an example image, and its side."""
    import numpy as np

    try:
        channels, height, width = example["shape"]
        pixels = np.frombuffer(base64.b64decode(example["pixels"]), np.uint8).reshape(channels, height, width)
    except (KeyError, TypeError, ValueError):
        return None
    if height != width or channels not in (1, 3):
        return None
    return np.broadcast_to(pixels, (3, height, width)).transpose(1, 2, 0).tobytes(), height


def covered(inside: Inside) -> list[str]:
    """The sentences that the tokenizer of a model covers best, with a mask where the model predicts masked tokens."""
    if inside.config.input != "tokens":
        return []
    costs = {text: cost(inside.bundle.source, text) for text in SENTENCES}
    best = sorted(SENTENCES, key=lambda text: (costs[text][0], costs[text][1] > NATIVE, SENTENCES.index(text)))[:COUNT]
    mask = inside.reader.mask
    return [with_mask(text, mask) for text in best] if mask is not None else best


def cost(tokenizer: Tokenizer, text: str) -> tuple[float, float]:
    """How badly a tokenizer covers a text: the fraction of unknown tokens, and its tokens per character."""
    ids = tokenizer.encode(text)
    return sum(id == tokenizer.unk for id in ids) / max(1, len(ids)), len(ids) / len(text)


def with_mask(text: str, mask: str) -> str:
    """The last but one word of a text masked."""
    words = text.split(" ")
    if len(words) > 2:
        words[-2] = mask
    return " ".join(words)


def unlike(inside: Inside, input: Input) -> list[dict[str, str]]:
    """How an input differs from the training data; [] if it does not, or if nothing is known."""
    from regard.training.examples import SHORT

    if inside.numbers is not None:
        return outside(inside.numbers, input)
    if input.text is None or inside.config.input != "tokens":
        return []
    tokenizer, notes = inside.bundle.source, []
    text = input.text if inside.reader.mask is None else input.text.replace(inside.reader.mask, " ")
    if tokenizer.unk is not None and tokenizer.unk in input.source[0].tolist():
        unknown = [piece for piece in dict.fromkeys(text.split()) if tokenizer.unk in tokenizer.encode(piece)]
        notes.append({"kind": "unknown", "what": ", ".join(shorten(piece) for piece in unknown[:5])})
    known = read_examples(inside.bundle.path) if inside.bundle.path is not None else {}
    own, trained = scripts(text), known.get("scripts")
    if own and isinstance(trained, dict) and trained:
        main = next(iter(own))
        if own[main] > 0.5 and trained.get(main, 0.0) < RARE:
            notes.append({"kind": "script", "what": main.title(), "trained": next(iter(trained)).title()})
    most, count = known.get("tokens_per_character"), len(tokenizer.encode(text))
    rate = count / max(1, len(text))
    if len(text) >= SHORT and isinstance(most, float) and not notes and rate > FERTILITY * most:
        notes.append({"kind": "fertility", "what": f"{rate:.2f}", "trained": f"{most:.2f}"})
    if not known and not notes and rate > 1 and rate > BYTES * min(cost(tokenizer, one)[1] for one in SENTENCES):
        notes.append({"kind": "bytes", "what": f"{rate:.2f}"})
    if inside.reader.writes or inside.config.output_head != "tokens":
        longest = known.get("tokens")
        if isinstance(longest, int) and count > LENGTH * longest:
            notes.append({"kind": "length", "what": f"{count:,}", "trained": f"{longest:,}"})
    elif (row := inside.bundle.tables["train"].get("pack")) and count > row:
        notes.append({"kind": "row", "what": f"{count:,}", "trained": f"{row:,}"})
    return notes


def shorten(word: str) -> str:
    return word if len(word) <= LONGEST else f"{word[:LONGEST]}…"


def outside(reader: NumberReader, input: Input) -> list[dict[str, str]]:
    """The numbers of an input that lie outside of the training data, and whether there are more than it has."""
    notes, regressor, series = [], reader.regressor, reader.parse(input.text or "")
    for at, numbers in enumerate(regressor.out_of_range(series)):
        if numbers:
            low, high = (f"{bound[at].item():.4g}" for bound in regressor.training_range)
            what = ", ".join(f"{number:.4g}" for number in numbers[:5])
            notes.append({"kind": "range", "what": what, "trained": f"{low} … {high}"})
            break
    if regressor.longest and len(series) > regressor.longest:
        notes.append({"kind": "numbers", "what": f"{len(series):,}", "trained": f"{regressor.longest:,}"})
    return notes
