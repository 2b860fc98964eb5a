"""Greedy search and beam search: which sequence is the most probable one?

Of all sequences the most probable is sought, and there are vocab_size^length of them. Greedy search commits to the
most probable token at each step; beam search keeps the `beam` most probable prefixes, extends each by every token and
keeps the `beam` most probable again (Graves 2012; Sutskever et al. 2014):

    total(y_1 … y_t) = Σ_i log p(y_i | y_<i, x)          [sentences, beam] + [sentences, beam, vocab_size]

Of the 2 · beam best extensions at most `beam` end with </s>, so enough continue. Those that end among the first
`beam` are finished and ranked by score (see `config`). A sentence is closed when no live hypothesis can be among its
`n_best` best: log p <= 0, so the best that a live one can become is

    total / lp(longest it may get)  with length_penalty >= 0,      total / lp(one more token)  with < 0

and cp <= 0. The rules are written once, as operations on tensors in fixed shapes (`Greedy`, `Beams`), so that a GPU
can replay a recorded step of them (`regard.predict.recorded`). `beam` drives them with an eager or lean engine: there
a closed sentence leaves the batch, so that one long sentence does not slow down the rest. One sentence alone on a CPU
is searched with lists (`regard.predict.single`), which find the same.

A sentence's result does not depend on its neighbours in the batch: limits follow from its own source, and
equal scores are decided by beam, then token id. What remains is rounding: a matmul may add up in another order when
the batch has another size, so float32 scores move by about 1e-6 and hypotheses closer than that may change ranks. No
rule can prevent it (a rounded grid only moves the edge); float64 makes it as good as impossible, batches of one make
it moot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.trace import Traceable, trace
from regard.predict.allocation import Automata, allocate
from regard.predict.config import SearchConfig
from regard.predict.constraints import Constraints, Pattern, forced
from regard.predict.engine import Engine, lean
from regard.predict.next_token import INFINITY, check_scores, largest, next_scores
from regard.predict.outputs import Hypothesis
from regard.predict.single import search_one

ROWS = 64  # hypotheses whose scores are ranked at a time on a CPU: they stay in its cache from softmax to rank

Watch = Callable[[Tensor, Tensor, Tensor], None]
Finished = Callable[[int, list[Hypothesis]], None]


@torch.inference_mode()
def beam(
    model: Engine,
    source: Tensor,
    is_real: Tensor | None,
    config: SearchConfig,
    bos: int,
    eos: int,
    watch: Watch | None = None,
    constraints: Constraints | None = None,
    interrupt: Callable[[], None] = lambda: None,
    finished: Finished = lambda row, hypotheses: None,
) -> list[list[Hypothesis]]:
    """The `config.n_best` best hypotheses of each row of `source`, best first; none where no output is possible.

    `watch` is called at every step with the best extensions: total, token and the row it extends, [n, 2 · beam] each;
    `interrupt` before every step, and ends the search by raising an error; `finished` with a row and its hypotheses
    when its search ends, which may be long before that of the others.
    """
    limits = config.limits(source, is_real)
    if not limits:
        return []
    cross = cross_attention(model) if config.coverage_penalty else None
    engine = lean(model) if cross is None else model  # attention weights can only be traced in the model itself
    if len(limits) == 1 and source.device.type == "cpu" and cross is watch is constraints is None:
        alone = search_one(engine, source, is_real, config, limits[0], bos, eos, interrupt)
        finished(0, alone)
        return [alone]
    results: list[list[Hypothesis]] = [[] for _ in limits]
    live: Beams | None = None
    sentences = torch.arange(len(limits), device=source.device)  # those still open
    # The first step reads <s> once per sentence, not once per beam.
    state, tokens = engine.start(source, is_real), torch.full((len(limits), 1), bos, device=source.device)
    while True:
        interrupt()
        with nullcontext() if cross is None else trace(cross, only="weights") as traced:
            logits = engine.step(tokens, state)[:, -1]  # [rows, vocab_size]
        if live is None:
            rule = Greedy if config.beam == 1 and watch is None and cross is None else Beams
            if constraints is not None and any(constraints.required):
                rule = Constrained
            live = rule(config, len(limits), max(limits), eos, logits)
            live.watch = watch
            if constraints is not None:
                live.constrain(constraints)
            live.start(torch.tensor(limits, device=source.device))
        if traced is not None:
            live.cover(traced["weights"], is_real)
        rows = live.advance(logits)
        check_scores(live.totals[:, 0].tolist())
        closed = live.closed.nonzero()[:, 0]
        kept = torch.arange(len(sentences), device=source.device)
        if len(closed) and live.LEAVES * len(closed) >= len(sentences):
            for index, hypotheses in zip(sentences[closed].tolist(), live.results(closed), strict=True):
                results[index] = hypotheses
                finished(index, hypotheses)
            kept = (~live.closed).nonzero()[:, 0]
            if not len(kept):
                return results
            rows = kept if rows is None else rows.view(len(sentences), -1)[kept].flatten()
            sentences = sentences[kept]
            live.keep(kept)
        if rows is not None and not torch.equal(rows, torch.arange(len(tokens), device=rows.device)):
            state.reorder(rows, kept)
        tokens = live.tokens


def greedy(model: Engine, source: Tensor, is_real: Tensor | None, *, bos: int, eos: int, limit: int) -> list[list[int]]:
    """The most probable token at each step, until </s> or `limit` tokens; without <s> and </s>."""
    config = SearchConfig(max_length=limit, max_ratio=float(limit))
    return [some[0].tokens for some in beam(model, source, is_real, config, bos, eos)]


class Beams:
    """The live hypotheses of n sentences, `beam` rows each, best first, and the rule that extends them.

    Finished hypotheses are in tables [n, beam]. `like` has the device and the type of the model's logits.
    No shape depends on a value and, if `recorded`, none is read back: then a step can be replayed as a CUDA graph.
    """

    LEAVES = 1 << 30  # closed sentences leave the batch when this many times their number reaches its size
    OF_ROWS: ClassVar[tuple[str, ...]] = ("tokens", "written", "covered", "padding")  # tables with a row per hypothesis
    OF_SENTENCES: ClassVar[tuple[str, ...]] = (  # tables with a row per sentence
        "limits", "closed", "totals", "found_score", "found_total", "found_length", "found_ended", "found_tokens",
        "prefixes",
    )  # fmt: skip

    def __init__(
        self, config: SearchConfig, sentences: int, capacity: int, eos: int, like: Tensor, recorded: bool = False
    ) -> None:
        self.config, self.eos, self.recorded, self.watch = config, eos, recorded, None
        exact, device = torch.promote_types(like.dtype, torch.float32), like.device
        shape, rows = (sentences, config.beam), sentences * config.beam
        self.steps = 0  # as `t`, where it is not recorded
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # tokens of each live hypothesis
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)  # the last ones, which are read next
        self.written = torch.zeros(rows, capacity, dtype=torch.long, device=device)  # all of them
        self.limits = torch.zeros(sentences, dtype=torch.long, device=device)
        self.closed = torch.zeros(sentences, dtype=torch.bool, device=device)
        # totals: log P of the live hypotheses, best first, not a number where the logits are not
        self.totals, self.found_total = torch.zeros(2, *shape, dtype=exact, device=device)
        self.found_score = torch.zeros(shape, dtype=torch.float64, device=device)
        self.found_tokens = torch.zeros(*shape, capacity, dtype=torch.long, device=device)
        self.found_length = torch.zeros(shape, dtype=torch.long, device=device)
        self.found_ended = torch.zeros(shape, dtype=torch.bool, device=device)
        penalties = [config.penalty(count) for count in range(capacity + 2)]
        self.penalties = torch.tensor(penalties, dtype=torch.float64, device=device)  # by length
        self.covered: Tensor | None = None  # [rows, S]: the attention that each source token has received
        self.padding: Tensor | None = None  # [rows, S]: True where the source is padding
        self.prefixes: Tensor | None = None  # [n, longest]: the first tokens of each sentence, -1 after them
        self.forbidden: Sequence[Pattern] = ()

    watch: Watch | None

    def constrain(self, constraints: Constraints) -> None:
        """Search outputs that satisfy these constraints, one for each sentence."""
        self.prefixes, self.forbidden = constraints.prefix_table(self.totals.device), constraints.forbidden

    def start(self, limits: Tensor) -> None:
        """Begin with empty hypotheses of sentences with these limits [<= n]; further rows have no sentence."""
        self.limits.fill_(self.written.shape[1])
        self.limits[: len(limits)] = limits
        self.closed.fill_(True)
        self.closed[: len(limits)] = False
        self.totals.fill_(-INFINITY)
        self.totals[:, 0] = 0.0
        self.found_score.fill_(-INFINITY)
        self.found_length.zero_()
        self.t.zero_()

    def keep(self, sentences: Tensor) -> None:
        """Continue with these sentences only."""
        beams = torch.arange(self.config.beam, device=sentences.device)
        rows = (sentences[:, None] * self.config.beam + beams).flatten()
        for names, kept in ((self.OF_ROWS, rows), (self.OF_SENTENCES, sentences)):
            for name in names:
                if (table := getattr(self, name)) is not None:
                    setattr(self, name, table.index_select(0, kept))

    def scores(self, logits: Tensor, written: Tensor) -> Tensor:
        """log p of every next token, -inf where it is forbidden."""
        least = self.config.min_length
        early = self.t < least if self.recorded and least else self.steps < least
        return next_scores(logits, early, written[:, : self.steps], self.config, self.eos, self.forbidden)[1]

    def force(self, logits: Tensor, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The best extensions of each row [rows, count], replaced by the token of its prefix where there is one."""
        if self.prefixes is None or self.steps >= self.prefixes.shape[1]:
            return values, tokens
        is_forced, token, log_p = forced(self.prefixes, self.steps, logits)
        first = torch.arange(values.shape[1], device=values.device) == 0
        alone = torch.where(first, log_p, -INFINITY)
        return torch.where(is_forced, alone, values), torch.where(is_forced & first, token, tokens)

    def advance(self, logits: Tensor) -> Tensor | None:
        """One more token for every hypothesis, by the logits [rows, vocab_size].

        Gives the row that each of them extends; None: its own.
        """
        size, length = self.config.beam, self.t + 1
        totals, tokens, rows = self._extend(logits)  # [n, 2 · beam] each, best first
        ends, full = tokens == self.eos, (self.limits == length)[:, None]
        taken = (ends | full)[:, :size] & (totals[:, :size] > -INFINITY) & ~self.closed[:, None]
        if self.recorded or bool(taken.any()):
            self._finish(taken, totals[:, :size], tokens[:, :size], rows[:, :size], length)
        # The first `beam` that continue; where </s> is among them for want of others, that beam is dead.
        order = ends.int().sort(dim=1, stable=True).indices[:, :size]
        totals = totals.masked_fill(ends, -INFINITY).gather(1, order)
        # Sentences are closed whose best live total can no longer pass the last of the finished that are given out.
        stop_early = self.config.early_stopping
        best, worst = totals[:, 0], self.found_score[:, (size if stop_early else self.config.n_best) - 1]
        settled = worst > -INFINITY
        if not (stop_early or size == 1):  # beam 1 is greedy search: the first </s> is the end
            longest = self.limits if self.config.length_penalty >= 0 else length + 1
            settled &= best.double() / self.penalties[longest] <= worst
        self.closed |= (self.limits == length) | (best == -INFINITY) | settled
        rows, tokens = rows.gather(1, order).flatten(), tokens.gather(1, order).view(-1, 1)
        self.totals.copy_(totals)
        self.tokens.copy_(tokens)
        self.written.copy_(self.written.index_select(0, rows))
        self.written.index_copy_(1, self.t, tokens)
        if self.covered is not None:
            self.covered = self.covered[rows]
            self.padding = None if self.padding is None else self.padding[rows]
        self.t += 1
        self.steps += 1
        return rows

    def _extend(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The 2 · beam best extensions of each sentence: total, token, and the row it extends, [n, 2 · beam]."""
        count, many = 2 * self.config.beam, ROWS if logits.device.type == "cpu" else len(logits)
        written = self.written[: len(logits)]
        parts = [  # [rows, <= count] each: the best of all are among each row's best
            largest(self.scores(part, before), count, self.recorded)
            for part, before in zip(logits.split(many), written.split(many), strict=True)
        ]
        values, tokens = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        values, tokens = self.force(logits, values, tokens)
        width = len(logits) // len(self.limits)  # 1 in the first step of an engine that reads <s> once per sentence
        (sentences, each), before = (len(self.limits), values.shape[1]), self.totals[:, :width]
        totals, index = (values + before.reshape(-1, 1)).view(sentences, -1).sort(dim=1, descending=True, stable=True)
        totals, index = totals[:, :count], index[:, :count]
        tokens = tokens.view(sentences, -1).gather(1, index)
        rows = index // each + torch.arange(sentences, device=totals.device)[:, None] * width
        short = count - totals.shape[1]  # a vocabulary smaller than the beam has no more to offer
        if short > 0:
            totals = F.pad(totals, (0, short), value=-INFINITY)
            tokens = F.pad(tokens, (0, short), value=self.eos)
            rows = torch.cat((rows, rows[:, :1].expand(-1, short)), dim=1)
        if self.watch is not None:
            self.watch(totals, tokens, rows)
        return totals, tokens, rows

    def _finish(self, taken: Tensor, totals: Tensor, tokens: Tensor, rows: Tensor, length: Tensor) -> None:
        """Merge what ends here [n, beam] into the tables of the finished; of equal ones the earlier stays in front."""
        size, ended = self.config.beam, tokens == self.eos
        score = totals.double() / self.penalties[length]
        if self.covered is not None:
            sums = self.covered[rows].clamp(1e-12, 1.0)  # a weight may round to 0, whose logarithm is -inf
            sums = sums if self.padding is None else sums.masked_fill(self.padding[rows], 1.0)
            score = score + self.config.coverage_penalty * sums.log().sum(dim=-1).double()
        score = torch.where(taken, score, -INFINITY)
        score, order = torch.cat((self.found_score, score), dim=1).sort(dim=1, descending=True, stable=True)
        order = order[:, :size]
        text = self.written[rows].index_copy(2, self.t, torch.where(ended, 0, tokens)[..., None])
        self.found_score.copy_(score[:, :size])
        for table, new in (
            (self.found_total, totals),
            (self.found_length, torch.where(ended, self.t, length)),
            (self.found_ended, ended),
        ):
            table.copy_(torch.cat((table, new), dim=1).gather(1, order))
        both = torch.cat((self.found_tokens, text), dim=1)
        self.found_tokens.copy_(both.gather(1, order[..., None].expand(-1, -1, both.shape[2])))

    def results(self, sentences: Tensor) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of these sentences."""
        tables = (self.found_score, self.found_total, self.found_length, self.found_ended, self.found_tokens)
        columns = (table[sentences, : self.config.n_best].tolist() for table in tables)
        return [
            [
                Hypothesis(tokens[:length], score, total, ended)
                for score, total, length, ended, tokens in zip(*row, strict=True)
                if score > -INFINITY
            ]
            for row in zip(*columns, strict=True)
        ]

    def cover(self, weights: Tensor, is_real: Tensor | None) -> None:
        """Add the attention of each row, the mean of its heads: weights [n, H, width, S] or [n · width, H, 1, S]."""
        mean = (weights if weights.dtype == torch.float64 else weights.float()).mean(dim=1).flatten(0, 1)
        if self.covered is None:
            self.covered, self.padding = torch.zeros_like(mean), None if is_real is None else ~is_real
        self.covered = self.covered + mean


class Greedy(Beams):
    """Beam 1, which needs no ranking: a row takes its most probable token until that is </s>.

    Closed rows are carried along until they are an eighth of the batch: taking them out copies the whole cache.
    """

    LEAVES = 8
    OF_SENTENCES = ("limits", "closed", "totals", "found_length", "prefixes")  # found_length counts </s>, too

    def advance(self, logits: Tensor) -> None:
        scores = self.scores(logits, self.written)
        one = self.recorded or len(scores) == 1
        best, tokens = scores.max(dim=1, keepdim=True) if one else largest(scores, 1)  # [n, 1]
        best, tokens = self.force(logits, best, tokens)
        self.totals += torch.where(self.closed[:, None], 0.0, best)
        self.found_length += ~self.closed[:, None]
        self.written.index_copy_(1, self.t, tokens)
        self.tokens.copy_(tokens)
        self.t += 1
        self.steps += 1
        self.closed |= (tokens[:, 0] == self.eos) | (self.limits == self.t) | (self.totals[:, 0] == -INFINITY)

    def results(self, sentences: Tensor) -> list[list[Hypothesis]]:
        results = []
        columns = (table[sentences].tolist() for table in (self.totals[:, 0], self.found_length[:, 0], self.written))
        for total, length, tokens in zip(*columns, strict=True):
            finished = tokens[length - 1] == self.eos
            hypothesis = Hypothesis(tokens[: length - finished], total / self.config.penalty(length), total, finished)
            results.append([hypothesis] if total > -INFINITY else [])
        return results


class Constrained(Beams):
    """Beam search for outputs with required phrases (`regard.predict.allocation`)."""

    OF_ROWS: ClassVar[tuple[str, ...]] = (*Beams.OF_ROWS, "states")

    def constrain(self, constraints: Constraints) -> None:
        super().constrain(constraints)
        self.automata = Automata(constraints.required, self.totals.device)
        self.states = self.automata.first  # [rows, C]: of each phrase; a row per sentence until the first step

    def keep(self, sentences: Tensor) -> None:
        super().keep(sentences)
        self.automata.keep(sentences)

    def advance(self, logits: Tensor) -> Tensor | None:
        rows = super().advance(logits)
        sentences = torch.arange(len(self.tokens), device=logits.device) // self.config.beam
        self.states = self.automata.read(self.states[rows], self.tokens, sentences)
        return rows

    def _extend(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As that of `Beams`, but `beam` extensions that end here, and then `beam` that continue, each best first."""
        size, count, length, device = self.config.beam, len(self.limits), self.t + 1, logits.device
        width = len(logits) // count
        sentences = torch.arange(len(logits), device=device) // width
        scores = self.scores(logits, self.written[: len(logits)])
        if self.prefixes is not None and self.steps < self.prefixes.shape[1]:
            is_forced, token, log_p = forced(self.prefixes, self.steps, logits)
            scores = torch.where(is_forced, torch.full_like(scores, -INFINITY).scatter(1, token, log_p), scores)
        # Candidates of each row: its best tokens, and those of its phrases; a last column is for gaps in the alphabet.
        scores = F.pad(scores, (0, 1), value=-INFINITY)
        own = self.automata.alphabet[sentences]
        own = torch.where(own < 0, scores.shape[1] - 1, own)  # [rows, K]
        values, tokens = largest(scores.scatter(1, own, -INFINITY), 2 * size)
        need = self.automata.need(self.automata.reach(self.states, sentences), sentences)  # [rows, K + 1]
        need = torch.cat((need[:, -1:].expand_as(values), need[:, :-1]), dim=1)
        values, tokens = torch.cat((values, scores.gather(1, own)), dim=1), torch.cat((tokens, own), dim=1)
        possible = torch.where(tokens == self.eos, need == 0, need <= (self.limits - length)[sentences, None])
        totals = (values + self.totals[:, :width].reshape(-1, 1)).masked_fill(~possible, -INFINITY)
        totals, index = totals.view(count, -1).sort(dim=1, descending=True, stable=True)
        tokens, need = (table.view(count, -1).gather(1, index) for table in (tokens, need))
        full = (self.limits == length)[:, None]
        chosen = allocate(need, totals != -INFINITY, tokens == self.eos, full, size, self.automata.banks)
        is_none, chosen = chosen == totals.shape[1], chosen.clamp_max(totals.shape[1] - 1)
        totals = totals.gather(1, chosen).masked_fill(is_none, -INFINITY)
        tokens = tokens.gather(1, chosen).masked_fill(is_none, self.eos)
        rows = index.gather(1, chosen) // values.shape[1] + torch.arange(count, device=device)[:, None] * width
        if self.watch is not None:
            self.watch(totals, tokens, rows)
        return totals, tokens, rows


def cross_attention(model: Any) -> Traceable:
    """The last cross-attention layer, for the coverage penalty."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    parts = [part for name, part in named if name.endswith("cross") and "weights" in getattr(part, "stages", ())]
    if not parts:
        raise UserError(
            f"coverage_penalty: {type(model).__name__} has no cross attention to read coverage from; set it to 0"
        )
    last: Traceable = parts[-1]
    return last
