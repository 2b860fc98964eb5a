"""The figures of a study as SVG.

differences         a forest plot: the difference of every row to the base   (`regard.study.forest`)
curves              learning curves, a panel per row                         (`regard.study.curves`)
parameters, flops   quality against cost, a point per row                    (`regard.study.scatter`)
"""

from __future__ import annotations

from regard.study.curves import curves
from regard.study.forest import differences
from regard.study.marks import WIDE
from regard.study.scatter import against
from regard.study.table import StudyTable


def figures(table: StudyTable, width: int = WIDE) -> dict[str, str]:
    """All figures of a study by the name of their file; WIDE or NARROW."""
    return {
        "differences": differences(table, width),
        "curves": curves(table, width),
        "parameters": against(table, "parameters", width),
        "flops": against(table, "flops", width),
    }
