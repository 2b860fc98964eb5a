"""Inside: open any model, give it a text or an image, and see what every head attends to, as it is and changed.

    inside = Inside.open("runs/demo")
    look = inside.look("March 3rd, 2021")                              one forward pass, all attention maps
    look.parts["cross"].weights[0][3]                                  layer 0, head 3: [queries, keys]
    look.steps("cross", 0, 3, query=2)                                 q·k, scaled, masked, softmax, weighted values
    both = inside.compare("March 3rd, 2021", changes=Changes(heads=(("decoder", 0, 0),)))
    both.before.output.generated, both.after.output.generated          the output, before and after

One class serves every architecture: an encoder-decoder that translates or captions images, a decoder that continues a
text, an encoder over text or patches, the recurrent model of 2015; trained here or imported. Figures, reports, the
commands and the page all show what a `Look` holds.

Attention shows which values were mixed, not why: different weights can give the same output (Jain & Wallace 2019,
"Attention is not Explanation"). The output under an intervention is the better evidence.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import Anatomy, Changes, PartName, edits, feedforward_stage
from regard.explore.forward import Difference, Input, InputReader, Output, difference, read_output
from regard.explore.numbers import NumberReader
from regard.models.folder import find_device
from regard.models.recipe import RECIPE
from regard.models.transformer import EncoderDecoder
from regard.nn.multihead import MultiHead
from regard.nn.trace import Edit, Trace, trace
from regard.predict.beam import Watch, beam
from regard.predict.bundle import Bundle
from regard.predict.config import SearchConfig, recipe_config
from regard.predict.outputs import Hypothesis
from regard.predict.regressor import autoregress
from regard.tasks.registry import load_run

LARGEST = 2**28  # attention weights of one look: 1 GiB


@dataclass(frozen=True)
class Part:
    """One kind of attention: the labels of its queries and keys, and the weights [heads, Nq, Nk] of each layer."""

    name: PartName
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: tuple[Tensor, ...]

    def position(self, query: str | int) -> int:
        """The query at that position, or the one with that label if the label occurs once."""
        if isinstance(query, int) or query.isdecimal():
            if not 0 <= int(query) < len(self.rows):
                raise UserError(f"query = {query}: {self.name} attention has queries 0 to {len(self.rows) - 1}")
            return int(query)
        matches = [at for at, label in enumerate(self.rows) if query in (label, label.removeprefix("▁"))]
        if len(matches) != 1:
            where = f"at positions {', '.join(map(str, matches))}" if matches else f"none of {' '.join(self.rows[:40])}"
            raise UserError(f"query = {query!r} is {where}; give one position as a number, from 0 on")
        return matches[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to 6 digits; a weight that is not finite becomes None, which JSON has."""
        layers = (layer.double().round(decimals=6).numpy() for layer in self.weights)
        values = [np.where(np.isfinite(layer), layer, None).tolist() for layer in layers]  # type: ignore[call-overload]
        return {"rows": list(self.rows), "columns": list(self.columns), "weights": values}


@dataclass(frozen=True)
class Steps:
    """The stages of one query of one head: a number per key, or vectors where noted."""

    q: Tensor  # [D]
    k: Tensor  # [Nk, D]
    v: Tensor  # [Nk, Dv]
    scores: Tensor  # q · k
    scaled: Tensor  # q · k · scale + position bias
    masked: Tensor  # -inf at masked keys; divided by the temperature if one is set
    weights: Tensor  # softmax
    values: Tensor  # [Nk, Dv] weight · v per key
    output: Tensor  # [Dv] their sum; 0 if the head is off
    scale: float


@dataclass(frozen=True)
class Look:
    """What one forward pass shows: the input with its labels, the attention weights of every part, the output."""

    inside: Inside
    input: Input
    changes: Changes
    parts: Mapping[PartName, Part]
    output: Output

    @torch.inference_mode()
    def steps(self, part: PartName, layer: int, head: int, query: int) -> Steps:
        """The stages of one query, from a second pass: the first keeps nothing but the weights."""
        inside, path = self.inside, self.inside.anatomy.path(part, layer, head)
        query = self.parts[part].position(query)
        seen = inside.trace(self.input, self.changes, f"{path}.*")
        stage = {name: seen[f"{path}.{name}"][0].float().cpu() for name in _STAGES}
        attention = inside.attention(path)
        own = attention.key_of[head] if isinstance(attention, MultiHead) else 0  # recurrent: one head
        k, v = stage.pop("k")[own], stage.pop("v")[own]
        output = stage.pop("heads")[head, query]
        rows = {name: values[head, query] for name, values in stage.items()}
        scale = float(getattr(attention, "scale", inside.config.scale))
        return Steps(**rows, k=k, v=v, values=rows["weights"][:, None] * v, output=output, scale=scale)

    @property
    def nbytes(self) -> int:
        """The memory of the weights and logits."""
        tensors = [layer for part in self.parts.values() for layer in part.weights]
        return sum(tensor.nbytes for tensor in (*tensors, self.output.logits))

    def show(self, **options: Any) -> NotebookFigure:
        """A figure for a notebook; the options part, layer, head, grid, query are those of `explore.figures.draw`."""
        from regard.explore.figures import draw

        return NotebookFigure(draw(self, **options))

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def to_dict(self, parts: Sequence[PartName] | None = None) -> dict[str, Any]:
        """Labels, weights (of all `parts` by default) and the output as plain values for JSON."""
        return {
            "model": self.inside.name,
            "text": self.input.text,
            "changes": self.changes.to_dict(),
            "parts": {name: self.parts[name].to_dict() for name in (self.parts if parts is None else parts)},
            "output": self.output.to_dict(),
        }


@dataclass(frozen=True)
class NotebookFigure:
    """A figure that a notebook displays: `svg`, with a note below it, by default the caveat about attention."""

    svg: str
    note: str | None = None

    def _repr_html_(self) -> str:
        from regard.explore.html import attention_note, paragraph

        # The figure follows the system's colour scheme, the notebook its own theme: so it needs its own background.
        note = attention_note() if self.note is None else paragraph(self.note)
        style = "color-scheme:light dark;background:Canvas;color:CanvasText;padding:4px"
        return f'<div style="{style}"><div style="overflow-x:auto">{self.svg}</div>{note}</div>'


_STAGES = ("q", "k", "v", "scores", "scaled", "masked", "weights", "heads")


@dataclass(frozen=True)
class Comparison:
    """The same input twice, unchanged and changed. Both have the same target, so that their maps can be compared."""

    before: Look
    after: Look

    def _repr_html_(self) -> str:
        from regard.explore.figures import output_table

        return output_table(self.after.output, self.before.output) + self.after._repr_html_()

    @property
    def difference(self) -> Difference:
        return difference(self.before.output, self.after.output)


class Inside:
    """A model whose attention can be inspected. A lock serialises the passes, so that threads may share it."""

    def __init__(self, bundle: Bundle, search: SearchConfig | None = None) -> None:
        """`search` finds what an encoder-decoder generates; by default the recipe says how."""
        self.bundle, self.model, self.config = bundle, bundle.model, bundle.config
        self.name = "model" if bundle.path is None else bundle.path.resolve().name
        self.device, self.reader = bundle.device, InputReader(bundle)
        self.numbers = NumberReader(bundle) if bundle.config.output_head == "values" else None
        if search is None and self.reader.writes and not bundle.tables["decode"].get("sample"):
            search = recipe_config(bundle.recipe, bundle.where)
        search = search or SearchConfig()  # no sampling, so that equal looks are equal
        # the coverage penalty needs a trace of its own
        self.search = replace(search, coverage_penalty=0.0).within(bundle.limits.positions)
        self.anatomy = Anatomy.of(self.model)
        self.lock = threading.RLock()

    @classmethod
    def open(cls, folder: str | Path, device: str | None = "cpu", recipe: Mapping[str, Any] | None = None) -> Inside:
        """The model in the folder of a run, or in one of Hugging Face; `recipe`: its tables, if already read.

        `device` is as in `regard.models.folder.find_device`: None is a GPU if there is one.
        """
        if (Path(folder) / "config.json").is_file() and not (Path(folder) / RECIPE).is_file():
            from regard.interop.folder import read_folder

            imported = read_folder(folder)
            model = imported.model.to(find_device(device))
            return cls(Bundle(model, imported.tokenizers, {"hf": imported.metadata}, folder))
        return cls(load_run(folder, find_device(device), recipe))

    def look(
        self,
        text: str | None = None,
        *,
        image: Any = None,
        target: str | None = None,
        changes: Changes | None = None,
        generate: bool = True,
    ) -> Look:
        """One pass over a text, or over an image (a file, or pixels [channels, height, width]).

        `target` is what the decoder of an encoder-decoder reads; by default what the unchanged model generates.
        `generate=False` skips the search for what it generates under the changes.
        """
        changes = changes or Changes()
        input = self.numbers.read(text or "") if self.numbers is not None else self.reader.read(text, image)
        self._check(input)  # before any search: a source too long would fill the memory
        hypotheses: list[Hypothesis] | None = None
        if self.reader.writes:
            if target is None:
                hypotheses = self.generate(input, Changes())
            ids = hypotheses[0].tokens if hypotheses else self.bundle.target.encode(target or "")
            input = self.reader.with_target(input, ids)
        elif self.numbers is not None:
            own = self.forecast(input, Changes()) if target is None else None
            values = self.numbers.parse(target or "") if own is None else self.numbers.data.denormalize(own)
            input = self.numbers.with_target(input, values)
        return self._look(input, changes, None if changes else hypotheses, generate)

    def compare(
        self, text: str | None = None, *, changes: Changes, image: Any = None, target: str | None = None
    ) -> Comparison:
        """The same input and target, unchanged and changed."""
        before = self.look(text, image=image, target=target)
        return Comparison(before, self.change(before, changes))

    def change(self, look: Look, changes: Changes) -> Look:
        """`look` under other changes: same input, same target."""
        return self._look(look.input, changes)

    @torch.inference_mode()
    def _look(
        self, input: Input, changes: Changes, hypotheses: list[Hypothesis] | None = None, generate: bool = True
    ) -> Look:
        self._check(input, changes)
        with self.lock, trace(self.model, self.edits(changes, input), only="*.weights") as seen:
            logits = self.forward(input)
        if hypotheses is None:
            hypotheses = self.generate(input, changes) if generate and self.reader.writes else []
        parts: dict[PartName, Part] = {}
        for name, layers in self.anatomy.parts.items():
            rows, columns = input.labels(name)
            none = torch.zeros(0, len(rows), len(columns))  # of a layer that computes no weights
            weights = tuple(seen[f"{path}.weights"][0].float().cpu() if heads else none for path, heads in layers)
            parts[name] = Part(name, rows, columns, weights)
        if self.numbers is not None:
            forecast = self.forecast(input, changes) if generate else None
            return Look(self, input, changes, parts, self.numbers.output(logits[0], forecast))
        texts = [(self.reader.decode(one.tokens), one.score) for one in hypotheses]
        return Look(self, input, changes, parts, read_output(self.reader, input, logits[0], texts))

    def forward(self, input: Input) -> Tensor:
        """The output of the model for a batch of one input: logits of tokens or classes, or states."""
        tensors = (input.source,) if input.target is None else (input.source, input.target)
        return self.model(*tensors)

    @torch.inference_mode()
    def trace(self, input: Input, changes: Changes, only: str) -> Trace:
        """The activations that match `only` in one pass under these changes."""
        with self.lock, trace(self.model, self.edits(changes, input), only=only) as seen:
            self.forward(input)
        return seen

    def edits(self, changes: Changes, input: Input) -> dict[str, Edit]:
        """The interventions of these changes; means are those of the unchanged model over this input."""
        stages = [feedforward_stage(self.anatomy, *one[:2]) for one in changes.feedforward if one[2] == "mean"]
        means = {}
        if stages:
            seen = self.trace(input, Changes(), "*.feedforward.output")
            means = {stage: seen[stage][0].mean(dim=0) for stage in stages}
        return edits(changes, self.anatomy, means)

    @torch.inference_mode()
    def forecast(self, input: Input, changes: Changes) -> Tensor:
        """What a model of numbers predicts step by step, [T, channels] in its own scale."""
        assert self.numbers is not None
        steps = self.numbers.steps(input)
        with self.lock, trace(self.model, self.edits(changes, input), only=""):
            return autoregress(cast(EncoderDecoder, self.model), input.source, None, steps)[0]

    def attention(self, path: str) -> torch.nn.Module:
        """The module at a path of the trace: decoder.3.cross is decoder.blocks.3.cross."""
        stack, _, rest = path.partition(".")
        return self.model.get_submodule(f"{stack}.blocks.{rest}" if rest[:1].isdigit() else path)

    def generate(
        self, input: Input, changes: Changes, search: SearchConfig | None = None, watch: Watch | None = None
    ) -> list[Hypothesis]:
        """What an encoder-decoder generates, best first; `watch` sees the candidates of every step of the search."""
        bos, eos = self.bundle.target_frame
        with self.lock, trace(self.model, self.edits(changes, input), only=""):
            return beam(cast(Any, self.model), input.source, None, search or self.search, bos, eos, watch)[0]

    def _check(self, input: Input, changes: Changes | None = None) -> None:
        """Raise for a model without weights, an input that is too long, and a row of weights that does not fit it."""
        self.anatomy.check_weights()
        sizes = {name: tuple(map(len, input.labels(name))) for name in self.anatomy.parts}
        layers = ((*sizes[name], heads) for name, layers in self.anatomy.parts.items() for _, heads in layers)
        if (cells := sum(map(math.prod, layers))) > LARGEST:
            raise UserError(
                f"the input has {len(input.source_labels):,} positions, which makes {cells:,} attention weights "
                f"({cells * 4 / 2**30:.1f} GiB); the limit is {LARGEST:,}: give a shorter one"
            )
        for part, layer, head, query, weights in changes.rows if changes else ():
            self.anatomy.path(part, layer, head)
            rows, columns = sizes[part]
            if not 0 <= query < rows:
                raise UserError(f"rows: query = {query}, but {part} attention has queries 0 to {rows - 1}")
            if len(weights) != columns or not all(0 <= weight < math.inf for weight in weights):
                raise UserError(
                    f"rows: {len(weights)} weights for {columns} keys: give one per key, finite and none below 0"
                )
