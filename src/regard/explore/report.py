"""Reports as single HTML files: of a trained run, of one look at a model, and of its heads.

`write_report` renders the neutral `Results` that a task gives: headline metrics, the learning curve, the sections with
their tables, charts and examples, and the attention maps of a few inputs. `look_page` shows one look: its output,
before and after an intervention, and every head of every part. Both draw attention from a `Look`. `head_page` shows
the metrics of all heads: a cell per head, coloured by how much the loss rises without it and labelled with its pattern.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.explore import html, svg
from regard.explore.chart import line_chart
from regard.explore.figures import TITLES, draw, main_part, output_table, over_image
from regard.explore.heads import HeadMetrics
from regard.explore.heatmap import gallery, heat_map
from regard.explore.html import Section, figure, paragraph
from regard.explore.inside import Inside, Look
from regard.messages import localize
from regard.predict.bundle import Bundle
from regard.training import results as plain

LOSSES = {"loss": "training loss", "valid_loss": "validation loss"}
FRACTIONS = ("previous", "next", "self", "first", "last", "punctuation", "alignment", "positional")
LEGEND = (
    "Score: the fraction of its attention that follows the pattern. Entropy in nats. Fractions: how much attention the "
    "head pays to these keys. Off: change of the loss in nats per token when the head alone is switched off. Gradient: "
    "mean |dL/dgate| (Michel et al. 2019). Redundant heads all seem unimportant when they are switched off one by one."
)


def write_report(path: str | os.PathLike[str], results: plain.Results, bundle: Bundle) -> Path:
    """Render `results` of the model in `bundle` as an HTML file."""
    parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    seconds = max((line["seconds"] for line in results.history), default=0.0)
    summary = [*results.headline, ("training", localize(f"{seconds:.0f} s")), ("parameters", f"{parameters:,}")]
    sections = [_curve(results)]
    sections += [Section(one.heading, "".join(map(_part, one.parts))) for one in results.sections]
    if results.attention:
        sections.append(_attention(Inside(bundle), results.attention))
    return html.write_page(path, html.page(results.title, summary, sections))


def _curve(results: plain.Results) -> Section:
    """Losses over the steps; a line of the history holds one of them, or both."""
    history = results.history
    titles = {name: localize(title) for name, title in LOSSES.items()}
    lines = {title: [(line["step"], line[name]) for line in history if name in line] for name, title in titles.items()}
    lines = {title: points for title, points in lines.items() if points}
    chart = line_chart(lines, title="Loss", x_label="step", y_label=results.loss_unit, log_y=True)
    last = [localize(f"the last {title} is {points[-1][1]:.4f}") for title, points in lines.items()]
    steps = max((line["step"] for line in history), default=0)
    return Section("Learning curve", figure(chart, f"{steps:,} steps; {', '.join(last) or 'nothing was logged'}."))


def _part(part: plain.Part) -> str:
    match part:
        case str():
            return paragraph(part)
        case plain.Table():
            classes = None
            if part.preformatted:
                cells = list(zip(*part.rows, strict=True))
                classes = ["token" if any(isinstance(cell, str) for cell in column) else "number" for column in cells]
            fixed = len(part.columns) if part.fixed is None else part.fixed
            columns = [*map(localize, part.columns[:fixed]), *part.columns[fixed:]]
            return html.table(columns, part.rows, classes=classes or None)
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
    if not inside.anatomy.parts:
        return Section("Attention", paragraph(f"None: the layers have mixer = '{inside.config.mixer}'."))
    body = ""
    for index, one in enumerate(inputs):
        text, image = (one.input, None) if isinstance(one.input, str) else (None, one.input)
        look = inside.look(text, image=image, target=one.output, generate=False)
        title = one.title or " → ".join(part for part in (text, one.output) if part is not None) or localize("an image")
        body += figure(draw(look), f"{localize(TITLES[main_part(look).name])}: {title}")
        for part in look.parts.values() if index == 0 and not over_image(look, main_part(look)) else ():
            causal = ["Above the diagonal is the future, which is masked."] * (part.name == "decoder")
            caption = " ".join(map(localize, ["Rows are queries, columns are keys.", *causal]))
            body += figure(draw(look, part=part.name, grid=True), caption)
    return Section("Attention", body + html.attention_note())


def look_page(look: Look, before: Look | None = None) -> str:
    """One look as an HTML page; `before` is the same input without the changes."""
    title = look.input.text if look.input.text is not None else localize("An image")
    heads = sum(len(weights) for part in look.parts.values() for weights in part.weights)
    summary = [("model", look.inside.name), ("heads", f"{heads}"), ("positions", f"{len(look.input.source_labels)}")]
    sections = [Section("Changes", paragraph(str(look.changes)))] if look.changes else []
    sections.append(Section("Output", output_table(look.output, None if before is None else before.output)))
    main = main_part(look)
    for part in (main, *(part for part in look.parts.values() if part is not main)):
        caption = f"Rows: {len(part.rows)} queries. Columns: {len(part.columns)} keys."
        body = figure(draw(look, part=part.name), caption)
        if sum(map(len, part.weights)) > 1:
            body += figure(draw(look, part=part.name, grid=True), "Every layer and head, each with its own scale.")
        sections.append(Section(TITLES[part.name], body + (html.attention_note() if part is main else "")))
    return html.page(title, summary, sections)


def head_map(metrics: Sequence[HeadMetrics], part: str) -> str:
    """One part, layers down and heads across: colour and number are a head's importance, the label its pattern."""
    own = [one for one in metrics if one.part == part]
    measured = all(one.loss_change is not None for one in metrics)
    layers, heads = max(one.layer for one in own) + 1, max(one.head for one in own) + 1
    table = np.full((layers, heads), np.nan)
    for one in own:
        table[one.layer, one.head] = one.gradient if one.loss_change is None else one.loss_change  # None is NaN
    levels, wide, tall, left, top = svg.colour_levels(table), 112, 46, 76, 66
    parts = [svg.label(left + (j + 0.5) * wide, top - 8, localize(f"head {j}"), "mute", "middle") for j in range(heads)]
    parts += [svg.label(16, top + (i + 0.5) * tall + 4, localize(f"layer {i}"), "mute") for i in range(layers)]
    for one in own:
        level, value = int(levels[one.layer, one.head]), table[one.layer, one.head]
        pattern, score = one.pattern
        text, x, y = f"{localize(pattern)} {score:.2f}", left + one.head * wide, top + one.layer * tall
        kind = "" if level == svg.LEVELS else "mid" * (level > 14) + " on" * (level > 20)
        tip = html.escape(localize(f"layer {one.layer}, head {one.head}") + f": {text}, {value:.4f}")
        box = f'x="{x}" y="{y}" width="{wide - 2}" height="{tall - 2}" class="k{level}"'
        parts.append(f"<rect {box}><title>{tip}</title></rect>")
        for at, line in ((18, html.token_label(text, wide + 34)), (34, f"{value:+.4f}")):
            parts.append(svg.label(x + wide / 2 - 1, y + at, line, f"cell {kind}", "middle"))
    what = "change of the loss when the head is off" if measured else "gradient of the loss at the head's gate"
    note = localize(f"Colour and number: {what}. Label: its pattern.")
    low, high = (svg.short_number(float(f"{end:.2g}")) for end in svg.weight_range(table))
    bottom = top + layers * tall
    parts.append(svg.colour_legend(left, bottom + 14, low, high, [note]))
    width = left + max(heads * wide + 14, 300, 16 + html.text_width(note))
    about = localize(f"{layers} layers of up to {heads} heads.") + f" {note}"
    return svg.frame(width, bottom + 64, TITLES[part], about, "".join(parts))


def head_maps(metrics: Sequence[HeadMetrics]) -> str:
    """All parts in one figure, one below the other."""
    body, wide, top = "", 0.0, 0.0
    for part in dict.fromkeys(one.part for one in metrics):
        figure = head_map(metrics, part)
        width, height = svg.figure_size(figure)
        body += f'<g transform="translate(0 {top:.0f})">{figure}</g>'
        wide, top = max(wide, width), top + height
    return svg.frame(wide, top, "", "One map for each part.", body, name="Heads")


def head_page(facts: Mapping[str, Any], metrics: Sequence[HeadMetrics]) -> str:
    """The maps and a table of all metrics, as an HTML page."""
    summary = [("model", str(facts["model"])), ("heads", f"{len(metrics)}"), ("examples", f"{facts['examples']:,}")]
    if facts["loss"] is not None:
        summary.append(("loss", f"{facts['loss']:.4f}"))
    sections = []
    for part in dict.fromkeys(one.part for one in metrics):
        sections.append(Section(TITLES[part], figure(head_map(metrics, part), "Each cell is a head.")))
    headers = ["head", "pattern", "score", "entropy", "distance", *FRACTIONS, "off", "gradient"]
    rows: list[list[object]] = []
    for one in metrics:
        pattern, score = one.pattern
        numbers = [score, one.entropy, one.distance, *(one.fractions.get(name) for name in FRACTIONS)]
        rounded = [None if number is None else round(number, 3) for number in numbers]
        rows.append([one.name, localize(pattern), *rounded, one.loss_change, one.gradient])
    body = html.table([*map(localize, headers)], rows) + paragraph(LEGEND) + html.attention_note()
    sections.append(Section("All metrics", body))
    return html.page(localize("Attention heads"), summary, sections)
