"""The report of a masked language model: how it learned, how often it guesses right, what it would put where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import regard
from regard.data.batch import PairBatch
from regard.data.masked import MaskedBatch
from regard.explore.heatmap import head_grid
from regard.explore.html import Section, attention_note, figure, page, paragraph, table, write_page
from regard.explore.translation import curves
from regard.nn.trace import trace
from regard.predict.mask_predictor import MaskPredictor

SHOWN = 12  # texts with a gap
LONGEST = 40  # tokens of such a text; PICTURED: of the one whose attention is drawn
PICTURED = 24
GUESSES = 3


def write_report(
    path: Path,
    title: str,
    filler: MaskPredictor,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    batch: MaskedBatch | None,
) -> Path:
    """Write report.html; the gaps of `batch`, validation text on the CPU, are filled as examples."""
    parameters = sum(parameter.numel() for parameter in filler.model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"right guesses on {name}", f"{found['accuracy']:.2%}") for name, found in scores.items()][:2]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [curves(metrics, "nats per hidden token"), *_figures(scores)]
    if batch is not None:
        texts = _texts(batch)
        sections += [*_examples(filler, texts), *_attention(filler, [ids for ids, _ in texts])]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def _figures(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    if not scores:
        return []
    names = ("loss", "perplexity", "accuracy", "unigram_loss", "tokens")
    rows = [[name, *(found[one] for one in names)] for name, found in scores.items()]
    told = (
        "Loss and share of right guesses over the hidden tokens; the unigram loss is what their frequency alone gives."
    )
    return [Section("How well it guesses", table(["text", *names], rows) + paragraph(told))]


def _texts(batch: MaskedBatch) -> list[tuple[list[int], dict[int, int]]]:
    """(ids as they were, {place: right id}) of single texts that are short enough to show."""
    found = []
    for row in range(len(batch.ids)):
        hidden = {
            place: right
            for place, right in zip(batch.positions[row].tolist(), batch.labels[row].tolist(), strict=True)
            if right != PairBatch.IGNORE
        }
        for number in range(1, int(batch.document[row].max()) + 1):
            at = (batch.document[row] == number).nonzero()[:, 0].tolist()
            inside = {place - at[0]: right for place, right in hidden.items() if at[0] <= place <= at[-1]}
            ids = [hidden.get(place, int(batch.ids[row, place])) for place in at]
            if inside and 6 <= len(ids) <= LONGEST:
                found.append((ids, inside))
            if len(found) == SHOWN:
                return found
    return found


def _examples(filler: MaskPredictor, texts: Sequence[tuple[list[int], dict[int, int]]]) -> list[Section]:
    rows = []
    for ids, hidden in texts:
        place, right = min(hidden.items())
        shown = [filler.mask if i == place else id for i, id in enumerate(ids)]
        written = "".join("▢" if id == filler.mask else filler.tokenizer.token(id) for id in shown[1:-1])
        guesses = ", ".join(f"{one.token} {one.probability:.2f}" for one in filler.candidates(shown, GUESSES)[0])
        rows.append([written.replace("▁", " "), filler.tokenizer.token(right), guesses])
    return [Section("What it would put there", table(["text", "hidden", "guesses"], rows))] if rows else []


@torch.inference_mode()
def _attention(filler: MaskPredictor, texts: Sequence[list[int]]) -> list[Section]:
    ids = next((ids for ids in texts if len(ids) <= PICTURED), None)
    if ids is None:
        return []
    with trace(filler.model, only="*.attention.weights") as seen:
        filler.model(torch.tensor([ids], device=filler.device))
    weights = seen.stack("encoder.*.attention.weights")[-1, 0].float().cpu()  # [heads, N, N]
    tokens = [filler.tokenizer.token(id) for id in ids]
    grid = head_grid(weights, tokens, tokens, title="Self attention of the last layer")
    return [Section("Heads", figure(grid, "Every token may look at every other one.") + attention_note())]
