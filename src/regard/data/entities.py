"""People, places and dates in English and Korean sentences, written by rule and tagged.

A tagging task that needs no download. It is small, yet a list of names does not solve it: the people and places of the
test never occur in training, and some names are of both kinds.

    Florence/B-PER Young/I-PER moved to Austin/B-LOC in May/B-DATE 2021/I-DATE .
    정선은/B-PER 3월/B-DATE 2일에/I-DATE 강진에서/B-LOC 강의를 했다 .

Words are separated by spaces, so a Korean particle belongs to the word before it, and with it to the entity. A hash of
the name decides whether it is for training or for the test.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

from regard.data.korean import KOREAN_WEEKDAYS, MONTHS, WEEKDAYS

GIVEN = (
    "Anna", "April", "Austin", "Carlos", "Charlotte", "Daniel", "Elena", "Florence", "Georgia", "Hannah", "Ibrahim",
    "Jack", "Jordan", "June", "Karim", "Laura", "Madison", "Maria", "Noah", "Olga", "Paris", "Peter", "Ravi", "Rosa",
    "Sydney", "Thomas", "Victoria", "Yuki",
)  # fmt: skip
SURNAMES = (
    "Adams", "Baker", "Chen", "Diaz", "Evans", "Fischer", "Garcia", "Hill", "Ivanova", "Jackson", "Kumar", "Lopez",
    "London", "Moreau", "Novak", "Okafor", "Park", "Quinn", "Rossi", "Silva", "Tanaka", "Lincoln", "Wang", "Young",
)  # fmt: skip
PLACES = (
    "Austin", "Berlin", "Cairo", "Charlotte", "Dublin", "Florence", "Georgia", "Hanoi", "Istanbul", "Jordan", "Kyoto",
    "Lima", "Lincoln", "London", "Madison", "Madrid", "Mexico City", "Nairobi", "New York", "Oslo", "Paris", "Porto",
    "Quebec", "Rome", "San Diego", "Seoul", "Sydney", "Tallinn", "Vienna", "Victoria", "Warsaw", "Cape Town", "Busan",
)  # fmt: skip
BEGINNINGS = ("East", "Fort", "Lake", "New", "North", "Port", "South", "West")
KOREAN_ENDINGS = ("역", "공항", "시청", "항", "대학교", "동", "시장", "병원")
KOREAN_SURNAMES = ("강", "고", "김", "박", "서", "안", "오", "윤", "이", "임", "장", "정", "조", "최", "하", "한")
KOREAN_GIVEN = (
    "민수", "지영", "서연", "도윤", "하늘", "지훈", "수진", "예린", "현우", "은지", "동", "진", "선", "성", "수",
    "준호", "가은", "태민", "유나", "재석",
)  # fmt: skip
KOREAN_PLACES = (
    "서울", "부산", "대구", "인천", "광주", "대전", "울산", "제주", "강릉", "전주", "경주", "수원", "여수",
    "춘천", "목포", "안동", "강진", "고성", "장수", "정선", "하동", "이천", "임실", "런던", "파리", "도쿄",
    "베를린", "하노이", "한강", "설악산", "종로",
)  # fmt: skip
# Slots are PER, LOC and DATE; after + follows a Korean particle, in the form for a final consonant
ENGLISH = """
PER was born in LOC on DATE .
On DATE , PER left LOC .
PER and PER met in LOC .
LOC is cold in winter .
The mayor of LOC thanked PER .
PER moved to LOC in DATE .
Did PER call on DATE ?
The train to LOC is late .
It rained in LOC until DATE .
PER , who lives in LOC , plays the piano .
The letter to PER arrived on DATE .
Flights from LOC to LOC start on DATE .
PER 's sister works in LOC .
Nobody answered the phone .
She asked PER to wait .
The museum in LOC opens on DATE .
PER may return in DATE .
We walked home slowly .
"""
KOREAN = """
PER+은 DATE+에 LOC+에서 태어났다 .
DATE , PER+이 LOC+을 떠났다 .
PER+과 PER+은 LOC+에서 만났다 .
LOC+은 겨울에 춥다 .
LOC 시장은 PER+에게 감사했다 .
PER+은 DATE+에 LOC+으로 이사했다 .
DATE+에 PER+이 전화했니 ?
LOC+으로 가는 기차가 늦는다 .
DATE+까지 LOC+에 비가 왔다 .
LOC+에 사는 PER+은 피아노를 친다 .
PER+에게 보낸 편지가 DATE+에 도착했다 .
LOC+에서 LOC+까지 걸었다 .
PER+의 언니는 LOC+에서 일한다 .
아무도 전화를 받지 않았다 .
나는 PER+을 기다렸다 .
LOC 박물관은 DATE+에 문을 연다 .
PER+은 DATE+에 강의를 했다 .
우리는 천천히 집으로 돌아왔다 .
"""
AFTER_VOWEL = {"은": "는", "이": "가", "을": "를", "과": "와", "으로": "로"}
TEST_EVERY = 5  # one name in five is kept for the test


def sentences(split: Literal["train", "test"], count: int, seed: int) -> Iterator[tuple[list[str], list[str]]]:
    """`count` sentences, half of them Korean: words, and tags in the scheme IOB2."""
    rng, templates = random.Random(f"{split} {seed}"), [text.strip().splitlines() for text in (ENGLISH, KOREAN)]
    for number in range(count):
        words: list[str] = []
        tags: list[str] = []
        korean = number % 2 == 1
        for word in rng.choice(templates[korean]).split():
            slot, _, particle = word.partition("+")
            if slot not in SLOTS:
                words.append(word)
                tags.append("O")
                continue
            name = _sample(rng, split, korean, slot)
            words += [*name[:-1], name[-1] + _particle(name[-1], particle)]
            tags += [f"B-{slot}", *[f"I-{slot}"] * (len(name) - 1)]
        yield words, tags


def _sample(rng: random.Random, split: str, korean: bool, slot: str) -> list[str]:
    """The words of a name that belongs to the split; dates belong to both."""
    while True:
        name = SLOTS[slot](rng, korean)
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        if slot == "DATE" or (int.from_bytes(digest, "big") % TEST_EVERY == 0) == (split == "test"):
            return name.split()


def _person(rng: random.Random, korean: bool) -> str:
    if korean:
        return rng.choice(KOREAN_SURNAMES) + rng.choice(KOREAN_GIVEN)
    given = rng.choice(GIVEN)
    return f"{given} {rng.choice(SURNAMES)}" if rng.random() < 0.7 else given


def _place(rng: random.Random, korean: bool) -> str:
    name, longer = rng.choice(KOREAN_PLACES if korean else PLACES), rng.random() < 0.5
    if korean:
        return name + rng.choice(KOREAN_ENDINGS) if longer else name
    return f"{rng.choice(BEGINNINGS)} {name}" if longer else name


def _date(rng: random.Random, korean: bool) -> str:
    year, month, day, weekday = rng.randint(1950, 2029), rng.randrange(12), rng.randint(1, 28), rng.randrange(7)
    if korean:
        forms = (f"{year}년 {month + 1}월 {day}일", f"{month + 1}월 {day}일", f"{year}년", KOREAN_WEEKDAYS[weekday])
    else:
        name = MONTHS[month]
        forms = (f"{name} {day} , {year}", f"{day} {name} {year}", f"{name} {year}", WEEKDAYS[weekday])
    return rng.choice(forms)


def _particle(word: str, particle: str) -> str:
    """The particle in the form for the last syllable: 서울은, 파리는; 서울로, 인천으로, 파리로."""
    final = (ord(word[-1]) - 0xAC00) % 28 if "가" <= word[-1] <= "힣" else 0
    return AFTER_VOWEL.get(particle, particle) if final == 0 or (particle == "으로" and final == 8) else particle


SLOTS = {"PER": _person, "LOC": _place, "DATE": _date}
