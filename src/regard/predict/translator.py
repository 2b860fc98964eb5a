"""Translation: text in, text out, through an encoder-decoder with its tokenizers.

Sentences of similar length are decoded together; the translations are returned in the order of the inputs, one per
line. How they are found (greedy, beam, sampling) is a `SearchConfig`, by default that of the recipe, table [decode].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from regard.errors import UserError
from regard.models.transformer import EncoderDecoder, SequenceToSequence
from regard.nn.trace import trace
from regard.predict.alignment import Links, alignment_layer, link_words
from regard.predict.beam import Hypothesis
from regard.predict.bundle import Batch, ScoredText, SearchPredictor, TextPrediction
from regard.predict.config import SearchConfig
from regard.predict.engine import traced
from regard.predict.recorded import LONGEST, TURN, RecordedSearches
from regard.predict.scoring import SequenceScore, label_scores, pair_batches
from regard.predict.workers import side_by_side

TOKENS = 2**15  # source tokens of a batch, padding and beams included: long sentences come in smaller batches


class Translator(SearchPredictor[str, TextPrediction]):
    """An encoder-decoder, Transformer or recurrent, with the tokenizers of its two sides."""

    NEEDS = "an encoder-decoder from text to text, with its tokenizers"
    MODEL: ClassVar = {
        "architecture": ("encoder-decoder", "recurrent"), "input": ("tokens",), "output_head": ("tokens",)
    }  # fmt: skip
    model: SequenceToSequence
    COMMAND = "translate"
    ENSEMBLES = True
    _recorded: RecordedSearches | None = None

    def predict(
        self,
        inputs: Sequence[str],
        *,
        batch: int = 128,
        config: SearchConfig | None = None,
        first: int = 0,
        done: Callable[[Sequence[int]], object] | None = None,
        failed: dict[int, str] | None = None,
        **options: Any,
    ) -> list[TextPrediction]:
        """A translation of each line, decoded at most `batch` lines at a time; a blank line gives "".

        `options` are fields of a SearchConfig. `first` is the index of the first line, which determines its samples.
        `done` is called with the rows that were decoded together. A line that is too long is an error, unless there is
        a dict `failed`, which gets its row and the reason; its translation is "".
        """
        config = self.configured(config, **options)
        ids = self.source.encode_batch(inputs, add_eos=True)
        too_long = set[int]()
        for row, line in enumerate(ids):  # before any line is translated
            if failed is None:
                self._check_length(f"line {first + row + 1}", len(line))
            elif reason := self._too_long(len(line)):
                failed[row] = reason
                too_long.add(row)
        if batch < 1:
            raise UserError(f"batch = {batch}: must be 1 or more lines")
        lines = [row for row, text in enumerate(inputs) if text.strip() and row not in too_long]  # blank: nothing
        batches = self.batches(ids, lines, TOKENS // (config.n_best if config.sample else config.beam), batch)
        predictions = [TextPrediction((ScoredText("", 0.0, 0.0),)) for _ in ids]
        for rows, results in self._search(batches, config, first):
            texts = iter(self.target.decode_batch(one.tokens for some in results for one in some))
            for row, some in zip(rows, results, strict=True):
                scored = tuple(ScoredText(next(texts), one.score, one.log_probability) for one in some)
                predictions[row] = TextPrediction(scored)
            if done is not None:
                done(rows)
        return predictions

    def translate(self, lines: Sequence[str], **options: Any) -> list[str]:
        """One translation for each line."""
        return [prediction.text for prediction in self.predict(lines, **options)]

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str, str]]) -> list[SequenceScore]:
        """log P(target | source) of each pair, </s> included."""
        sources, targets = self._encode_pairs(pairs)
        scores = [SequenceScore(()) for _ in pairs]
        for rows, batch in pair_batches(sources, targets):
            batch = batch.to(self.device)
            states = self.model.states(batch.target, self.model.encode(batch.source, batch.source_is_real))
            for row, values in zip(rows, label_scores(self.model, states, batch.labels), strict=True):
                scores[row] = SequenceScore.of(self.target, targets[row][1:], values)
        return scores

    @torch.inference_mode()
    def align(self, pairs: Sequence[tuple[str, str]], layer: int | None = None) -> list[Links]:
        """Links (source word, target word) of each pair, by the cross-attention of a layer, numbered from 0."""
        name, links = alignment_layer(self.model, layer), [Links() for _ in pairs]
        for rows, batch in pair_batches(*self._encode_pairs(pairs)):
            batch = batch.to(self.device)
            with trace(self.model, only=name) as seen:
                self.model.states(batch.target, self.model.encode(batch.source, batch.source_is_real))
            for row, weights in zip(rows, seen[name].float().mean(dim=1).cpu(), strict=True):  # [T, S] each
                source, target = pairs[row]
                words = self.source.encode_words(source)[1], self.target.encode_words(target)[1]
                links[row] = link_words(weights, *words)
        return links

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        """Sources end with </s>, targets are <s> … </s>; an error where one of them is longer than the positions."""
        begin, end = self.bundle.target_frame
        sources = self.source.encode_batch([source for source, _ in pairs], add_eos=True)
        targets = [[begin, *ids, end] for ids in self.target.encode_batch([target for _, target in pairs])]
        for pair, source, target in zip(pairs, sources, targets, strict=True):
            self._check_length(f"{pair[0][:40]!r} …", len(source))
            self._check_length(f"{pair[1][:40]!r} …", len(target) - 1)
        return sources, targets

    def _check_length(self, what: str, tokens: int) -> None:
        if reason := self._too_long(tokens):
            raise UserError(f"{what} {reason}")

    def _too_long(self, tokens: int) -> str:
        """Why the model cannot read so many tokens, or nothing."""
        limit = self.bundle.limits.positions
        if limit is None or tokens <= limit:
            return ""
        return (
            f"has {tokens} tokens, its end included, but the model's learned positions end at max_length = {limit}: "
            "split the line"
        )

    def _search(
        self, batches: Iterator[Batch], config: SearchConfig, first: int
    ) -> Iterator[tuple[Sequence[int], list[list[Hypothesis]]]]:
        """The rows of each batch, and the hypotheses of each row."""
        if self.device.type == "cuda" and isinstance(self.engine, EncoderDecoder):
            with TURN:  # threads that search with this model share what was recorded
                self._recorded = self._recorded or RecordedSearches(self.engine, *self.bundle.target_frame)
            recorded, others = self._recorded, list[Batch]()
            fits = recorded.fits(config)

            def fitting() -> Iterator[Batch]:  # padded while the GPU computes those before
                for batch in batches:
                    if fits and max(config.limits(*batch[1:])) <= LONGEST:
                        yield batch
                    else:
                        others.append(batch)

            yield from recorded.search_all(fitting(), config)
            batches = iter(others)
        work, todo = partial(self.search, config, first), list(batches)
        if self.device.type != "cpu" or config.sample or config.coverage_penalty > 0 or any(map(traced, self.models)):
            results: Iterator[list[list[Hypothesis]]] = map(work, todo)  # a trace sees one batch at a time
        else:
            todo.reverse()  # the longest first, so that all cores end together
            results = side_by_side(work, todo)
        yield from zip((rows for rows, _, _ in todo), results, strict=True)
