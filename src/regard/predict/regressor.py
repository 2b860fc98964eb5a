"""Numbers, one step after another: what a model has written is what it reads next.

    y_1 = f(0, memory)      y_t = f(y_t-1, …, memory)            x [B, S, channels] -> y [B, T, channels]

In training the decoder reads the true numbers (teacher forcing). Here it reads its own, so an error at one step is
an input at the next: this is the figure that counts. The first input is zeros, where a text has <s>: it stands at
position 0, and no number ever does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.numbers import NumbersData
from regard.data.scaled import Scale
from regard.errors import UserError
from regard.models import EncoderDecoder
from regard.models.folder import load, load_recipe
from regard.models.recipe import RECIPE
from regard.settings import from_dict

DEVIATIONS = 4  # from the mean of the training data: hardly any number of it lies beyond


@torch.inference_mode()
def write_numbers(model: EncoderDecoder, source: Tensor, is_real: Tensor | None, steps: int) -> Tensor:
    """[B, S, channels] -> [B, steps, channels], free-running, in the scale of the model."""
    state = model.start(source, is_real, capacity=steps)
    value = torch.zeros_like(source[:, :1])
    written = []
    for _ in range(steps):
        value = model.step(value, state)
        written.append(value)
    return torch.cat(written, dim=1)


class Regressor:
    """A trained model of numbers with the scale it was trained in."""

    def __init__(self, model: EncoderDecoder, data: NumbersData) -> None:
        self.model, self.data, self.scale = model.eval(), data, Scale.of(data)
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Regressor:
        tables = load_recipe(folder)
        table: Any = tables.get("data")
        if tables.get("task") != "numbers" or not isinstance(table, Mapping):
            raise UserError(
                f"{folder}: is no model of numbers; its task is {tables.get('task', 'translation')!r}. Train one with "
                'a recipe that says  task = "numbers"'
            )
        try:
            data = from_dict(NumbersData, dict(table), "data.")
        except UserError as error:
            raise UserError(f"{Path(folder) / RECIPE}: {error}") from None
        model = load(folder, device)
        if not isinstance(model, EncoderDecoder) or model.config.output_head != "values" or not data.mean:
            raise UserError(f"{folder}: holds no trained model of numbers; train it again")
        return cls(model, data)

    @property
    def channels(self) -> int:
        return self.model.config.feature_dim

    def _read(self, given: Tensor) -> Tensor:
        """Of steps [n, channels] those that the model reads, of a series the last `context`."""
        return given[-self.data.context :]  # context = 0: all

    @property
    def known(self) -> tuple[Tensor, Tensor]:
        """The range of what it has learned from, (lowest, highest) [channels]: the rule's, or mean ± DEVIATIONS."""
        rule, reach = self.data.rule, DEVIATIONS * self.scale.std
        if rule is None:
            return self.scale.mean - reach, self.scale.mean + reach
        return torch.tensor([rule.low], dtype=torch.float64), torch.tensor([rule.high], dtype=torch.float64)

    @property
    def longest(self) -> int:
        """The most numbers of a sequence that it has learned from; 0: it reads a series, always the same length."""
        return 0 if self.data.context else self.data.longest

    def strange(self, given: Tensor) -> list[list[float]]:
        """By channel, the numbers of [n, channels] that are read and lie outside what it has learned from."""
        read, (low, high) = self._read(given), self.known
        return [read[odd, at].tolist() for at, odd in enumerate(((read < low) | (read > high)).T)]

    def predict(self, sequences: Sequence[Sequence[float]], steps: int | None = None) -> list[list[float]]:
        """What follows each sequence of one channel: `steps` numbers, or as many as it has (a series: its horizon)."""
        if self.channels != 1:
            raise UserError(f"this model reads {self.channels} channels a step: give them as a table, with --file")
        answers = []
        for numbers in sequences:
            if not numbers:
                raise UserError("the sequence has no numbers; give at least one, such as  10 20 30")
            count = steps or (self.data.horizon if self.data.context else len(numbers))
            given = torch.tensor(numbers, dtype=torch.float64)[:, None]
            answers.append(self.forecast(given, count)[:, 0].tolist())
        return answers

    def forecast(self, given: Tensor, steps: int | None = None) -> Tensor:
        """What follows steps [n, channels], of a series the last `context` of them: [steps, channels]"""
        context = self.data.context
        if given.dim() != 2 or given.shape[1] != self.channels:
            raise UserError(f"numbers have shape {tuple(given.shape)}: give [steps, channels = {self.channels}]")
        if context and len(given) < context:
            steps_are = "1 step is" if len(given) == 1 else f"{len(given):,} steps are"
            raise UserError(f"{steps_are} given, but the model reads {context}: give as many")
        source = self.scale.shrink(self._read(given)).to(self.device)
        found = self.scale.widen(write_numbers(self.model, source[None], None, steps or self.data.horizon))[0]
        if not bool(found.isfinite().all()):
            known = ", ".join(f"{mean:g} ± {std:g}" for mean, std in zip(self.data.mean, self.data.std, strict=True))
            raise UserError(
                "the model's answer is no number: it was trained on numbers of about "
                f"{known}, and what is given goes up to {given.abs().max().item():g}; give numbers like those"
            )
        return found
