"""What the built site must satisfy: internal links and anchors exist, and nothing is loaded from other hosts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADING = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "srcset",
    "video": "src",
    "audio": "src",
}
ICONS = ("icon", "stylesheet", "preload", "modulepreload", "manifest")  # <link>s that make a browser load something


class Page(HTMLParser):
    """The ids, links and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        name = LOADING.get(tag, "")
        if name in values and (tag != "link" or any(kind in values.get("rel", "") for kind in ICONS)):
            self.loaded.append(values[name])


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with the HTML and CSS below a folder, one line each."""
    pages = {
        path.relative_to(folder).as_posix(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")
    }
    for name, page in sorted(pages.items()):
        for target in page.loaded:
            if re.match(r"(https?:)?//", target):
                yield f"{name}: loads {target}"
            elif not target.startswith("data:") and not (folder / local(name, target)).is_file():
                yield f"{name}: {target} is missing"
        for target in page.links:
            if re.match(r"[a-z]+:|//", target):
                continue
            path, _, anchor = target.partition("#")
            place = local(name, path) if path else name
            if (folder / place).is_dir():
                place = posixpath.join(place, "index.html")
            if not (folder / place).is_file():
                yield f"{name}: {target} leads nowhere"
            elif anchor and place in pages and unquote(anchor) not in pages[place].ids:
                yield f"{name}: {place} has no #{unquote(anchor)}"
    for path in folder.rglob("*.css"):
        for target in re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(folder)}: loads {target}"


def local(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(re.sub(r"[?#].*", "", target))))
