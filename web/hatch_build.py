"""Build the pages as part of the wheel: `pip install .` of a fresh clone brings `regard explore` with it.

The pages are what `make page` leaves in src/regard/explore/page, that of `regard serve` included, and, for
`regard export --web`, in src/regard/interop/page. Where one is missing or older than its sources, npm builds them.
Without npm, or without a network for it, the wheel has no pages: everything else works, and these commands say what is
missing. An editable install is a checkout, where `make page` builds them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "src", "public", "browser", "index.html", "playground.html", "package-lock.json", "vite.config.ts",
    "vite.browser.config.ts", "vite.standalone.config.ts", "svelte.config.js",
)  # fmt: skip
PAGES = ("src/regard/explore/page/index.html", "src/regard/interop/page/index.html")


class PageHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or up_to_date(root):
            return
        why = build(root / "web")
        if why is not None:
            self.app.display_warning(
                f"the pages: {why}; regard explore and export --web are missing, everything else works"
            )


def up_to_date(root: Path) -> bool:
    pages = [root / name for name in PAGES]
    if not all(page.is_file() for page in pages):
        return False
    sources = [root / "web" / name for name in SOURCES]
    files = [file for one in sources for file in (one.rglob("*") if one.is_dir() else [one]) if file.is_file()]
    oldest = min(page.stat().st_mtime for page in pages)
    return all(file.stat().st_mtime <= oldest for file in files)


def build(web: Path) -> str | None:
    """None when the page is built, else why it is not."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm not found (install Node.js 20.19 or newer)"
    if not (web / "package.json").is_file():
        return "the folder web is missing"
    lock, installed = web / "package-lock.json", web / "node_modules/.package-lock.json"
    ready = installed.is_file() and installed.stat().st_mtime > lock.stat().st_mtime
    for words in ([] if ready else [["ci", "--silent"]]) + [["run", "--silent", "build"]]:
        done = subprocess.run([npm, *words], cwd=web, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return f"npm {words[0]} failed" + (f": {said[-1][:200]}" if said else "")
    return None
