"""Translation metrics, as others report them.

bleu             sacrebleu on plain text, with its signature                    Papineni et al. 2002; Post 2018
tokenised_bleu   the same formula over text that is already tokenised, lower-cased: what old papers report
chrf             F-score of character n-grams; fair to Korean                    Popović 2015
exact            the fraction of lines that match exactly

BLEU counts words, so it depends on the tokenisation. sacrebleu's 13a splits at spaces and punctuation, which fits
languages with spaces. Where references have none, Japanese is split into characters ("char") and Chinese by
sacrebleu's "zh", neither of which needs another package; "ja-mecab" and "ko-mecab", which others report for Japanese
and Korean, can be chosen. The signature names the choice: compare only scores with equal signatures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from regard.errors import UserError, suggest

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

Splitting = Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none"]  # sacrebleu's names
_KANA = re.compile(r"[\u3040-\u30ff\uff66-\uff9f]")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")
_SOUTH_EAST = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # Thai, Lao, Burmese, Khmer


def natural_splitting(references: Sequence[str]) -> Splitting:
    """The tokenisation for text like this: at spaces, unless it is mostly in a script that has none."""
    text = "".join(references)
    letters = max(sum(map(str.isalpha, text)), 1)
    kana, han, others = (len(script.findall(text)) for script in (_KANA, _HAN, _SOUTH_EAST))
    spaces = sum(map(str.isspace, text))
    if 2 * (kana + han + others) < letters or 4 * spaces > letters:  # other scripts, or words kept apart beforehand
        return "13a"
    return "zh" if han > 9 * kana and han > others else "char"


def score(hypotheses: Sequence[str], references: Sequence[str], splitting: Splitting | None = None) -> dict[str, Any]:
    """All metrics of these hypotheses, each against one reference, as plain values.

    `splitting` is the tokenisation of `bleu`; by default what fits the references (`natural_splitting`).
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if len(hypotheses) != len(references) or not references:
        counts = f"{len(hypotheses)} hypotheses and {len(references)} references"
        raise UserError(f"{counts}: pass one of each, for one line or more")
    plain = bleu_metric(splitting or natural_splitting(references))
    split = BLEU(tokenize="none", lowercase=True, force=True)
    bleu, tokenised = plain.corpus_score(hypotheses, [references]), split.corpus_score(hypotheses, [references])
    return {
        "lines": len(references),
        "bleu": bleu.score,
        "tokenised_bleu": tokenised.score,
        "chrf": CHRF().corpus_score(hypotheses, [references]).score,
        "exact": sum(map(str.__eq__, hypotheses, references)) / len(references),
        "signature": str(plain.get_signature()),  # of `bleu`: says exactly what was computed
        "reference_tokens": tokenised.ref_len,  # of `tokenised_bleu`: 12,103 for Multi30k test2016 En-De
    }


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """chrF of one line, which has too few words for BLEU."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().sentence_score(hypothesis, [reference]).score)


def bleu_metric(splitting: str) -> BLEU:
    """sacrebleu's BLEU with this tokenisation; a UserError if it is unknown or needs a package that is missing."""
    from sacrebleu.metrics.bleu import BLEU

    if splitting not in get_args(Splitting):
        raise UserError(f"tokenize = {splitting!r}: {suggest(splitting, get_args(Splitting))}")
    try:
        return BLEU(tokenize=splitting, force=True)
    except (ImportError, RuntimeError) as error:
        reason, language = str(error).strip().splitlines()[0], splitting.partition("-")[0]
        remedy = f"pip install 'sacrebleu[{language}]', or use 'char'"
        raise UserError(f"tokenize = {splitting!r} needs a missing package ({reason}): {remedy}") from None
