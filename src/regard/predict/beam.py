"""Beam search: follow the best few beginnings, not only the best one.

Of all sequences the likeliest is wanted, and there are vocab_size^length of them. Greedy search commits to each
token at once; beam search keeps the `beam` likeliest beginnings, extends each by every token and keeps the
`beam` likeliest again (Graves 2012; Sutskever et al. 2014):

    total(y_1 … y_t) = Σ_i log p(y_i | y_<i, x)          [sentences, beam] + [sentences, beam, vocab_size]

Of the 2 · beam best extensions at most `beam` end with </s>, so enough go on. Those that end among the first
`beam` are finished and ranked by score (see `config`). A sentence is closed when it has `beam` finished
hypotheses and no live one can pass the worst of them: log p <= 0, so the best that a live one can become is

    total / lp(longest it may get)  with length_penalty >= 0,      total / lp(one more token)  with < 0

and cp <= 0. A closed sentence leaves the batch, so that one long sentence does not drag the rest along.

A sentence's result does not depend on its neighbours in the batch: limits follow from its own source, and
equal scores are decided by beam, then token id. What remains is rounding: a matrix product may add up in
another order when the batch has another size, so float32 scores move by about 1e-6 and hypotheses closer
than that may change positions. No rule can prevent it (a rounded grid only moves the edge); float64 makes it
as good as impossible, batches of one make it moot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.trace import Traceable, trace
from regard.predict.config import SearchConfig
from regard.predict.lean import lean
from regard.predict.search import Hypothesis, Steps, check_scores, forbid, length_limits, log_probabilities

ROWS = 64  # hypotheses whose scores are ranked at a time on a CPU: they stay in its cache from softmax to rank
GROUPS = 96  # of columns, for each number that is sought, see `foremost`

Watch = Callable[[Tensor, Tensor, Tensor], None]


@torch.inference_mode()
def beam(
    model: Steps,
    source: Tensor,
    is_real: Tensor | None,
    config: SearchConfig,
    bos: int,
    eos: int,
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """The `config.n_best` best hypotheses of each row of `source`, best first.

    `watch` sees at every step what is weighed: total, token and the row it extends, [n, 2 · beam] each, best first.
    """
    limits = length_limits(source, is_real, config)
    if not limits:
        return []
    beams = Beams(config, limits, eos, source.device, watch)
    cross = cross_attention(model) if config.coverage_penalty else None
    model = lean(model) if cross is None else model  # what a step looks at is only seen in the model itself
    if config.beam == 1 and watch is None and cross is None and source.device.type == "cpu":
        return likeliest(model, source, is_real, config, limits, (bos, eos))
    # The first step reads <s> once a sentence, not once a beam: what it reads from the memory is computed once.
    state = model.start(source, is_real)
    tokens = torch.full((len(limits), 1), bos, device=source.device)
    while True:
        with nullcontext() if cross is None else trace(cross, only="weights") as seen:
            logits = model.step(tokens, state)[:, -1]  # [rows, vocab_size]
        if seen is not None:
            beams.cover(seen["weights"], is_real)
        rows, sources = beams.advance(logits)
        if not beams.open:
            return [found[: config.n_best] for found in beams.found]
        if rows is not None:
            state.reorder(rows, sources)
        tokens = beams.written[:, -1:]


def likeliest(
    model: Steps, source: Tensor, is_real: Tensor | None, config: SearchConfig, limits: list[int], ends: tuple[int, int]
) -> list[list[Hypothesis]]:
    """Beam 1, which needs no ranking: a row takes its likeliest token until that is </s>.

    Rows that have ended are carried along until an eighth has: taking them out moves the whole cache.
    """
    found: list[list[Hypothesis]] = [[] for _ in limits]
    state, reach, sentences = model.start(source, is_real), torch.tensor(limits), torch.arange(len(limits))
    tokens, written = torch.full((len(limits), 1), ends[0]), torch.zeros(len(limits), 0, dtype=torch.long)
    totals, done = torch.zeros(len(limits)), torch.zeros(len(limits), dtype=torch.bool)
    for length in range(1, max(limits) + 1):
        logits = model.step(tokens, state)[:, -1]
        values, tokens = largest(forbid(log_probabilities(logits), written, config, ends[1]), 1)  # [rows, 1]
        totals, written = totals + values[:, 0], torch.cat((written, tokens), dim=1)
        check_scores(totals.tolist())
        over = ((tokens[:, 0] == ends[1]) | (reach == length) | (totals == float("-inf"))) & ~done
        for row in over.nonzero()[:, 0].tolist():
            total, text = float(totals[row]), written[row].tolist()
            finished = text[-1] == ends[1]
            answer = Hypothesis(text[:-1] if finished else text, total / config.penalty(length), total, finished)
            found[int(sentences[row])] = [answer] if total > -math.inf else []
        done |= over
        if 8 * int(done.sum()) >= len(done):
            rows = (~done).nonzero()[:, 0]
            if not len(rows):
                break
            state.reorder(rows, rows)
            tokens, written, totals, reach, sentences, done = (
                x.index_select(0, rows) for x in (tokens, written, totals, reach, sentences, done)
            )
    return found


class Beams:
    """The live hypotheses of the sentences still open; rows are sentence by sentence, best beam first."""

    def __init__(
        self, config: SearchConfig, limits: list[int], eos: int, device: torch.device, watch: Watch | None = None
    ) -> None:
        self.config, self.limits, self.eos, self.device, self.watch = config, limits, eos, device, watch
        self.found: list[list[Hypothesis]] = [[] for _ in limits]
        self.open = list(range(len(limits)))  # n sentences
        self.totals = torch.zeros(len(limits), 1, device=device)  # [n, width]: width 1 at first, then beam
        self.written = torch.zeros(len(limits), 0, dtype=torch.long, device=device)  # [n · width, t]
        self.covered: Tensor | None = None  # [n · width, S]
        self.filler: Tensor | None = None  # [n · width, S] True where the source is padding

    def advance(self, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """One more token for every hypothesis; gives the rows that go on, in their new order (None: as they are),
        and which of the n sentences they belong to."""
        size, length = self.config.beam, self.written.shape[1] + 1
        totals, tokens, rows = self._extend(logits)  # [n, 2 · beam] each, best first
        ends = tokens == self.eos
        self._finish(totals, tokens, rows, ends, length)
        # The first `beam` that go on; where </s> stands among them for want of others, that beam is dead.
        order = ends.int().sort(dim=1, stable=True).indices[:, :size]
        totals = totals.masked_fill(ends, float("-inf")).gather(1, order)  # [n, beam]
        kept = [at for at, best in enumerate(totals[:, 0].tolist()) if not self._closed(self.open[at], best, length)]
        rows, tokens = rows.gather(1, order), tokens.gather(1, order)
        chosen = torch.tensor(kept, dtype=torch.long, device=self.device)
        if len(kept) < len(self.open):
            totals, rows, tokens = totals[chosen], rows[chosen], tokens[chosen]
        self.open, self.totals = [self.open[at] for at in kept], totals
        return self._move(rows.flatten(), tokens.view(-1, 1)), chosen

    def _extend(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The 2 · beam best extensions of each sentence: total, token, and the row it extends, [n, 2 · beam]."""
        count, many = 2 * self.config.beam, ROWS if logits.device.type == "cpu" else len(logits)
        parts = []
        for some, written in zip(logits.split(many), self.written.split(many), strict=True):
            scores = forbid(log_probabilities(some), written, self.config, self.eos)
            parts.append(largest(scores, count))  # [rows, <= count]: the best of all are among each row's best
        values, tokens = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        totals, tokens, rows = extensions(values, tokens, self.totals, count, self.eos)
        check_scores(totals[:, 0].tolist())
        if self.watch is not None:
            self.watch(totals, tokens, rows)
        return totals, tokens, rows

    def _finish(self, totals: Tensor, tokens: Tensor, rows: Tensor, ends: Tensor, length: int) -> None:
        """Take down what ends here: </s> among the first `beam`, and everything there where the limit is reached."""
        size = self.config.beam
        full = [self.limits[sentence] == length for sentence in self.open]
        ending = ends[:, :size]
        if any(full):
            ending = ending | torch.tensor(full, device=self.device)[:, None]
        at, rank = (ending & (totals[:, :size] > float("-inf"))).nonzero(as_tuple=True)
        if not len(at):
            return
        parents = rows[at, rank]
        coverage = [0.0] * len(at) if self.covered is None else self._coverage(parents).tolist()
        columns = (at, totals[at, rank], tokens[at, rank], self.written[parents])
        for index, total, token, before, extra in zip(*(column.tolist() for column in columns), coverage, strict=True):
            finished = token == self.eos
            score = total / self.config.penalty(length) + self.config.coverage_penalty * extra
            found = self.found[self.open[index]]
            found.append(Hypothesis(before if finished else [*before, token], score, total, finished))
            found.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equal ones the earlier stays in front
            del found[size:]

    def _closed(self, sentence: int, best: float, length: int) -> bool:
        """Whether a sentence whose best live total is `best` has nothing more to find."""
        found, config = self.found[sentence], self.config
        if length == self.limits[sentence] or best == -math.inf:
            return True
        if len(found) < config.beam:
            return False
        if config.early_stopping or config.beam == 1:  # beam 1 is greedy search: the first </s> is the end
            return True
        mildest = self.limits[sentence] if config.length_penalty >= 0 else length + 1
        return best / config.penalty(mildest) <= found[-1].score

    def _move(self, rows: Tensor, tokens: Tensor) -> Tensor | None:
        """Give every row its parent's past; None where each is its own parent."""
        same = torch.equal(rows, torch.arange(len(self.written), device=self.device))
        if not same:
            self.written = self.written[rows]
            self.covered = None if self.covered is None else self.covered[rows]
            self.filler = None if self.filler is None else self.filler[rows]
        self.written = torch.cat((self.written, tokens), dim=1)
        return None if same else rows

    def cover(self, weights: Tensor, is_real: Tensor | None) -> None:
        """Add what every row has just looked at: weights [n, H, width, S] or [n · width, H, 1, S], mean of heads."""
        looked = (weights if weights.dtype == torch.float64 else weights.float()).mean(dim=1).flatten(0, 1)
        if self.covered is None:
            self.covered, self.filler = torch.zeros_like(looked), None if is_real is None else ~is_real
        self.covered = self.covered + looked

    def _coverage(self, rows: Tensor) -> Tensor:
        """Σ_i log min(Σ_j a_ji, 1) over the real tokens of the source, [rows]."""
        assert self.covered is not None
        share = self.covered[rows].clamp(1e-12, 1.0)  # a weight may round to 0, whose logarithm would end all
        return (share if self.filler is None else share.masked_fill(self.filler[rows], 1.0)).log().sum(dim=1)


def extensions(values: Tensor, tokens: Tensor, totals: Tensor, count: int, eos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row's best tokens [n · width, each] the `count` best of each sentence: total, token, row, [n, count]."""
    (sentences, width), each = totals.shape, values.shape[1]
    found, place = (values + totals.view(-1, 1)).view(sentences, -1).sort(dim=1, descending=True, stable=True)
    found, place = found[:, :count], place[:, :count]
    tokens = tokens.view(sentences, -1).gather(1, place)
    rows = place // each + torch.arange(sentences, device=totals.device)[:, None] * width
    short = count - found.shape[1]  # a vocabulary smaller than the beam has no more to offer
    if short > 0:
        found = F.pad(found, (0, short), value=float("-inf"))
        tokens = F.pad(tokens, (0, short), value=eos)
        rows = torch.cat((rows, rows[:, :1].expand(-1, short)), dim=1)
    return found, tokens, rows


def ordered(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Each row from the largest on; equal ones by column."""
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row (or all there are), in order, and their columns; equal ones by column.

    `topk` leaves open which of equal numbers it takes and in what order. The order is mended by sorting what
    it took; which ones it took matters only where the next one is equal too, and then the row is sorted whole.
    """
    values, columns = foremost(scores, min(count + 1, scores.shape[1]))
    if scores.device.type == "cpu" and not bool((values[:, 1:] == values[:, :-1]).any()):
        return values[:, :count].contiguous(), columns[:, :count].contiguous()
    if values.shape[1] > count:
        tied = (values[:, -2] == values[:, -1]) & (values[:, -1] > float("-inf"))
        values, columns = values[:, :count], columns[:, :count]
        if bool(tied.any()):
            whole, order = scores[tied].sort(dim=1, descending=True, stable=True)
            values[tied], columns[tied] = whole[:, :count], order[:, :count]
    return ordered(values, columns)


def foremost(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk`; of a long row in two rounds. Every column stands in one of some groups; the largest numbers
    stand in the groups with the largest maxima, and a maximum is found many times as fast as a rank.
    """
    rows, size = scores.shape
    deep = size // (GROUPS * count)
    if deep < 2:
        return scores.topk(count, dim=1)
    groups, rest = divmod(size, deep)
    layers = scores[:, : size - rest].unflatten(1, (deep, groups))
    chosen = layers.amax(dim=1).topk(count, dim=1, sorted=False).indices  # [rows, count]
    columns = (chosen[:, :, None] + torch.arange(0, size - rest, groups, device=scores.device)).flatten(1)
    if rest:  # what fills no layer takes part as it is
        columns = torch.cat((columns, torch.arange(size - rest, size, device=scores.device).expand(rows, -1)), dim=1)
    values, place = scores.gather(1, columns).topk(count, dim=1)
    return values, columns.gather(1, place)


def cross_attention(model: Any) -> Traceable:
    """The last part that looks at the source, for the coverage penalty."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    found = [part for name, part in parts if name.endswith("cross") and "weights" in getattr(part, "stages", ())]
    if not found:
        raise UserError(
            f"coverage_penalty: {type(model).__name__} has no cross attention to read coverage from; set it to 0"
        )
    last: Traceable = found[-1]
    return last
