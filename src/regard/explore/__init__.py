"""Explore: what every head of a model attends to, as it is and under interventions, in figures, reports and a page.

`Inside` opens a model; `heatmap`, `images`, `chart` and `html` draw. The latter take plain numbers and strings, so
that the weights of any model can be drawn. Only `Inside` and `Changes` need torch: they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.explore.chart import line_chart
from regard.explore.heatmap import head_grid, heat_map
from regard.explore.html import (
    Section,
    attention_note,
    examples_table,
    figure,
    page,
    paragraph,
    table,
    token_label,
    write_page,
)
from regard.explore.svg import svg_file

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
