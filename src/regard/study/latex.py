"""The table of a study for a paper, in LaTeX.

Names and notes are texts of others, in which some characters have a meaning for LaTeX: ten are commands (backslash, { }
$ & # _ % ^ ~), `[` after a line break would begin an option, and two hyphens would be a dash. Each is written so that
it is printed as it is. The rules are those of the package booktabs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from regard.study.formats import caption, cells, headings, minus, remarks, shown
from regard.study.table import RowResult, StudyTable

LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "[": "{[}", "]": "{]}", "*": "{*}", '"': r"\char34{}", "±": r"$\pm$", "–": "--",
    "→": r"$\rightarrow$", "−": "$-$",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Text that LaTeX prints as it is: a bracket after a line break is no option, two hyphens are no dash."""
    return "".join(LATEX.get(char, char) for char in re.sub("-(?=-)", "-\0", text)).replace("\0", "{}")


def latex(table: StudyTable) -> str:
    """A table for a paper, with the rules of the package booktabs."""
    columns = shown(table)

    def line(texts: Sequence[str]) -> str:
        return " & ".join(texts) + r" \\"

    def row_line(row: RowResult) -> str:
        texts = zip(columns, cells(table, row, columns), strict=True)
        return line([latex_text(text if one.left else minus(text)) for one, text in texts])

    base, *rest = [row_line(row) for row in table.rows]
    notes = "".join(f"  {latex_text(note)}\\par\n" for note in remarks(table))
    notes = f"  \\par\\medskip\\raggedright\n{notes}" if notes else ""
    body = "".join(f"    {one}\n" for one in (r"\midrule" * bool(rest), *rest) if one)
    return (
        "% in the preamble: \\usepackage{booktabs}; for Korean, Chinese or Japanese names compile with LuaLaTeX\n"
        f"\\begin{{table}}\n  \\centering\\footnotesize\n  \\caption{{{latex_text(caption(table))}}}\n"
        f"  \\begin{{tabular}}{{{''.join('l' if one.left else 'r' for one in columns)}}}\n    \\toprule\n"
        f"    {line([*map(latex_text, headings(table, columns))])}\n    \\midrule\n    {base}\n{body}"
        f"    \\bottomrule\n  \\end{{tabular}}\n{notes}\\end{{table}}\n"
    )
