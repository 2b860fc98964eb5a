"""Looking inside: figures of attention and training, and the page that shows them.

`svg` draws, `report` writes. Both take plain numbers and strings, so anything that can hand over its
weights can be looked at: a model of ours, one of somebody else's, or an array from a paper.
"""

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
from regard.explore.svg import head_grid, heat_map, line_chart

__all__ = [
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
