"""Translation: text in, text out, through a model with its tokenizers.

Sentences of similar length are decoded together; the answers come back in the order of the questions, a
line for a line. How they are found (greedy, beam, sampling) is a `SearchConfig`, by default that of the
folder's recipe, table [decode].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Ragged
from regard.errors import UserError
from regard.models import EncoderDecoder, SequenceToSequence
from regard.models.folder import load, load_recipe, load_tokenizers
from regard.models.recipe import RECIPE
from regard.predict.beam import beam
from regard.predict.config import SearchConfig, read_config
from regard.predict.fixed import FixedSearches
from regard.predict.lean import lean, traced
from regard.predict.sampling import sample
from regard.predict.search import TURN, Hypothesis, length_limits
from regard.predict.workers import side_by_side
from regard.text.tokenizer import Tokenizer

TOKENS = 2**15  # source tokens of a batch, filler and beams included: long sentences come in smaller batches


@dataclass(frozen=True)
class Translation:
    """One translation of a line; `score` ranks it among the others, `log_probability` is the model's own."""

    text: str
    score: float
    log_probability: float


class Translator:
    """An encoder-decoder, Transformer or recurrent, with the tokenizers of its two sides."""

    def __init__(
        self,
        model: SequenceToSequence,
        source: Tokenizer,
        target: Tokenizer,
        config: SearchConfig | None = None,
        start: int | None = None,
    ) -> None:
        """`start` is the token that every target begins with, where it is not the tokenizer's <s>."""
        self.model, self.source, self.target = model.eval(), source, target
        self.config, self.start = config or SearchConfig(), start
        self.device = next(model.parameters()).device
        self._fixed: FixedSearches | None = None

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", changes: Mapping[str, Any] | None = None) -> Translator:
        """The model in `folder`, searched as [decode] of its recipe says; `changes` are fields of a SearchConfig."""
        tables = load_recipe(folder)
        config = decode_config(tables, changes, Path(folder) / RECIPE)
        model, tokenizers = load(folder, device), load_tokenizers(folder)
        if not isinstance(model, SequenceToSequence) or not tokenizers:
            raise UserError(
                f"{folder}: architecture = {model.config.architecture!r} with {len(tokenizers)} tokenizers; "
                "translation needs an encoder-decoder and its tokenizers"
            )
        if model.config.architecture != "recurrent" and model.config.input != "tokens":
            raise UserError(f"{folder}: reads {model.config.input}, not text; use  regard caption {folder} FILE")
        both = tokenizers.get("tokenizer")
        source, target = tokenizers.get("source", both), tokenizers.get("target", both)
        if source is None or target is None:
            raise UserError(f"{folder}: needs tokenizer.json, or both source.json and target.json")
        notes = tables.get("hf")  # an imported model may start with another token than <s>
        start = notes.get("decoder_start_token_id") if isinstance(notes, dict) else None
        return cls(model, source, target, config, start)

    def translate(self, lines: Sequence[str], *, batch: int = 128, config: SearchConfig | None = None) -> list[str]:
        """One translation for each line; an empty line stays empty."""
        return [found[0].text for found in self.search(lines, batch=batch, config=config)]

    def search(
        self,
        lines: Sequence[str],
        *,
        batch: int = 128,
        config: SearchConfig | None = None,
        first: int = 0,
        tell: Callable[[Sequence[int]], object] | None = None,
    ) -> list[list[Translation]]:
        """Up to `n_best` translations of each line, best first, decoded at most `batch` lines at a time.

        `first` is the number of the first line, by which a sample tells lines apart. `tell` hears which were done.
        """
        config = self._within_reach(config or self.config)
        bos = self.target.special_id("bos") if self.start is None else self.start
        eos = self.target.special_id("eos")
        ids = self.source.encode_batch(lines, add_eos=True)
        self._check_reach(ids, first)
        answers = [[Translation("", 0.0, 0.0)] for _ in ids]
        for rows, found in self._found(ids, batch, config, (bos, eos), first):
            texts = iter(self.target.decode_batch(one.tokens for some in found for one in some))
            for row, some in zip(rows, found, strict=True):
                answers[row] = [Translation(next(texts), one.score, one.log_probability) for one in some]
            if tell is not None:
                tell(rows)
        return answers

    def _found(
        self, ids: Sequence[Sequence[int]], batch: int, config: SearchConfig, ends: tuple[int, int], first: int
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:
        """Rows that were decoded together, and what was found for each."""
        table = Ragged.of(ids)
        padded: Iterator[tuple[list[int], Tensor, Tensor]]
        padded = ((rows, *table.pad(torch.tensor(rows))) for rows in self._batches(ids, batch, config))
        if self.device.type == "cuda" and isinstance(self.model, EncoderDecoder):
            with TURN:  # threads that search with this model share what was recorded
                self._fixed = self._fixed or FixedSearches(self.model, *ends)
            fixed, others = self._fixed, []

            def fitting() -> Iterator[tuple[list[int], Tensor, Tensor]]:
                for rows, source, is_real in padded:
                    if fixed.fits(config, length_limits(source, is_real, config)):
                        yield rows, source, is_real
                    else:
                        others.append((rows, source, is_real))

            yield from fixed.search_all(fitting(), config)
            padded = iter(others)
        looked_at = config.coverage_penalty > 0 or traced(self.model)
        model = self.model if config.sample or looked_at else lean(self.model)

        def search(given: tuple[list[int], Tensor, Tensor]) -> tuple[list[int], list[list[Hypothesis]]]:
            rows, source, is_real = given
            whole = None if bool(is_real.all()) else is_real.to(self.device)
            asked = (model, source.to(self.device), whole, config, *ends)
            return rows, sample(*asked, lines=[first + row for row in rows]) if config.sample else beam(*asked)

        if self.device.type == "cpu" and not (config.sample or looked_at):  # a trace sees one batch at a time
            yield from side_by_side(search, list(padded)[::-1])  # the longest first, so that all cores end together
        else:
            yield from map(search, padded)

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

    @property
    def _ends(self) -> bool:
        """Whether the model's positions end: a table of learned ones does."""
        return self.model.config.position == "learned" and self.model.config.architecture != "recurrent"

    def _check_reach(self, ids: Sequence[Sequence[int]], first: int) -> None:
        """Learned positions end; a line beyond them is named before any is translated."""
        model = self.model.config
        for number, line in enumerate(ids, start=first + 1):
            if self._ends and len(line) > model.max_length:
                raise UserError(
                    f"line {number} has {len(line)} tokens, its end included, but the model's learned positions end at "
                    f"max_length = {model.max_length}: split the line"
                )

    def _within_reach(self, config: SearchConfig) -> SearchConfig:
        """Learned positions end, and so do answers."""
        model = self.model.config
        if not self._ends or (config.max_length or model.max_length + 1) <= model.max_length:
            return config
        if config.min_length > model.max_length:
            raise UserError(f"min_length = {config.min_length}: the model's positions end at {model.max_length}")
        return replace(config, max_length=model.max_length)


def decode_config(tables: Mapping[str, Any], changes: Mapping[str, Any] | None, where: Path) -> SearchConfig:
    """The config that [decode] of a recipe asks for, with changes; a mistake in the recipe names the file."""
    table = tables.get("decode", {})
    if not isinstance(table, dict):
        raise UserError(f"{where}: decode = {table!r}: write a table [decode], such as  [decode]  with  beam = 5")
    try:
        read_config(table)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return read_config(table, changes)
