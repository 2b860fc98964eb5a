"""Inside: open any model, give it a text or a picture, and see where every head looks, as it is and changed.

    inside = Inside.open("runs/demo")
    look = inside.look("March 3rd, 2021")                              one forward pass, all maps
    look.parts["cross"].weights[0][3]                                  layer 0, head 3: [queries, keys]
    look.steps("cross", 0, 3, query=2)                                 q·k, scaled, masked, softmax, weighted values
    both = inside.compare("March 3rd, 2021", changes=Changes(heads=(("decoder", 0, 0),)))
    both.before.output.answer, both.after.output.answer                what it says, before and after

One class serves every shape: an encoder-decoder that translates or captions pictures, a decoder that
continues a text, an encoder over text or patches, the recurrent model of 2015; trained here or imported.
Figures, tables, the commands and the page all read what `Look` holds.

Attention shows what was mixed, not why: different weights can give the same output (Jain & Wallace 2019,
"Attention is not Explanation"). The changed output is the better evidence.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import Anatomy, Changes, PartName, edits
from regard.explore.output import Difference, Kind, Output, difference, read_output
from regard.explore.reading import Reading, Readings
from regard.models.folder import find_device
from regard.models.recipe import RECIPE
from regard.nn.multihead import MultiHead
from regard.nn.trace import trace
from regard.predict.beam import beam
from regard.predict.bundle import load
from regard.predict.config import SearchConfig, recipe_config
from regard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from regard.models import Model

LARGEST = 2**28  # weights of one look: 1 GiB; a longer text is refused with the length that fits
TOP = 8  # likeliest tokens that are told for each place
Written = tuple[str, float, list[int]]  # an answer, its score and its ids


@dataclass(frozen=True)
class Part:
    """One kind of attention: the labels of its queries and keys, and the weights of each layer [heads, Nq, Nk]."""

    name: PartName
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: tuple[Tensor, ...]

    @property
    def layers(self) -> int:
        return len(self.weights)

    def mean(self) -> Tensor:
        """The mean of all heads of all layers, [Nq, Nk]."""
        return torch.cat(self.weights).mean(dim=0)


@dataclass(frozen=True)
class Steps:
    """How one query of one head arrives at its sum: a number for each key, vectors where it says so."""

    q: Tensor  # [D]
    k: Tensor  # [Nk, D]
    v: Tensor  # [Nk, Dv]
    scores: Tensor  # q · k
    scaled: Tensor  # · scale, plus the position's bias
    masked: Tensor  # hidden keys at -inf; divided by the temperature where one is set
    weights: Tensor  # softmax
    values: Tensor  # [Nk, Dv] weight · v of each key
    output: Tensor  # [Dv] their sum, 0 where the head is off
    scale: float


@dataclass(frozen=True)
class Look:
    """Everything one pass shows. `source` and `target` are the labels of what was read and what is written."""

    inside: Inside
    reading: Reading
    changes: Changes
    parts: Mapping[PartName, Part]
    output: Output

    @torch.inference_mode()
    def steps(self, part: PartName, layer: int, head: int, query: int) -> Steps:
        """The stages of one query, from a pass of their own: nothing but the weights is kept of the first."""
        inside, path = self.inside, self.inside.anatomy.path(part, layer, head)
        if not 0 <= query < len(self.parts[part].rows):
            raise UserError(f"query = {query}: {part} attention has queries 0 to {len(self.parts[part].rows) - 1}")
        with inside.lock, trace(inside.model, edits(self.changes, inside.anatomy), only=f"{path}.*") as seen:
            inside.forward(self.reading)
        stage = {name: seen[f"{path}.{name}"][0].float().cpu() for name in _STAGES}
        own = getattr(inside.attention(path), "key_of", (0,))[head]  # several heads may share a key head
        k, v = stage["k"][own], stage["v"][own]
        weights = stage["weights"][head, query]
        return Steps(
            q=stage["q"][head, query],
            k=k,
            v=v,
            scores=stage["scores"][head, query],
            scaled=stage["scaled"][head, query],
            masked=stage["masked"][head, query],
            weights=weights,
            values=weights[:, None] * v,
            output=stage["heads"][head, query],
            scale=float(getattr(inside.attention(path), "scale", inside.config.scale)),
        )

    def show(self, **which: Any) -> Shown:
        """A figure for a notebook: part, layer, head, grid and query choose as in `regard.explore.figures.draw`."""
        from regard.explore.figures import draw
        from regard.explore.report import attention_note

        return Shown(draw(self, **which), attention_note())

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Labels, all weights and the output as plain values."""
        from regard.explore.figures import numbers_of

        return numbers_of(self)


@dataclass(frozen=True)
class Shown:
    """A figure that a notebook draws: `svg`, and the sentence that belongs beside it."""

    svg: str
    note: str

    def _repr_html_(self) -> str:
        # The figure follows the system's light or dark, a notebook its own theme: so it brings its ground along.
        ground = "color-scheme:light dark;background:Canvas;color:CanvasText;padding:4px"
        return f'<div style="{ground}"><div style="overflow-x:auto">{self.svg}</div>{self.note}</div>'


_STAGES = ("q", "k", "v", "scores", "scaled", "masked", "weights", "heads")


@dataclass(frozen=True)
class Comparison:
    """The same input twice: as the model is, and changed. Both look at the same target, so maps can be compared."""

    before: Look
    after: Look

    def _repr_html_(self) -> str:
        from regard.explore.figures import output_table

        return output_table(self.after.output, self.before.output) + self.after._repr_html_()

    @property
    def difference(self) -> Difference:
        return difference(self.before.output, self.after.output)


class Inside:
    """A model that can be looked into. Passes take turns, so that one may be shared by threads."""

    def __init__(
        self,
        model: Model,
        tokenizers: Mapping[str, Tokenizer],
        tables: Mapping[str, Any] | None = None,
        search: SearchConfig | None = None,
        name: str = "model",
    ) -> None:
        """`tables` are those of its recipe: class names and the first token of an imported model stand there."""
        self.model, self.name, self.tables = model.eval(), name, dict(tables or {})
        like = next(model.parameters())
        self.config, self.device = model.config, like.device
        self.tokenizers = dict(tokenizers)
        self.readings = Readings(self.config, tokenizers, self.tables, like)
        self.search = replace(search or SearchConfig(), coverage_penalty=0.0)  # which needs a trace of its own
        self.anatomy = anatomy_of(model)
        self.lock = threading.RLock()

    @classmethod
    def open(cls, folder: str | Path, device: str = "cpu") -> Inside:
        """The model in a run's folder, or in one as Hugging Face writes it."""
        if (Path(folder) / "config.json").is_file() and not (Path(folder) / RECIPE).is_file():
            from regard.interop.folder import read_folder

            found = read_folder(folder)
            model = found.model.to(find_device(device))
            return cls(model, found.tokenizers, {"hf": found.notes}, name=Path(folder).resolve().name)
        bundle, search = load(folder, device), None
        sampled = bundle.table("decode").get("sample")  # what is drawn would differ from look to look
        if bundle.config.architecture in ("encoder-decoder", "recurrent") and not sampled:
            search = recipe_config(bundle.recipe, bundle.where)
        return cls(bundle.model, bundle.tokenizers, bundle.recipe, search, Path(folder).resolve().name)

    def look(
        self,
        text: str | None = None,
        *,
        picture: Any = None,
        target: str | None = None,
        changes: Changes | None = None,
        answer: bool = True,
        top: int = TOP,
    ) -> Look:
        """One pass over a text, or over a picture (a file, or pixels [channels, height, width]).

        `target` is what an encoder-decoder is made to write; left out, it is what the unchanged model writes.
        `answer=False` saves the search for what it writes under the changes.
        """
        reading, changes = self.readings.read(text, picture), changes or Changes()
        self._check_size(reading)  # before anything is searched: a source too long would fill the memory
        found: list[Written] | None = None
        if self.readings.writes:
            if target is None:
                found = self._write(reading, Changes())
            ids = found[0][2] if found else self.readings.target_ids(target or "")
            reading = self.readings.with_target(reading, ids)
        return self._look(reading, changes, answer, top, None if changes else found)

    def compare(
        self,
        text: str | None = None,
        *,
        changes: Changes,
        picture: Any = None,
        target: str | None = None,
        answer: bool = True,
        top: int = TOP,
    ) -> Comparison:
        """The same input as it is and changed, over the same target."""
        before = self.look(text, picture=picture, target=target, answer=answer, top=top)
        return Comparison(before, self._look(before.reading, changes, answer, top))

    def change(self, look: Look, changes: Changes, *, answer: bool = True, top: int = TOP) -> Look:
        """What `look` would have been under other changes: same input, same target."""
        return self._look(look.reading, changes, answer, top)

    @torch.inference_mode()
    def _look(
        self, reading: Reading, changes: Changes, answer: bool, top: int, found: list[Written] | None = None
    ) -> Look:
        self._check_size(reading)
        self._check_rows(reading, changes)
        with self.lock, trace(self.model, edits(changes, self.anatomy), only="*.weights") as seen:
            logits = self.forward(reading)
        if found is None:
            found = self._write(reading, changes) if answer and self.readings.writes else []
        parts: dict[PartName, Part] = {}
        for name, layers in self.anatomy.parts.items():
            rows, columns = reading.labels(name)
            weights = tuple(seen[f"{path}.weights"][0].float().cpu() for path, _ in layers)
            parts[name] = Part(name, rows, columns, weights)
        output = self._output(reading, logits[0], [(text, score) for text, score, _ in found], top)
        return Look(self, reading, changes, parts, output)

    def forward(self, reading: Reading) -> Tensor:
        """The model's answer to one reading: logits, classes or states, with a batch of one."""
        given = (reading.source,) if reading.target is None else (reading.source, reading.target)
        return cast(Tensor, self.model(*given))

    def attention(self, path: str) -> torch.nn.Module:
        """The module at a trace's path: decoder.3.cross is decoder.blocks.3.cross."""
        stack, _, rest = path.partition(".")
        return self.model.get_submodule(f"{stack}.blocks.{rest}" if rest[:1].isdigit() else path)

    def _write(self, reading: Reading, changes: Changes) -> list[Written]:
        """What an encoder-decoder writes by itself, best first."""
        config, model = self.search, self.config
        if model.position == "learned" and model.architecture != "recurrent":
            config = replace(config, max_length=min(config.max_length or model.max_length, model.max_length))
        bos, eos = self.readings.frame
        with self.lock, trace(self.model, edits(changes, self.anatomy), only="encoder.output"):  # keep next to nothing
            found = beam(cast(Any, self.model), reading.source, None, config, bos, eos)[0]
        return [(self.readings.decode(one.tokens), one.score, one.tokens) for one in found]

    def _output(self, reading: Reading, logits: Tensor, answers: Sequence[tuple[str, float]], top: int) -> Output:
        kind: Kind
        match self.config.architecture, self.config.output_head:
            case "encoder", "classes":
                return read_output("classes", logits[None], [""], self.readings.class_name, [None], top)
            case "encoder", "tokens":
                kind = "masked"
            case "encoder", _:
                return read_output("vector", torch.atleast_2d(logits), [], str, [], top)
            case "decoder", _:
                kind = "next"
            case _:
                kind = "target"
        return read_output(kind, logits, reading.read, self.readings.label, reading.expected, top, answers)

    def _check_size(self, reading: Reading) -> None:
        cells = 0
        for name, layers in self.anatomy.parts.items():
            rows, columns = reading.labels(name)
            cells += len(rows) * len(columns) * sum(heads for _, heads in layers)
        if cells > LARGEST:
            raise UserError(
                f"the text has {len(reading.source_labels):,} tokens, which makes {cells:,} weights "
                f"({cells * 4 / 2**30:.1f} GiB); the most is {LARGEST:,}: give a shorter piece of it"
            )

    def _check_rows(self, reading: Reading, changes: Changes) -> None:
        for row in changes.rows:
            self.anatomy.path(row.part, row.layer, row.head)
            rows, columns = reading.labels(row.part)
            if row.query >= len(rows):
                raise UserError(f"rows: query = {row.query}, but {row.part} attention has queries 0 to {len(rows) - 1}")
            if len(row.weights) != len(columns) or min(row.weights, default=0.0) < 0:
                raise UserError(
                    f"rows: {len(row.weights)} weights for {len(columns)} keys: give one for each, none below 0"
                )


def anatomy_of(model: Model) -> Anatomy:
    """Where the attention of a model is, in the order in which it is computed."""
    parts: dict[PartName, list[tuple[str, int]]] = {}
    for name, module in model.named_modules():
        path = name.replace("blocks.", "")
        if isinstance(module, MultiHead):
            part: PartName = "cross" if module.cross else cast(PartName, path.partition(".")[0])
            parts.setdefault(part, []).append((path, module.heads))
        elif path == "decoder.cross":  # the recurrent model's
            parts["cross"] = [(path, 1)]
    ordered = {name: tuple(parts[name]) for name in ("encoder", "decoder", "cross") if name in parts}
    told = model.config.architecture != "recurrent" and model.config.position != "none"
    reads = ("decoder" if model.config.architecture == "decoder" else "encoder") if told else None
    return Anatomy(cast(Mapping[PartName, tuple[tuple[str, int], ...]], ordered), reads)
