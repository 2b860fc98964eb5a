"""Explore: what every head of a model attends to, as it is and under interventions, in figures, reports and a page.

`Inside` opens a model; the other names draw. They take plain numbers and strings, so that the weights of any model can
be drawn. Each name is imported on first use, so that a figure does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.explore.changes import Changes
    from regard.explore.chart import line_chart
    from regard.explore.heatmap import head_grid, heat_map
    from regard.explore.html import Section, attention_note, examples_table, figure, page, paragraph, table, write_page
    from regard.explore.inside import Inside
    from regard.explore.svg import svg_file

__all__ = [
    "Changes", "Inside", "Section", "attention_note", "examples_table", "figure", "head_grid", "heat_map", "line_chart",
    "page", "paragraph", "svg_file", "table", "write_page",
]  # fmt: skip
_MODULES = {
    "Changes": "changes", "Inside": "inside", "head_grid": "heatmap", "heat_map": "heatmap", "line_chart": "chart",
    "svg_file": "svg",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"regard.explore.{_MODULES.get(name, 'html')}"), name)
