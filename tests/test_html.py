"""Figures and the report page: well-formed, inert, self-contained, bounded, and true to the numbers."""

import base64
import itertools
import math
import os
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from datetime import datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.explore import head_grid, heat_map, html, line_chart, svg_file
from regard.explore.chart import make_axis
from regard.explore.svg import DARK, LEVELS, LIGHT

NS = "{http://www.w3.org/2000/svg}"
ODD = ["나는", "😀", "👨‍👩‍👧", "שלום", "<s>", "<script>alert(1)</script>", "\"&'"]
ODD += [" ", "", "\n", "\x00", "\ud800", "\u200b", "x" * 500]
NAMES = [f"token{i}" for i in range(1500)]


def softmax(*shape):
    weights = np.exp(np.random.default_rng(0).normal(size=shape) * 3)
    return weights / weights.sum(-1, keepdims=True)


def square(weights, **options):
    return heat_map(weights, NAMES[: len(weights)], NAMES[: len(weights[0])], **options)


def read(markup):
    """HTML or SVG as a tree, which being well-formed XML it must allow; nothing in it may run or load anything."""
    assert "@import" not in markup and "url(" not in markup
    assert set(re.findall(r"https?://[^\s\"'<)]*", markup)) <= {NS.strip("{}")}
    root = ET.fromstring(markup)
    for element in root.iter():
        assert element.tag.removeprefix(NS) not in ("script", "img", "b", "i", "iframe")
        for name, value in element.attrib.items():
            assert not name.startswith("on") and (name not in ("href", "src") or value.startswith(("data:", "#")))
    return root


def parse(svg):
    """The figure as a tree, after checking what must hold for every figure."""
    root = read(svg)
    assert root.get("role") == "img" and root.get("aria-label")
    assert root[0].tag == NS + "title" and root[0].text and root[1].tag == NS + "desc"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    positions = [value for element in root.iter() for name, value in element.attrib.items() if name != "href"]
    assert not re.search(r"\bnan|\binf", " ".join(positions))
    return root


def all_text(root, tag):
    return [element.text for element in root.iter(NS + tag)]


def images(root, name):
    """The images of one theme: palette indices [rows, columns] and colours, read as the PNG standard says."""
    for element in root.iterfind(f".//{NS}image[@class='{name}']"):
        data = base64.b64decode(element.get("href").removeprefix("data:image/png;base64,"), validate=True)
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        at, chunks = 8, {}
        while at < len(data):
            size, kind = struct.unpack(">I4s", data[at : at + 8])
            chunks[kind], end = data[at + 8 : at + 8 + size], at + 12 + size
            assert data[end - 4 : end] == struct.pack(">I", zlib.crc32(kind + chunks[kind]))
            at = end
        width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
        rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
        assert (depth, colour) == (8, 3) and (rows[:, 0] == 0).all()  # a palette, and no filter
        yield rows[:, 1:].astype(int), np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)


def luminance(colour):
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("palette", "sign"), [(LIGHT, -1), (DARK, 1)])
def test_colour_scale_is_even_in_lightness(palette, sign):
    """CIE L* is another measure of lightness than the one the scale was made in; it must be nearly linear too."""
    steps = sign * np.diff([116 * luminance(colour) ** (1 / 3) - 16 for colour in palette[:LEVELS]])
    assert steps.min() > 0.5 * steps.mean() and steps.max() < 1.6 * steps.mean() and steps.sum() > 60


def test_numbers_in_cells_are_readable_in_both_themes():
    root = parse(square(np.linspace(0, 1, 64).reshape(8, 8)))
    classes = [e.get("class", "") for e in root.iter() if e.tag == NS + "rect" or "cell" in e.get("class", "")]
    pairs = [(int(cell[1:]), kind) for cell, kind in itertools.pairwise(classes) if "cell" in kind]
    assert len(pairs) > 50
    for level, kind in pairs:
        for ink, cell in ((float("on" in kind), LIGHT[level]), (float("mid" not in kind), DARK[level])):
            low, high = sorted((ink, luminance(cell)))
            assert (high + 0.05) / (low + 0.05) >= 4.5


def test_heat_map_shows_every_label_and_value():
    weights, rows, columns = softmax(5, 7), list("2021년"), ["<s>", "March", "3rd", ",", "2021", "</s>", "끝"]
    root = parse(heat_map(weights, rows, columns, title="정렬", row_label="target", column_label="source"))
    assert {*rows, *columns, "정렬", "target", "source"} <= set(all_text(root, "text"))
    for cell, ((i, j), value) in zip(root.iter(NS + "rect"), np.ndenumerate(weights), strict=True):
        assert cell[0].text.replace("\u200e", "") == f"{rows[i]} → {columns[j]}: {value:.3f}"
        assert abs(int(cell.get("class")[1:]) - value / weights.max() * (LEVELS - 1)) <= 0.51


@pytest.mark.parametrize("count", [1, 2, 9, 30, 60])
def test_up_to_sixty_tokens_every_label_is_there_and_cells_lie_inside(count):
    svg = square(softmax(count, count), title="t")
    root = parse(svg)
    group = next(g for g in root.iter(NS + "g") if "translate" in g.get("transform", ""))
    left, top = (float(number) for number in re.findall(r"[\d.]+", group.get("transform")))
    for cell in group.iter(NS + "rect"):
        x, y, width, height = (float(cell.get(name)) for name in ("x", "y", "width", "height"))
        assert min(width, height) >= 11 and left + x + width <= float(root.get("width"))
        assert top + y + height <= float(root.get("height"))
    assert set(NAMES[:count]) <= set(all_text(root, "text")) and len(svg.encode()) < 600_000


def test_odd_tokens_are_text():
    svg = heat_map(softmax(len(ODD), len(ODD)), ODD, ODD, title="<script>x</script>", row_label="<i>", column_label="&")
    root = parse(svg.encode("utf-8").decode())  # no lone surrogate is left
    labels = set(all_text(root, "text"))
    assert {*ODD[:5], "\"&'", "␣", "∅", "↵", "␀", "\ufffd", "U+200B", "<i>", "&"} <= labels
    assert any(label.startswith("xxx") and label.endswith("…") for label in labels)
    assert "<script" not in svg and any("<script>alert(1)</script>" in tip for tip in all_text(root, "title"))


def test_empty_single_constant_and_negative_maps():
    for rows, columns in ((0, 0), (0, 3), (3, 0)):
        assert "no tokens" in heat_map(np.zeros((rows, columns)), NAMES[:rows], NAMES[:columns])
        assert "no tokens" in head_grid(np.zeros((2, 2, rows, columns)), NAMES[:rows], NAMES[:columns])
    assert parse(heat_map([], [], [])) and parse(head_grid([], [], []))
    assert "token0 \u200e→ token0\u200e: 1.000" in all_text(parse(square([[1.0]])), "title")
    for weights, classes in (([[0, 0]], ["k0", "k0"]), ([[-2.0, 2.0]], ["k0", f"k{LEVELS - 1}"])):
        assert [cell.get("class") for cell in parse(square(weights)).iter(NS + "rect")] == classes


def test_values_that_are_not_finite_are_counted_and_never_zero():
    weights = softmax(3, 3)
    weights[0, 1], weights[2, 2] = np.nan, np.inf
    root = parse(square(torch.from_numpy(weights)))  # whatever numpy can read
    assert np.isinf(weights[2, 2])  # the caller's numbers stay as they were
    assert [i for i, cell in enumerate(root.iter(NS + "rect")) if cell.get("class") == f"k{LEVELS}"] == [1, 8]
    assert any("Not finite" in text and "2 of 9" in text for text in all_text(root, "text"))
    parse(head_grid(np.full((1, 2, 2, 2), np.nan), NAMES[:2], NAMES[:2]))


def test_many_tokens_are_one_small_image_with_fewer_labels():
    weights = softmax(200, 200)
    svg = square(weights)
    root = parse(svg)
    ((levels, _),) = images(root, "dark")
    assert len(svg) < 400_000 and np.abs(levels - weights / weights.max() * (LEVELS - 1)).max() <= 0.51
    assert 60 <= sum(text.startswith("token") for text in all_text(root, "text")) <= 140  # both axes together
    tips = {f"token{i} \u200e→ token{row.argmax()}\u200e: {row.max():.3f}" for i, row in enumerate(weights)}
    assert tips <= set(all_text(root, "title"))
    lone = np.zeros((1500, 900))
    lone[777, 333] = 1
    svg = square(lone)
    ((levels, _),) = images(parse(svg), "light")
    assert len(svg) < 200_000 and "Thinned" in svg and max(levels.shape) <= 400
    assert levels.max() == LEVELS - 1 and (levels > 0).sum() == 1  # thinning keeps a lone strong cell


def test_wrong_shapes_are_user_errors():
    shared = [np.zeros(4), "text", [[1, 2], [3]], np.zeros((0, 0)), np.zeros((1, 1, 2, 3))]
    for draw, wrong in ((heat_map, [*shared, np.zeros((1, 2, 2))]), (head_grid, [*shared, np.zeros((2, 2))])):
        for weights in wrong:
            with pytest.raises(UserError, match="weights"):
                draw(weights, NAMES[:2], NAMES[:2])
    with pytest.raises(UserError, match="<train>"):
        curve([(1, 2, 3)])


def test_head_grid_is_small_and_names_each_head_and_its_peak():
    weights, names = softmax(6, 8, 40, 40), NAMES[:40]
    svg = head_grid(weights, names, names, title="heads")
    root = parse(svg)
    tips, pictures = all_text(root, "title"), list(images(root, "light"))
    assert len(pictures) == len(list(images(root, "dark"))) == 48 and len(svg.encode()) < 300_000
    for (layer, head), (levels, colours) in zip(np.ndindex(6, 8), pictures, strict=True):
        maps = weights[layer, head]
        i, j = np.unravel_index(maps.argmax(), maps.shape)
        peak = f"token{i} \u200e→ token{j}\u200e: {maps.max():.3f}"
        assert f"layer {layer}, head {head}: largest weight {peak}" in tips
        assert np.abs(levels - maps / maps.max() * (LEVELS - 1)).max() <= 0.51
        assert ["#" + bytes(colour).hex() for colour in colours] == LIGHT
    assert {f"layer {i}" for i in range(6)} | {f"head {i}" for i in range(8)} <= set(all_text(root, "text"))
    assert len(list(images(parse(head_grid(softmax(3, 5, 7), NAMES[:5], NAMES[:7])), "dark"))) == 3
    svg = head_grid(softmax(24, 16, 64, 64), NAMES[:64], NAMES[:64])
    assert len(svg) < 700_000 and "Thinned" in svg


def curve(points, **options):
    return line_chart({"<train> 학습": points}, title="loss", x_label="step", y_label="nats", **options)


def drawn(root):
    lines = [line.get("points").split() for g in root.iter(NS + "g") for line in g.iter(NS + "polyline")]
    return [np.array([[float(v) for v in point.split(",")] for point in line]) for line in lines]


def test_curves_are_linear_in_the_values_or_their_logarithms():
    points = np.array([(0, 1.0), (10, 3.0), (20, 2.0), (40, 5.0)])
    root = parse(curve(points))
    (line,) = drawn(root)
    for axis, sign in ((0, 1), (1, -1)):
        slopes = sign * np.diff(line[:, axis]) / np.diff(points[:, axis])
        assert slopes.min() > 0 and np.ptp(slopes) < 0.02 * slopes.max()
    assert {"loss", "step", "nats", "<train> 학습", "0", "40", "5"} <= set(all_text(root, "text"))
    (line,) = drawn(parse(curve([(i, 10.0**-i) for i in range(6)], log_y=True)))
    assert np.diff(line[:, 1]).min() > 0 and np.ptp(np.diff(line[:, 1])) <= 0.11


def test_values_that_cannot_be_drawn_are_gaps_and_counted():
    root = parse(curve([(0, 1), (1, 2), (2, math.nan), (3, 2), (4, math.inf), (5, 1), (6, 2), (math.nan, 3)]))
    assert [len(line) for line in drawn(root)] == [2, 2] and len(list(root.iter(NS + "circle"))) == 1
    assert "Gaps: 3 values not finite." in all_text(root, "text")
    root = parse(curve([(0, 1), (1, 0), (2, -1), (3, 5)], log_y=True))
    assert "Gaps: 2 values not finite or not positive." in all_text(root, "text")
    for empty in ([], [(math.nan, 1.0)], [(0, math.inf)], np.zeros((0, 2))):
        assert "no points" in parse(curve(empty))[1].text
    assert parse(curve([(3, 0.5)], log_y=True)).find(f".//{NS}circle") is not None


def test_hundred_thousand_points_are_thinned_and_keep_their_extremes():
    y = np.random.default_rng(0).normal(size=100_000)
    y[12_345], y[67_890] = 40.0, -40.0
    svg = curve(np.stack([np.arange(100_000), y], axis=1))
    (line,) = drawn(parse(svg))
    assert len(svg) < 60_000 and len(line) <= 1_100 and (np.diff(line[:, 0]) >= 0).all()
    zero = np.median(line[:, 1])  # 40 and -40 lie at the same height above and below it
    assert line[:, 1].max() - zero == pytest.approx(zero - line[:, 1].min(), rel=0.05)
    y[::2] = np.nan
    assert len(curve(np.stack([np.arange(100_000), y], axis=1))) < 200_000


@given(st.lists(st.floats(), min_size=3, max_size=3), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_numbers_make_a_figure(numbers, log):
    parse(curve(list(zip(numbers, numbers[1:] + numbers[:1], strict=True)), log_y=log))
    parse(square([numbers]))


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_ticks_are_round_and_few(low, span, snap):
    first, last, ticks = make_axis(np.array([low, low + span]), snap=snap)
    slack = 1e-6 * (last - first)
    assert 2 <= len(ticks) <= 12 and all(first - slack <= tick <= last + slack for tick in ticks)
    assert not snap or (first <= low + slack and last >= low + span - slack and abs(last - ticks[-1]) <= slack)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    assert min(abs(step / 10 ** math.floor(math.log10(step * 1.001)) - mark) for mark in (1, 2, 5)) < 1e-2


def attributes(root, tag, name):
    return [element.get(name) for element in root.iter(tag)]


def sample(sections):
    body = html.paragraph("a < b & <script>alert(1)</script>") + html.attention_note()
    body += html.figure(heat_map(softmax(2, 2), ["<s>", "나"], ["a", "b"]), "caption <i>")
    body += html.examples_table([("3 March", "3월", "3월"), ("<script>", "2월", "12월 <b>"), ("\x00", "x", "")])
    body += html.table(["이름", "n"], [["<img src=x>", 1]])
    parts = [html.Section(f"Part <{i}>", body) for i in range(sections)]
    named = {"created": datetime(2025, 1, 2, 3, 4), "version": "1.2<3"}
    return html.page("Title <script>", [("exact <match>", "99.4 %")], parts, **named)


def test_page_is_inert_self_contained_and_complete():
    markup = sample(4)
    root = read(markup)
    text = "".join(root.itertext())
    for words in ("Regard", "2025-01-02 03:04", "1.2<3", "99.4 %", "exact <match>", "Title <script>", "caption <i>"):
        assert words in text
    assert "not why" in text and "Jain & Wallace 2019" in text and "Attention is not Explanation" in text
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in attributes(root, "meta", "content")
    assert "prefers-color-scheme: dark" in markup and "@media print" in markup and "max-width: 600px" in markup
    ids, links = [name for name in attributes(root, None, "id") if name], attributes(root, "a", "href")
    assert len(links) == 4 and {link[1:] for link in links} <= set(ids) and len(ids) == len(set(ids))
    assert read(sample(3)).find(".//nav") is None  # so few sections need no contents
    assert "today" in "".join(read(html.page("Empty", [], [], created="today", version="0")).itertext())


def test_table_aligns_numbers_and_escapes():
    rows = [["<b>", 0.5, "99.4 %", 12000, True], ["c", np.float32(0.1234), "3 %", 7, None]]
    root = read(html.table(["name", "loss", "fraction", "steps", "ok"], rows))
    assert attributes(root, "th", "class") == [None, "number", "number", "number", None]
    assert {"0.5000", "0.1234", "12,000", "yes", "–", "<b>"} <= set(root.itertext())
    root = read(html.table(["a", "b"], [[math.nan, math.inf], [1e-5, 2]], classes=["token", ""]))
    assert attributes(root, "td", "class") == ["token", None] * 2 and {"nan", "inf", "1e-05"} <= set(root.itertext())
    assert "No rows" in html.table(["a"], []) and "No examples" in html.examples_table([])
    for rows, classes, field in (([[1], [1, 2]], None, "row 1"), ([[1]], ["x", "y"], "classes")):
        with pytest.raises(UserError, match=field):
            html.table(["a"], rows, classes=classes)


def test_examples_are_marked_by_words_and_their_differences():
    long = ("s", "a" * 50_000 + "bc", "a" * 50_000 + "dc")
    markup = html.examples_table([("s", "7월 1일", "7월 11일"), ("s", "같다", "같다"), ("s", "있다", ""), long])
    assert markup.count("✓") == markup.count(" correct</td>") == 1
    assert markup.count("✗") == markup.count(" wrong</td>") == 3
    assert re.findall(r'<mark class="extra">(.*?)</mark>', markup) == ["1", "d"]
    assert re.findall(r'<mark class="missing">(.*?)</mark>', markup) == ["있다", "b"] and "(empty)" in markup


@given(st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_marking_changes_no_text_and_marks_only_differences(expected, got):
    root = read(html.examples_table([("", expected, got)]))
    assert bool(attributes(root, "mark", "class")) == (expected != got)
    assert all(text in "".join(root.itertext()) for text in (expected, got) if text.isprintable())


def test_files_are_whole(tmp_path):
    assert html.write_page(tmp_path / "보고서.html", sample(1)).read_text("utf-8") == sample(1)
    file = svg_file(tmp_path / "map.svg", heat_map(softmax(2, 2), ["가", "b"], ["c", "d"]))
    assert file.read_bytes().startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n<svg')
    assert ET.parse(file).getroot().tag == NS + "svg" and "prefers-color-scheme" in file.read_text("utf-8")
    link = tmp_path / "link.svg"
    link.symlink_to(file)
    svg_file(link, "<svg/>")
    assert link.is_symlink() and file.read_text().endswith("<svg/>\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.svg", "map.svg", "보고서.html"]
    for path in (tmp_path, tmp_path / "nowhere" / "x.html"):
        with pytest.raises(UserError, match="cannot be written"):
            html.write_page(path, "x")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, call, failure):
    def fail(*arguments):
        raise failure

    path = html.write_page(tmp_path / "html.markup", "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises((UserError, KeyboardInterrupt), match=r"No space|^$"):
        html.write_page(path, "new" * 1000)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["html.markup"]
