"""The report of a study as a page that is one file, and all files of a study's results.

`write_all` writes into the folder of the study

    table.md, table.csv, table.json, table.tex      the table (`regard.study.formats`, `.latex`)
    report.html                                     the table, the figures and examples
    figures/NAME.svg, and .png if asked for         differences, curves, parameters, flops (`regard.study.figures`)

The page has the design of the report of a run: no scripts, nothing loaded, light and dark, phone and paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from regard.explore import html, svg
from regard.explore.html import Section, escape, figure, paragraph
from regard.files import make_folder, write_atomically
from regard.study import formats
from regard.study.figures import figures
from regard.study.latex import latex
from regard.study.marks import NARROW
from regard.study.table import Disagreement, RowResult, StudyTable

MOST_EXAMPLES = 20
SIGNS = {"better": "▲", "worse": "▼", "not decided": "○", formats.BASE: "◆"}
EXAMPLES = (
    "Test items whose scores differ most between rows. Outputs are those of the first seed, scores are means over "
    "seeds. Marked: what the reference does not have."
)
SECOND = {1: "training FLOPs", 4: "sign flips"}  # columns whose second line needs its name on a phone
READING = (
    "Each row is trained with the same seeds as the base, and differences are paired by seed, so that what a seed does "
    "to both cancels. The interval is the t-interval of the mean difference. A row is called better or worse if the "
    "p-value of its paired t-test, corrected for the number of rows by Holm's method, is below 0.05. “Not decided” is "
    "not the same as “no difference”: the seeds that were trained cannot tell."
)


def write_all(folder: str | Path, table: StudyTable, *, png: bool = False) -> list[Path]:
    """Write every format of the results into the folder of a study; `png` also renders the figures as PNG."""
    folder = Path(folder)
    drawn = figures(table)
    content = json.dumps(formats.to_json(table), ensure_ascii=False, indent=1, allow_nan=False)
    files = {
        folder / "table.md": formats.markdown(table).encode("utf-8", "replace"),
        folder / "table.csv": formats.to_csv(table).encode("utf-8", "replace"),
        folder / "table.json": f"{content}\n".encode("utf-8", "replace"),
        folder / "table.tex": latex(table).encode("utf-8", "replace"),
        folder / "report.html": page(table, drawn).encode("utf-8", "replace"),
    }
    for name, one in drawn.items():
        files[folder / "figures" / f"{name}.svg"] = svg.document(one)
        if png:
            files[folder / "figures" / f"{name}.png"] = svg.to_png(one)
    make_folder(folder / "figures")
    for path, data in files.items():
        write_atomically(path, data)
    return list(files)


def page(table: StudyTable, drawn: Mapping[str, str] | None = None) -> str:
    """The report; `drawn` are the figures, where they exist already."""
    drawn = drawn or figures(table)
    small = figures(table, NARROW)
    base, others = table.rows[0], table.rows[1:]
    runs = [len(row.scores) for row in table.rows]
    lacking = [len(row.failed) + len(row.pending) for row in table.rows]
    summary = [
        (f"{formats.one_line(base.name)}: {formats.metric_name(table)}", formats.number(table, base.mean) or "–")
    ]
    summary.append(("runs with a score", f"{sum(runs)}" + (f" of {sum(runs) + sum(lacking)}" if any(lacking) else "")))
    if others:
        verdicts = [row.verdict for row in others]
        summary += [(word, f"{verdicts.count(word)}") for word in ("better", "worse", "not decided")]
    compared = [row.difference for row in others if row.difference is not None]
    paired = bool(compared) and all(one.over == "seeds" for one in compared)  # else a remark says what was compared
    reading = paragraph(READING) if paired else ""
    about = f"{table.metric} on {table.test}; {'higher' if table.higher else 'lower'} is better."
    sections = [Section("Results", paragraph(about) + results_table(table) + reading)]
    if remarks := formats.remarks(table):
        items = "".join(f"<li>{escape(one)}</li>" for one in remarks)
        sections.append(Section("Remarks", f"<ul>{items}</ul>"))
    if compared:
        text = "Mean difference to the base with its 95 % interval, the best row first."
        sections.append(Section("Differences", _figure("differences", drawn, small, text)))
    if any(line for row in table.rows for line in row.curves.values()):
        text = "All panels have the same axes."
        sections.append(Section("Learning curves", _figure("curves", drawn, small, text)))
    text = "A row further up at the same cost is better." if table.higher else "Lower is better."
    scored = [row for row in table.rows if row.mean is not None]
    costs = [name for name in ("parameters", "flops") if any(getattr(row, name) for row in scored)]
    if costs:
        body = "".join(_figure(name, drawn, small, text) for name in costs)
        sections.append(Section("Quality and cost", body))
    if table.disagreements:
        body = paragraph(EXAMPLES)
        body += "".join(_disagreement(one, table.item_metric) for one in table.disagreements[:MOST_EXAMPLES])
        sections.append(Section("Where rows disagree", body))
    return html.page(formats.one_line(table.title), summary, sections)


def _figure(name: str, drawn: Mapping[str, str], small: Mapping[str, str], caption: str) -> str:
    """A figure in two widths, of which the page shows the one that fits."""
    return figure(f'<div class="wide">{drawn[name]}</div><div class="narrow">{small[name]}</div>', caption)


def results_table(table: StudyTable) -> str:
    """The table with two lines per cell, so that it fits on a page; on a phone every row is a block."""
    heads = [("Row", "changes"), ("Parameters", "training FLOPs")]
    heads += [
        (f"{formats.metric_name(table)} ± sd", "seeds"),
        ("Difference", "95 % interval"),
        ("p, Holm", "sign flips"),
    ]
    heads += [("Verdict", "seeds to decide")]
    has_paper = any(row.paper is not None for row in table.rows)
    heads += [("Paper", "")] if has_paper else []
    rows = [_cells(table, row)[: len(heads)] for row in table.rows]
    used = [at for at in range(len(heads)) if any(cells[at][1] for cells in rows)]
    head = ""
    for at in used:
        style = rows[0][at][0].split()[0]
        head += f'<th scope="col" class="{style}">{escape(heads[at][0])}<span>{escape(heads[at][1])}</span></th>'
    body = ""
    for cells in rows:
        body += "<tr>"
        for at in used:
            style, first, second = cells[at]
            style += " none" * (not first)
            name = f' data-name="{escape(heads[at][0])}"' if at else ""
            what = f' data-name="{SECOND[at]}"' if at in SECOND else ""
            below = f"<span{what}>{escape(second)}</span>" if second else ""
            body += f'<td class="{style.strip()}"{name}>{escape(first) or "–"}{below}</td>'
        body += "</tr>"
    return html.scrolling(f'<table class="study"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _cells(table: StudyTable, row: RowResult) -> list[tuple[str, str, str]]:
    """(class, first line, second line) of every cell."""
    by_name = {one.heading: one.text(table, row) for one in formats.COLUMNS if one.text}
    said = formats.verdict(table, row)
    score, _, seeds = by_name["score"].partition(" (")
    difference, _, interval = formats.minus(by_name["difference [95 %]"]).partition(" ")
    boot = formats.minus(by_name["bootstrap [95 %]"])
    needed = by_name["seeds to decide"]
    style = said if said in ("better", "worse") else "unknown" if said != formats.BASE else ""
    return [
        ("name", by_name["row"], by_name["changes"]),
        ("number", by_name["parameters"], by_name["training FLOPs"]),
        ("number", score, _counted(seeds.removesuffix(")"))),
        ("number", difference, f"{interval}\nbootstrap {boot}" if boot else interval),
        ("number", by_name["p (Holm)"], by_name["sign-flip p"]),
        (f"verdict {style}", f"{SIGNS.get(said, '')} {said}".strip(), f"{needed} seeds" if needed else ""),
        ("number", by_name["paper"], ""),
    ]


def _counted(seeds: str) -> str:
    """ "6" and "4, 2 pending" with their unit."""
    number, _, rest = seeds.partition(", ")
    if not number.isdecimal():
        return seeds
    return f"{number} {'seed' if number == '1' else 'seeds'}" + f", {rest}" * bool(rest)


def _disagreement(one: Disagreement, metric: str) -> str:
    """Rows with the same output are one line, the best score first."""
    together: dict[tuple[str, float | None], list[str]] = {}
    for name, output in one.outputs.items():
        together.setdefault((output, one.scores.get(name)), []).append(formats.one_line(name))
    order = sorted(together.items(), key=lambda item: -(item[0][1] or 0.0))
    lines = [(", ".join(names), output, "" if s is None else f"{s:.1f}") for (output, s), names in order]
    return html.outputs_table(one.input, one.reference, lines, metric or "Score")
