"""Looking inside: what every head of a model does, as it is and changed, and the figures that show it.

`Inside` opens a model and looks; `svg` draws, `report` writes. The last two take plain numbers and strings, so
anything that can hand over its weights can be drawn: a model of ours, one of somebody else's, or an array from a
paper. Only `Inside` and `Changes` need torch, so they are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.explore.chart import line_chart
from regard.explore.report import (
    Section,
    attention_note,
    examples_table,
    figure,
    page,
    paragraph,
    svg_file,
    table,
    token_label,
    write_page,
)
from regard.explore.svg import head_grid, heat_map

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.inside import Inside

__all__ = [
    "Changes",
    "Inside",
    "Section",
    "attention_note",
    "examples_table",
    "figure",
    "head_grid",
    "heat_map",
    "line_chart",
    "page",
    "paragraph",
    "svg_file",
    "table",
    "token_label",
    "write_page",
]


def __getattr__(name: str) -> object:
    if name == "Changes":
        from regard.explore.changes import Changes

        return Changes
    if name == "Inside":
        from regard.explore.inside import Inside

        return Inside
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
