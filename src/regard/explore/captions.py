"""The report of a captioning model: how it learned, what it writes, where each word looks.

Of a scene it is known where every item stands, so a question about attention has an answer in numbers: when the model
writes a noun, how much of its cross attention lies inside the boxes of the items it names?

    inside = Σ_p w_p c_p        w_p: weight of patch p, mean of the heads of the last layer
                                c_p: share of the patch that the boxes cover
    chance = Σ_p c_p / P        what attention spread evenly would give
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.data.captionsets import CaptionSet
from regard.data.scenes import coverage
from regard.explore.heatmap import heat_map
from regard.explore.html import Section, attention_note, examples_table, figure, page, paragraph, table, write_page
from regard.explore.images import image_panels
from regard.explore.inputs import grid_of
from regard.explore.pictures import as_rgb, gallery
from regard.explore.svg import png_bytes
from regard.explore.translation import curves
from regard.files import make_folder, write_atomically
from regard.predict.captioner import Captioner, as_input

LOOKED_AT = 256  # scenes whose attention is measured
TOGETHER = 64
DRAWN = 3
LISTED = 12
EXAMPLES = 8


@dataclass(frozen=True)
class Judged:
    """A set, what the model writes about it, and the figures."""

    data: CaptionSet
    found: list[str]
    figures: dict[str, Any]


@torch.inference_mode()
def noun_attention(captioner: Captioner, data: CaptionSet) -> dict[str, float]:
    """How much of each noun's attention lies on its items; {} where it is not known where they stand."""
    if data.scenes is None or data.phrases is None:
        return {}
    config = captioner.model.config
    across, count = config.image_size // config.patch_size, min(LOOKED_AT, len(data))
    inside: list[Tensor] = []  # [layers, heads] each
    chance: list[Tensor] = []
    for rows in torch.arange(count).split(TOGETHER):
        scenes = data.scenes.each(lambda part, rows=rows: part[rows])  # type: ignore[misc]
        covers = [coverage(scenes, group, config.image_size, across) for group in (0, 1)]
        ids, weights = _attention(captioner, data, rows)
        for at, row in enumerate(rows.tolist()):
            for before, noun, group in data.phrases[row].nouns():
                begin, end = (len(captioner.tokenizer.encode(text)) for text in (before, f"{before} {noun}".strip()))
                assert end <= len(ids[at])
                looked = weights[:, at, :, begin:end].mean(dim=2)  # [layers, heads, patches]
                inside.append(looked @ covers[group][at])
                chance.append(covers[group][at].mean())
    found = torch.stack(inside).mean(dim=0)
    return {
        "inside": found[-1].mean().item(),
        "inside_best": found.max().item(),
        "inside_chance": torch.stack(chance).mean().item(),
    }


def _attention(captioner: Captioner, data: CaptionSet, rows: Tensor) -> tuple[list[list[int]], Tensor]:
    """The right captions as ids, and cross attention [layers, B, heads, T, places] while they are written."""
    ids = captioner.tokenizer.encode_batch([data.captions[row] for row in rows.tolist()], add_eos=True)
    target = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
    for at, one in enumerate(ids):
        target[at, : len(one)] = torch.tensor(one)
    source, _ = data.sources(rows)
    return ids, captioner.attention(source, target)


def write_report(
    path: Path, title: str, captioner: Captioner, metrics: Sequence[dict[str, Any]], results: Mapping[str, Judged]
) -> Path:
    parameters = sum(parameter.numel() for parameter in captioner.model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"exact on {name}", f"{one.figures['exact']:.2%}") for name, one in results.items() if name != "valid"]
    summary = [*summary[:2], ("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [curves(metrics)]
    if results:
        name, last = list(results.items())[-1]
        sections += [_figures(results), *_examples(name, last), _looks(name, captioner, last.data)]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def write_examples(folder: Path, data: CaptionSet) -> None:
    """A few pictures as PNG files, and captions.jsonl, which a recipe can read again."""
    make_folder(folder)
    rows = torch.arange(min(EXAMPLES, len(data)))
    lines = []
    for number, picture in enumerate(as_input(data.sources(rows)[0].cpu())):
        write_atomically(folder / f"{number}.png", png_bytes(as_rgb(picture)))
        lines.append(json.dumps({"image": f"{number}.png", "caption": data.captions[number]}, ensure_ascii=False))
    write_atomically(folder / "captions.jsonl", ("\n".join(lines) + "\n").encode())


def _figures(results: Mapping[str, Judged]) -> Section:
    names = {"exact": "exact", "bleu": "BLEU", "chrf": "chrF"}
    if any("inside" in one.figures for one in results.values()):
        names |= {
            "inside": "attention on the item", "inside_best": "of the best head", "inside_chance": "by chance"
        }  # fmt: skip
    names["lines"] = "pictures"
    rows = [[name, *(one.figures.get(key) for key in names)] for name, one in results.items()]
    told = ""
    if "held-out" in results:
        told = paragraph(
            "held-out: every scene has a pair of noun and place that never occurs in training. Attention: how much of "
            "a noun's cross attention lies inside the boxes of its items."
        )
    return Section("How well it describes", told + table(["set", *names.values()], rows))


def _examples(name: str, one: Judged) -> list[Section]:
    rows = list(zip(range(len(one.found)), one.data.captions, one.found, strict=True))
    wrong = [row for row in rows if row[1] != row[2]]
    listed = (wrong + [row for row in rows if row[1] == row[2]])[:LISTED]
    texts = [(str(number + 1), expected, got) for number, (_, expected, got) in enumerate(listed)]
    shown = ""
    if one.data.sources(torch.tensor([0]))[0].dim() == 4:  # a picture
        pictures = as_input(one.data.sources(torch.tensor([row for row, *_ in listed]))[0].cpu())
        shown = figure(gallery(pictures, [text[0] for text in texts]), "The pictures, by number.")
    told = paragraph(f"{len(wrong):,} of {len(rows):,} differ from the right caption; the first of them, then others:")
    return [Section(f"Captions of {name}", told + shown + examples_table(texts))]


def _looks(name: str, captioner: Captioner, data: CaptionSet) -> Section:
    """Where each word looks: over the picture, or over the regions."""
    body, config = "", captioner.model.config
    for row in range(min(DRAWN, len(data))):
        ids, weights = _attention(captioner, data, torch.tensor([row]))
        words = [captioner.tokenizer.token(id) for id in ids[0]]
        looked = weights[-1, 0].mean(dim=0)[: len(words)]  # [T, places]
        if config.input == "patches":
            grid, picture = grid_of(config), as_input(data.sources(torch.tensor([row]))[0].cpu())[0]
            drawn = image_panels(picture, grid.down, grid.across, looked, words, title=data.captions[row])
        else:
            regions = [f"region {at}" for at in range(looked.shape[1])]
            drawn = heat_map(looked, words, regions, title=data.captions[row])
        body += figure(drawn, f"Cross attention of the last layer, mean of its heads ({name}, picture {row + 1}).")
    return Section("Where each word looks", body + attention_note())
