"""Sentences for the benchmarks: Multi30k from files, or generated ones with the same distribution of lengths.

Training speed depends on the distribution of sentence lengths, not on the content. Lengths of sentences are close to
log-normal: log n ~ N(μ, σ²), whose mean is  exp(μ + σ²/2).

    Multi30k, joint BPE of 10,000      mean 15, σ 0.32, longest 51
    WMT-like                           mean 27, σ 0.60, cut at 256

The source is as long as the target times exp(N(0, 0.17²)), as measured on Multi30k. A target of n tokens is
n + 1 ids: <s>, n - 1 tokens, </s>.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.data.batch import Pairs, Ragged
from regard.data.pairs import PairData
from regard.text.tokenizer import Tokenizer

BOS, EOS, FIRST = 2, 3, 4  # of our tokenizers; ordinary ids begin at FIRST
FILES = "{}.lc.norm.tok.{}"
RATIO = 0.17  # spread of log(source / target)


@dataclass(frozen=True)
class Lengths:
    """How many tokens targets have, </s> included."""

    name: str
    mean: float
    spread: float  # σ of log n
    longest: int

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Source and target tokens of `count` pairs; at least one token and </s>."""
        middle = math.log(self.mean) - self.spread**2 / 2
        target = (middle + self.spread * torch.randn(count, generator=generator)).exp()
        source = target * (RATIO * torch.randn(count, generator=generator)).exp()
        return self._whole(source), self._whole(target)

    def _whole(self, lengths: Tensor) -> Tensor:
        return lengths.round().long().clamp(2, self.longest)


MULTI30K = Lengths("Multi30k-like", 15.1, 0.32, 51)
WMT = Lengths("WMT-like", 27.0, 0.6, 256)


@dataclass(frozen=True)
class Corpus:
    """Sentence pairs, and their origin."""

    pairs: Pairs
    vocab_size: int
    origin: str

    @property
    def tokens(self) -> int:
        """Target tokens of an epoch: </s> is one, <s> is not."""
        return target_tokens(self.pairs)


def target_tokens(data: Pairs, rows: Tensor | None = None) -> int:
    """Target tokens in these rows, or in all, without padding."""
    lengths = data.targets.lengths if rows is None else data.targets.lengths[rows]
    return int((lengths - 1).sum())


def generate(lengths: Lengths, count: int, vocab_size: int, seed: int = 0) -> Corpus:
    """Random ids in sentences of such lengths."""
    generator = torch.Generator().manual_seed(seed)
    source, target = lengths.draw(count, generator)

    def side(ids: Tensor) -> Ragged:
        flat = torch.randint(FIRST, vocab_size, (int(ids.sum()),), generator=generator, dtype=torch.int32)
        ragged = Ragged(flat, ids)
        flat[ragged.starts + ids - 1] = EOS
        return ragged

    sources, targets = side(source), side(target + 1)
    targets.flat[targets.starts] = BOS
    return Corpus(Pairs(sources, targets), vocab_size, f"{count:,} generated pairs, {lengths.name}")


def read_lines(folder: Path, split: str) -> tuple[list[str], list[str]]:
    """English and German of `train`, `val` or `test_2016_flickr`."""
    files = tuple(FILES.format(split, language) for language in ("en", "de"))
    found = list(PairData(train=files, folder=str(folder)).read(files))
    return [pair.source for pair in found], [pair.target for pair in found]


def learn_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Joint BPE of the training pairs, as `recipes/multi30k-en-de.toml` has it."""
    sources, targets = read_lines(folder, "train")
    return Tokenizer.train((line for pair in zip(sources, targets, strict=True) for line in pair), "bpe", vocab_size)


def multi30k(folder: Path, vocab_size: int) -> Corpus:
    tokenizer = learn_tokenizer(folder, vocab_size)
    sources, targets = read_lines(folder, "train")
    ids = tokenizer.encode_batch(sources, add_eos=True), tokenizer.encode_batch(targets, add_bos=True, add_eos=True)
    data = Pairs(*ids)
    return Corpus(data, len(tokenizer), f"{len(sources):,} pairs of Multi30k")


def made_up_lines(count: int, vocab_size: int, seed: int = 0) -> tuple[Tokenizer, list[str]]:
    """Lines of made-up words with Multi30k-like lengths, and a word tokenizer of `vocab_size` tokens."""
    words = [_word(number) for number in range(vocab_size - FIRST)]
    tokenizer = Tokenizer.train([" ".join(words)], "word")
    generator = torch.Generator().manual_seed(seed)
    lengths, _ = MULTI30K.draw(count, generator)
    lines = [torch.randint(len(words), (length - 1,), generator=generator).tolist() for length in lengths.tolist()]
    return tokenizer, [" ".join(words[number] for number in line) for line in lines]


def _word(number: int) -> str:
    """0 is a, 25 is z, 26 is ba: letters only, because a word tokenizer splits at digits."""
    letters = ""
    while True:
        number, rest = divmod(number, 26)
        letters = chr(ord("a") + rest) + letters
        if not number:
            return letters


def even_choice(plan: Sequence[Tensor], data: Pairs, count: int) -> list[Tensor]:
    """`count` representative batches of an epoch: from shortest to longest sentences in even steps."""
    ordered = sorted(plan, key=lambda rows: int(data.sizes[rows].max()))
    count = min(count, len(ordered))
    return [ordered[int((at + 0.5) * len(ordered) / count)] for at in range(count)]
