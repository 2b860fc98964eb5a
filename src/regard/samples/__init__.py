"""Small pieces of real data that come with Regard, so that a recipe can be tried at once.

    folder = "sample:nsmc"        in [data] or [smoke.data] of a recipe
    regard train … --data sample:nsmc

Each folder here is one sample; where its lines come from and under which licence stands in its README.md.
"""

from __future__ import annotations

from pathlib import Path

from regard.errors import UserError, suggest

PREFIX = "sample:"
HERE = Path(__file__).parent


def sample_folder(given: str | Path) -> Path | None:
    """The folder that `sample:NAME` means; None for any other text, which is a path."""
    if not str(given).startswith(PREFIX):
        return None
    name = str(given).removeprefix(PREFIX)
    names = [path.name for path in HERE.iterdir() if (path / "README.md").is_file()]
    if name not in names:
        raise UserError(f"data.folder = {given!s}: there is no such sample; {suggest(name, names)}")
    return HERE / name
