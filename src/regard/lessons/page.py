"""A lesson as a page for the browser: one HTML file with its style sheet and its figures inside.

It runs no scripts and loads nothing, as a report does (`regard.explore.html`), and follows the reader's colour scheme.
Links to other lessons lead to their pages in the same folder; links to the documentation, which is not part of an
installation, become plain text.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from regard.explore.html import LOGO, PAGE_CSS, escape, scrolling, write_page
from regard.lessons.course import FOLDER, Lesson, anchor, lessons

WORDS = {
    "en": {
        "other": "한국어",
        "contents": "Contents",
        "note": "This page is a single file: it loads nothing.",
        "minutes": " min",
    },
    "ko": {
        "other": "English",
        "contents": "차례",
        "note": "이 페이지는 파일 하나로 되어 있으며 외부에서 아무것도 불러오지 않습니다.",
        "minutes": "분",
    },
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_LESSON = re.compile(r"^(?:\./)?(\d\d-[\w-]+\.(?:en|ko))\.md(#.*)?$")
_IMAGE = re.compile(r'((?:src|srcset)=")(images/[^"]+)(")')


def _code(code: str, name: str, attributes: str) -> str:
    """A fenced block with its syntax marked."""
    try:
        lexer = get_lexer_by_name(name or "text", stripnl=False)
    except ClassNotFound:
        lexer = get_lexer_by_name("text", stripnl=False)
    marked = highlight(code, lexer, HtmlFormatter(nowrap=True))
    return f'<pre tabindex="0" class="{escape(name)}"><code>{marked}</code></pre>'


def renderer() -> MarkdownIt:
    """CommonMark with tables; HTML in a lesson is kept: <details>, <img>."""
    return MarkdownIt("commonmark", {"html": True, "highlight": _code}).enable(["table", "strikethrough"])


def data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def body(text: str) -> tuple[str, list[tuple[str, str]]]:
    """A lesson as HTML, and the (id, heading) of its sections."""
    markdown = renderer()
    tokens, sections = markdown.parse(text), list[tuple[str, str]]()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = tokens[at + 1].content
            token.attrSet("id", anchor(heading))
            if token.tag == "h2":
                sections.append((anchor(heading), re.sub(r"[`*]", "", heading)))
        if token.type == "inline":
            _localise(token.children or [])
    html = markdown.renderer.render(tokens, markdown.options, {})
    html = _IMAGE.sub(lambda match: f"{match[1]}{data_url(FOLDER / match[2])}{match[3]}", html)
    return re.sub(r"<table>.*?</table>", lambda match: scrolling(match[0]), html, flags=re.S), sections


def _localise(tokens: list[Any]) -> None:
    """Lead links to lessons to their pages, and take away those that lead out of the course."""
    inside = False
    for token in tokens:
        if token.type == "link_open":
            target = str(token.attrGet("href"))
            match = _LESSON.match(target)
            if match and (FOLDER / f"{match[1]}.md").is_file():
                token.attrSet("href", f"{match[1]}.html{match[2] or ''}")
            else:
                inside = not target.startswith(("#", "https://", "http://", "mailto:"))
        if inside and token.type in ("link_open", "link_close"):
            token.type, token.tag, token.attrs = f"em_{token.type[5:]}", "em", {}
            inside = token.type == "em_open"


def page(lesson: Lesson, language: str) -> str:
    """The whole page."""
    words, (html, sections) = WORDS[language], body(lesson.text(language))
    title, _, text = html.partition("</h1>")
    other = "ko" if language == "en" else "en"
    known = lessons()
    at = known.index(lesson)
    near = [
        f'<a href="{one.name}.{language}.html">{arrow} {one.number}. {escape(one.title(language))}</a>'
        for arrow, one in (("←", known[at - 1] if at else None), ("→", known[at + 1] if at + 1 < len(known) else None))
        if one is not None
    ]
    links = "".join(f'<li><a href="#{escape(name)}">{escape(heading)}</a></li>' for name, heading in sections)
    style = PAGE_CSS + resources.files("regard.lessons").joinpath("page.css").read_text("utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="{language}"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/><link rel="icon" href="data:,"/>'
        f"<title>{lesson.number}. {escape(lesson.title(language))} · Regard</title>\n<style>\n{style}</style></head>\n"
        f'<body class="lesson"><header><div class="brand">{LOGO}<span>Regard</span></div><p class="meta">'
        f'{lesson.minutes(language)}{words["minutes"]} · <a lang="{other}" href="{lesson.name}.{other}.html">'
        f"{words['other']}</a></p></header>\n<main>{title}</h1>"
        f'<nav aria-labelledby="contents"><h2 id="contents">{words["contents"]}</h2><ol>{links}</ol></nav>'
        f'{text}<p class="near">{" ".join(near)}</p></main>\n<footer><p>{words["note"]}</p></footer></body></html>\n'
    )


def write_pages(folder: Path) -> None:
    """The pages of all lessons in both languages, so that their links work; only those whose sources are newer."""
    own = max(path.stat().st_mtime for path in (Path(__file__), FOLDER / "page.css"))
    folder.mkdir(parents=True, exist_ok=True)
    images = {path.name[:2]: path.stat().st_mtime for path in sorted(FOLDER.glob("images/*"), key=os.path.getmtime)}
    for lesson in lessons():
        for language in WORDS:
            target = folder / f"{lesson.name}.{language}.html"
            newest = max(own, lesson.path(language).stat().st_mtime, images.get(f"{lesson.number:02}", 0.0))
            if not target.is_file() or target.stat().st_mtime < newest:
                write_page(target, page(lesson, language))
