"""Regression: numbers in, numbers out, one step after another; each output is the next input.

    y_1 = f(0, memory)      y_t = f(y_t-1, …, memory)            x [B, S, channels] -> y [B, T, channels]

In training the decoder reads the true numbers (teacher forcing). Here it is autoregressive: it reads its own outputs,
so an error at one step is an input at the next, and the error of these outputs is the metric that counts. The first
input is zeros, where a text has <s>; it is at position 0, and no number ever is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.numeric import NumberData
from regard.errors import UserError
from regard.models.transformer import EncoderDecoder
from regard.predict.bundle import Bundle, Prediction, Predictor
from regard.settings import from_dict

DEVIATIONS = 4  # standard deviations from the mean of the training data: hardly any number of it lies beyond


@torch.inference_mode()
def autoregress(model: EncoderDecoder, source: Tensor, is_real: Tensor | None, steps: int) -> Tensor:
    """[B, S, channels] -> [B, steps, channels], in the scale of the model."""
    state = model.start(source, is_real, capacity=steps)
    value = torch.zeros_like(source[:, :1])
    outputs = []
    for _ in range(steps):
        value = model.step(value, state)
        outputs.append(value)
    return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class Forecast(Prediction):
    """The steps that follow an input: [steps][channels]."""

    values: list[list[float]]

    @property
    def series(self) -> list[float]:
        """The first channel, which may be the only one."""
        return [step[0] for step in self.values]


class Regressor(Predictor["Sequence[float] | Tensor", Forecast]):
    """A trained model of numbers with the scale that it was trained in."""

    NEEDS = "a trained encoder-decoder with output_head = 'values', and [data] with its scale"
    MODEL: ClassVar = {"output_head": ("values",)}
    model: EncoderDecoder
    COMMAND = "predict"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        if not bundle.tables["data"].get("mean"):
            raise UserError(f"{bundle.where}: has no data.mean: {self.NEEDS} is needed here")
        try:
            self.data = from_dict(NumberData, bundle.tables["data"], "data.")
        except UserError as error:
            raise UserError(f"{bundle.where}: {error}") from None
        self.channels = self.model.config.feature_dim
        # The most numbers of a sequence in the training data; 0: a time series, always of the same length.
        self.longest = 0 if self.data.context else self.data.longest
        # (lowest, highest) [channels] of the training data: those of the rule, or mean ± DEVIATIONS.
        rule, (mean, std) = self.data.rule, self.data.scale
        self.training_range = mean - DEVIATIONS * std, mean + DEVIATIONS * std
        if rule is not None:
            low, high = torch.tensor([[rule.low], [rule.high]], dtype=torch.float64)
            self.training_range = low, high

    def out_of_range(self, series: Tensor) -> list[list[float]]:
        """By channel, the numbers of [n, channels] that are read and lie outside the training range."""
        read, (low, high) = series[-self.data.context :], self.training_range  # context = 0: all
        return [read[outside, at].tolist() for at, outside in enumerate(((read < low) | (read > high)).T)]

    def predict(
        self, inputs: Sequence[Sequence[float] | Tensor], *, steps: int | None = None, **options: Any
    ) -> list[Forecast]:
        """What follows each input: a sequence of numbers, or a time series [n, channels].

        `steps`: how many; by default as many as a sequence has, or the horizon of a time series.
        """
        return [Forecast(self.forecast(numbers, steps).tolist()) for numbers in inputs]

    def as_series(self, numbers: Sequence[float] | Tensor) -> Tensor:
        """[n, channels] of a sequence of one channel, or of a tensor."""
        try:
            series = torch.as_tensor(numbers, dtype=torch.float64)
        except (TypeError, ValueError):
            raise UserError(f"numbers: give a list, or [steps, channels = {self.channels}]") from None
        series = series[:, None] if series.dim() == 1 else series
        if series.dim() != 2 or series.shape[1] != self.channels:
            raise UserError(f"numbers have shape {tuple(series.shape)}: give [steps, channels = {self.channels}]")
        if not len(series):
            raise UserError("the sequence has no numbers; give at least one, such as  10 20 30")
        return series

    def forecast(self, numbers: Sequence[float] | Tensor, steps: int | None = None) -> Tensor:
        """What follows steps [n, channels], of a time series the last `context` of them: [steps, channels]"""
        context, series = self.data.context, self.as_series(numbers)
        if context and len(series) < context:
            raise UserError(f"{len(series):,} steps are too few: the model reads {context}")
        steps = steps or (self.data.horizon if context else len(series))
        source = self.data.normalize(series[-context:]).to(self.device)
        outputs = self.data.denormalize(autoregress(self.model, source[None], None, steps))[0]
        if not bool(outputs.isfinite().all()):
            scale = ", ".join(f"{mean:g} ± {std:g}" for mean, std in zip(self.data.mean, self.data.std, strict=True))
            raise UserError(
                f"the prediction is not a number: the model was trained on numbers of about {scale}, and the input "
                f"has numbers up to {series.abs().max().item():g}; give numbers in the range of the training data"
            )
        return outputs
