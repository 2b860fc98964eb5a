"""How good a translation is, in figures that others report too.

bleu             sacrebleu on plain text (13a tokens), with its signature       Papineni et al. 2002; Post 2018
tokenised_bleu   the same formula over the text as it is split already, lower-cased: what old papers report
chrf             F-score of character n-grams; fair to Korean                    Popović 2015
exact            the share of lines that are right to the letter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import UserError


@dataclass(frozen=True)
class Scores:
    lines: int
    bleu: float
    tokenised_bleu: float
    chrf: float
    exact: float
    signature: str  # of `bleu`: says exactly what was computed
    reference_tokens: int  # of `tokenised_bleu`: 12,103 for Multi30k test2016 En-De


def score(answers: Sequence[str], references: Sequence[str]) -> Scores:
    """All figures for these answers, line by line against one reference each."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if len(answers) != len(references) or not references:
        raise UserError(
            f"{len(answers)} answers and {len(references)} references: give one of each, for a line or more"
        )
    plain, split = BLEU(force=True), BLEU(tokenize="none", lowercase=True, force=True)
    bleu, tokenised = plain.corpus_score(answers, [references]), split.corpus_score(answers, [references])
    return Scores(
        lines=len(references),
        bleu=bleu.score,
        tokenised_bleu=tokenised.score,
        chrf=CHRF().corpus_score(answers, [references]).score,
        exact=sum(map(str.__eq__, answers, references)) / len(references),
        signature=str(plain.get_signature()),
        reference_tokens=tokenised.ref_len,
    )
