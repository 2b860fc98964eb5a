"""Time stamps of a series: read, checked for a regular step, continued after the last row.

    2024-03-31 22:00          the step is the most frequent difference, here one hour; the stamps that follow a series
    2024-03-31 23:00          are written like its own:  2024-04-01 01:00, 2024-04-01 02:00, …
    2024-04-01 00:00

A stamp is a date, a date with a time, or a month (ISO 8601: 2024-01-31, 2024-01-31T13:00+09:00, 2024-01), with a blank
for the T if need be. Rows are in increasing order. Months and years differ in length, so where every stamp is at the
same time of the same day of a month, or at the end of a month, the step is a number of months. A difference of several
steps is a gap, which is noted: a window across it takes its rows for neighbours. Any other difference is an error.
"""

from __future__ import annotations

import calendar
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from regard.data.lines import Notes
from regard.errors import UserError

Step = timedelta | int  # or so many months


class Stamp(NamedTuple):
    """A time, and how it is written in the file."""

    at: datetime
    text: str


def parse_stamp(value: Any) -> Stamp:
    """A cell with a time stamp; ValueError: it is something else."""
    if isinstance(value, datetime):
        return Stamp(value, value.isoformat(" "))
    if isinstance(value, date):
        return Stamp(datetime.combine(value, time()), value.isoformat())
    text = value.strip() if isinstance(value, str) else ""
    try:
        if len(text) < 7 or text.isdecimal():  # a number, or a time without a date
            raise ValueError
        return Stamp(datetime.fromisoformat(f"{text}-01" if re.fullmatch(r"\d{4}-\d\d", text) else text), text)
    except ValueError:
        raise ValueError(f"is {str(value)[:40]!r}, not a time stamp; write it like 2024-01-31 13:00") from None


@dataclass(frozen=True)
class Clock:
    """The last stamp of a series, its step, and a stamp that shows how they are written."""

    last: datetime
    step: Step
    example: str
    month_end: bool = False

    def following(self, count: int) -> list[str]:
        """The next stamps."""
        try:
            return [self._written(self._after(number)) for number in range(1, count + 1)]
        except (ValueError, OverflowError):
            raise UserError(f"{count:,} steps after {self.example}: beyond the year 9999; predict fewer") from None

    def _after(self, number: int) -> datetime:
        if isinstance(self.step, timedelta):
            return self.last + number * self.step
        year, month = divmod(self.last.year * 12 + self.last.month - 1 + number * self.step, 12)
        day = calendar.monthrange(year, month + 1)[1] if self.month_end else self.last.day
        return self.last.replace(year=year, month=month + 1, day=day)

    def _written(self, at: datetime) -> str:
        if len(self.example) <= 10:
            return at.date().isoformat()[: len(self.example)]
        clock = self.example[11:].partition("+")[0].partition("-")[0].removesuffix("Z")
        precision = {5: "minutes", 8: "seconds", 12: "milliseconds"}.get(len(clock), "auto")
        text = at.isoformat(self.example[10], precision)
        return text.replace("+00:00", "Z") if self.example.endswith("Z") else text

    def __str__(self) -> str:
        """The step in words."""
        return _words(self.step)


def read_clock(file: str, rows: Sequence[tuple[int, Stamp]], notes: Notes) -> Clock | None:
    """Check the stamps of a series, (line, stamp) each; None: a single one has no step."""
    if len(rows) < 2:
        return None
    if len({stamp.at.tzinfo is None for _, stamp in rows}) > 1:
        line = next(line for line, stamp in rows if (stamp.at.tzinfo is None) != (rows[0][1].at.tzinfo is None))
        raise UserError(f"{file}, line {line:,}: of two time stamps, only one has a time zone; write all in one way")
    for (_, before), (line, stamp) in pairwise(rows):
        if stamp.at <= before.at:
            problem = "is there twice" if stamp.at == before.at else f"comes after {before.text}"
            raise UserError(f"{file}, line {line:,}: the time {stamp.text} {problem}; sort the rows, one for each time")
    times = [stamp.at for _, stamp in rows]
    month_end = all(at.day == calendar.monthrange(at.year, at.month)[1] for at in times)
    by_month = (month_end or len({at.day for at in times}) == 1) and len({at.time() for at in times}) == 1
    by_month = by_month and max(at.day for at in times) <= (31 if month_end else 28)
    by_month = by_month and all(after - before >= timedelta(28) for before, after in pairwise(times))
    steps = [_difference(before, after, by_month) for before, after in pairwise(times)]
    counts = Counter(steps)
    step: Any = min(counts, key=lambda one: (-counts[one], one))
    for own, (line, stamp) in zip(steps, rows[1:], strict=True):
        if own % step:  # type: ignore[operator]
            raise UserError(
                f"{file}, line {line:,}: the time {stamp.text} is {_words(own)} after the row before, but the step of "
                f"the series is {_words(step)}; give a row for each step"
            )
        if own != step:
            gap = f"a gap, the first at line {line:,} before {stamp.text}"
            where = next((key for key in notes if key[0] == file and "a gap" in key[1]), (file, gap))
            notes[where] += 1
    example = max((stamp.text for _, stamp in rows), key=len)
    return Clock(times[-1], step, example, month_end and by_month)


def _difference(before: datetime, after: datetime, by_month: bool) -> Any:
    if not by_month:
        return after - before
    return (after.year - before.year) * 12 + after.month - before.month


def _words(step: Step) -> str:
    if isinstance(step, int):
        count, unit = (step // 12, "year") if step % 12 == 0 else (step, "month")
    else:
        units = {"day": timedelta(1), "hour": timedelta(hours=1), "minute": timedelta(minutes=1)}
        unit = next((name for name, size in units.items() if not step % size), "second")
        count = step / units.get(unit, timedelta(seconds=1))  # type: ignore[assignment]
    return f"{count:g} {unit}{'s' * (count != 1)}"
