"""Generation: a decoder continues a text, token by token.

The prompt is read once and its keys and values are cached (`regard.nn.cache`); after that a token costs one step,
however long the text is. Several samples continue one prompt together, one row each, and end independently: at </s>,
at a stop string, at the limit. Tokens are sampled as in `regard.predict.sampling`.

A model attends to `context` tokens. When they are used up, generation ends (`overflow = "stop"`), or the older half
is dropped and the newer half read again (`overflow = "slide"`): one long step every context / 2 tokens, so the
cost of a token stays constant on average. A prompt that does not fit is an error, or loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batch import Labels
from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder
from regard.predict.bundle import Bundle, Prediction, SearchPredictor
from regard.predict.config import SearchConfig
from regard.predict.engine import lean
from regard.predict.next_token import check_scores, next_scores
from regard.predict.replay import FixedSampler, Replays
from regard.predict.sampling import CHUNK, Uniform, sample_token
from regard.predict.scoring import TOKENS, SequenceScore, label_scores, windows
from regard.text.stream import StopStrings, StreamDecoder
from regard.text.tokenizer import Tokenizer

Overflow = Literal["stop", "slide"]
LIMIT = 200  # tokens, by default
PADDING = 128  # a vocabulary may be padded to a multiple of at most this many, which makes matmuls faster


@dataclass(frozen=True)
class Token:
    """A token of a sample, and the text that is complete with it; `ended` is the reason if it was the last.

    "end": </s>; "stop": a stop string; "limit": `max_length` tokens; "context": the context is full.
    """

    sample: int
    id: int
    log_probability: float
    text: str
    ended: str | None = None
    prompt: int = 0  # the index of the prompt
    top: tuple[tuple[int, float], ...] = ()  # the most probable tokens in its place, where they were asked for


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


@dataclass(frozen=True)
class Generation(Prediction):
    """The continuations of one prompt; `text` is the first one."""

    samples: tuple[Sample, ...]

    @property
    def text(self) -> str:
        return self.samples[0].text


class SampleWriter:
    """The text of one sample, as whole characters, up to </s>, a stop string, or `limit` tokens for `reason`."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], limit: int, reason: str, sample: int = 0, prompt: int = 0
    ) -> None:
        self.decoder, self.stop, self.eos = StreamDecoder(tokenizer), StopStrings(stops), tokenizer.eos
        self.limit, self.reason, self.sample, self.prompt = limit, reason, sample, prompt
        self.count, self.ended = 0, False

    def add(self, id: int, log_probability: float, top: tuple[tuple[int, float], ...] = ()) -> Token:
        self.count += 1
        is_end = id == self.eos
        text = "" if is_end else self.stop.add(self.decoder.add(id))
        ended = "end" if is_end else "stop" if self.stop.stopped else self.reason if self.count == self.limit else None
        if ended is not None:
            text += self.stop.add(self.decoder.end()) + self.stop.end()
            self.ended = True
        return Token(self.sample, id, log_probability, text, ended, self.prompt, top)


class Generator(SearchPredictor[str, Generation]):
    """A decoder with its tokenizer; `context` is how many tokens it attends to at most."""

    NEEDS = "a decoder (a language model) with its tokenizer"
    MODEL: ClassVar = {"architecture": ("decoder",)}
    model: Decoder
    COMMAND = "generate"
    DEFAULTS: ClassVar = {"sample": True}
    SLIDES = True
    SEEDS: ClassVar[bool] = True  # whether a seed determines the samples
    RANKS: ClassVar[bool] = True  # whether a token can come with the most probable ones in its place

    def __init__(self, bundle: Bundle, config: SearchConfig | None = None) -> None:
        super().__init__(bundle, config)
        self.tokenizer, self.context = bundle.tokenizer, bundle.limits.context
        try:
            check_vocabulary(self.model.config, self.tokenizer, "model.")
        except UserError as error:
            raise UserError(f"{bundle.name}: {error}") from None
        self.fixed = self.device.type == "cuda"  # in fixed shapes, where that is possible
        self._replays = Replays(self.model, len(self.tokenizer), self.tokenizer.eos)

    def predict(self, inputs: Sequence[str], **options: Any) -> list[Generation]:
        """The continuations of each prompt; the options are those of `stream`."""
        return [Generation(tuple(self.generate(prompt, **options))) for prompt in inputs]

    def generate(self, prompt: str, **options: Any) -> list[Sample]:
        """All continuations of one prompt."""
        samples: dict[int, Sample] = {}
        for token in self.stream([prompt], **options):
            samples.setdefault(token.sample, Sample()).take(token)
        return [samples[number] for number in sorted(samples)]

    def stream(
        self,
        inputs: Sequence[str],
        *,
        config: SearchConfig | None = None,
        stops: Sequence[str] = (),
        overflow: Overflow = "stop",
        begin: bool = False,
        context: int | None = None,
        **options: Any,
    ) -> Iterator[Token]:
        """Tokens of all `n_best` samples of each prompt as they are sampled; `options` are fields of a SearchConfig.

        `begin` puts </s>, the end of a document, first. A prompt that is too long is an error at once.
        """
        context, config = self.context if context is None else context, self.configured(config, **options)
        prompts = [self.read(prompt, overflow, begin, context) for prompt in inputs]
        return (
            token
            for number, ids in enumerate(prompts)
            for token in self._stream(ids, config, stops, overflow, context, number)
        )

    @torch.inference_mode()
    def _stream(
        self, ids: list[int], config: SearchConfig, stops: Sequence[str], overflow: Overflow, context: int, prompt: int,
        top: int = 0,
    ) -> Iterator[Token]:  # fmt: skip
        """The tokens of one prompt, each with the `top` most probable ones in its place."""
        limit = config.max_length or LIMIT
        room = context - len(ids) + 1 if overflow == "stop" else limit
        ends = (limit, "limit") if limit <= room else (room, "context")
        writers = [SampleWriter(self.tokenizer, stops, *ends, number, prompt) for number in range(config.n_best)]
        with self._sampler(ids, config, context, limit, top) as sampler:
            while True:
                live, chosen, known = sampler.step()
                tops = sampler.top(top) if isinstance(sampler, Sampler) and top else [()] * len(live)
                for number, id, log_probability, best in zip(live, chosen, known, tops, strict=True):
                    yield writers[number].add(id, log_probability, best)
                kept = [row for row, number in enumerate(live) if not writers[number].ended]
                if not kept:
                    return
                sampler.keep(kept)

    def _sampler(
        self, ids: list[int], config: SearchConfig, context: int, limit: int, top: int = 0
    ) -> AbstractContextManager[FixedSampler | Sampler]:
        if self.tokenizer.eos is None and (config.min_length or config.no_repeat_ngram):
            raise UserError("min_length and no_repeat_ngram need a token for the end, which the tokenizer lacks")
        if self.fixed and not top and self._replays.fits(config):
            return self._replays.sampler(ids, config, context, limit)
        if self.bundle.own and self.device.type == "cpu" and config.n_best == 1:
            lay_columns(self.model)
        return nullcontext(Sampler(self.model, ids, config, len(self.tokenizer), context, self.tokenizer.eos, limit))

    def check_options(self, overflow: str, begin: bool, context: int) -> None:
        """Options of `stream` that this model cannot use are an error."""
        if overflow not in get_args(Overflow):
            raise UserError(f"overflow = {overflow!r}; {suggest(str(overflow), get_args(Overflow))}")
        if context < 1:
            raise UserError(f"context = {context}: must be 1 or more tokens")
        limit = self.bundle.limits.positions
        if limit is not None and context > limit:
            raise UserError(
                f"context = {context}: the learned positions of this model end at max_length = {limit}; give no more"
            )
        self._before(begin)

    def read(self, prompt: str, overflow: Overflow, begin: bool, context: int) -> list[int]:
        """The prompt's tokens, at most as many as the context."""
        self.check_options(overflow, begin, context)
        ids = [*self._before(begin), *self.tokenizer.encode(prompt)]
        if not ids:
            raise UserError(
                "the prompt is empty: pass at least one character to continue, or --begin to start a new document"
            )
        if len(ids) > context and overflow == "stop":
            raise UserError(
                f"the prompt has {len(ids):,} tokens, but the context has {context:,}: shorten it, or drop its "
                "beginning with --overflow slide"
            )
        return ids[-context:]

    def _before(self, begin: bool) -> list[int]:
        """The </s> of the document before, if a text is to `begin` one."""
        if begin and self.tokenizer.eos is None:
            raise UserError("begin: the tokenizer has no token for the end of a document; pass a prompt instead")
        return [self.tokenizer.eos] if begin and self.tokenizer.eos is not None else []

    @torch.inference_mode()
    def score(self, texts: Sequence[str], *, begin: bool = False) -> list[SequenceScore]:
        """log p of every token of each text given those before, without the first; with `begin` also of that one."""
        ids = [[*self._before(begin), *one] for one in self.tokenizer.encode_batch(texts)]
        pieces = [(row, *piece) for row, one in enumerate(ids) if len(one) > 1 for piece in windows(one, self.context)]
        known = self._piece_scores([part for _, part, _ in pieces], [counted for _, _, counted in pieces])
        scores: list[list[float]] = [[] for _ in texts]
        for (row, _, _), values in zip(pieces, known, strict=True):
            scores[row] += values
        return [SequenceScore.of(self.tokenizer, one[1:], values) for one, values in zip(ids, scores, strict=True)]

    def _piece_scores(self, pieces: Sequence[list[int]], counted: Sequence[int]) -> list[list[float]]:
        """log p of the tokens of each piece after its first, without those `counted` in the piece before."""
        known: list[list[float]] = [[] for _ in pieces]
        for rows, padded, is_real in self.batches(pieces, range(len(pieces)), TOKENS):
            scored = torch.ones_like(padded, dtype=torch.bool) if is_real is None else is_real
            for row, piece in enumerate(rows):
                scored[row, : 1 + counted[piece]] = False
            labels = torch.where(scored, padded, Labels.IGNORE)[:, 1:].to(self.device)
            states = self.model.states(padded[:, :-1].to(self.device))
            for piece, values in zip(rows, label_scores(self.model, states, labels), strict=True):
                known[piece] = values
        return known


class Sampler:
    """Samples in progress: rows that continue one prompt, all of one length."""

    def __init__(
        self, model: Decoder, prompt: list[int], config: SearchConfig, vocab_size: int, context: int, eos: int | None,
        limit: int,
    ) -> None:  # fmt: skip
        self.model: Any = lean(model)
        self.config, self.vocab_size, self.context, self.eos = config, vocab_size, context, eos
        self.uniform, self.live = Uniform(config.seed, [0], config.n_best), list(range(config.n_best))
        self.length, self.generated = len(prompt), 0
        given = torch.tensor([prompt], device=next(model.parameters()).device)
        self.state = model.start(capacity=min(context, self.length + limit))
        self.logits = model.step(given, self.state, last=True)[:, -1]  # the prompt is read once for all
        if config.n_best > 1:
            self._take(torch.zeros(config.n_best, dtype=torch.long, device=given.device))
        self.ids = given.repeat(config.n_best, 1)  # the prompt, then the samples; grows by doubling
        self.uniforms = torch.empty(0)  # [rows, CHUNK]: the random numbers of the next tokens
        self.known = self.logits  # [rows, vocab_size]: log-probabilities of the last step

    def step(self) -> tuple[list[int], list[int], list[float]]:
        """One more token for every row: (numbers of the samples, ids, log-probabilities under the model)."""
        end = self.length + self.generated
        if self.generated:  # the last token is read; if the context is full, the older half is dropped
            begin = end - 1
            if self.state.cache.length >= self.context:
                self.state = self.model.start(capacity=self.context)
                begin = end - max(1, self.context // 2)
            self.logits = self.model.step(self.ids[:, begin:end], self.state, last=True)[:, -1]
        column = self.generated % CHUNK
        if column == 0:
            self.uniforms = self.uniform.following(CHUNK)[self.live].to(self.ids.device)
        early, written = self.generated < self.config.min_length, self.ids[:, self.length : end]
        logits = self.logits[:, : self.vocab_size]  # rows that pad a vocabulary are not tokens
        self.known, scores = next_scores(logits, early, written, self.config, self.eos)
        token = sample_token(scores, self.config, self.uniforms[:, column])[:, None]  # [rows, 1]
        if end == self.ids.shape[1]:
            self.ids = F.pad(self.ids, (0, max(end, CHUNK)))
        self.ids[:, end : end + 1] = token
        self.generated += 1
        values = self.known.gather(1, token)[:, 0].tolist()
        check_scores(values)
        return self.live, token[:, 0].tolist(), values

    def top(self, count: int) -> list[tuple[tuple[int, float], ...]]:
        """The `count` most probable tokens of the last step, for every row."""
        return most_probable(self.known, count)

    def keep(self, rows: list[int]) -> None:
        """Continue with these rows only."""
        if len(rows) == len(self.live):
            return
        self.live = [self.live[row] for row in rows]
        chosen = torch.tensor(rows, device=self.ids.device)
        self.ids, self.uniforms = self.ids[chosen], self.uniforms[chosen]
        self._take(chosen)

    def _take(self, rows: Tensor) -> None:
        self.logits = self.logits[rows]
        self.state.reorder(rows)


def most_probable(known: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The (id, log-probability) of the `count` most probable tokens of each row [rows, vocab_size]."""
    values, ids = (part.tolist() for part in known.topk(min(count, known.shape[1])))
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]


def lay_columns(model: nn.Module) -> None:
    """Store the weights in column-major order: a CPU multiplies a single row with them a fifth faster.

    Not those that are also embedding matrices, which are read by row.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables and module.weight.stride(0) != 1:
            with torch.inference_mode(False):  # weights made in inference mode could not be trained later
                module.weight.data = module.weight.data.t().contiguous().t()


def check_vocabulary(config: ModelConfig, tokenizer: Tokenizer, where: str = "") -> None:
    """A model may have a few more rows than its tokenizer has tokens, for a round number, and never fewer."""
    vocab_size, size = config.vocab_size or 0, len(tokenizer)
    if not size <= vocab_size <= -(-size // PADDING) * PADDING:
        raise UserError(
            f"{where}vocab_size = {vocab_size}, but the tokenizer has {size} tokens: they do not match. In a recipe, "
            f"remove vocab_size or round it up to a multiple of at most {PADDING}; with trained weights, use the "
            "tokenizer that they were trained with"
        )
