"""Examples: a few inputs of a run's own test data with their targets, saved in RUN/examples.json before training.

The page of `regard explore` begins with them, and knows by them what the training data is like, without the data:

    inputs       [{"text": …, "target": …}], {"pixels": base64 of bytes, "shape": [channels, side, side], "target": …}
                 or {"values": [[…]]} of features; examples of different targets come first
    scripts      {"HANGUL": 0.93, "LATIN": 0.07}: the fraction of the letters that belong to each script
    tokens_per_character    of the text that has the most (a mean would be exceeded by every date among words)
    tokens       of the longest text
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.files import write_atomically
from regard.models.recipe import EXAMPLES
from regard.text.scripts import scripts
from regard.training.task import Task

READ = 64  # inputs that are read, to choose from
KEPT = 6
SPECIALS = 2  # tokens that a model may add to its input
SHORT = 20  # characters: a shorter text says little about tokens per character
LONGEST = 240  # characters of a text that is kept
BYTES = 400_000  # of images that are kept in all
VALUES = 4_000  # numbers of an input that is kept


def save_examples(task: Task, folder: Path) -> None:
    """Write the examples of the last test set, or of the validation set; a run without sets has none."""
    for name in reversed(task.sets):
        if inputs := task.inputs(name, READ):
            targets: list[str | None] = [*task.references(name, len(inputs))] or [None] * len(inputs)
            write_atomically(folder / EXAMPLES, json.dumps(describe(task, name, inputs, targets)).encode())
            return


def describe(task: Task, name: str, inputs: Sequence[Any], targets: Sequence[str | None]) -> dict[str, Any]:
    content: dict[str, Any] = {"set": name}
    texts = [one for one in inputs if isinstance(one, str)]
    if texts and task.tokenizers:
        tokenizer = task.tokenizers.get("source", next(iter(task.tokenizers.values())))
        ids = tokenizer.encode_batch(texts)
        content["scripts"] = scripts(" ".join(texts))
        rates = [len(one) / len(text) for one, text in zip(ids, texts, strict=True) if len(text) >= SHORT]
        if rates:
            content["tokens_per_character"] = max(rates)
        content["tokens"] = max(map(len, ids))
    kept: list[dict[str, Any]] = []
    room = BYTES
    for input, target in masked(task, fitting(task, choose(inputs, targets))[:KEPT]):
        if isinstance(input, Tensor):
            if input.is_floating_point() and input.numel() > VALUES:  # features of another model
                break
            room -= input.numel()
        if kept and room < 0:
            break
        kept.append({**as_json(task.as_example(input)), "target": target})
    return {**content, "inputs": kept}


def fitting(task: Task, pairs: list[tuple[Any, str | None]]) -> list[tuple[Any, str | None]]:
    """The pairs whose text fits into learned positions; if there are none, texts that are cut, without targets."""
    limit = task.model_config.position_limit
    if limit is None or not task.tokenizers:
        return pairs
    tokenizer = task.tokenizers.get("source", next(iter(task.tokenizers.values())))

    def fits(text: Any) -> bool:
        return not isinstance(text, str) or len(tokenizer.encode(text)) <= limit - SPECIALS

    def cut(text: str) -> str:
        while not fits(text):
            text = (text.rpartition(" ")[0] or text[: len(text) // 2]).rstrip()
        return text

    return [pair for pair in pairs if fits(pair[0])] or [(cut(text), None) for text, _ in pairs[:KEPT]]


def masked(task: Task, pairs: list[tuple[Any, str | None]]) -> list[tuple[Any, str | None]]:
    """For a model of masked tokens: each text with one word masked, which becomes the target."""
    config = task.model_config
    tokenizer = task.tokenizers.get("tokenizer")
    if (
        config.architecture != "encoder"
        or config.output_head != "tokens"
        or tokenizer is None
        or tokenizer.mask is None
    ):
        return pairs
    made: list[tuple[Any, str | None]] = []
    for text, _ in pairs:
        words = text.split(" ")
        at = len(words) // 2
        hidden, words[at] = words[at], tokenizer.token(tokenizer.mask)
        made.append((" ".join(words), hidden))
    return made


def choose(inputs: Sequence[Any], targets: Sequence[str | None]) -> list[tuple[Any, str | None]]:
    """Pairs in an order in which each target comes once before any comes twice; long texts are left out."""
    seen: dict[str | None, int] = {}
    ranked = []
    for at, (input, target) in enumerate(zip(inputs, targets, strict=True)):
        if isinstance(input, str) and not 0 < len(input) <= LONGEST:
            continue
        rank = 0 if target is None else seen.get(target, 0)
        seen[target] = rank + 1
        ranked.append((rank, at, input, target))
    if not ranked and isinstance(inputs[0], str):  # all are long
        ranked = [(0, 0, inputs[0][:LONGEST], None)]
    return [(input, target) for _, _, input, target in sorted(ranked, key=lambda one: one[:2])]


def as_json(input: Any) -> dict[str, Any]:
    if isinstance(input, str):
        return {"text": input}
    if input.is_floating_point():
        return {"values": input.tolist()}
    return {"pixels": base64.b64encode(input.cpu().numpy().tobytes()).decode(), "shape": list(input.shape)}
