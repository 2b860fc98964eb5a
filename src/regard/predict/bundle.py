"""A bundle: a model with everything that is needed to use it.

    bundle = regard.load("runs/mine")                 a folder, read once
    bundle.predict(["A man rides a horse."])          one prediction for each input
    for token in bundle.stream(["Once upon"]): ...    predictions, or tokens of a generation, as they come
    bundle.model, bundle.tokenizer, bundle.config     the parts

A folder holds recipe.toml, the weights and the tokenizers (`regard.models.folder`); a bundle is made from those, or
from a model in memory: `Bundle(model, tokenizers, recipe)`. What it predicts is the affair of a `Predictor`, a class
for each kind of input and output; `regard.load` chooses it by the recipe's task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from regard.errors import MissingExtra, UserError
from regard.models.recipe import RECIPE
from regard.models.transformer import Model
from regard.predict.beam import Finished, beam
from regard.predict.config import SearchConfig, read_config, recipe_config
from regard.predict.constraints import Constraints
from regard.predict.ensemble import Ensemble, difference
from regard.predict.outputs import Hypothesis, Limits, Prediction
from regard.predict.outputs import ScoredText as ScoredText
from regard.predict.outputs import TextPrediction as TextPrediction
from regard.predict.sampling import sample
from regard.settings import to_dict
from regard.text.tokenizer import Tokenizer

Input = TypeVar("Input")
Opened = TypeVar("Opened")
Output = TypeVar("Output", bound="Prediction")
Batch = tuple[Sequence[int], Tensor, Tensor | None]  # rows, their inputs, and which of these are real (None: all)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class Bundle:
    """A model in eval mode, its tokenizers, the tables of its recipe, and its limits."""

    def __init__(
        self,
        model: Model,
        tokenizers: Mapping[str, Tokenizer] | None = None,
        recipe: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
        predictor: type[Predictor[Any, Any]] | None = None,
        others: Sequence[Bundle] = (),
    ) -> None:
        """`path` is the folder that it was read from, None for a model in memory; `others` make it an ensemble."""
        self.model, self.config = model.eval(), model.config
        self.tokenizers, self.recipe = dict(tokenizers or {}), dict(recipe or {})
        self.path = None if path is None else Path(path)
        self.name, self.where = ("model", RECIPE) if path is None else (str(path), str(Path(path) / RECIPE))  # messages
        self.predictor_class, self.device = predictor, next(model.parameters()).device
        self.own = False  # whether nothing else uses the model, so that its weights may be stored in another order
        tables = {name: table for name, table in self.recipe.items() if isinstance(table, dict)}
        self.tables: defaultdict[str, dict[str, Any]] = defaultdict(dict, tables)  # empty where there is none
        positions, longest = self.config.position_limit, self.tables["data"].get("max_length")
        source = longest if isinstance(longest, int) and self.config.architecture == "encoder" else positions
        source = _least(source, positions)
        self.limits = Limits(positions, source, self.tables["train"].get("pack") or self.config.max_length)
        self.others = tuple(others)
        for other in self.others:
            self._check_member(other)

    # --- tokenizers

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that has one."""
        if "tokenizer" not in self.tokenizers:
            raise UserError(
                f"{self.name}: has no tokenizer.json (or source.json and target.json); copy the folder again"
            )
        return self.tokenizers["tokenizer"]

    @property
    def source(self) -> Tokenizer:
        """The tokenizer of the inputs."""
        return self.tokenizers.get("source") or self.tokenizer

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of the outputs."""
        return self.tokenizers.get("target") or self.tokenizer

    @property
    def target_frame(self) -> tuple[int, int]:
        """The ids with which a target begins and ends; an imported model may begin with another token than <s>."""
        start = self.tables["hf"].get("decoder_start_token_id")
        return self.target.special_id("bos") if start is None else int(start), self.target.special_id("eos")

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes: the recipe's, those of an imported model, or numbers."""
        count, names = self.config.classes or 0, self.tables["data"].get("classes")
        imported = self.tables["hf"].get("id2label")
        if not names and isinstance(imported, dict):
            names = [imported.get(str(number), number) for number in range(count)]
        names = names or range(count)
        if isinstance(names, str) or len(names) != count:
            raise UserError(
                f"{self.where}: data.classes names {len(names)} classes, but the model has {count}; correct the recipe"
            )
        return tuple(map(str, names))

    # --- ensembles

    def _check_member(self, other: Bundle) -> None:
        """An ensemble reads the same inputs and predicts the same tokens; its limits are the lowest of its members."""
        own = {"patches": ("image_size", "channels"), "features": ("feature_dim",)}.get(self.config.input, ())
        for name in ("input", *own, "output_head"):
            if (value := getattr(other.config, name)) != (expected := getattr(self.config, name)):
                raise UserError(f"{other.name}: {name} = {value!r}, but {self.name} has {expected!r}: not an ensemble")
        for side in ("source", "target") if self.config.input == "tokens" else ("target",):
            if (what := difference(getattr(self, side), getattr(other, side))) is not None:
                raise UserError(
                    f"{other.name}: its {side} tokenizer has {what}, compared with {self.name}; the members of an "
                    "ensemble need the same tokenizers: train them with the same text.tokenizer_file"
                )
        if (self.target_frame, self.config.target_size) != (other.target_frame, other.config.target_size):
            raise UserError(f"{other.name}: its first token, </s> or vocabulary size is not that of {self.name}")
        ours, its = self.limits, other.limits
        self.limits = replace(
            ours, positions=_least(ours.positions, its.positions), source=_least(ours.source, its.source)
        )

    # --- predictions

    @cached_property
    def predictor(self) -> Predictor[Any, Any]:
        if self.predictor_class is None:
            config = self.config
            raise UserError(
                f"{self.name}: no predictor for architecture = {config.architecture!r}, input = {config.input!r}, "
                f"output_head = {config.output_head!r}; call the model itself: regard.load(path).model"
            )
        return self.predictor_class(self)

    def predict(self, inputs: Sequence[Any], **options: Any) -> list[Any]:
        """One prediction for each input; the options are those of the predictor."""
        return self.predictor.predict([inputs] if isinstance(inputs, str) else inputs, **options)

    def stream(self, inputs: Sequence[Any], **options: Any) -> Iterator[Any]:
        """Predictions as they are ready; of a language model, tokens."""
        return self.predictor.stream([inputs] if isinstance(inputs, str) else inputs, **options)


class Predictor(ABC, Generic[Input, Output]):
    """From inputs to predictions, with the model of a bundle."""

    NEEDS: ClassVar[str]  # the kind of model, for a message where it is another
    MODEL: ClassVar[Mapping[str, tuple[str, ...]]]  # what [model] must be: {"architecture": ("encoder",), …}
    COMMAND: ClassVar[str]  # the command that uses it
    model: Any  # that of the bundle
    BATCH: ClassVar[int] = 64  # inputs between two predictions of a stream
    ENSEMBLES: ClassVar[bool] = False  # whether it predicts with several models

    def __init__(self, bundle: Bundle) -> None:
        for name, config in ((one.name, one.config) for one in (bundle, *bundle.others)):
            if any(getattr(config, key) not in values for key, values in self.MODEL.items()):
                raise UserError(
                    f"{name}: architecture = {config.architecture!r}, input = {config.input!r}, output_head = "
                    f"{config.output_head!r}: {self.NEEDS} is needed here"
                )
        kinds = (type(self), *(other.predictor_class for other in bundle.others))
        if bundle.others and not all(kind is None or kind.ENSEMBLES for kind in kinds):
            raise UserError(f"{bundle.others[0].name}: ensembles are of runs that translate or caption; name one run")
        self.bundle, self.model, self.device = bundle, bundle.model, bundle.device

    @abstractmethod
    def predict(self, inputs: Sequence[Input], **options: Any) -> list[Output]:
        """One prediction for each input, in their order."""

    def stream(self, inputs: Sequence[Input], **options: Any) -> Iterator[Any]:
        """One prediction for each input, as soon as those of its batch are ready; a list of options is split."""
        for at in range(0, len(inputs), self.BATCH):
            own = {
                name: value[at : at + self.BATCH] if isinstance(value, list) and len(value) == len(inputs) else value
                for name, value in options.items()
            }
            if isinstance(self, SearchPredictor):  # the index of an input determines its samples
                own["first"] = at + options.get("first", 0)
            yield from self.predict(inputs[at : at + self.BATCH], **own)

    @staticmethod
    def batches(
        ids: Sequence[Sequence[int]], rows: Iterable[int], tokens: int, most: int | None = None
    ) -> Iterator[Batch]:
        """These rows of `ids` as batches [B, longest], shortest first: no more than `tokens`, padding included."""
        groups: list[list[int]] = []
        for row in sorted(rows, key=lambda row: len(ids[row])):
            if not groups or len(groups[-1]) == most or (len(groups[-1]) + 1) * len(ids[row]) > tokens:
                groups.append([])
            groups[-1].append(row)
        for group in groups:
            if len(ids[group[0]]) == len(ids[group[-1]]):
                yield group, torch.tensor([ids[row] for row in group], dtype=torch.long), None
                continue
            lengths = torch.tensor([len(ids[row]) for row in group])
            is_real = torch.arange(int(lengths[-1])) < lengths[:, None]
            padded = torch.zeros(is_real.shape, dtype=torch.long)
            padded[is_real] = torch.tensor([id for row in group for id in ids[row]])
            yield group, padded, is_real


def open_each(
    inputs: Sequence[Input], read: Callable[[Input], Opened], failed: dict[int, str] | None, first: int = 0
) -> list[Opened | None]:
    """`read` of each input, the first in row `first`.

    With a dict `failed`, it gets the rows that cannot be read, with the reasons, and they are None; else an error.
    """
    opened: list[Opened | None] = []
    for row, one in enumerate(inputs, first):
        try:
            opened.append(read(one))
        except MissingExtra:
            raise
        except UserError as error:
            if failed is None:
                raise
            failed[row] = str(error)
            opened.append(None)
    return opened


class SearchPredictor(Predictor[Input, Output]):
    """A predictor whose outputs are sequences: [decode] of the recipe says how they are found."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # of [decode]
    SLIDES: ClassVar[bool] = False  # whether outputs may be longer than the model's positions

    def __init__(self, bundle: Bundle, config: SearchConfig | None = None) -> None:
        super().__init__(bundle)
        self.source, self.target = bundle.source, bundle.target  # tokenizers
        self.interrupt: Callable[[], None] = lambda: None  # called before every step; it may raise an error
        self.finished: Finished = lambda row, hypotheses: None  # called when the search for an input ends
        self.config = config or recipe_config(bundle.recipe, bundle.where, **self.DEFAULTS)
        self.models = [bundle.model, *(other.model for other in bundle.others)]
        self.engine: Any = Ensemble(self.models) if bundle.others else bundle.model

    def configured(self, config: SearchConfig | None = None, **changes: Any) -> SearchConfig:
        """`config`, or that of the recipe, with fields changed, and within the model's positions."""
        config = config or self.config
        if changes:
            config = read_config(to_dict(config), changes)
        return config if self.SLIDES else config.within(self.bundle.limits.positions)

    def search(
        self, config: SearchConfig, first: int, batch: Batch, constraints: Constraints | None = None
    ) -> list[list[Hypothesis]]:
        """The outputs for a batch of an encoder-decoder; `first` is the index of the first row, for its samples."""
        rows, source, is_real = batch
        own = None if constraints is None else constraints.of(rows)
        real = None if is_real is None else is_real.to(self.device)
        arguments = (self.engine, source.to(self.device), real, config, *self.bundle.target_frame)
        if config.sample:
            lines = [first + row for row in rows]
            return sample(*arguments, lines=lines, constraints=own, interrupt=self.interrupt)
        found = lambda at, hypotheses: self.finished(rows[at], hypotheses)  # noqa: E731
        return beam(*arguments, constraints=own, interrupt=self.interrupt, finished=found)
