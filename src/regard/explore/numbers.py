"""Numbers: what goes into a pass of a model of numbers and what comes out, with a label for each step.

    10 20 30 40 50   ->   source  (x - mean) / std    [1, S, channels]        target  start y_1 … y_T-1

The first input of the decoder is zeros, where a text has <s>. The numbers that it reads are by default those that the
unchanged model predicts, one step after another, as `regard predict` does. Inputs are texts: numbers separated by
blanks or commas, of several channels step by step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.data.numeric import number_text, parse_numbers
from regard.errors import UserError
from regard.explore.forward import Input, Output
from regard.predict.bundle import Bundle
from regard.predict.regressor import Regressor

START = "start"


class NumberReader:
    """Texts to normalised numbers and back, for one model."""

    def __init__(self, bundle: Bundle) -> None:
        self.like = next(bundle.model.parameters())
        self.regressor = Regressor(bundle)
        self.data, self.channels = self.regressor.data, self.regressor.channels

    def read(self, text: str) -> Input:
        """The steps that the model reads: all numbers of a sequence, the last `context` of a series."""
        series, context = self.parse(text), self.data.context
        if context and len(series) < context:
            raise UserError(
                f"the text has {len(series):,} steps, but the model reads {context}: give {context} or more, separated "
                "by blanks or commas"
            )
        series = series[-context:]
        return Input(self._normal(series), self.labels(series), text=text)

    def steps(self, input: Input) -> int:
        """How many steps follow an input: as many as a sequence has, or the horizon of a series."""
        return self.data.horizon if self.data.context else len(input.source_labels)

    def with_target(self, input: Input, values: Tensor) -> Input:
        """The decoder reads a step of zeros and the values [T, channels], without the last."""
        target = self._normal(values)
        read = torch.cat((torch.zeros_like(target[:, :1]), target[:, :-1]), dim=1)
        written = self.labels(values)
        unknown = (None,) * len(written)
        return replace(input, target=read, read=(START, *written[:-1]), expected=unknown, written=written)

    def output(self, values: Tensor, generated: Tensor | None) -> Output:
        """From what the model predicts after each step, and what it generates, [T, channels] in its own scale each."""
        texts = () if generated is None else ((number_text(self.data.denormalize(generated)), 0.0),)
        shown = self.data.denormalize(values.float().cpu()).float()
        return Output("values", (), None, shown, texts[0][0] if texts else None, texts)

    def labels(self, series: Tensor) -> tuple[str, ...]:
        """The number of each step; of several channels, the index of the step."""
        if self.channels > 1:
            return tuple(f"{step}" for step in range(len(series)))
        return tuple(f"{value:.4g}" for value in series[:, 0].tolist())

    def parse(self, text: str) -> Tensor:
        """Numbers as the user writes them, [n, channels]."""
        numbers = parse_numbers(text)
        if not numbers or len(numbers) % self.channels:
            raise UserError(
                f"the text has {len(numbers)} numbers: give some, such as  10 20 30, in each step {self.channels}"
            )
        return self.regressor.as_series(torch.tensor(numbers, dtype=torch.float64).view(-1, self.channels))

    def _normal(self, series: Tensor) -> Tensor:
        """[n, channels] -> [1, n, channels] in the scale of the model."""
        return self.data.normalize(series)[None].to(self.like)
