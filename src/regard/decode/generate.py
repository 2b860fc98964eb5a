"""Generation: a decoder goes on with a text, token by token.

The prompt is read once and its keys and values are kept (`regard.nn.cache`); after that a token costs one step,
however much has been written before. Several samples continue one prompt together, a row each, and end by
themselves: at </s>, at a stop string, at the limit. What is drawn is decided as in `regard.decode.sample`.

A model sees `context` tokens at once. When they are full, generation ends (`overflow = "stop"`), or the older half
is forgotten and the newer half read again (`overflow = "slide"`): one long step every context / 2 tokens, so the
cost of a token stays flat on average. A prompt that does not fit is an error, or loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from regard.decode.config import SearchConfig, read_config
from regard.decode.sample import Chance, distribution, pick
from regard.decode.search import check_scores, forbid, log_probabilities
from regard.errors import UserError, suggest
from regard.models import Decoder, ModelConfig
from regard.recipe import RECIPE
from regard.run import load, load_recipe, load_tokenizers
from regard.text.stream import Letters, Until
from regard.text.tokenizer import Tokenizer

Overflow = Literal["stop", "slide"]
LIMIT = 200  # tokens, where nothing else is said
PADDING = 128  # a vocabulary may be filled up to a multiple of at most so many, which matrix products like


@dataclass(frozen=True)
class Token:
    """A token of a sample, and the text that became certain with it; `ended` says why, where it was the last.

    "end": </s>; "stop": a stop string; "limit": as many as asked for; "context": there is no room for more.
    """

    sample: int
    id: int
    log_probability: float
    text: str
    ended: str | None = None


@dataclass
class Sample:
    """A finished continuation."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    ended: str | None = None

    def take(self, token: Token) -> None:
        self.text += token.text
        self.ids.append(token.id)
        self.log_probabilities.append(token.log_probability)
        self.ended = token.ended


class Generator:
    """A decoder with its tokenizer; `context` is how many tokens it is given at most."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, config: SearchConfig | None = None, context: int | None = None
    ) -> None:
        check_vocabulary(model.config, tokenizer, "model.")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.config = config or SearchConfig(sample=True)
        self.context = context or model.config.max_length
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", changes: Mapping[str, Any] | None = None) -> Generator:
        """The model in `folder`, drawing as [decode] of its recipe says; `changes` are fields of a SearchConfig."""
        tables = load_recipe(folder)
        table = {"sample": True, **tables.get("decode", {})}
        try:
            config = read_config(table, changes)
        except UserError as error:
            given = str(error).partition(" ")[0] in (changes or {})
            raise error if given else UserError(f"{Path(folder) / RECIPE}: {error}") from None
        model, tokenizers = load(folder, device), load_tokenizers(folder)
        if not isinstance(model, Decoder):
            raise UserError(
                f"{folder}: model.shape = {model.config.shape!r}: only a decoder goes on with a text; an "
                "encoder-decoder answers to  regard translate"
            )
        if "tokenizer" not in tokenizers:
            raise UserError(f"{folder}: has no tokenizer.json, so text cannot be turned into the model's tokens")
        train = tables.get("train")
        context = train.get("pack") if isinstance(train, dict) else None
        try:
            return cls(model, tokenizers["tokenizer"], config, context)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    def generate(self, prompt: str, **settings: Any) -> list[Sample]:
        """All samples, finished; `settings` are those of `stream`."""
        samples: dict[int, Sample] = {}
        for token in self.stream(prompt, **settings):
            samples.setdefault(token.sample, Sample()).take(token)
        return [samples[number] for number in sorted(samples)]

    def stream(
        self,
        prompt: str,
        *,
        config: SearchConfig | None = None,
        stops: Sequence[str] = (),
        overflow: Overflow = "stop",
        begin: bool = False,
        context: int | None = None,
    ) -> Iterator[Token]:
        """Tokens of all `config.n_best` samples as they are drawn; `begin` puts </s>, the end of a document, first.

        A prompt that cannot be is an error at once, before any token is asked for.
        """
        context = self.context if context is None else context
        ids = self.read(prompt, overflow, begin, context)
        return self._stream(ids, config or self.config, stops, overflow, context)

    @torch.inference_mode()
    def _stream(
        self, ids: list[int], config: SearchConfig, stops: Sequence[str], overflow: Overflow, context: int
    ) -> Iterator[Token]:
        limit = config.max_length or LIMIT
        drawing = Drawing(self.model, ids, config, len(self.tokenizer), context, self.tokenizer.eos, limit)
        writers = [_Writer(Letters(self.tokenizer), Until(stops)) for _ in range(config.n_best)]
        for count in range(1, limit + 1):
            full = overflow == "stop" and len(ids) + count > context
            live, chosen, known = drawing.step()
            kept = []
            for row, (number, id, log_probability) in enumerate(zip(live, chosen, known, strict=True)):
                text, ended = writers[number].add(id, id == self.tokenizer.eos)
                ended = ended or ("limit" if count == limit else "context" if full else None)
                if ended:
                    text += writers[number].end()
                else:
                    kept.append(row)
                yield Token(number, id, log_probability, text, ended)
            if not kept:
                return
            drawing.keep(kept)

    def read(self, prompt: str, overflow: Overflow, begin: bool, context: int) -> list[int]:
        """The prompt's tokens, as many as the context has room for."""
        if overflow not in get_args(Overflow):
            raise UserError(f"overflow = {overflow!r}; {suggest(str(overflow), get_args(Overflow))}")
        if context < 1:
            raise UserError(f"context = {context}: give 1 or more tokens")
        config, first = self.model.config, []
        if config.position == "learned" and context > config.max_length:
            raise UserError(
                f"context = {context}: the learned positions of this model end at max_length = {config.max_length}; "
                "give no more"
            )
        if begin:
            if self.tokenizer.eos is None:
                raise UserError("begin: the tokenizer has no token for the end of a document; give a prompt instead")
            first = [self.tokenizer.eos]
        ids = [*first, *self.tokenizer.encode(prompt)]
        if not ids:
            raise UserError(
                "the prompt is empty: give at least a letter to go on from, or --begin to start where a document does"
            )
        if len(ids) > context and overflow == "stop":
            raise UserError(
                f"the prompt has {len(ids):,} tokens, but the context has room for {context:,}: shorten it, or let its "
                "beginning go with --overflow slide"
            )
        return ids[-context:]


class Drawing:
    """Samples under way: rows that continue one prompt, all of one length."""

    def __init__(
        self, model: Decoder, prompt: list[int], config: SearchConfig, vocab: int, context: int, eos: int | None,
        limit: int,
    ) -> None:  # fmt: skip
        if eos is None and (config.min_length or config.no_repeat_ngram):
            raise UserError("min_length and no_repeat_ngram need a token for the end, which the tokenizer lacks")
        self.model, self.config, self.vocab, self.context, self.eos = model, config, vocab, context, eos
        device = next(model.parameters()).device
        self.chance, self.live = Chance(config.seed, [0], config.n_best), torch.arange(config.n_best, device=device)
        self.ids = torch.tensor([prompt], device=device)  # [1, T], then [rows, T + t]
        self.length = len(prompt)
        self.state = model.start(capacity=min(context, len(prompt) + limit))
        self.logits = model.step(self.ids, self.state)[:, -1]  # the prompt is read once for all
        if config.n_best > 1:
            self.keep([0] * config.n_best, first=True)

    def step(self) -> tuple[list[int], list[int], list[float]]:
        """One more token for every row: (numbers of the samples, ids, log-probabilities under the model)."""
        written = self.ids[:, self.length :]
        if written.shape[1]:
            self._advance()
        known = log_probabilities(self.logits[:, : self.vocab])  # what fills up a vocabulary is no token
        check_scores(known[:, 0].tolist())
        scores = known if self.eos is None else forbid(known, written, self.config, self.eos)
        token = pick(distribution(scores, self.config), self.chance.at(written.shape[1], self.live))  # [rows]
        self.ids = torch.cat((self.ids, token[:, None]), dim=1)
        return self.live.tolist(), token.tolist(), known.gather(1, token[:, None])[:, 0].tolist()

    def _advance(self) -> None:
        """Read the token drawn last; where there is no room for it, forget the older half."""
        if len(self.state.cache) < self.context:
            self.logits = self.model.step(self.ids[:, -1:], self.state)[:, -1]
            return
        self.state = self.model.start(capacity=self.context)
        self.logits = self.model.step(self.ids[:, -max(1, self.context // 2) :], self.state)[:, -1]

    def keep(self, rows: list[int], first: bool = False) -> None:
        """Go on with these rows only."""
        if len(rows) == self.ids.shape[0] and not first:
            return
        chosen = torch.tensor(rows, device=self.ids.device)
        self.ids, self.logits = self.ids[chosen], self.logits[chosen]
        self.state.reorder(chosen)
        if not first:
            self.live = self.live[chosen]


@dataclass
class _Writer:
    """A sample's text: whole characters, up to a stop string."""

    letters: Letters
    until: Until

    def add(self, id: int, is_end: bool) -> tuple[str, str | None]:
        if is_end:
            return "", "end"
        text = self.until.add(self.letters.add(id))
        return text, "stop" if self.until.stopped else None

    def end(self) -> str:
        return "" if self.until.stopped else self.until.add(self.letters.end()) + self.until.end()


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, where: str = "") -> None:
    """A model may have a few rows more than its tokenizer has tokens, to make a round number, and never fewer."""
    vocab, size = config.vocab or 0, len(tokenizer)
    if not size <= vocab <= -(-size // PADDING) * PADDING:
        raise UserError(
            f"{where}vocab = {vocab}, but the tokenizer has {size} tokens: they do not belong together. In a recipe, "
            f"leave vocab out or round it up to a multiple of at most {PADDING}; beside trained weights, put the "
            "tokenizer that they were trained with"
        )
