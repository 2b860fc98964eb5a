"""Search that works in Korean.

Sphinx splits text at spaces, and matches a part of a word only for queries of three characters or more. A Korean word
carries its particles (어텐션은, 헤드를), and many terms have two syllables. So the index also contains every pair of
neighbouring syllables of a Korean word: "헤드" finds 멀티헤드를, and longer queries find parts of words as before.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.en import SearchEnglish

_HANGUL = re.compile(r"[가-힣]{2,}")


def pairs(word: str) -> list[str]:
    """Neighbouring syllables: 어텐션은 -> 어텐, 텐션, 션은."""
    return [run[at : at + 2] for run in _HANGUL.findall(word) for at in range(len(run) - 1)]


class SearchEnglishAndKorean(SearchEnglish):
    """English words by their stems; Korean words with their pairs of syllables."""

    def split(self, text: str) -> list[str]:
        words = super().split(text)
        return [one for word in words for one in dict.fromkeys((word, *pairs(word)))]


def install(app: Sphinx) -> None:
    languages["en"] = SearchEnglishAndKorean
