"""Translation: text in, text out, through an encoder-decoder with its tokenizers.

Sentences of similar length are decoded together; the translations are returned in the order of the inputs, one per
line. How they are found (greedy, beam, sampling) is a `SearchConfig`, by default that of the recipe, table [decode].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Ragged
from regard.errors import UserError
from regard.models.transformer import EncoderDecoder, SequenceToSequence
from regard.predict.beam import Hypothesis, beam
from regard.predict.bundle import Bundle, ScoredText, SearchPredictor, TextPrediction
from regard.predict.config import SearchConfig
from regard.predict.engine import traced
from regard.predict.recorded import TURN, RecordedSearches
from regard.predict.sampling import sample
from regard.predict.workers import side_by_side

Batch = tuple[list[int], Tensor, Tensor]  # rows, their ids, which of them are real
TOKENS = 2**15  # source tokens of a batch, padding and beams included: long sentences come in smaller batches


class Translator(SearchPredictor[str, TextPrediction]):
    """An encoder-decoder, Transformer or recurrent, with the tokenizers of its two sides."""

    NEEDS = "an encoder-decoder from text to text, with its tokenizers"
    model: SequenceToSequence
    COMMAND = "translate"

    def __init__(self, bundle: Bundle, config: SearchConfig | None = None) -> None:
        super().__init__(bundle, config)
        self.source, self.target = bundle.source, bundle.target
        self._recorded: RecordedSearches | None = None

    @staticmethod
    def accepts(bundle: Bundle) -> bool:
        from_text = bundle.config.input == "tokens" and bundle.config.output_head == "tokens"
        return from_text and isinstance(bundle.model, SequenceToSequence)

    def predict(
        self,
        inputs: Sequence[str],
        *,
        batch: int = 128,
        config: SearchConfig | None = None,
        first: int = 0,
        done: Callable[[Sequence[int]], object] | None = None,
        **options: Any,
    ) -> list[TextPrediction]:
        """A translation of each line, decoded at most `batch` lines at a time; an empty line stays empty.

        `options` are fields of a SearchConfig. `first` is the index of the first line, which determines its samples.
        `done` is called with the rows that were decoded together.
        """
        config = self.configured(config, **options)
        ids = self.source.encode_batch(inputs, add_eos=True)
        limit = self.bundle.limits.source
        for number, line in enumerate(ids, start=first + 1):  # before any line is translated
            if limit is not None and len(line) > limit:
                raise UserError(
                    f"line {number} has {len(line)} tokens, its end included, but the model's learned positions end at "
                    f"max_length = {limit}: split the line"
                )
        predictions = [TextPrediction((ScoredText("", 0.0, 0.0),)) for _ in ids]
        for rows, results in self._search(ids, batch, config, first):
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

    def _search(
        self, ids: Sequence[Sequence[int]], batch: int, config: SearchConfig, first: int
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:
        """Rows that were decoded together, and the hypotheses of each."""
        ends, table = self.bundle.target_frame, Ragged.of(ids)
        padded: Iterator[Batch] = ((rows, *table.pad(torch.tensor(rows))) for rows in self._batches(ids, batch, config))
        if self.device.type == "cuda" and isinstance(self.model, EncoderDecoder):
            with TURN:  # threads that search with this model share what was recorded
                self._recorded = self._recorded or RecordedSearches(self.model, *ends)
            recorded, others = self._recorded, list[Batch]()

            def fitting() -> Iterator[Batch]:
                for rows, source, is_real in padded:
                    if recorded.fits(config, config.limits(source, is_real)):
                        yield rows, source, is_real
                    else:
                        others.append((rows, source, is_real))

            yield from recorded.search_all(fitting(), config)
            padded = iter(others)

        def search(part: Batch) -> tuple[list[int], list[list[Hypothesis]]]:
            rows, source, is_real = part
            mask = None if bool(is_real.all()) else is_real.to(self.device)
            arguments = (self.model, source.to(self.device), mask, config, *ends)
            if config.sample:
                return rows, sample(*arguments, lines=[first + row for row in rows])
            return rows, beam(*arguments)

        in_turn = self.device.type != "cpu" or config.sample or config.coverage_penalty > 0 or traced(self.model)
        if in_turn:  # a trace sees one batch at a time
            yield from map(search, padded)
        else:
            yield from side_by_side(search, list(padded)[::-1])  # the longest first, so that all cores end together

    def _batches(self, ids: Sequence[Sequence[int]], batch: int, config: SearchConfig) -> Iterator[list[int]]:
        """Rows that are decoded together, shortest first; a line of </s> alone has nothing to translate."""
        if batch < 1:
            raise UserError(f"batch = {batch}: must be 1 or more lines")
        width = config.n_best if config.sample else config.beam
        rows: list[int] = []
        for row in sorted((row for row in range(len(ids)) if len(ids[row]) > 1), key=lambda row: len(ids[row])):
            if len(rows) == batch or ((len(rows) + 1) * len(ids[row]) * width > TOKENS and rows):
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows
