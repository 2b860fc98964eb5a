"""English dates and numbers with their Korean, written by rule.

A translation task that needs no download and has exactly one correct translation per sentence, so accuracy can be
counted instead of estimated. It is small, yet it cannot be solved word by word:

    Wednesday, March 3rd, 2021           ->  2021년 3월 3일 수요일        the order is reversed
    three hundred forty-two thousand     ->  삼십사만 이천                 thousands are regrouped

English counts in groups of three digits, Korean in groups of four (만 = 10,000), so every Korean digit word
depends on English words across a group boundary. Attention learns that alignment, and it is visible.

Conventions for the Sino-Korean numbers, as numbers are normally read aloud and spelled:
  * a space follows 만 and nothing else: 342,015 is 삼십사만 이천십오 (Hangul orthography, article 44);
  * 일 (one) is left out before 십, 백 and 천: 1,110 is 천백십, never 일천일백일십 (the form used on cheques);
  * 10,000 to 19,999 begin with 만, not 일만; a one after another digit stays: 110,000 is 십일만;
  * 0 is 영.

Training and test data are split by meaning, not by sentence: a hash of the date or of the number decides, so
a test date was never seen in training in any of its spellings.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import random
from dataclasses import dataclass
from typing import Literal, get_args

from regard.errors import UserError, suggest

Kind = Literal["date", "number"]
Split = Literal["train", "test"]
DateStyle = Literal["ordinal", "plain", "day-first", "of", "weekday", "short"]

LARGEST = 999_999
FIRST_DAY, LAST_DAY = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
TEST_EVERY = 10  # one meaning in ten is kept for the test split

# Spelled out here because `calendar` and `strftime` follow the computer's language setting.
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KOREAN_WEEKDAYS = ("월요일", "화요일", "수요일", "목요일", "금요일", "토요일", "일요일")
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
KOREAN_DIGITS = "영일이삼사오육칠팔구"


@dataclass(frozen=True, slots=True)
class Example:
    """One sentence pair: English `source`, Korean `target`."""

    source: str
    target: str
    kind: Kind


def english_number(n: int) -> str:
    """`n` from 0 to 999,999 in English words, without "and": 705 is "seven hundred five"."""
    _check_number(n)
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if n >= unit:
            words = f"{english_number(n // unit)} {name}"
            return f"{words} {english_number(n % unit)}" if n % unit else words
    if n < 20:
        return ONES[n]
    return f"{TENS[n // 10]}-{ONES[n % 10]}" if n % 10 else TENS[n // 10]


def korean_number(n: int) -> str:
    """`n` from 0 to 999,999 in Sino-Korean words: 342,000 is 삼십사만 이천 (conventions above)."""
    _check_number(n)
    if n == 0:
        return KOREAN_DIGITS[0]
    myriads, rest = divmod(n, 10_000)
    first = "" if myriads == 0 else "만" if myriads == 1 else _korean_below_myriad(myriads) + "만"
    return f"{first} {_korean_below_myriad(rest)}".strip()


def english_date(date: datetime.date, style: DateStyle) -> str:
    """`date` in one of six spellings; `weekday` is the only one that names the day of the week."""
    _check_date(date)
    month, day, year = MONTHS[date.month - 1], date.day, date.year
    ordinal = f"{day}{'th' if day in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
    spellings: dict[str, str] = {
        "ordinal": f"{month} {ordinal}, {year}",
        "plain": f"{month} {day}, {year}",
        "day-first": f"{day} {month} {year}",
        "of": f"the {ordinal} of {month}, {year}",
        "weekday": f"{WEEKDAYS[date.weekday()]}, {month} {ordinal}, {year}",
        "short": f"{month[:3]} {day}, {year}",
    }
    if style not in spellings:
        raise UserError(f"style is {style!r}; {suggest(str(style), spellings)}")
    return spellings[style]


def korean_date(date: datetime.date, weekday: bool = False) -> str:
    """`date` as 2021년 3월 3일, with 수요일 after it if `weekday`."""
    _check_date(date)
    text = f"{date.year}년 {date.month}월 {date.day}일"
    return f"{text} {KOREAN_WEEKDAYS[date.weekday()]}" if weekday else text


def examples(split: Split, count: int, seed: int) -> list[Example]:
    """`count` pairs, half dates and half numbers, in random order; the same `seed` gives the same list.

    No meaning occurs in both splits. Test examples are all different dates and different numbers, so each one
    counts once; training examples are sampled with replacement.
    """
    if split not in get_args(Split):
        raise UserError(f"split is {split!r}; {suggest(str(split), get_args(Split))}")
    if count < 0:
        raise UserError(f"count is {count}; give the number of examples wanted, 0 or more")
    rng, dates = random.Random(f"{split} {seed}"), _dates(split)
    if split == "test" and count // 2 > len(dates):
        raise UserError(
            f"count asks for {count // 2:,} test dates, but the test split has {len(dates):,}; "
            f"ask for at most {2 * len(dates):,} examples"
        )
    days = rng.choices(dates, k=count // 2) if split == "train" else rng.sample(dates, count // 2)
    numbers = _sample_numbers(rng, split, count - count // 2)
    styles: list[DateStyle] = [rng.choice(get_args(DateStyle)) for _ in days]
    pairs = [
        Example(english_date(day, style), korean_date(day, weekday=style == "weekday"), "date")
        for day, style in zip(days, styles, strict=True)
    ]
    pairs += [Example(english_number(n), korean_number(n), "number") for n in numbers]
    rng.shuffle(pairs)
    return pairs


def _sample_numbers(rng: random.Random, split: Split, count: int) -> list[int]:
    numbers: list[int] = []
    taken: set[int] = set()
    while len(numbers) < count:
        n = _sample_number(rng)
        # "zero" and 영 occur in no other number: if 0 were a test number, they could not be learned.
        if split != ("train" if n == 0 else _split_of(f"number {n}")) or n in taken:
            continue
        numbers.append(n)
        if split == "test":  # about 100,000 test numbers exist, many times what the dates allow
            taken.add(n)
    return numbers


def _sample_number(rng: random.Random) -> int:
    """A third by length (1 to 6 digits alike), a third round ones such as 340,000, a third anywhere."""
    match rng.randrange(3):
        case 0:
            length = rng.randint(1, 6)
            return rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)
        case 1:
            significant = rng.randint(1, 3)
            leading = rng.randrange(10 ** (significant - 1), 10**significant)
            return int(leading * 10 ** rng.randint(1, 6 - significant))
        case _:
            return rng.randint(0, LARGEST)


@functools.cache
def _dates(split: Split) -> tuple[datetime.date, ...]:
    """All dates of a split, in order: about 66,000 for training and 7,000 for the test."""
    every = map(datetime.date.fromordinal, range(FIRST_DAY.toordinal(), LAST_DAY.toordinal() + 1))
    return tuple(date for date in every if _split_of(f"date {date.isoformat()}") == split)


def _split_of(meaning: str) -> Split:
    # Python's own hash() of a string changes from run to run; this one never does.
    digest = hashlib.blake2b(meaning.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_EVERY == 0 else "train"


def _korean_below_myriad(n: int) -> str:
    """1 to 9,999: each digit before its power of ten, 일 left out before 천, 백 and 십."""
    text = ""
    for power, name in ((1000, "천"), (100, "백"), (10, "십"), (1, "")):
        digit = n // power % 10
        if digit:
            text += name if digit == 1 and name else KOREAN_DIGITS[digit] + name
    return text


def _check_number(n: int) -> None:
    if not 0 <= n <= LARGEST:
        raise UserError(f"n is {n}; numbers from 0 to {LARGEST:,} can be written out")


def _check_date(date: datetime.date) -> None:
    if not FIRST_DAY.year <= date.year <= LAST_DAY.year:
        raise UserError(f"date is {date.isoformat()}; use a year from {FIRST_DAY.year} to {LAST_DAY.year}")
