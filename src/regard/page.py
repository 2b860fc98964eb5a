"""The built pages: `npm run build` leaves those of `regard explore` and `regard serve` in one folder, and that of
`regard export --web` in another.

They load nothing from other hosts, and the headers below make the browser enforce it (the exported page has its own).
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent / "explore" / "page"
EXPORTED = Path(__file__).parent / "interop" / "page"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def page_missing(name: str = "index.html", folder: Path | None = None) -> str | None:
    """Why there is no page, or None if there is one."""
    if ((folder or PAGE) / name).is_file():
        return None
    checkout = (PAGE.parents[3] / "web" / "package.json").is_file()  # src/regard/explore/page, beside web
    where = "in this checkout" if checkout else "here, because there was no npm when Regard was installed"
    how = "make page" if checkout else "pip install --force-reinstall --no-deps  and the folder or address as before"
    return (
        f"the page is not built {where}: install Node.js 20.19 or newer with npm, then  {how} ; "
        "everything else works without it"
    )
