"""Tagging: sentences in, a tag for every word out, and the entities that the tags mark.

    p = softmax(W · encoder(<s> tokens </s>) + b)[first token of the word]         [words, tags]

A text is split into words at spaces and, if the training data has punctuation as words of its own, around punctuation;
a sentence that is already split is a list of words. Sentences of similar length are computed together. One that is
longer than the model was trained on is tagged in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.tags import find_entities, is_prefixed, split_words
from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle, Prediction, Predictor
from regard.text.words import encode_words

TOKENS = 2**14  # of a batch, padding included


@dataclass(frozen=True)
class TaggedWord:
    """A word of a text, from character `start` to before `end`, and its most probable tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True)
class Entity:
    """Neighbouring words that tags mark as one; `probability` is the mean of theirs."""

    type: str
    text: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class TagPrediction(Prediction):
    """The tagged words of a text, and its entities (none where tags have no B- or I-)."""

    words: tuple[TaggedWord, ...]
    entities: tuple[Entity, ...]
    note: str | None = None  # what was changed about the input

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(one.tag for one in self.words)


class Tagger(Predictor["str | Sequence[str]", TagPrediction]):
    """An encoder with an output head over tags for every token, and its tokenizer."""

    NEEDS = "an encoder of text with output_head = 'classes' and pooling = 'none', with its tokenizer"
    MODEL: ClassVar = {
        "architecture": ("encoder",), "input": ("tokens",), "output_head": ("classes",), "pooling": ("none",)
    }  # fmt: skip
    model: Encoder
    COMMAND = "tag"
    BATCH = 1024

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.tokenizer, self.classes = bundle.tokenizer, bundle.classes
        self.max_length = bundle.limits.source or bundle.limits.context
        self.punctuation = str(bundle.tables["data"].get("punctuation", "attached"))
        self.marks_entities = is_prefixed(self.classes)

    def predict(
        self, inputs: Sequence[str | Sequence[str]], *, tokens: int = TOKENS, **options: Any
    ) -> list[TagPrediction]:
        """The tags of each text, or of each list of words; batches have about `tokens` tokens."""
        texts = [one if isinstance(one, str) else " ".join(one) for one in inputs]
        spans = [split_words(one, self.punctuation) if isinstance(one, str) else _spans(one) for one in inputs]
        words = [[text[a:b] for a, b in each] for text, each in zip(texts, spans, strict=True)]
        probabilities, split = self._probabilities(words, tokens)
        return [
            self._prediction(text, each, rows, row in split)
            for row, (text, each, rows) in enumerate(zip(texts, spans, probabilities, strict=True))
        ]

    def _prediction(
        self, text: str, spans: Sequence[tuple[int, int]], probabilities: Tensor, split: bool
    ) -> TagPrediction:
        best, numbers = (part.tolist() for part in probabilities.max(dim=-1))
        words = [
            TaggedWord(text[a:b], self.classes[number], p, a, b)
            for (a, b), number, p in zip(spans, numbers, best, strict=True)
        ]
        entities = [
            Entity(
                kind,
                text[words[a].start : words[b - 1].end],
                words[a].start,
                words[b - 1].end,
                sum(best[a:b]) / (b - a),
            )
            for kind, a, b in (find_entities([one.tag for one in words]) if self.marks_entities else ())
        ]
        note = f"tagged in parts of the model's {self.max_length} tokens"
        return TagPrediction(tuple(words), tuple(entities), note if split else None)

    def probabilities(self, sentences: Sequence[Sequence[str]], tokens: int = TOKENS) -> list[Tensor]:
        """[words, tags] of each sentence, in float32 on the CPU."""
        return self._probabilities(sentences, tokens)[0]

    @torch.inference_mode()
    def _probabilities(self, sentences: Sequence[Sequence[str]], tokens: int) -> tuple[list[Tensor], set[int]]:
        """The probabilities, and the sentences that were split."""
        parts = [*encode_words(self.tokenizer, sentences, self.max_length)]
        results = [torch.empty(len(words), len(self.classes)) for words in sentences]
        for rows, source, is_real in self.batches([part.ids for part in parts], range(len(parts)), tokens):
            real = None if is_real is None else is_real.to(self.device)
            output = self.model(source.to(self.device), real).float().softmax(dim=-1).cpu()
            for row, number in enumerate(rows):
                part = parts[number]
                results[part.sentence][part.begin : part.begin + len(part.first)] = output[row, part.first]
        return results, {part.sentence for part in parts if part.begin}


def _spans(words: Sequence[str]) -> list[tuple[int, int]]:
    """Where each word is in the text of all, with spaces between them."""
    ends = accumulate(len(word) + 1 for word in words)
    return [(end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True)]
