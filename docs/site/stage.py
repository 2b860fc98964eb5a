"""The sources of the site, gathered in one folder for Sphinx.

    docs/*.md, docs/howto, docs/explanation, docs/ko     where they are in docs
    src/regard/lessons/*.md                              learn/
    generated pages                                      reference/

The navigation is that of docs/README.md: a section for each of its headings, with the pages that it links to. Links
between the sources work on GitHub and in an editor; here they are led to the staged pages, and links to other files of
the repository to the repository's address, or, where it is not known, to copies of the files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import api_page
import commands_page
import errors_page
import settings_page

from regard.lessons.course import Lesson, lessons
from regard.lessons.notebook import write_notebook

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# owner/name on GitHub: in GitHub Actions it is set; elsewhere there is none until someone sets it
REPOSITORY = os.environ.get("REGARD_REPOSITORY") or os.environ.get("GITHUB_REPOSITORY") or ""
BRANCH = "gh-pages"  # where the workflow publishes the site, and with it the notebooks that Colab opens
WORDS = {
    "en": {"colab": "Open in Colab", "notebook": "Download the notebook", "other": "한국어", "minutes": "{} minutes"},
    "ko": {"colab": "Colab에서 열기", "notebook": "노트북 내려받기", "other": "English", "minutes": "{}분"},
}
GENERATED_TABLE = """| generated | |
|---|---|
| [every command](reference/commands.md) | options and examples, from the parsers |
| [every recipe key](reference/keys.md) | type, default, meaning |
| [Python API](reference/api.md) | from docstrings |
| [errors](reference/errors.md) | every message, and what raises it |

"""
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`change` applied to what is not inside a fenced block."""
    parts, end = [], 0
    for match in _FENCE.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def tree(pages: Iterable[str], caption: str = "") -> str:
    """A part of the navigation."""
    head = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(pages) + "\n```\n"


def _targets(text: str) -> Iterator[str]:
    """The pages that a text links to, without their extension."""
    for match in _LINK.finditer(text):
        if (page := match[2].partition("#")[0]).endswith(".md"):
            yield page.removesuffix(".md")


def is_korean(page: str) -> bool:
    return page.endswith(".ko") or page.startswith("ko/")


class Stage:
    """The folder with the sources, and which file of the repository became which page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: list[str] = []  # links that lead nowhere
        shutil.rmtree(folder, ignore_errors=True)
        self.pages: dict[Path, str] = {}  # file of the repository: page, as a path in the folder
        for path in sorted(DOCS.rglob("*.md")):
            self.pages[path] = str(path.relative_to(DOCS))
        self.pages[DOCS / "README.md"] = "index.md"
        for lesson in lessons():
            for language in WORDS:
                self.pages[lesson.path(language)] = f"learn/{lesson.path(language).name}"
        for name in ("README.md", "README.ko.md", "CHANGELOG.md", "CONTRIBUTING.md"):
            self.pages[ROOT / name] = name.lower()

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    # --- links

    def link(self, source: Path, page: str, target: str) -> str | None:
        """The target of a link of `source` as seen from `page`; None: there is nothing to link to."""
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return target
        name, _, anchor = target.partition("#")
        path = (source.parent / name).resolve()
        end = f"#{anchor}" if anchor else ""
        here = (self.folder / page).parent
        path = DOCS / "README.md" if path == DOCS else path
        if path in self.pages:
            return os.path.relpath(self.folder / self.pages[path], here) + end
        if REPOSITORY and path.exists():
            kind = "tree" if path.is_dir() else "blob"
            return f"https://github.com/{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}{end}"
        if not path.exists():
            self.missing.append(f"{source.relative_to(ROOT)}: {target} leads nowhere")
        if not path.is_file():
            return None
        copy = self.folder / "files" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        return os.path.relpath(copy, here)

    def image(self, source: Path, page: str, target: str) -> str:
        path = (source.parent / target).resolve()
        copy = (self.folder / page).parent / "images" / path.name
        for place in (copy, self.folder / "extra" / Path(page).parent / "images" / path.name):  # the second: for <img>
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        return f"images/{path.name}"

    def rewrite(self, source: Path, page: str, text: str) -> str:
        """The text of a page with its links and images led to the staged files."""

        def change(prose: str) -> str:
            def one(match: re.Match[str]) -> str:
                if match[1].startswith("!") and not match[2].startswith(("https:", "http:")):
                    return f"{match[1]}{self.image(source, page, match[2])}{match[3]}"
                target = self.link(source, page, match[2])
                return match[1][1:-2] if target is None else f"{match[1]}{target}{match[3]}"

            prose = _LINK.sub(one, prose)
            return re.sub(
                r'(<img [^>]*src=")((?!https?:|data:)[^"]+)', lambda m: m[1] + self.image(source, page, m[2]), prose
            )

        return outside_code(text, change)

    # --- pages

    def lesson(self, lesson: Lesson, language: str) -> str:
        """The text of a lesson with its links above the first section: the other language, the notebook, Colab."""
        source = lesson.path(language)
        text = self.rewrite(source, self.pages[source], lesson.text(language))
        words, other = WORDS[language], "ko" if language == "en" else "en"
        book = f"{lesson.name}.{language}.ipynb"
        install = f"git+https://github.com/{REPOSITORY}" if REPOSITORY else None
        path = self.folder / "extra" / "notebooks" / book
        path.parent.mkdir(parents=True, exist_ok=True)
        write_notebook(path, lesson, language, install)
        links = [
            words["minutes"].format(lesson.minutes(language)),
            f"[{words['other']}]({lesson.name}.{other}.md)",
            f'<a href="../notebooks/{book}" download>{words["notebook"]}</a>',
        ]
        if REPOSITORY:
            address = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{BRANCH}/notebooks/{book}"
            links.append(f"[{words['colab']}]({address})")
        title, _, rest = text.partition("\n")
        return f"{title}\n\n{{.lesson-links}}\n{' · '.join(links)}\n{rest}"

    def generate(self) -> None:
        """The pages of the reference."""
        self.write("reference/keys.md", settings_page.settings_page())
        self.write("reference/errors.md", errors_page.errors_page())
        self.write(
            "reference/commands.md",
            commands_page.overview_page() + tree(f"commands/{n}" for n in commands_page.COMMANDS),
        )
        for name in commands_page.COMMANDS:
            self.write(f"reference/commands/{name}.md", commands_page.command_page(name))
        packages = (*api_page.PACKAGES, *api_page.EXTRA_MODULES)
        self.write("reference/api.md", api_page.names_page() + tree(f"api/{name}" for name in packages))
        for name in packages:
            self.write(f"reference/api/{name}.md", api_page.package_page(name))

    def navigation(self, text: str) -> str:
        """A tree of pages for each section of the index, those that it links to, and one of the Korean pages."""
        trees, listed = dict[str, list[str]](), set[str]()
        korean = dict.fromkeys(page for page in _targets(text) if is_korean(page))
        for section in re.split(r"^## ", text, flags=re.M)[1:]:
            title = section.splitlines()[0].strip()
            pages = dict.fromkeys(page for page in _targets(section) if page not in listed and not is_korean(page))
            listed.update(pages)
            trees.setdefault(title, [*pages])
            if title == "Learn":
                trees["한국어"] = [*korean, "readme.ko"]
        trees["Project"] = ["readme", "changelog", "contributing"]
        return "".join(tree(pages, title) for title, pages in trees.items() if pages)

    def run(self) -> None:
        for source, page in self.pages.items():
            by_name = {lesson.path(language): (lesson, language) for lesson in lessons() for language in WORDS}
            if source in by_name:
                text = self.lesson(*by_name[source])
            else:
                text = self.rewrite(source, page, source.read_text(encoding="utf-8"))
            self.write(page, text)
        self.generate()
        index = self.folder / "index.md"
        text = re.sub(r"^`make docs`.*?\n\n", GENERATED_TABLE, index.read_text(encoding="utf-8"), flags=re.M | re.S)
        index.write_text(text + self.navigation(text), encoding="utf-8")
        static = self.folder / "_static"
        static.mkdir(exist_ok=True)
        for name in ("site.css", "icon.svg"):
            shutil.copyfile(Path(__file__).parent / name, static / name)
