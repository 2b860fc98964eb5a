"""HTML: headings, tables, examples and figures on a page that is one file.

The page is plain HTML with its stylesheet inside. It loads no script, font or image, so it can be mailed,
archived and opened without a network years later; a Content-Security-Policy in the page makes the browser enforce
that. Every text that comes from data passes through `escape`, so a token such as `<script>` is shown and never run.
It adapts to light and dark, a phone, paper, and a screen reader.

Headline metrics come first (`summary`), then the sections with the evidence.

Attention weights show which values were mixed, not why; `attention_note` says so beside every attention map
(S. Jain and B. C. Wallace, "Attention is not Explanation", NAACL 2019).
"""

from __future__ import annotations

import difflib
import html as markup
import itertools
import math
import numbers
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import regard
from regard.errors import UserError
from regard.files import write_atomically
from regard.messages import language, localize

DIFFERENCE_LIMIT = 1_000  # characters; difflib takes time in proportion to the square of the length
_INVALID = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NUMERIC = re.compile(r"[+−-]?(\d[\d,]*\.?\d*|\.\d+)(e[+−-]?\d+)?( ?(%|[a-zA-Zµ]{1,3}(/s)?))?|-?(nan|inf)|[–—-]?")
_CSS = resources.files("regard.explore").joinpath("style.css").read_text("utf-8").split("/* Figures */")
PAGE_CSS, FIGURE_CSS = _CSS[0], " ".join(_CSS[1].split())
READING = (
    "Attention weights show which values were mixed, not why: a large weight says that a value was used, and different "
    "weights can lead to the same output (Jain & Wallace 2019, “Attention is not Explanation”). Better evidence is an "
    "experiment: switch the head off and see whether the output changes."
)
LOGO = (
    '<svg class="logo" viewBox="0 0 22 22" width="22" height="22" aria-hidden="true">'
    '<rect width="6" height="6" rx="1.5"/><rect x="8" y="8" width="6" height="6" rx="1.5"/>'
    '<rect x="16" y="16" width="6" height="6" rx="1.5"/><rect x="8" width="6" height="6" rx="1.5" opacity=".3"/>'
    '<rect x="16" y="8" width="6" height="6" rx="1.5" opacity=".3"/></svg>'
)


def escape(text: object) -> str:
    """Text that is inert inside HTML and XML; characters that XML forbids are replaced by visible symbols."""
    return markup.escape(_INVALID.sub(lambda m: chr(0x2400 + ord(m[0])) if m[0] < " " else "\ufffd", str(text)))


def text_width(text: str, size: float = 13) -> float:
    """Estimated width of a text: 1 em per wide character or emoji, 0.58 em per other, nothing for marks."""
    visible = (c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf"))
    return size * sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.58 for c in visible)


def token_label(token: str, limit: float = 150.0) -> str:
    """A token as a label: whitespace made visible, cut with an ellipsis beyond `limit` pixels."""
    token = re.sub("^ +| +$", lambda m: "␣" * len(m[0]), str(token)[:200])
    token = token.replace("\n", "↵").replace("\r", "␍").replace("\t", "⇥") or "∅"
    if not text_width(token):  # only invisible characters, such as a zero-width space
        token = " ".join(f"U+{ord(c):04X}" for c in token[:3])
    if text_width(token) > limit:
        ends = range(len(token), 0, -1)
        token = next(token[:end] for end in ends if text_width(token[:end]) <= limit - 13) + "…"
    return token


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading (text) and a body (HTML made by the functions below)."""

    heading: str
    body: str


def paragraph(text: str) -> str:
    return f"<p>{escape(localize(text))}</p>"


def figure(svg: str, caption: str) -> str:
    """A figure with its caption; one wider than the page scrolls, also by keyboard."""
    text = f"<figcaption>{escape(localize(caption))}</figcaption>" if caption else ""
    return f"<figure>{scrolling(svg, 'Figure')}{text}</figure>"


def attention_note() -> str:
    """The caveat shown beside every attention map."""
    text = escape(localize(READING))
    return f'<aside class="note"><p><strong>{localize("Reading attention.")}</strong> {text}</p></aside>'


def _column(values: Sequence[object]) -> list[str]:
    """Values as text: 12,000, yes, a dash for None; all numbers of a column have the same decimals."""

    def digits(value: object) -> int:
        plain = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and math.isfinite(value)
        return len(f"{value:.4f}".rstrip("0").split(".")[1]) if plain else 0

    decimals, texts = max(map(digits, values), default=0), []
    for value in values:
        match value:
            case None:
                texts.append("–")
            case bool():
                texts.append(localize("yes" if value else "no"))
            case numbers.Integral():
                texts.append(f"{int(value):,}")
            case numbers.Real():
                number = float(value)
                texts.append(f"{number:.3g}" if 0 < abs(number) < 1e-3 else f"{number:,.{decimals}f}")
            case _:
                texts.append(str(value))
    return texts


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, classes: Sequence[str] | None = None) -> str:
    """A table of escaped text. Columns of numbers are right-aligned, unless `classes` names one CSS class per column:
    "number", "token" (keeps whitespace, fixed width), "muted", or "" for plain text."""
    width = len(headers)
    for index, row in enumerate(rows):
        if len(row) != width:
            raise UserError(f"rows: row {index} has {len(row)} cells but headers names {width}; give one per header")
    if classes is not None and len(classes) != width:
        raise UserError(f"classes: {len(classes)} names for {width} columns; give one per column, '' for none")
    columns = [_column([row[i] for row in rows]) for i in range(width)]
    if classes is None:
        classes = ["number" if rows and all(map(_NUMERIC.fullmatch, texts)) else "" for texts in columns]
    attributes = [f' class="{escape(name)}"' if name else "" for name in classes]

    def line(tag: str, texts: Sequence[str]) -> str:
        cells = zip(attributes, texts, strict=True)
        return "<tr>" + "".join(f"<{tag}{attribute}>{escape(text)}</{tag[:2]}>" for attribute, text in cells) + "</tr>"

    head, body = line('th scope="col"', headers), "".join(line("td", texts) for texts in zip(*columns, strict=True))
    body = body or f'<tr><td class="muted" colspan="{max(1, width)}">{localize("No rows.")}</td></tr>'
    return scrolling(f"<table><thead>{head}</thead><tbody>{body}</tbody></table>")


def scrolling(inner: str, kind: str = "Table") -> str:
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{localize(kind)}">{inner}</div>'


def _characters(text: str) -> list[str]:
    """User-perceived characters: marks, joiners, emoji modifiers and Hangul vowels stay attached."""
    parts: list[str] = []
    for c in text:
        joins = unicodedata.category(c) in ("Mn", "Me", "Mc", "Cf") or "\u1160" <= c <= "\u11ff"
        joins = joins or "\U0001f3fb" <= c <= "\U0001f3ff" or (bool(parts) and parts[-1].endswith("\u200d"))
        if joins and parts:
            parts[-1] += c
        else:
            parts.append(c)
    return parts


def _common_prefix(left: list[str], right: list[str]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _differences(expected: str, predicted: str) -> tuple[str, str]:
    """Both texts as HTML; what only one of them has is marked, as missing in the first or extra in the second."""
    left, right = _characters(expected), _characters(predicted)
    if max(len(left), len(right)) <= DIFFERENCE_LIMIT:
        steps = difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    else:  # long texts: everything between the common prefix and the common suffix
        head = _common_prefix(left, right)
        tail = _common_prefix(left[head:][::-1], right[head:][::-1])
        a, b = len(left) - tail, len(right) - tail
        steps = [("equal", 0, head, 0, head), ("replace", head, a, head, b), ("equal", a, len(left), b, len(right))]
    first = second = ""
    for kind, a0, a1, b0, b1 in steps:
        missing, extra = escape("".join(left[a0:a1])), escape("".join(right[b0:b1]))
        first += missing if kind == "equal" or not missing else f'<mark class="missing">{missing}</mark>'
        second += extra if kind == "equal" or not extra else f'<mark class="extra">{extra}</mark>'
    return first, second


def _empty() -> str:
    return f"<em>{localize('(empty)')}</em>"


def examples_table(rows: Sequence[tuple[str, str, str]], *, graded: bool = True) -> str:
    """Rows (input, expected, predicted), graded as correct or wrong, with the differing characters marked.

    `graded=False` omits the grade: a translation that differs from its reference need not be wrong.
    """
    parts, names = [], [*map(localize, ("Result", "Input", "Expected", "Predicted"))]
    for text, expected, predicted in rows:
        grade, sign = ("correct", "✓") if expected == predicted else ("wrong", "✗")
        first, second = _differences(expected, predicted)
        cells = zip(names[-3:], (escape(text), first, second), strict=True)
        row = f'<tr class="{grade}"><td class="grade"><span aria-hidden="true">{sign}</span> {localize(grade)}</td>'
        row = row if graded else "<tr>"
        parts.append(
            row
            + "".join(f'<td data-name="{name}" dir="auto">{cell or _empty()}</td>' for name, cell in cells)
            + "</tr>"
        )
    body = "".join(parts) or f'<tr><td class="muted" colspan="4">{localize("No examples.")}</td></tr>'
    heads = "".join(f'<th scope="col">{name}</th>' for name in names[not graded :])
    return scrolling(f'<table class="examples"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>')


def outputs_table(input: str, reference: str, outputs: Sequence[tuple[str, str, str]], metric: str) -> str:
    """What several models make of one input: (models, output, score), with what the reference does not have marked."""
    rows = [(localize("Input"), escape(input), ""), (localize("Reference"), escape(reference), "")]
    rows = rows[not input :]  # an image has no text
    given = len(rows)
    rows += [(who, _differences(reference, output)[1], escape(score)) for who, output, score in outputs]
    body = "".join(
        f'<tr><td class="{"who muted" if at < given else "who"}">{escape(who)}</td>'
        f'<td dir="auto">{text or _empty()}</td>'
        f'<td class="{"number" if score else "none"}" data-name="{escape(metric)}">{score}</td></tr>'
        for at, (who, text, score) in enumerate(rows)
    )
    heads = "".join(f'<th scope="col">{localize(name)}</th>' for name in ("Rows", "Output"))
    heads += f'<th scope="col" class="number">{escape(metric)}</th>'
    return scrolling(f'<table class="examples outputs"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>')


def page(
    title: str,
    summary: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    *,
    created: datetime | str | None = None,
    version: str = regard.__version__,
) -> str:
    """The whole page. `summary` holds the headline metrics, such as ("exact match", "99.4 %"); `created`: now."""
    time = created if isinstance(created, str) else (created or datetime.now()).isoformat(" ", "minutes")
    headings = [escape(localize(part.heading)) for part in sections]
    tiles = "".join(f"<div><dt>{escape(localize(name))}</dt><dd>{escape(value)}</dd></div>" for name, value in summary)
    links = "".join(f'<li><a href="#section-{i}">{heading}</a></li>' for i, heading in enumerate(headings, 1))
    contents = f'<nav aria-labelledby="contents"><h2 id="contents">{localize("Contents")}</h2><ol>{links}</ol></nav>'
    body = "".join(
        f'<section id="section-{i}" aria-labelledby="heading-{i}"><h2 id="heading-{i}">{heading}</h2>'
        f"{part.body}</section>"
        for i, (heading, part) in enumerate(zip(headings, sections, strict=True), 1)
    )
    return (
        f'<!DOCTYPE html>\n<html lang="{language()}"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"/>"
        '<link rel="icon" href="data:,"/>'
        f"<title>{escape(title)} · Regard</title>\n<style>\n{PAGE_CSS}</style></head>\n<body>"
        f'<header><div class="brand">{LOGO}<span>Regard</span></div>'
        f'<p class="meta">{escape(time)} · {escape(localize(f"version {version}"))}</p></header>\n'
        f"<main><h1>{escape(title)}</h1>"
        + (f'<dl class="tiles">{tiles}</dl>' if summary else "")
        + (contents if len(sections) > 3 else "")
        + f"{body}</main>\n<footer><p>{escape(localize(f'Made with Regard {version}.'))} "
        + localize("This page is a single file: it runs no scripts and loads nothing.")
        + "</p></footer></body></html>\n"
    )


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Write a page atomically and return its absolute path."""
    write_atomically(path, html.encode("utf-8", "replace"))
    return Path(path).resolve()
