"""Figures of a look: the numbers drawn are the model's, labels of any script are text, a PNG never shows boxes."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from inside_models import SHAPES, given, opened
from regard.commands import screen_width
from regard.commands.attend import as_text
from regard.errors import UserError
from regard.explore.changes import Changes
from regard.explore.figures import attended, draw, stage_panel
from regard.explore.heads import HeadMetrics
from regard.explore.heatmap import head_panels, image_panels
from regard.explore.html import text_width
from regard.explore.report import head_map, look_page
from regard.explore.svg import characters_without_font, to_png

NS = "{http://www.w3.org/2000/svg}"
ODD = [
    "<script>alert(1)</script>",
    "שלום",
    "مرحبا",
    "동물",
    "a\u200bb",
    "\u202e",
    "e\u0301",
    "🙂",
    "&amp;",
    "\x00",
    '"',
]


def parse(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert not {"script", "foreignObject"} & {element.tag.removeprefix(NS) for element in root.iter()}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    return root


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NS}text")]


def softmax(*shape: int) -> np.ndarray:
    return torch.rand(*shape).mul(4).softmax(dim=-1).numpy()


def head(layer: int, head: int, pattern: str, loss_change: float | None) -> HeadMetrics:
    return HeadMetrics("encoder", layer, head, 0.0, 0.0, None, {pattern: 0.7}, None, loss_change)


# Panels


def test_head_panels_show_every_weight() -> None:
    weights, names = softmax(3, 4, 5), ["a", "b", "c", "d"]
    root = parse(head_panels(weights, names, [*names, "e"], ["one", "two", "three"], title="t"))
    tips = [float(element.find(f"{NS}title").text.rsplit(" ", 1)[1]) for element in root.iter(f"{NS}rect")]
    np.testing.assert_allclose(np.array(tips).reshape(3, 4, 5), weights, atol=5.1e-4)
    assert [text for text in words(root) if text.startswith("two")] == [f"two, max {weights[1].max():.2f}"]


@pytest.mark.parametrize("count", [1, 20, 60])
def test_labels_of_head_panels_do_not_overlap(count: int) -> None:
    names = [f"token{at}" for at in range(count)]
    root = parse(head_panels(softmax(2, count, count), names, names, ["x", "y"]))
    for group in root.iter(f"{NS}g"):
        size = re.search(r"font-size:([\d.]+)", group.get("style", ""))
        rows = sorted(float(text.get("y")) for text in group.iter(f"{NS}text") if text.get("text-anchor") == "end")
        if size and len(rows) > 1:
            assert min(np.diff(rows)) >= float(size[1])
    assert names[0] in words(root)


def test_names_of_narrow_head_panels_do_not_overlap() -> None:
    root = parse(head_panels(softmax(4, 9, 2), list("abcdefghi"), ["x", "y"], [f"head {at}" for at in range(4)]))
    names = [
        (float(text.get("x")), text.text) for text in root.iter(f"{NS}text") if (text.text or "").startswith("head ")
    ]
    for (x, name), (following, _) in itertools.pairwise(sorted(names)):
        assert len(names) == 4 and x + text_width(name) < following


def test_odd_labels_are_text() -> None:
    count = len(ODD)
    for svg in (
        head_panels(softmax(1, count, count), ODD, ODD, ["<b>"], title="<script>"),
        stage_panel([("<i>", np.arange(count))], ODD, title="<script>x", note="&"),
        image_panels(np.random.rand(3, 8, 8), 2, 2, softmax(count, 4), ODD, title="<script>"),
        head_map([head(0, at, pattern, 0.1 * at) for at, pattern in enumerate(ODD)], "encoder"),
    ):
        root = parse(svg)
        shown = " ".join(words(root))
        assert "<script>" in shown and "동물" in shown and "שלום" in shown


def test_images_are_grey_and_attention_is_orange_by_its_weight() -> None:
    picture, weights = torch.rand(3, 6, 6).numpy(), softmax(2, 9)
    root = parse(image_panels(picture, 3, 3, weights, ["a", "b"]))
    (image,) = [image for image in root.find(f"{NS}defs").iter(f"{NS}image")]
    raw = base64.b64decode(image.get("href").partition("base64,")[2])
    data = zlib.decompress(raw[raw.index(b"IDAT") + 4 : raw.index(b"IEND") - 8])
    assert struct.unpack(">II", raw[16:24]) == (6, 6)
    pixels = np.frombuffer(data, np.uint8).reshape(6, 19)[:, 1:].reshape(6, 6, 3)
    luminance = np.tensordot((0.2126, 0.7152, 0.0722), picture, 1)  # Rec. 709
    np.testing.assert_allclose(pixels, np.repeat(luminance[..., None], 3, -1) * 255, atol=0.51)
    strengths = [float(rect.get("fill-opacity")) for rect in root.iter(f"{NS}rect")]
    np.testing.assert_allclose(
        np.array(strengths).reshape(2, 9), 0.8 * weights / weights.max(axis=1, keepdims=True), atol=1e-3
    )


def test_stages_show_their_numbers_and_masked_keys() -> None:
    stages = [("scores", [1.5, -2.0, 0.0]), ("masked", [1.5, -np.inf, np.nan])]
    root = parse(stage_panel(stages, ["a", "b", "c"], title="t", note="n"))
    shown = words(root)
    assert [shown.count(text) for text in ("1.500", "-2.000", "0.000", "masked", "not a number")] == [2, 1, 1, 2, 1]


def test_layers_may_have_different_numbers_of_heads() -> None:
    metrics = [head(0, 0, "x", 0.5), head(0, 1, "y", -0.25), head(1, 0, "z", 1.0)]
    root = parse(head_map(metrics, "encoder"))
    assert len([rect for rect in root.iter(f"{NS}rect")]) == 3
    assert {"+0.5000", "-0.2500", "+1.0000"} <= set(words(root))


# A look, drawn


@pytest.mark.parametrize("architecture", SHAPES)
def test_every_architecture_can_be_drawn_in_every_way(architecture: str) -> None:
    inside = opened(architecture)
    look = inside.look(**given(architecture, "the animal 동물 <unk>"))
    for part in look.parts:
        for which in ({}, {"grid": True}, {"layer": 0}, {"layer": 0, "head": 0}, {"layer": 0, "head": 0, "query": 1}):
            assert words(parse(draw(look, part=part, **which)))
    page = look_page(look)
    assert "not why" in page and "Jain" in page and "<script" not in page
    assert parse(look.show(layer=0).svg) is not None
    assert "Jain" in look._repr_html_() and "<svg" in look._repr_html_()


def test_a_figure_of_one_head_shows_that_head() -> None:
    look = opened("encoder-decoder").look("the animal did not cross", target="a b c")
    for part, seen in look.parts.items():
        svg = draw(look, part=part, layer=1, head=2)
        tips = [rect.find(f"{NS}title").text for rect in parse(svg).iter(f"{NS}rect")]
        values = [float(tip.rsplit(" ", 1)[1]) for tip in tips]
        np.testing.assert_allclose(values, seen.weights[1][2].flatten(), atol=5.1e-4)


def test_numbers_are_the_weights() -> None:
    look = opened("encoder-decoder").look("the animal", target="a b")
    numbers = json.loads(json.dumps(look.to_dict()))
    for part, seen in look.parts.items():
        result = numbers["parts"][part]
        assert (tuple(result["rows"]), tuple(result["columns"])) == (seen.rows, seen.columns)
        for own, weights in zip(result["weights"], seen.weights, strict=True):
            np.testing.assert_allclose(own, weights, atol=1e-6)
    assert numbers["output"]["loss"] == look.output.loss and numbers == json.loads(json.dumps(look.to_dict()))


def test_a_comparison_shows_both_answers() -> None:
    both = opened("encoder-decoder").compare("the animal", changes=Changes(heads=(("cross", 0, 0),)))
    for html in (both._repr_html_(), look_page(both.after, both.before)):
        assert "unchanged" in html.lower()
    assert "head cross.0.0 off" in look_page(both.after, both.before)


def test_invalid_options_are_reported() -> None:
    look = opened("decoder").look("a b a")
    for which, message in (
        ({"head": 0}, "its layer too"),
        ({"layer": 5}, "layers 0 to 1"),
        ({"grid": True, "layer": 0}, "remove layer and head"),
        ({"query": 0}, "name it"),
        ({"part": "cross"}, "does not have it"),
        ({"layer": 0, "head": 0, "query": 9}, "queries 0 to 2"),
    ):
        with pytest.raises(UserError, match=message):
            draw(look, **which)
    assert look.parts["decoder"].position("b") == 1
    with pytest.raises(UserError, match="positions 0, 2"):
        look.parts["decoder"].position("a")


# In words


def test_the_largest_weights_come_first() -> None:
    look = opened("decoder").look("the animal did not cross")
    part = look.parts["decoder"]
    (mean,) = attended(look, part, layer=None, head=None, top=2, each=False)
    stacked = torch.cat(part.weights).mean(dim=0)
    for query, (row, token) in enumerate(zip(stacked, mean["tokens"], strict=True)):
        best = row.topk(2)
        result = [(key["at"], key["weight"]) for key in token["attends_to"]]
        assert result == [(at, w) for at, w in zip(best.indices.tolist(), best.values.tolist(), strict=True) if w > 0]
        assert (token["at"], token["token"]) == (query, part.rows[query])
        assert all(key["token"] == part.columns[key["at"]] for key in token["attends_to"])
    every = attended(look, part, layer=None, head=None, top=1, each=True)
    assert [(one["layer"], one["head"]) for one in every] == [(layer, head) for layer in (0, 1) for head in range(4)]
    assert json.dumps(every[0])


def test_columns_of_text_are_aligned_in_any_script() -> None:
    """동 takes two columns of a terminal, a combining accent none (Unicode UAX 11)."""
    assert [screen_width(text) for text in ("동물", "ab", "e\u0301", "漢a")] == [4, 2, 1, 3]
    look = opened("decoder").look("the 동물 a")
    lines = as_text(attended(look, look.parts["decoder"], layer=0, head=0, top=1, each=False)[0]).splitlines()[1:]
    starts = {
        screen_width(line[: line.index("  ", 2)]) + len(re.match(r" +", line[line.index("  ", 2) :])[0])
        for line in lines
    }
    assert len(starts) == 1


# Fonts and PNG


def test_the_map_of_heads_shows_every_score_in_full() -> None:
    names = ("previous token", "next token", "first token", "last token", "punctuation", "alignment", "-12 tokens")
    svg = head_map([head(0, at, name, 0.1) for at, name in enumerate(names)], "encoder")
    assert "…" not in svg and svg.count(" 0.70</text>") == len(names)


def test_a_file_that_is_not_a_font_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    (tmp_path / "a.ttf").write_text("no font")
    with pytest.raises(UserError, match="is not a font"):
        to_png(head_panels(softmax(1, 2, 2), ["a", "b"], ["a", "b"], ["x"]), fonts=[tmp_path / "a.ttf"])


def test_a_character_without_a_font_is_reported_before_anything_is_drawn() -> None:
    pytest.importorskip("resvg_py")
    unassigned = "\u0378"  # in no font
    with pytest.raises(UserError, match=r"no installed font has .*U\+0378.*fonts-noto-cjk.*--font.*\.svg"):
        to_png(head_panels(softmax(1, 2, 2), [unassigned, "b"], ["a", "b"], ["x"]))
    with pytest.raises(UserError, match="there is no such file"):
        to_png(head_panels(softmax(1, 2, 2), ["a", "b"], ["a", "b"], ["x"]), fonts=["nowhere.ttf"])


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def ink(letter: str) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    png = to_png(head_panels([[[1.0]]], [letter], ["a"], ["x"]), zoom=3)
    return np.asarray(image.open(io.BytesIO(png)).convert("L"))


@pytest.mark.parametrize("letters", ["abcd", "동물강한"])
def test_a_png_shows_letters_and_not_boxes(letters: str) -> None:
    """Every letter has its own shape; boxes would all be equal."""
    pytest.importorskip("resvg_py")
    if characters_without_font(letters):
        pytest.skip("needs a font with these letters")
    assert len({ink(letter).tobytes() for letter in letters}) == 4


def test_a_png_has_the_size_of_its_figure_times_the_zoom() -> None:
    pytest.importorskip("resvg_py")
    svg = head_panels(softmax(1, 2, 2), ["a", "b"], ["a", "b"], ["x"])
    width, height = (float(number) for number in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2])
    for zoom in (1, 2.5):
        assert size_of(to_png(svg, zoom=zoom)) == pytest.approx((width * zoom, height * zoom), abs=1)
    with pytest.raises(UserError, match="lower --zoom"):
        to_png(svg, zoom=200)
