"""Small samples of real data, and a small model, included in the package: recipes and a page to try without downloads.

    folder = "sample:nsmc"        in [data] or [smoke.data] of a recipe
    regard train … --data sample:nsmc
    regard explore sample:korean-small

Each folder here is one sample; its README.md names the origin and the licence.
"""

from __future__ import annotations

from pathlib import Path

from regard.errors import UserError, suggest

PREFIX = "sample:"
HERE = Path(__file__).parent


def sample_folder(folder: str | Path) -> Path | None:
    """The folder of `sample:NAME`; None for any other text, which is a path."""
    if not str(folder).startswith(PREFIX):
        return None
    name = str(folder).removeprefix(PREFIX)
    names = [path.name for path in HERE.iterdir() if (path / "README.md").is_file()]
    if name not in names:
        raise UserError(f"{folder!s}: unknown sample; {suggest(name, names)}")
    return HERE / name
