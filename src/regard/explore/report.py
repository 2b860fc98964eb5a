"""Reports as single HTML files: of a trained run, and of one look at a model.

`write_report` renders the neutral `Results` that a task gives: headline metrics, the learning curve, the sections with
their tables, charts and examples, and the attention maps of a few inputs. `look_page` shows one look: its output,
before and after an intervention, and every head of every part. Both draw attention from a `Look`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import regard
from regard.explore import html
from regard.explore.chart import line_chart
from regard.explore.figures import TITLES, draw, main_part, output_table, over_image
from regard.explore.heatmap import heat_map
from regard.explore.html import Section, figure, paragraph
from regard.explore.images import gallery
from regard.explore.inside import Inside, Look
from regard.predict.bundle import Bundle
from regard.training import results as plain

LOSSES = {"loss": "training loss", "valid_loss": "validation loss"}


def write_report(path: str | os.PathLike[str], results: plain.Results, bundle: Bundle) -> Path:
    """Render `results` of the model in `bundle` as an HTML file."""
    parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    seconds = max((line["seconds"] for line in results.history), default=0.0)
    summary = [*results.headline, ("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [_curve(results)]
    sections += [Section(one.heading, "".join(map(_part, one.parts))) for one in results.sections]
    if results.attention:
        sections.append(_attention(Inside(bundle), results.attention))
    content = html.page(results.title, summary, sections, created=datetime.now(), version=regard.__version__)
    return html.write_page(path, content)


def _curve(results: plain.Results) -> Section:
    """Losses over the steps; a line of the history holds one of them, or both."""
    history = results.history
    lines = {title: [(line["step"], line[name]) for line in history if name in line] for name, title in LOSSES.items()}
    lines = {title: points for title, points in lines.items() if points}
    chart = line_chart(lines, title="Loss", x_label="step", y_label=results.loss_unit, log_y=True)
    last = [f"the last {title} is {points[-1][1]:.4f}" for title, points in lines.items()]
    steps = max((line["step"] for line in history), default=0)
    return Section("Learning curve", figure(chart, f"{steps:,} steps; {', '.join(last) or 'nothing was logged'}."))


def _part(part: plain.Part) -> str:
    match part:
        case str():
            return paragraph(part)
        case plain.Table():
            classes = None
            if part.preformatted:
                columns = list(zip(*part.rows, strict=True))
                classes = ["token" if any(isinstance(cell, str) for cell in column) else "number" for column in columns]
            return html.table(part.columns, part.rows, classes=classes or None)
        case plain.Examples():
            return html.examples_table(part.rows, graded=part.graded)
        case plain.Chart():
            chart = line_chart(part.lines, title=part.title, x_label=part.x_label, y_label=part.y_label)
            return figure(chart, part.caption)
        case plain.Matrix():
            sides = {"row_label": part.row_label, "column_label": part.column_label}
            return figure(heat_map(part.values, part.rows, part.columns, title=part.title, **sides), part.caption)
        case plain.Images():
            return figure(gallery(part.pixels, part.captions, title=part.title), part.caption)


def _attention(inside: Inside, inputs: Sequence[plain.AttentionInput]) -> Section:
    """The main map of every input; of the first one also all heads of all layers."""
    body = ""
    for index, one in enumerate(inputs):
        text, image = (one.input, None) if isinstance(one.input, str) else (None, one.input)
        look = inside.look(text, image=image, target=one.output, generate=False)
        title = one.title or " → ".join(part for part in (text, one.output) if part is not None) or "an image"
        body += figure(draw(look), f"{TITLES[main_part(look).name]}: {title}")
        for part in look.parts.values() if index == 0 and not over_image(look, main_part(look)) else ():
            causal = " Above the diagonal is the future, which is masked." if part.name == "decoder" else ""
            body += figure(draw(look, part=part.name, grid=True), f"Rows are queries, columns are keys.{causal}")
    return Section("Attention", body + html.attention_note())


def look_page(look: Look, before: Look | None = None) -> str:
    """One look as an HTML page; `before` is the same input without the changes."""
    title = look.input.text if look.input.text is not None else "An image"
    heads = sum(len(weights) for part in look.parts.values() for weights in part.weights)
    summary = [("model", look.inside.name), ("heads", f"{heads}"), ("positions", f"{len(look.input.source_labels)}")]
    sections = [Section("Changes", paragraph(str(look.changes)))] if look.changes else []
    sections.append(Section("Output", output_table(look.output, None if before is None else before.output)))
    main = main_part(look)
    for part in (main, *(part for part in look.parts.values() if part is not main)):
        caption = f"Rows: {len(part.rows)} queries. Columns: {len(part.columns)} keys."
        body = figure(draw(look, part=part.name), caption)
        if part.layers * max(len(weights) for weights in part.weights) > 1:
            body += figure(draw(look, part=part.name, grid=True), "Every layer and head, each with its own scale.")
        sections.append(Section(TITLES[part.name], body + (html.attention_note() if part is main else "")))
    return html.page(title, summary, sections, created=datetime.now(), version=regard.__version__)
