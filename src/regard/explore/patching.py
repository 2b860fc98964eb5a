"""Activation patching: which activation carries the difference between two inputs.

Run the model on a clean input (July) and on a corrupted one (March). Then run the corrupted input again, with one
activation replaced by that of the clean run, and see how much of the clean output comes back:

    d(run)    = logit(clean answer) - logit(corrupted answer)            at the position of the answer
    restored  = (d(patched) - d(corrupted)) / (d(clean) - d(corrupted))       0: nothing, 1: all of it

    residual   the residual stream after each layer at each position      layers + 1 by positions, per stack
    heads      the output of one attention head at all positions          layers by heads, per kind of attention

Vig et al. 2020; Meng et al. 2022; Wang et al. 2022. The answer of an encoder-decoder is the first token in which its
two outputs differ, after what they have in common; of a decoder the next token; of a masked model the token at the
first mask; of a classifier the class. Positions are compared one by one, so both inputs need as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.changes import Changes, PartName
from regard.explore.forward import Input
from regard.explore.inside import Inside, Look, NotebookFigure
from regard.nn.trace import Edit, trace

TOKENS = 4096  # of one batch of patched runs
MOST = 4e12  # floating-point operations of all patched runs: about a minute on a laptop
Stage = tuple[str, int]  # the name of an activation in a trace, and the position (or head) that is patched


@dataclass(frozen=True)
class Pair:
    """Two inputs with their answers, ready to be patched."""

    inside: Inside
    clean: Input
    corrupted: Input
    changes: Changes
    at: int  # the position of the answer
    answers: tuple[int, int]  # ids, clean and corrupted
    differences: tuple[float, float]  # d of the clean and of the corrupted run


@dataclass(frozen=True)
class Patching:
    """`residual` [layers + 1, positions] by stack and `heads` [layers][heads] by part: the fraction restored."""

    pair: Pair
    answers: tuple[str, str]  # labels: clean, corrupted
    residual: Mapping[str, Tensor]
    heads: Mapping[PartName, tuple[Tensor, ...]]
    labels: Mapping[str, tuple[tuple[str, str], ...]]  # of the positions: clean, corrupted

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "at": self.pair.at,
            "answers": self.answers,
            "differences": self.pair.differences,
            "residual": {stack: grid.tolist() for stack, grid in self.residual.items()},
            "heads": {part: [layer.tolist() for layer in layers] for part, layers in self.heads.items()},
            "labels": dict(self.labels),
        }

    def _repr_html_(self) -> str:
        clean, corrupted = self.answers
        figures = []
        for stack, grid in self.residual.items():
            rows = ["embeddings", *(f"after layer {layer}" for layer in range(len(grid) - 1))]
            columns = [one if one == other else f"{one} → {other}" for one, other in self.labels[stack]]
            title = f"Patching the residual stream of the {stack}: fraction of {clean} (not {corrupted}) restored"
            figures.append(cell_map(grid, rows, columns, title=title))
        return NotebookFigure("<br>".join(figures), note="Columns: clean → corrupted token.")._repr_html_()


def make_pair(clean: Look, corrupted: Look, at: int | None = None) -> Pair:
    """The position and the tokens of the answer; an error if the two inputs cannot be compared."""
    inside, changes = clean.inside, clean.changes
    if corrupted.inside is not inside or corrupted.changes != changes:
        raise UserError("patching: both looks must be those of one model, under the same changes")
    if inside.config.architecture == "recurrent":
        raise UserError("architecture = 'recurrent': has no residual stream to patch; use a Transformer")
    if clean.output.kind in ("vector", "values"):
        raise UserError("patching: the model outputs numbers, and an answer is a token or a class")
    inputs = (clean.input, corrupted.input)
    sizes = [len(input.source_labels) for input in inputs]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the inputs have {sizes[0]} and {sizes[1]} tokens: patching compares position by position; give two "
            "inputs with as many tokens, such as two that differ in one word"
        )
    if inside.reader.writes:
        inputs = _common_target(inside, *inputs)
        if at is not None:
            raise UserError("at: the answer of an encoder-decoder is where its two outputs first differ; remove it")
    logits = [_logits(inside, input, changes) for input in inputs]
    if at is None:
        at = _answer_position(inside, inputs[0], logits)
    if not 0 <= at < len(logits[0]):
        raise UserError(f"at = {at}: the output has positions 0 to {len(logits[0]) - 1}")
    answers = int(logits[0][at].argmax()), int(logits[1][at].argmax())
    if answers[0] == answers[1]:
        label = inside.reader.label(answers[0])
        raise UserError(f"both inputs give {label!r} at position {at}: there is no difference to restore")
    differences = tuple(float(one[at, answers[0]] - one[at, answers[1]]) for one in logits)
    return Pair(inside, *inputs, changes, at, answers, differences)  # type: ignore[arg-type]


def _common_target(inside: Inside, clean: Input, corrupted: Input) -> tuple[Input, Input]:
    """Both inputs with what their outputs have in common as the target."""
    sides = [list(input.expected) for input in (clean, corrupted)]  # the tokens that are generated, </s> included
    pairs = list(zip(*sides, strict=False))
    length = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if length is None:
        raise UserError("both inputs give the same output: there is no difference to restore")
    ids = [id for id in sides[0][:length] if id is not None]
    return inside.reader.with_target(clean, ids), inside.reader.with_target(corrupted, ids)


def _answer_position(inside: Inside, clean: Input, logits: Sequence[Tensor]) -> int:
    if inside.config.architecture != "encoder":
        return len(logits[0]) - 1
    mask = inside.bundle.source.mask if inside.config.input == "tokens" and not inside.reader.tags else None
    if mask is not None and mask in (ids := clean.source[0].tolist()):
        return ids.index(mask)
    differs = (logits[0].argmax(dim=-1) != logits[1].argmax(dim=-1)).nonzero()[:, 0].tolist()
    return differs[0] if differs else 0


@torch.inference_mode()
def _logits(inside: Inside, input: Input, changes: Changes, patch: Mapping[str, Edit] | None = None) -> Tensor:
    """[positions, outputs] of one run."""
    return _run(inside, input, changes, patch or {}, 1)[0]


def _run(inside: Inside, input: Input, changes: Changes, patch: Mapping[str, Edit], rows: int) -> Tensor:
    """Logits [rows, positions, outputs] of the same input in every row of a batch, with these edits."""
    edits = inside.edits(changes, input)
    for stage, edit in patch.items():  # after the edits that the stage already has
        first = edits.get(stage, lambda value: value)
        edits[stage] = lambda value, first=first, edit=edit: edit(first(value))  # type: ignore[misc]
    batch = replace(
        input,
        source=input.source.expand(rows, *input.source.shape[1:]),
        target=None if input.target is None else input.target.expand(rows, -1),
    )
    with inside.lock, trace(inside.model, edits, only=""):
        logits = inside.forward(batch).double().cpu()
    return logits if logits.dim() == 3 else logits[:, None]


@torch.inference_mode()
def activation_patching(
    clean: Look, corrupted: Look, *, at: int | None = None, positions: Sequence[int] | None = None
) -> Patching:
    """restored = (d(patched) - d(corrupted)) / (d(clean) - d(corrupted)) for the residual stream and for every head.

    `at` is the position of the answer; `positions`, those of the source (of a decoder: of the text) that are patched.
    """
    pair = make_pair(clean, corrupted, at)
    inside = pair.inside
    stages = _residual_stages(inside)
    seen = [inside.trace(input, pair.changes, "*.[eoh][mue][bta]*") for input in (pair.clean, pair.corrupted)]
    wanted: list[Stage] = []
    for stack, names in stages.items():
        count = seen[0][names[0]].shape[1]
        chosen = range(count)
        if positions is not None and stack == next(iter(stages)):
            if not all(0 <= one < count for one in positions):
                raise UserError(f"positions = {list(positions)[:8]}: the {stack} has positions 0 to {count - 1}")
            chosen = sorted(set(positions))  # type: ignore[assignment]
        wanted += [(name, at) for name in names for at in chosen if _differs(seen, name, at)]
    layers = [path for part in inside.anatomy.parts.values() for path, heads in part if heads]
    wanted += [(f"{path}.heads", head) for path in layers for head in range(seen[0][f"{path}.heads"].shape[1])]
    _check_cost(inside, pair, len(wanted))
    restored = dict(zip(wanted, _patched(pair, seen[0], wanted), strict=True))
    residual = {
        stack: torch.tensor([[restored.get((name, at), 0.0) for at in range(seen[0][name].shape[1])] for name in names])
        for stack, names in stages.items()
    }
    heads: dict[PartName, tuple[Tensor, ...]] = {}
    for part, some in inside.anatomy.parts.items():
        heads[part] = tuple(
            torch.tensor([restored[f"{path}.heads", head] for head in range(count)]) for path, count in some
        )
    first, last = pair.clean, pair.corrupted
    sides = {"encoder": (first.source_labels, last.source_labels), "decoder": (first.read, last.read)}
    labels = {stack: tuple(zip(*sides[stack], strict=True)) for stack in stages}
    reader = inside.reader
    return Patching(pair, (reader.label(pair.answers[0]), reader.label(pair.answers[1])), residual, heads, labels)


def _residual_stages(inside: Inside) -> dict[str, list[str]]:
    """The residual stream of every stack: the embeddings, then the output of each block."""
    stacks = {name: getattr(inside.model, name, None) for name in ("encoder", "decoder")}
    return {
        name: [f"{name}.embedded", *(f"{name}.{layer}.output" for layer in range(len(stack.blocks)))]
        for name, stack in stacks.items()
        if stack is not None
    }


def _differs(seen: Sequence[Any], name: str, at: int) -> bool:
    """Whether the two runs differ there at all: else a patch changes nothing and need not be run."""
    return not torch.equal(seen[0][name][:, at], seen[1][name][:, at])


def _check_cost(inside: Inside, pair: Pair, runs: int) -> None:
    tokens = len(pair.clean.source_labels) + (0 if pair.clean.target is None else pair.clean.target.shape[1])
    operations = 2.0 * sum(parameter.numel() for parameter in inside.model.parameters()) * tokens * runs
    if operations > MOST:
        raise UserError(
            f"patching: {runs:,} runs of {tokens:,} tokens take {operations:.1e} operations (limit {MOST:.0e}); give "
            "shorter inputs, or fewer positions"
        )


def _patched(pair: Pair, clean: Any, wanted: Sequence[Stage]) -> Iterator[float]:
    """`restored` for every stage: runs of the same activation form batches."""
    tokens = len(pair.clean.source_labels) + (0 if pair.clean.target is None else pair.clean.target.shape[1])
    size, (best, worst) = max(1, TOKENS // max(1, tokens)), pair.differences
    by_name: dict[str, list[int]] = {}
    for name, index in wanted:
        by_name.setdefault(name, []).append(index)
    for name, indices in by_name.items():
        for start in range(0, len(indices), size):
            some = indices[start : start + size]
            logits = _run(pair.inside, pair.corrupted, pair.changes, {name: _put(clean[name], some)}, len(some))
            there = logits[:, pair.at]
            difference = there[:, pair.answers[0]] - there[:, pair.answers[1]]
            yield from ((difference - worst) / (best - worst)).tolist()


def _put(value: Tensor, indices: Sequence[int]) -> Edit:
    """Row r of a batch gets `value` [1, N, dim] at position indices[r]; of heads [1, H, N, D], at that head."""

    def edit(old: Tensor) -> Tensor:
        new = old.clone()
        for row, index in enumerate(indices):
            new[row, index] = value[0, index]
        return new

    return edit


def run_logits(pair: Pair, input: Input) -> Tensor:
    """Logits [outputs] of the answer of one of the two runs."""
    return _logits(pair.inside, input, pair.changes)[pair.at]


@torch.inference_mode()
def patch_output(pair: Pair, stage: str, index: int) -> Tensor:
    """Logits [outputs] of the answer when the corrupted run gets the clean activation `stage` at that position."""
    seen = pair.inside.trace(pair.clean, pair.changes, stage)
    size = seen[stage].shape[1]
    if not 0 <= index < size:
        raise UserError(f"{stage}: index {index}, but there are 0 to {size - 1}")
    return _logits(pair.inside, pair.corrupted, pair.changes, {stage: _put(seen[stage], [index])})[pair.at]
