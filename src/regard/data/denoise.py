"""Span corruption: text with holes in, what was in the holes out (Raffel et al. 2020, section 3.1.4).

    text     Thank you for inviting me to your party last week .
    source   Thank you <extra_id_0> me to your party <extra_id_1> week . </s>
    target   <s> <extra_id_0> for inviting <extra_id_1> last </s>

Of a text of n tokens, round(density · n) are noise, in round(noise / span) holes. Noise and rest are cut at random
places, and their parts alternate: rest, hole, rest, …, hole, rest. No hole is empty, nor the rest between two of them;
every way of doing it is as likely as the others. (T5's own code lets every text end with a hole. In texts of 512 tokens
that is one of 26; in a review of 20 it would be the only one, always at the end.) How long source and target are
follows from n alone. Each epoch makes other holes; which ones follows from the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import PairBatch, Pairs, Ragged, steps
from regard.data.streams import epoch_generator
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))


@dataclass(frozen=True)
class Noise:
    """How much is taken out, and in pieces of which mean length."""

    density: float = 0.15
    span: float = 3.0


def find_sentinels(tokenizer: Tokenizer) -> Tensor:
    """The ids of the sentinels, in their order."""
    found = [tokenizer.token_to_id(name) for name in SENTINELS]
    if any(id is None for id in found):
        raise UserError(
            f"the tokenizer has no {SENTINELS[0]} … {SENTINELS[-1]}, which stand for holes in a text: "
            "let the run make its own, or start from one that was denoised"
        )
    return torch.tensor(found)


def counts(lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Noise tokens and spans of texts of these lengths, of 2 tokens or more."""
    hidden = (lengths * noise.density).round().long().clamp_min(1).minimum(lengths - 1)
    spans = (hidden / noise.span).round().long().clamp_min(1)
    return hidden, spans.minimum(hidden).minimum(lengths - hidden + 1)


def segments(sizes: Tensor, parts: Tensor, generator: torch.Generator) -> Tensor:
    """Texts of `sizes` items cut into `parts` parts each, none empty: the lengths of all parts. [Σ parts]"""
    text = torch.arange(len(sizes)).repeat_interleave(sizes)
    starts = sizes.cumsum(0) - sizes
    lot = torch.rand(len(text), generator=generator)
    lot[starts] = -1.0  # the first item always begins a part
    order = lot.argsort(stable=True)
    order = order[text[order].argsort(stable=True)]  # by text, then by lot
    rank = torch.arange(len(text)) - starts[text]
    begins = torch.zeros(len(text), dtype=torch.bool)
    begins[order] = rank < parts[text]
    places = begins.nonzero()[:, 0]
    return torch.cat((places, torch.tensor([len(text)]))).diff()


def corrupt(texts: Ragged, sentinels: Tensor, noise: Noise, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """(texts with holes, what was in the holes), both without the tokens around them."""
    lengths = texts.lengths
    hidden, spans = counts(lengths, noise)
    if int(spans.max()) > len(sentinels):
        raise UserError(
            f"a text of {int(lengths.max())} tokens would have {int(spans.max())} holes, and there are "
            f"{len(sentinels)} sentinels: lower max_length or density, or raise span"
        )
    place = steps(2 * spans + 1)  # rest 0, hole 1, rest 2, …, hole, rest of each text
    holes = place % 2 == 1
    rest = segments(lengths - hidden + 2, spans + 1, generator)  # one more at either end, where the rest may be empty
    rest -= ((place == 0) | (place == 2 * spans.repeat_interleave(2 * spans + 1)))[~holes].long()
    parts = torch.empty_like(place)
    parts[holes], parts[~holes] = segments(hidden, spans, generator), rest
    is_hole = holes.repeat_interleave(parts)
    mark = sentinels[place // 2 % len(sentinels)].repeat_interleave(parts)
    begins = torch.zeros(len(is_hole), dtype=torch.bool)  # the first token of a hole
    begins[(parts.cumsum(0) - parts)[holes]] = True
    ids = texts.joined().long()
    source = torch.where(is_hole, mark, ids)[~is_hole | begins]
    copies = is_hole.long() + begins  # the sentinel goes before the first token of its hole
    target, first = ids.repeat_interleave(copies), (copies.cumsum(0) - copies)[begins]
    target[first] = mark[begins]
    return Ragged(source, lengths - hidden + spans), Ragged(target, hidden + spans)


def surround(texts: Ragged, before: Sequence[int], after: Sequence[int]) -> Ragged:
    """The same texts, each between these tokens; what they are made of lies end to end."""
    lengths = texts.lengths + len(before) + len(after)
    start = lengths.cumsum(0) - lengths
    flat = torch.empty(int(lengths.sum()), dtype=torch.long)
    flat[(start + len(before)).repeat_interleave(texts.lengths) + steps(texts.lengths)] = texts.joined().long()
    for number, id in enumerate(before):
        flat[start + number] = id
    for number, id in enumerate(after):
        flat[start + len(before) + texts.lengths + number] = id
    return Ragged(flat, lengths)


class Denoised:
    """Texts, as `store_documents` stores them (<s> … </s>), that are corrupted anew in every epoch."""

    def __init__(self, texts: Ragged, tokenizer: Tokenizer, noise: Noise, prefix: Sequence[int], seed: int) -> None:
        inner = texts.choose((texts.lengths >= 4).nonzero()[:, 0])  # 2 tokens and the frame
        inner.starts, inner.lengths = inner.starts + 1, inner.lengths - 2
        if not len(inner):
            raise UserError("no text of 2 tokens or more: there is nothing to take out")
        self.texts, self.noise, self.prefix, self.seed = inner, noise, list(prefix), seed
        self.sentinels = find_sentinels(tokenizer)
        self.bos, self.eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")

    def __len__(self) -> int:
        return len(self.texts)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of sources and targets, with all that stands around them: the same in every epoch."""
        hidden, spans = counts(self.texts.lengths, self.noise)
        return self.texts.lengths - hidden + spans + len(self.prefix) + 1, hidden + spans + 2

    def at(self, epoch: int) -> Pairs:
        generator = epoch_generator(self.seed, epoch)
        sources, targets = corrupt(self.texts, self.sentinels, self.noise, generator)
        return Pairs(surround(sources, self.prefix, [self.eos]), surround(targets, [self.bos], [self.eos]))


class Mixture:
    """Fixed pairs and texts to be denoised, side by side; `Batches` and `Packs` take it as they take pairs."""

    def __init__(self, fixed: Pairs | None, denoised: Sequence[Denoised]) -> None:
        self.fixed, self.denoised = fixed, tuple(denoised)
        self.made: tuple[int, Pairs] | None = None  # the epoch that was asked for last
        sides = [one.lengths() for one in self.denoised]
        if fixed is not None:
            sides.append((fixed.sources.lengths, fixed.targets.lengths))
        sources, targets = (torch.cat(side) for side in zip(*sides, strict=True))
        self.count = len(sources)
        self.longest = max(int(sources.max()), int(targets.max()) - 1)
        self.longest_row = max(int(sources.max()), int(targets.max()))
        if fixed is not None:
            self.longest = max(self.longest, fixed.longest)
            self.longest_row = max(self.longest_row, fixed.longest_row)

    def __len__(self) -> int:
        return self.count

    @property
    def sizes(self) -> Tensor:
        return self.at(0).sizes

    def batch(self, rows: Tensor) -> PairBatch:
        return self.at(0).batch(rows)

    def at(self, epoch: int) -> Pairs:
        if self.made is None or self.made[0] != epoch:
            self.made = epoch, self._make(epoch)
        return self.made[1]

    def _make(self, epoch: int) -> Pairs:
        parts = [one.at(epoch) for one in self.denoised]
        if self.fixed is not None:
            parts.append(self.fixed.at(epoch))
        return (
            parts[0] if len(parts) == 1 else Pairs(_join([p.sources for p in parts]), _join([p.targets for p in parts]))
        )


def _join(parts: Sequence[Ragged]) -> Ragged:
    return Ragged(torch.cat([part.joined().int() for part in parts]), torch.cat([part.lengths for part in parts]))
