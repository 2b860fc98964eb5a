"""The dates and numbers against readers written the other way round, a table and the calendar."""

import calendar
import datetime
import os
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.korean import (
    DateStyle,
    Example,
    english_date,
    english_number,
    examples,
    korean_date,
    korean_number,
)
from regard.errors import UserError

STYLES: tuple[DateStyle, ...] = ("ordinal", "plain", "day-first", "of", "weekday", "short")
NUMBERS = st.integers(0, 999_999)
DATES = st.dates(datetime.date(1900, 1, 1), datetime.date(2099, 12, 31))

# Written out by hand: grouped by 만, with 일 left out before a unit, as a Korean textbook teaches them.
KOREAN_TABLE = {
    0: "영", 1: "일", 2: "이", 3: "삼", 4: "사", 5: "오", 6: "육", 7: "칠", 8: "팔", 9: "구", 10: "십",
    11: "십일", 12: "십이", 15: "십오", 16: "십육", 20: "이십", 21: "이십일", 35: "삼십오", 99: "구십구",
    100: "백", 101: "백일", 110: "백십", 111: "백십일", 365: "삼백육십오", 500: "오백", 999: "구백구십구",
    1_000: "천", 1_001: "천일", 1_988: "천구백팔십팔", 2_024: "이천이십사", 3_500: "삼천오백",
    10_000: "만", 10_001: "만 일", 11_111: "만 천백십일", 12_345: "만 이천삼백사십오", 20_000: "이만",
    50_000: "오만", 99_999: "구만 구천구백구십구", 100_000: "십만", 110_000: "십일만", 111_111: "십일만 천백십일",
    120_040: "십이만 사십", 210_000: "이십일만", 342_000: "삼십사만 이천", 500_000: "오십만",
    999_999: "구십구만 구천구백구십구",
}  # fmt: skip
ENGLISH_TABLE = {
    0: "zero", 7: "seven", 12: "twelve", 13: "thirteen", 15: "fifteen", 18: "eighteen", 20: "twenty",
    40: "forty", 42: "forty-two", 90: "ninety", 100: "one hundred", 110: "one hundred ten",
    705: "seven hundred five", 1_000: "one thousand", 1_001: "one thousand one", 10_000: "ten thousand",
    120_040: "one hundred twenty thousand forty", 342_000: "three hundred forty-two thousand",
    999_999: "nine hundred ninety-nine thousand nine hundred ninety-nine",
}  # fmt: skip
EDGES = sorted({n + d for k in range(1, 7) for n in (10**k, 2 * 10**k) for d in (-1, 0, 1) if n + d <= 999_999})

DIGIT = "[일이삼사오육칠팔구]"
BELOW_MYRIAD = re.compile(f"(?:({DIGIT}?)(천))?(?:({DIGIT}?)(백))?(?:({DIGIT}?)(십))?({DIGIT}?)")
ENGLISH_WORDS = {word: 10 * tens for word, tens in zip(
    ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], range(2, 10), strict=True
)} | {word: n for n, word in enumerate([
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
])}  # fmt: skip


def read_korean(text: str) -> int:
    """A pattern instead of arithmetic: units in falling order, each with at most one digit before it."""
    if text == "영":
        return 0
    if "만" in text:
        myriads, rest = text.split("만")
        return 10_000 * (read_korean(myriads) if myriads else 1) + (read_korean(rest[1:]) if rest else 0)
    found = BELOW_MYRIAD.fullmatch(text)
    assert text and found, f"{text!r} is no Korean number"
    *units, ones = found.groups(default="")
    value = int("0" + ones.translate(str.maketrans("일이삼사오육칠팔구", "123456789")))
    for digit, unit in zip(units[::2], units[1::2], strict=True):
        if unit:
            value += ("일이삼사오육칠팔구".find(digit) + 1 if digit else 1) * {"천": 1000, "백": 100, "십": 10}[unit]
    return value


def read_english(text: str) -> int:
    """Left to right: "hundred" multiplies the group so far, "thousand" closes it."""
    total = group = 0
    for word in re.split("[ -]", text):
        if word == "hundred":
            group *= 100
        elif word == "thousand":
            total, group = total + group * 1000, 0
        else:
            group += ENGLISH_WORDS[word]
    return total + group


@pytest.mark.parametrize(("n", "text"), KOREAN_TABLE.items())
def test_korean_numbers_of_the_textbook(n: int, text: str) -> None:
    assert korean_number(n) == text


@pytest.mark.parametrize(("n", "text"), ENGLISH_TABLE.items())
def test_english_numbers_of_the_textbook(n: int, text: str) -> None:
    assert english_number(n) == text


def test_numbers_read_back_as_themselves() -> None:
    sample = [*range(20_001), *EDGES, *random.Random(0).sample(range(1_000_000), 20_000)]
    for n in sample:
        assert read_korean(korean_number(n)) == n
        assert read_english(english_number(n)) == n


@given(NUMBERS)
def test_korean_spelling_rules(n: int) -> None:
    text = korean_number(n)
    assert not re.search("일[십백천]", text), "일 is left out before a unit"
    assert not text.startswith("일만")
    assert text.count(" ") == (1 if n > 10_000 and n % 10_000 else 0), "one space, after 만, if more follows"
    assert all(part.endswith("만") for part in text.split(" ")[:-1])


@given(NUMBERS)
def test_english_spelling_rules(n: int) -> None:
    text = english_number(n)
    assert "and" not in text.replace("thousand", "").split() and "  " not in text
    assert ("zero" in text) == (n == 0)
    assert ("-" in text) == any(part % 100 > 20 and part % 10 for part in (n // 1000, n % 1000))


@pytest.mark.parametrize("n", [-1, 1_000_000])
def test_a_number_out_of_range_is_refused(n: int) -> None:
    for write in (english_number, korean_number):
        with pytest.raises(UserError, match=str(n)):
            write(n)


def test_the_six_spellings_of_a_date() -> None:
    date = datetime.date(2021, 3, 3)
    assert [english_date(date, style) for style in STYLES] == [
        "March 3rd, 2021",
        "March 3, 2021",
        "3 March 2021",
        "the 3rd of March, 2021",
        "Wednesday, March 3rd, 2021",
        "Mar 3, 2021",
    ]
    assert korean_date(date) == "2021년 3월 3일"
    assert korean_date(date, weekday=True) == "2021년 3월 3일 수요일"


def test_ordinals() -> None:
    dates = [english_date(datetime.date(2020, 1, day), "ordinal") for day in range(1, 32)]
    assert " ".join(date.split()[1] for date in dates) == (
        "1st, 2nd, 3rd, 4th, 5th, 6th, 7th, 8th, 9th, 10th, 11th, 12th, 13th, 14th, 15th, 16th, 17th, 18th, "
        "19th, 20th, 21st, 22nd, 23rd, 24th, 25th, 26th, 27th, 28th, 29th, 30th, 31st,"
    )


@given(DATES)
def test_dates_follow_the_calendar(date: datetime.date) -> None:
    read = datetime.datetime.strptime  # reads English names: tests run in the C locale
    day = re.compile(r"(\d)(st|nd|rd|th)\b")
    forms = {
        "ordinal": "%B %d, %Y", "plain": "%B %d, %Y", "day-first": "%d %B %Y",
        "of": "the %d of %B, %Y", "weekday": "%A, %B %d, %Y", "short": "%b %d, %Y",
    }  # fmt: skip
    for style in STYLES:
        text = day.sub(r"\1", english_date(date, style))
        assert read(text, forms[style]).date() == date
    assert english_date(date, "weekday").split(",")[0] == date.strftime("%A")


@given(DATES)
def test_korean_dates_follow_the_calendar(date: datetime.date) -> None:
    year, month, day = map(int, re.fullmatch(r"(\d{4})년 (\d+)월 (\d+)일", korean_date(date)).groups())
    assert (year, month, day) == (date.year, date.month, date.day)
    weekday = korean_date(date, weekday=True).split()[-1]
    assert weekday == "월화수목금토일"[calendar.weekday(year, month, day)] + "요일"


def test_a_wrong_year_or_style_is_refused() -> None:
    with pytest.raises(UserError, match="1899-12-31"):
        english_date(datetime.date(1899, 12, 31), "plain")
    with pytest.raises(UserError, match="2100-01-01"):
        korean_date(datetime.date(2100, 1, 1))
    with pytest.raises(UserError, match="weekday"):
        english_date(datetime.date(2000, 1, 1), "weekdays")  # type: ignore[arg-type]


def meaning(example: Example) -> object:
    """What an example is about, read from its Korean: a number, or a date without its weekday."""
    if example.kind == "number":
        return read_korean(example.target)
    return tuple(map(int, re.findall(r"\d+", example.target)))


@pytest.fixture(scope="module")
def train() -> list[Example]:
    return examples("train", 40_000, seed=1)


@pytest.fixture(scope="module")
def held_out() -> list[Example]:
    return examples("test", 4_000, seed=1)


def test_no_meaning_is_in_both_splits(train: list[Example], held_out: list[Example]) -> None:
    nearly_all = examples("test", 14_000, seed=5)
    seen = {meaning(example) for example in train}
    assert not seen & {meaning(example) for example in nearly_all + held_out}


def test_test_examples_are_all_different(held_out: list[Example]) -> None:
    assert len({meaning(example) for example in held_out}) == len(held_out) == 4_000


def test_half_are_dates_in_every_spelling(train: list[Example], held_out: list[Example]) -> None:
    for drawn in (train, held_out):
        kinds = Counter(example.kind for example in drawn)
        assert kinds["date"] == kinds["number"] == len(drawn) // 2
        dates = [example.source for example in drawn if example.kind == "date"]
        named = sum("day," in source for source in dates)
        assert 0.12 < named / len(dates) < 0.22  # one spelling in six names the weekday
        weekday_targets = sum(example.target.endswith("요일") for example in drawn)
        assert weekday_targets == named


def test_short_round_and_long_numbers_all_occur_often(train: list[Example]) -> None:
    numbers = [read_english(example.source) for example in train if example.kind == "number"]
    lengths = Counter(len(str(n)) for n in numbers)
    assert all(lengths[length] > 0.04 * len(numbers) for length in range(1, 7))
    round_ones = sum(n > 0 and n % 10 ** (len(str(n)) - 2) == 0 for n in numbers if n >= 1000)
    assert round_ones > 0.1 * len(numbers)


def test_test_numbers_spread_over_the_full_range(held_out: list[Example]) -> None:
    numbers = [read_english(example.source) for example in held_out if example.kind == "number"]
    tenths = Counter(n // 100_000 for n in numbers)
    assert all(tenths[tenth] > 0.04 * len(numbers) for tenth in range(10))
    assert max(numbers) > 990_000


def test_every_word_of_the_test_is_in_the_training_data(train: list[Example], held_out: list[Example]) -> None:
    for side in ("source", "target"):
        known = {char for example in train for char in getattr(example, side)}
        assert known >= {char for example in held_out for char in getattr(example, side)}
    words = {word for example in train for word in re.findall("[a-z]+", example.source)}
    assert words >= {word for example in held_out for word in re.findall("[a-z]+", example.source)}
    assert "zero" in words


def test_both_sides_say_the_same(train: list[Example]) -> None:
    for example in train[:5_000]:
        if example.kind == "number":
            assert read_english(example.source) == read_korean(example.target)
        else:
            year, _, day = meaning(example)
            assert [int(n) for n in re.findall(r"\d+", example.source)] in ([day, year], [year, day])


def test_the_seed_decides_the_examples_in_every_process() -> None:
    assert examples("train", 50, seed=3) == examples("train", 50, seed=3)
    assert examples("train", 50, seed=3) != examples("train", 50, seed=4)
    code = "from regard.data.korean import examples; print(ascii(examples('test', 50, 3)))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {ascii(examples("test", 50, 3))}


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(UserError, match="train"):
        examples("trian", 10, 0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="count"):
        examples("train", -1, 0)
    with pytest.raises(UserError, match="at most"):
        examples("test", 1_000_000, 0)
    assert examples("train", 0, 0) == []
