"""Explore: what every head of a model attends to, as it is and under interventions, in figures, reports and a page.

`Inside` opens a model; the other names draw. They take plain numbers and strings, so that the weights of any model can
be drawn. Each name is imported on first use, so that a figure does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.explore.changes import Changes as Changes
    from regard.explore.chart import line_chart as line_chart
    from regard.explore.heatmap import head_grid as head_grid
    from regard.explore.heatmap import heat_map as heat_map
    from regard.explore.html import Section as Section
    from regard.explore.html import attention_note as attention_note
    from regard.explore.html import examples_table as examples_table
    from regard.explore.html import figure as figure
    from regard.explore.html import page as page
    from regard.explore.html import paragraph as paragraph
    from regard.explore.html import table as table
    from regard.explore.html import token_label as token_label
    from regard.explore.html import write_page as write_page
    from regard.explore.inside import Inside as Inside
    from regard.explore.svg import svg_file as svg_file

_HOME = {
    "changes": ("Changes",),
    "chart": ("line_chart",),
    "heatmap": ("head_grid", "heat_map"),
    "html": (
        "Section", "attention_note", "examples_table", "figure", "page", "paragraph", "table", "token_label",
        "write_page",
    ),
    "inside": ("Inside",),
    "svg": ("svg_file",),
}  # fmt: skip
_MODULES = {name: f"regard.explore.{module}" for module, names in _HOME.items() for name in names}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
