"""Translation: text in, text out, through an encoder-decoder with its tokenizers.

Sentences of similar length are decoded together; the translations are returned in the order of the inputs, one per
line. How they are found (greedy, beam, sampling) is a `SearchConfig`, by default that of the recipe, table [decode].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from regard.errors import UserError
from regard.models.transformer import EncoderDecoder, Model, SequenceToSequence
from regard.nn.trace import trace
from regard.predict.alignment import Links, alignment_layer, link_words
from regard.predict.bundle import Batch, ScoredText, SearchPredictor, TextPrediction
from regard.predict.config import SearchConfig
from regard.predict.constraints import Constraints, read_phrases, read_prefix
from regard.predict.engine import parts_of, traced
from regard.predict.outputs import Hypothesis
from regard.predict.recorded import LONGEST, TURN, RecordedSearches
from regard.predict.scoring import SequenceScore, pair_batches, pair_scores
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
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        forbid: Sequence[str] = (),
        **options: Any,
    ) -> list[TextPrediction]:
        """A translation of each line, decoded at most `batch` lines at a time; a blank line gives "".

        `options` are fields of a SearchConfig. `first` is the index of the first line, which determines its samples.
        `done` is called with the rows that were decoded together. For each line, its translation begins with its entry
        of `prefixes` and contains its phrases in `constraints`; no translation contains a phrase of `forbid`. A line
        that is too long, or whose constraints cannot be satisfied, is an error, unless there is a dict `failed`, which
        gets its row and the reason; its translation is "".
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
        rules, problems = self._constraints(config, [len(line) for line in ids], prefixes, constraints, forbid)
        if failed is not None:
            failed.update(problems)
        elif problems:
            raise UserError(f"line {first + min(problems) + 1}: {problems[min(problems)]}")
        bad = too_long | problems.keys()
        lines = [row for row, text in enumerate(inputs) if text.strip() and row not in bad]  # blank: nothing
        predictions = [TextPrediction((ScoredText("", 0.0, 0.0),)) for _ in ids]
        for part, own, group in self._groups(config, rules, lines):
            for rows, results in self._search(ids, group, batch, part, first, own):
                texts = iter(self.target.decode_batch(one.tokens for some in results for one in some))
                for row, some in zip(rows, results, strict=True):
                    if some:
                        predictions[row] = prediction(some, texts)
                        continue
                    limit = config.limit(len(ids[row]))
                    reason = f"no output of up to {limit} tokens satisfies its constraints; relax them, or allow more"
                    if failed is None:
                        raise UserError(f"line {first + row + 1}: {reason}")
                    failed[row] = reason
                if done is not None:
                    done(rows)
        return predictions

    def _constraints(
        self,
        config: SearchConfig,
        lengths: Sequence[int],
        prefixes: Sequence[str] | None,
        required: Sequence[Sequence[str]] | None,
        forbid: Sequence[str],
    ) -> tuple[Constraints | None, dict[int, str]]:
        """The constraints of lines with these lengths, and for lines whose constraints cannot be used the reason."""
        count, problems = len(lengths), dict[int, str]()
        if prefixes is None and required is None and not forbid:
            return None, problems
        for name, given in (("prefixes", prefixes), ("constraints", required)):
            if isinstance(given, str) or (given is not None and len(given) != count):
                raise UserError(f"{name}: must be a list with an entry for each of the {count} inputs")
        if config.sample and any(required or ()):
            raise UserError("constraints: phrases that are required need beam search; remove sample = true")
        forbidden = [one for phrase in read_phrases(self.target, forbid, name="forbid") for one in phrase]
        rules = Constraints([[]] * count, [[]] * count, forbidden)
        for row, length in enumerate(lengths):
            try:
                rules.prefixes[row] = read_prefix(self.target, prefixes[row] if prefixes else "", forbidden)
                rules.required[row] = read_phrases(self.target, required[row] if required else (), forbidden)
                needed, limit = len(rules.prefixes[row]) + rules.needed(row), config.limit(length)
                if needed > limit:
                    raise UserError(
                        f"prefix and constraints have {needed} tokens, but its output is limited to {limit} by "
                        "max_length or max_ratio; shorten them, or raise the limit"
                    )
            except UserError as error:
                problems[row] = str(error)
        return (rules if any((forbidden, *rules.prefixes, *rules.required)) else None), problems

    @staticmethod
    def _groups(
        config: SearchConfig, rules: Constraints | None, lines: Sequence[int]
    ) -> Iterator[tuple[SearchConfig, Constraints | None, list[int]]]:
        """Lines that are searched in the same way: with a beam that has a place for each number of required tokens."""
        groups: dict[int, list[int]] = {}  # by the width of the beam, 0 for lines without constraints
        for row in lines:
            free = rules is None or not (rules.forbidden or rules.prefixes[row] or rules.required[row])
            needed = 0 if rules is None else rules.needed(row)
            groups.setdefault(0 if free else max(config.beam, needed + (needed > 0)), []).append(row)
        for width, group in groups.items():
            wider = config if width <= config.beam else replace(config, beam=width)
            yield wider, rules if width else None, group

    def decode(self, hypotheses: Sequence[Hypothesis]) -> TextPrediction:
        """The output of one input, from what its search has found."""
        return prediction(hypotheses, self.target.decode_batch(one.tokens for one in hypotheses))

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
            scored = pair_scores(self.models, batch.source, batch.source_is_real, batch.target, batch.labels)
            for row, values in zip(rows, scored, strict=True):
                scores[row] = SequenceScore.of(self.target, targets[row][1:], values)
        return scores

    @torch.inference_mode()
    def align(self, pairs: Sequence[tuple[str, str]], layer: int | None = None) -> list[Links]:
        """Links (source word, target word) of each pair, by the cross-attention of a layer, numbered from 0.

        Of an ensemble, by that of its first model. A trace marks the modules of a model, which another thread may be
        using: traced is a copy of them, with the same weights.
        """
        if not isinstance(self.model, Model):
            raise UserError(
                "alignments need attention weights, which an export does not have; use the run it comes from"
            )
        name, links = alignment_layer(self.model, layer), [Links() for _ in pairs]
        tensors = (*self.model.parameters(), *self.model.buffers())
        model = copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})
        filled = [row for row, pair in enumerate(pairs) if all(map(str.strip, pair))]
        for rows, batch in pair_batches(*self._encode_pairs([pairs[row] for row in filled])):
            batch = batch.to(self.device)
            with trace(model, only=name) as seen:
                model.states(batch.target, model.encode(batch.source, batch.source_is_real))
            for row, weights in zip(rows, seen[name].float().mean(dim=1).cpu(), strict=True):  # [T, S] each
                source, target = pairs[filled[row]]
                words = self.source.encode_words(source)[1], self.target.encode_words(target)[1]
                links[filled[row]] = link_words(weights, *words)
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
        return self.bundle.limits.too_long(tokens)

    def _search(
        self, ids: Sequence[Sequence[int]], lines: Sequence[int], most: int, config: SearchConfig, first: int,
        constraints: Constraints | None,
    ) -> Iterator[tuple[Sequence[int], list[list[Hypothesis]]]]:  # fmt: skip
        """The rows of each batch of at most `most` of these lines, and the hypotheses of each row."""
        batches = self.batches(ids, lines, TOKENS // (config.n_best if config.sample else config.beam), most)
        if self.device.type == "cuda" and isinstance(self.engine, EncoderDecoder):
            with TURN:  # threads that search with this model share what was recorded
                self._recorded = self._recorded or RecordedSearches(self.engine, *self.bundle.target_frame)
            recorded, others = self._recorded, list[Batch]()
            fits = recorded.fits(config) and constraints is None

            def fitting() -> Iterator[Batch]:  # padded while the GPU computes those before
                for batch in batches:
                    if fits and max(config.limits(*batch[1:])) <= LONGEST:
                        yield batch
                    else:
                        others.append(batch)

            yield from recorded.search_all(fitting(), config)
            batches = iter(others)
        work, todo = partial(self.search, config, first, constraints=constraints), list(batches)
        is_serial = self.device.type != "cpu" or config.sample or config.coverage_penalty > 0 or len(todo) < 2
        if is_serial or traced(parts_of(*self.models)):  # a trace sees one batch at a time
            results: Iterator[list[list[Hypothesis]]] = map(work, todo)
        else:
            todo.reverse()  # the longest first, so that all cores end together
            results = side_by_side(work, todo)
        yield from zip((rows for rows, _, _ in todo), results, strict=True)


def prediction(hypotheses: Sequence[Hypothesis], texts: Iterable[str]) -> TextPrediction:
    """The hypotheses of one input with their texts, which may be followed by those of others."""
    scored = (ScoredText(text, one.score, one.log_probability) for one, text in zip(hypotheses, texts, strict=False))
    return TextPrediction(tuple(scored))
