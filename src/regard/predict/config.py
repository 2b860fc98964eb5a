"""How next-token distributions become a sequence, as values: the [decode] table of a recipe.

    [decode]
    beam = 5
    length_penalty = 0.6

A search ranks its hypotheses by  score = log P(Y | X) / lp(Y) + cp(X, Y),  with

    lp(Y)    = ((5 + |Y|) / 6)^length_penalty                             |Y| counts the tokens, </s> included
    cp(X, Y) = coverage_penalty · Σ_i log min(Σ_j a_ji, 1)                a_ji: attention weight of source i at target j

log P falls with every token, so plain beam search prefers short outputs; lp > 0 compensates for that. cp falls
where a source token received little attention, so that nothing is left untranslated (Wu et al. 2016, section 7).

`sample = true` samples from the distribution instead: temperature flattens or sharpens it, top_k keeps the k most
probable tokens (Fan et al. 2018), top_p the fewest whose probabilities sum to p (Holtzman et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.settings import check_fields, from_dict

if TYPE_CHECKING:
    from torch import Tensor

BEAM_ONLY = ("beam", "early_stopping", "coverage_penalty")
SAMPLE_ONLY = ("temperature", "top_k", "top_p", "seed")
WIDEST = 1000  # hypotheses that a search may keep: with more, one sentence takes minutes
SLACK = 50  # tokens that an output may always have beyond max_ratio times its source


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How an output is chosen: greedy search, beam search or sampling."""

    beam: int = 1  # hypotheses kept at every step; 1 is greedy search
    n_best: int = 1  # outputs for each source, best first; with sample = true: samples, which may be equal
    length_penalty: float = 0.0  # 0: none
    coverage_penalty: float = 0.0  # 0: none; needs cross attention; the weights of its last layer count
    early_stopping: bool = False  # true: stop at the first `beam` finished; false: when no other can rank higher
    min_length: int = 0  # tokens before </s>
    max_length: int | None = None  # tokens, </s> included; an output of that length counts as it is
    max_ratio: float = 2.0  # never more than max_ratio · source + 50 tokens
    no_repeat_ngram: int = 0  # no sequence of this many tokens occurs twice; 0: off
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 1  # with the index of a line it determines the samples of that line

    def __post_init__(self) -> None:
        least = {"min_length": 0, "no_repeat_ngram": 0, "max_ratio": 0, "coverage_penalty": 0, "top_k": 0, "seed": 0}
        check_fields(self, beam=1, n_best=1, **least)
        if self.max_length is not None and self.max_length < max(1, self.min_length):
            raise UserError(
                f"max_length = {self.max_length}: must be 1 or more and not below min_length = {self.min_length}"
            )
        if abs(self.length_penalty) > 10:
            raise UserError(f"length_penalty = {self.length_penalty}: must be from -10 to 10; 0.6 to 1 is usual")
        if not self.temperature > 0:
            raise UserError(f"temperature = {self.temperature}: must be greater than 0; top_k = 1 is greedy")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be greater than 0 and at most 1")
        for name in BEAM_ONLY if self.sample else SAMPLE_ONLY:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                remedy = "remove it, or set sample = false" if self.sample else "remove it, or set sample = true"
                kind = "sampling" if self.sample else "beam search"
                raise UserError(f"{name} = {value}: has no effect on {kind}; {remedy}")
        if not self.sample and (value := max(self.beam, self.n_best)) > WIDEST:
            name = "beam" if value == self.beam else "n_best"
            raise UserError(f"{name} = {value}: must be {WIDEST:,} or less; a beam of 4 to 10 is usual")
        if not self.sample and self.n_best > self.beam:
            raise UserError(
                f"n_best = {self.n_best}: a search with beam = {self.beam} finds no more than {self.beam}; "
                f"set beam = {self.n_best} or more"
            )

    def penalty(self, length: int) -> float:
        """lp: what log P of `length` tokens is divided by."""
        return float(((5 + length) / 6) ** self.length_penalty)

    def limits(self, source: Tensor, is_real: Tensor | None) -> list[int]:
        """The most tokens of each row's output. It follows from the row alone, not from the padding beside it."""
        if is_real is not None:
            lengths = is_real.sum(dim=1).tolist()
        else:  # an image [B, C, H, W] has no length to be a multiple of
            lengths = [source.shape[1] if source.dim() < 4 else 0] * len(source)
        return [self.limit(length) for length in lengths]

    def limit(self, length: int) -> int:
        """The most tokens of the output for a source of this length."""
        limit = int(self.max_ratio * length) + SLACK
        return limit if self.max_length is None else min(limit, self.max_length)

    def within(self, positions: int | None) -> SearchConfig:
        """With outputs that end where the positions of a model do; None: they do not end."""
        if positions is None or (self.max_length or positions + 1) <= positions:
            return self
        if self.min_length > positions:
            raise UserError(f"min_length = {self.min_length}: the model has {positions} positions; lower it")
        return replace(self, max_length=positions)


def read_config(table: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> SearchConfig:
    """The config of a [decode] table, with changes; a change of the kind of search drops the settings of the other."""
    if not changes:
        return from_dict(SearchConfig, dict(table), "decode.")
    kept, changes = dict(table), dict(changes)
    if "beam" in changes and "sample" not in changes and kept.pop("sample", False):
        kept = {name: value for name, value in kept.items() if name not in SAMPLE_ONLY}
    if changes.get("sample") and not kept.get("sample"):
        kept = {name: value for name, value in kept.items() if name not in BEAM_ONLY}
    return from_dict(SearchConfig, {**kept, **changes})


def recipe_config(recipe: Mapping[str, Any], where: str, **defaults: Any) -> SearchConfig:
    """The config of a recipe's table [decode]; `where` is what a message calls the recipe."""
    table = recipe.get("decode", {})
    if not isinstance(table, dict):
        raise UserError(f"{where}: decode = {table!r}: write a table [decode], such as  [decode]  with  beam = 5")
    try:
        return from_dict(SearchConfig, {**defaults, **table}, "decode.")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
