"""Which language is a text in? By its script, and among languages of one script by frequent words and letters.

    score(language) = Σ over words: 2 if it is one of its most frequent ones, 1 if it has a letter that few others use

The most frequent words of a language make up a third to a half of its running text, so a sentence nearly always has
some (Grefenstette 1995 compares this with character n-grams: equally good from about 20 words on). A text of one or
two rare words is a guess, and its confidence says so. Only the languages that the server translates are candidates.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection

SCRIPTS = {"HANGUL": "ko", "HIRAGANA": "ja", "KATAKANA": "ja", "CJK": "zh", "ARABIC": "ar", "CYRILLIC": "ru"}
FREQUENT = {
    "cs": "a v se na je že to s z do o i jsem jsou by ale jak za ve pro tak po není co jeho",
    "de": "der die und das ist in ein eine den von zu mit sich auf für nicht im dem des es auch an er sie ich wir wie",
    "en": "the of and to a in is that it for was on are as with his they be at this from i have or by not you he we",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como más pero o este sí está",
    "fr": "de la le et les des en un une du que est pour qui dans a par plus pas au sur ne se il je ce nous avec",
    "it": "di e il la che in a un per è una non sono del con si da al le dei come più anche ma questo io ho",
    "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als bij maar ik je wij naar uit",
    "pl": "i w na z do się jest nie że to o jak za po co tak ale od przez dla są był ma jego ze czy",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas ao ele das",
    "tr": "ve bir bu için de da ile ne o gibi daha çok var ben olarak sonra kadar değil en ama mi her sen",
    "vi": "là và của có không một cho các được trong đã người với này những khi đến cũng tôi ở ra anh",
}
MOST = 5000  # characters of a text that are read
WORDS = {language: frozenset(words.split()) for language, words in FREQUENT.items()}
LETTERS = {
    "cs": "ěřů", "de": "ßäöü", "es": "ñ¿¡", "fr": "œùêèç", "it": "ìò", "pl": "łąęśżźń", "pt": "ãõ", "tr": "ğışç",
    "vi": "ơưđạảấầẩẫậắằẳẵặẹẻẽếềểễệ",
}  # fmt: skip


def detect(text: str, languages: Collection[str]) -> list[tuple[str, float]]:
    """The languages with their confidence from 0 to 100, best first; they sum to 100."""
    text, scores = unicodedata.normalize("NFC", text[:MOST].lower()), Counter[str]()
    for char in text:
        name = unicodedata.name(char, "").split(" ")[0].split("-")[0] if not char.isascii() else ""
        if name in SCRIPTS:
            scores[SCRIPTS[name]] += 1
    if scores["ja"]:  # Japanese has Chinese characters too
        scores["ja"] += scores.pop("zh", 0)
    for word in re.findall(r"[^\W\d_]+", text):
        for language, frequent in WORDS.items():
            scores[language] += 2 * (word in frequent) + any(char in word for char in LETTERS.get(language, ""))
    weights = {language: scores[language] ** 2 + 0.01 for language in languages}
    total = sum(weights.values())
    return sorted(
        ((one, 100 * weight / total) for one, weight in weights.items()), key=lambda pair: (-pair[1], pair[0])
    )
