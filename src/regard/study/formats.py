"""The table of a study as lines for a terminal, Markdown, CSV, JSON, and (`regard.study.latex`) LaTeX.

All of them come from one list, `COLUMNS`. A column has a text for people and named values for programs:

    text     25.80 ± 0.21 (6)                          terminal, Markdown, LaTeX, the report
    values   mean = 25.8, sd = 0.21, n = 6             CSV and JSON, as they were computed

People see only the columns in which some row has a value; CSV and JSON always have the same fields. A run without a
score is counted beside the mean, and its reason is below the table. A metric whose format ends in % is a fraction; its
scores, and the differences between them in percentage points, are shown times 100.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from regard.errors import listed
from regard.metrics.significance import MOST_SEEDS
from regard.study.table import RowResult, StudyTable
from regard.terminal import aligned, count, screen_width

FIRST_TO_GO = (
    "changes",
    "training FLOPs",
    "bootstrap [95 %]",
    "parameters",
    "sign-flip p",
    "paper",
)  # when it is narrow
LONGEST = 300  # characters of a reason below the table
BASE, NO_SCORE = "base", "no score"


@dataclass(frozen=True)
class Column:
    """`text` is None where a column is for programs only; `left`: aligned to the left, as words are."""

    heading: str
    text: Callable[[StudyTable, RowResult], str] | None
    values: Mapping[str, Callable[[RowResult], Any]]
    left: bool = False


def scale(table: StudyTable) -> float:
    """Scores are multiplied by this before they are shown."""
    return 100.0 if table.unit.endswith("%") else 1.0


def number(table: StudyTable, value: float | None, *, sign: bool = False) -> str:
    """A score, or (`sign`) a difference between scores; never -0.00."""
    return "" if value is None else f"{value:{'+' if sign else ''}z{table.unit}}".removesuffix("%")


def metric_name(table: StudyTable) -> str:
    return f"{table.metric}, %" if table.unit.endswith("%") else table.metric


def p_value(p: float | None) -> str:
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def one_line(text: object) -> str:
    """A text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def capital(text: str) -> str:
    return text[:1].upper() + one_line(text[1:])


def setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else one_line(value)


def changes(row: RowResult) -> str:
    return ", ".join(f"{key} = {setting(value)}" for key, value in row.changes.items())


def missing(row: RowResult) -> str:
    """ "1 failed, 2 pending" """
    counts = ((len(row.failed), "failed"), (len(row.pending), "pending"))
    return ", ".join(f"{n} {what}" for n, what in counts if n)


def score(table: StudyTable, row: RowResult) -> str:
    """Mean ± standard deviation (seeds)."""
    if row.mean is None:
        return missing(row) or NO_SCORE
    spread = "" if row.sd is None else f" ± {number(table, row.sd)}"
    lacking = missing(row)
    return f"{number(table, row.mean)}{spread} ({len(row.scores)}{', ' * bool(lacking)}{lacking})"


def interval(table: StudyTable, low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{number(table, low, sign=True)}, {number(table, high, sign=True)}]"


def ends(row: RowResult) -> tuple[float | None, float | None]:
    """The t-interval; that of the bootstrap where there is no other, as between two single runs."""
    if (found := row.difference) is None:
        return None, None
    return (found.boot_low, found.boot_high) if found.low is None else (found.low, found.high)


def difference(table: StudyTable, row: RowResult) -> str:
    """The mean difference and its interval, which one seed alone does not have."""
    if row.difference is None:
        return ""
    return f"{number(table, row.difference.mean, sign=True)} {interval(table, *ends(row))}".rstrip()


def bootstrap(table: StudyTable, row: RowResult) -> str:
    """The bootstrap interval, where `difference` does not show it already."""
    found = row.difference
    return "" if found is None or found.low is None else interval(table, found.boot_low, found.boot_high)


def verdict(table: StudyTable, row: RowResult) -> str:
    if row is table.rows[0]:
        return BASE
    return row.verdict or (NO_SCORE if row.mean is None else "")


def seeds_needed(row: RowResult) -> str:
    """How many seeds would decide; more than are worth training, as that."""
    if row.seeds_needed is not None:
        return f"{row.seeds_needed:,}"
    found = row.difference
    undecided = row.verdict == "not decided" and found is not None and found.sd and found.mean
    return f">{MOST_SEEDS:,}" if undecided else ""


def paper(table: StudyTable, row: RowResult) -> str:
    """With as many digits as the paper has."""
    return "" if row.paper is None else f"{row.paper * scale(table):g}"


def _of(name: str) -> Callable[[RowResult], Any]:
    return lambda row: getattr(row, name)


def _of_difference(name: str) -> Callable[[RowResult], Any]:
    return lambda row: getattr(row.difference, name, None)


COLUMNS = (
    Column("row", lambda table, row: one_line(row.name), {"row": _of("name")}, left=True),
    Column("changes", lambda table, row: changes(row), {"changes": _of("changes")}, left=True),
    Column(
        "parameters",
        lambda table, row: "" if row.parameters is None else count(row.parameters),
        {"parameters": _of("parameters")},
    ),
    Column("training FLOPs", lambda table, row: "" if row.flops is None else count(row.flops), {"flops": _of("flops")}),
    Column("training time", None, {"seconds": _of("seconds")}),
    Column("score", score, {"mean": _of("mean"), "sd": _of("sd"), "n": lambda row: len(row.scores)}),
    Column(
        "difference [95 %]",
        difference,
        {"difference": _of_difference("mean"), "low": _of_difference("low"), "high": _of_difference("high")},
    ),
    Column(
        "bootstrap [95 %]",
        bootstrap,
        {"bootstrap_low": _of_difference("boot_low"), "bootstrap_high": _of_difference("boot_high")},
    ),
    Column(
        "sign-flip p",
        lambda table, row: p_value(getattr(row.difference, "p_sign", None)),
        {"p_sign_flip": _of_difference("p_sign")},
    ),
    Column("t-test p", None, {"p": _of_difference("p"), "p_over": _of_difference("over")}),  # over seeds, or over items
    Column("p (Holm)", lambda table, row: p_value(row.p_holm), {"p_holm": _of("p_holm")}),
    Column("verdict", verdict, {"verdict": _of("verdict")}, left=True),
    Column("seeds to decide", lambda table, row: seeds_needed(row), {"seeds_needed": _of("seeds_needed")}),
    Column("paper", paper, {"paper": _of("paper")}),
    Column("runs", None, {"scores": _of("scores"), "failed": _of("failed"), "pending": _of("pending")}),
)


def shown(table: StudyTable) -> list[Column]:
    """The columns for people in which some row has a value."""
    return [one for one in COLUMNS if one.text and any(one.text(table, row) for row in table.rows)]


def headings(table: StudyTable, columns: Sequence[Column]) -> list[str]:
    score_heading = f"{metric_name(table)} ± sd (seeds)"
    return [score_heading if one.heading == "score" else one.heading for one in columns]


def cells(table: StudyTable, row: RowResult, columns: Sequence[Column]) -> list[str]:
    return [one.text(table, row) or "–" for one in columns if one.text]


def remarks(table: StudyTable) -> list[str]:
    """Below the table: the reason of every run without a score, then the notes of the study."""
    lines = []
    for row in table.rows:
        reasons: dict[str, list[int]] = {}
        for seed, reason in row.failed.items():
            first = next(filter(None, map(one_line, reason.splitlines())), "")  # CSV and JSON have all of it
            reasons.setdefault(first if len(first) <= LONGEST else f"{first[:LONGEST]}…", []).append(seed)
        for reason, seeds in reasons.items():
            lines.append(f"{one_line(row.name)}, {_seeds(seeds)}: failed: {reason}")
        if row.pending:
            lines.append(f"{one_line(row.name)}, {_seeds(row.pending)}: not trained yet")
    return [*lines, *map(one_line, table.notes)]


def _seeds(seeds: Sequence[int]) -> str:
    """ "seed 3", "seeds 1, 2 and 4", "seeds 1 to 6 and 9" """
    runs: list[list[int]] = []
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    texts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {listed(texts)}"


def caption(table: StudyTable) -> str:
    better = "higher" if table.higher else "lower"
    return f"{one_line(table.title)}: {one_line(table.metric)} on {one_line(table.test)} ({better} is better)"


def lines(table: StudyTable, width: int | None = None) -> list[str]:
    """For a terminal. Columns that do not fit into `width` are left out, the least important first."""
    columns, left_out = shown(table), []
    text = _aligned(table, columns)
    for name in FIRST_TO_GO:
        if width is None or max(map(screen_width, text)) <= width:
            break
        if name in (rest := [one.heading for one in columns]):
            left_out.append(name)
            columns = [columns[at] for at, heading in enumerate(rest) if heading != name]
            text = _aligned(table, columns)
    notes = remarks(table)
    if left_out:
        notes.append(f"Left out, as the terminal is narrow: {', '.join(left_out)}.")
    return [caption(table), "", *text, *([""] if notes else []), *notes]


def _aligned(table: StudyTable, columns: Sequence[Column]) -> list[str]:
    rows = [headings(table, columns), *(cells(table, row, columns) for row in table.rows)]
    return aligned(rows, right={at for at, one in enumerate(columns) if not one.left})


def markdown(table: StudyTable) -> str:
    columns = shown(table)
    rule = [":---" if one.left else "---:" for one in columns]
    rows = [cells(table, row, columns) for row in table.rows]
    grid = [[*map(_markdown_text, headings(table, columns))], rule, *([*map(_markdown_text, row)] for row in rows)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in grid)
    notes = "".join(f"- {_markdown_text(note)}\n" for note in remarks(table))
    return f"{_markdown_text(caption(table))}\n\n{text}\n" + (f"\n{notes}" if notes else "")


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|~#$])", r"\\\1", text)


def fields(row: RowResult) -> dict[str, Any]:
    """The values of all columns by name."""
    return {name: value(row) for column in COLUMNS for name, value in column.values.items()}


def to_csv(table: StudyTable) -> str:
    """A line per row; a mapping is written as "key=value; key=value", a list as "1; 2"."""

    def cell(value: Any) -> Any:
        match value:
            case Mapping():
                return "; ".join(f"{key}={setting(one)}" for key, one in value.items())
            case list() | tuple():
                return "; ".join(map(str, value))
            case str():
                return one_line(value)
        return value

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for column in COLUMNS for name in column.values])
    writer.writerows([cell(value) for value in fields(row).values()] for row in table.rows)
    return text.getvalue()


def to_json(table: StudyTable) -> dict[str, Any]:
    """Everything, as values that JSON has: a number that is not finite is null."""
    rows = [{**fields(row), "curves": row.curves} for row in table.rows]
    content = {
        "title": table.title, "metric": table.metric, "higher_is_better": table.higher, "test": table.test,
        "curve": table.curve, "item_metric": table.item_metric, "rows": rows,
        "disagreements": [asdict(one) for one in table.disagreements], "notes": table.notes,
    }  # fmt: skip
    plain: dict[str, Any] = _plain(content)
    return plain


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
    return str(value)


def minus(text: str) -> str:
    """A number with a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text)
