"""Span corruption: spans of a text are replaced by sentinels, and the model restores them (Raffel et al. 2020, 3.1.4).

    text     Thank you for inviting me to your party last week .
    source   Thank you <extra_id_0> me to your party <extra_id_1> week . </s>
    target   <s> <extra_id_0> for inviting <extra_id_1> last </s>

Of a text of n tokens, round(density · n) are noise, in round(noise / span) spans. Noise and rest are split at random
positions, and their parts alternate: rest, span, rest, …, span, rest. No span is empty, nor the rest between two; all
such partitions are equally probable. (In T5's own code every text ends with a span. In texts of 512 tokens that is one
of 26; in a review of 20 it would be the only one, always at the end.) The lengths of source and target follow from n
alone. Each epoch samples other spans, by the seed and the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Pairs, Ragged, steps
from regard.data.streams import epoch_generator
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))


@dataclass(frozen=True)
class Noise:
    """Fraction of the tokens that is removed, and mean length of a span."""

    density: float = 0.15
    span: float = 3.0


def find_sentinels(tokenizer: Tokenizer) -> Tensor:
    """The ids of the sentinels, in their order."""
    ids = [tokenizer.token_to_id(name) for name in SENTINELS]
    if any(id is None for id in ids):
        raise UserError(
            f"the tokenizer has no {SENTINELS[0]} … {SENTINELS[-1]}, which replace spans of a text: "
            "let the run train its own, or start from a model that was trained by denoising"
        )
    return torch.tensor(ids)


def counts(lengths: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Noise tokens and spans of texts of these lengths, of 2 tokens or more."""
    noisy = (lengths * noise.density).round().long().clamp_min(1).minimum(lengths - 1)
    spans = (noisy / noise.span).round().long().clamp_min(1)
    return noisy, spans.minimum(noisy).minimum(lengths - noisy + 1)


def segments(sizes: Tensor, parts: Tensor, generator: torch.Generator) -> Tensor:
    """Texts of `sizes` items split into `parts` parts each, none empty: the lengths of all parts. [Σ parts]"""
    text = torch.arange(len(sizes)).repeat_interleave(sizes)
    starts = sizes.cumsum(0) - sizes
    lot = torch.rand(len(text), generator=generator)
    lot[starts] = -1.0  # the first item always begins a part
    order = lot.argsort(stable=True)
    order = order[text[order].argsort(stable=True)]  # by text, then by lot
    rank = torch.arange(len(text)) - starts[text]
    begins = torch.zeros(len(text), dtype=torch.bool)
    begins[order] = rank < parts[text]
    starts = begins.nonzero()[:, 0]
    return torch.cat((starts, torch.tensor([len(text)]))).diff()


def corrupt(texts: Ragged, sentinels: Tensor, noise: Noise, generator: torch.Generator) -> tuple[Ragged, Ragged]:
    """(texts with sentinels, the removed spans), both without prefix and special tokens."""
    lengths = texts.lengths
    noisy, spans = counts(lengths, noise)
    if int(spans.max()) > len(sentinels):
        raise UserError(
            f"a text of {int(lengths.max())} tokens would have {int(spans.max())} spans, and there are "
            f"{len(sentinels)} sentinels: lower max_length or density, or raise span"
        )
    part = steps(2 * spans + 1)  # rest 0, span 1, rest 2, …, span, rest of each text
    is_span = part % 2 == 1
    rest = segments(lengths - noisy + 2, spans + 1, generator)  # one more at either end, where the rest may be empty
    rest -= ((part == 0) | (part == 2 * spans.repeat_interleave(2 * spans + 1)))[~is_span].long()
    parts = torch.empty_like(part)
    parts[is_span], parts[~is_span] = segments(noisy, spans, generator), rest
    removed = is_span.repeat_interleave(parts)
    sentinel = sentinels[part // 2 % len(sentinels)].repeat_interleave(parts)
    begins = torch.zeros(len(removed), dtype=torch.bool)  # the first token of a span
    begins[(parts.cumsum(0) - parts)[is_span]] = True
    ids = texts.joined().long()
    source = torch.where(removed, sentinel, ids)[~removed | begins]
    copies = removed.long() + begins  # the sentinel comes before the first token of its span
    target, first = ids.repeat_interleave(copies), (copies.cumsum(0) - copies)[begins]
    target[first] = sentinel[begins]
    return Ragged(source, lengths - noisy + spans), Ragged(target, noisy + spans)


def surround(texts: Ragged, before: Sequence[int], after: Sequence[int]) -> Ragged:
    """The same texts, each between these tokens, concatenated."""
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
    """Texts, as `store_documents` stores them (<s> … </s>), that are corrupted differently in every epoch."""

    def __init__(self, texts: Ragged, tokenizer: Tokenizer, noise: Noise, prefix: Sequence[int], seed: int) -> None:
        inner = texts.choose((texts.lengths >= 4).nonzero()[:, 0])  # 2 tokens and the frame
        inner.starts, inner.lengths = inner.starts + 1, inner.lengths - 2
        if not len(inner):
            raise UserError("no text of 2 tokens or more: there is nothing to remove")
        self.texts, self.noise, self.prefix, self.seed = inner, noise, list(prefix), seed
        self.sentinels = find_sentinels(tokenizer)
        self.bos, self.eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")

    def at(self, epoch: int) -> Pairs:
        generator = epoch_generator(self.seed, epoch)
        sources, targets = corrupt(self.texts, self.sentinels, self.noise, generator)
        return Pairs(surround(sources, self.prefix, [self.eos]), surround(targets, [self.bos], [self.eos]))


class Mixture(Pairs):
    """Fixed pairs and texts to be denoised, side by side: the pairs of epoch 0, and others at another epoch.

    Their lengths are the same in every epoch.
    """

    def __init__(self, fixed: Pairs | None, denoised: Sequence[Denoised]) -> None:
        self.fixed, self.denoised = fixed, denoised
        self.made = 0, self._make(0)  # the last epoch
        super().__init__(self.made[1].sources, self.made[1].targets)

    def at(self, epoch: int) -> Pairs:  # type: ignore[override]  # other pairs, not another mixture
        if self.made[0] != epoch:
            self.made = epoch, self._make(epoch)
        return self.made[1]

    def _make(self, epoch: int) -> Pairs:
        parts = [*(one.at(epoch) for one in self.denoised), *([self.fixed] if self.fixed else [])]
        if len(parts) == 1:
            return parts[0]
        return Pairs(_join([pairs.sources for pairs in parts]), _join([pairs.targets for pairs in parts]))


def _join(parts: Sequence[Ragged]) -> Ragged:
    return Ragged(torch.cat([part.joined().int() for part in parts]), torch.cat([part.lengths for part in parts]))
