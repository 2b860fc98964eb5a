"""Regression: continuous values in, continuous values out, by an encoder-decoder that reads and predicts vectors.

    [data]    pairs of sequences, or a time series to be forecast     `regard.data.numeric`
    loss      Σ (y - ŷ)² over scaled numbers, each given those before
    metrics   MAE, mean of |y - ŷ|; MSE, mean of (y - ŷ)²

Nothing else differs from translation: a linear layer replaces the token embedding, another one the output layer. All
rows have one shape (sequences padded to data.longest, windows of data.context steps), so `train.cuda_graph` applies;
`train.batch_tokens` counts source steps.

Metrics are those of autoregressive predictions: the model reads its own outputs. A forecast of a time series is
compared with two that need no model, the last value and the last season, in units of each channel's standard deviation
in the training data; a sequence with the source itself (or, where lengths differ, with the mean).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.numeric import (
    NumberBatch,
    NumberData,
    NumberSets,
    last_season,
    last_value,
    make_sets,
    number_text,
)
from regard.data.streams import Examples
from regard.messages import localize
from regard.models.config import ModelConfig
from regard.models.transformer import EncoderDecoder
from regard.predict.regressor import Regressor, autoregress
from regard.training.results import Chart, Section, Table
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric, Objective

TOGETHER = 1024  # rows that are evaluated at once
SHOWN_SEQUENCE = [10.0, 20.0, 30.0, 40.0, 50.0]  # in every report on sequences by rule
BEFORE = 96  # steps before a forecast that are drawn
LISTED = 8  # sequences in the report


def squared_error(model: EncoderDecoder, batch: NumberBatch) -> tuple[Tensor, Tensor]:
    """(summed squared error, how many numbers) under teacher forcing."""
    error = (model(batch.source, batch.read, batch.source_is_real).float() - batch.target).square()
    if batch.target_is_real is not None:
        error = error * batch.target_is_real[..., None]
    return error.sum(), batch.tokens


def evaluate_series(batch: NumberBatch, predicted: Tensor, data: NumberData, channels: tuple[str, ...]) -> Metrics:
    """Of windows [n, horizon, channels]: over all, by channel and by step, compared with the two simple forecasts."""
    metrics: Metrics = {"windows": len(predicted), "channels": list(channels)}
    forecasts = {
        "": predicted,
        "last_": last_value(batch.source, data.horizon),
        "seasonal_": last_season(batch.source, data.horizon, data.period),
    }
    for name, forecast in forecasts.items():
        error = (forecast - batch.target).double()
        metrics |= {f"{name}mae": error.abs().mean().item(), f"{name}mse": error.square().mean().item()}
        metrics[f"{name}mae_by_channel"] = error.abs().mean(dim=(0, 1)).tolist()
        metrics[f"{name}mae_by_step"] = error.abs().mean(dim=(0, 2)).tolist()
    return metrics


def evaluate_pairs(batch: NumberBatch, predicted: Tensor, forced: Tensor, data: NumberData) -> Metrics:
    """Of padded sequences, in the units of the data; `forced` was predicted from the true numbers (teacher forcing)."""
    assert batch.source_is_real is not None and batch.target_is_real is not None
    is_real, unit = batch.target_is_real, data.std[0]
    error, forced_error = (((outputs - batch.target)[is_real] * unit).double().abs() for outputs in (predicted, forced))
    same = torch.equal(batch.source_is_real, is_real)
    naive = (batch.source - batch.target)[is_real] if same else batch.target[is_real]  # scaled numbers: their mean is 0
    return {
        "sequences": len(batch.source),
        "mae": error.mean().item(),
        "mse": error.square().mean().item(),
        "largest": error.max().item(),
        "within": (error <= data.tolerance).double().mean().item(),
        "tolerance": data.tolerance,
        "forced_mae": forced_error.mean().item(),
        "naive_mae": (naive * unit).double().abs().mean().item(),
    }


class Regression(Task):
    NAME = "regression"
    TABLES: ClassVar = {"data": NumberData}
    DEFAULTS: ClassVar = {
        "model": {
            "input": "features", "output_head": "values", "norm_order": "pre", "dropout": 0.0, "embed_dropout": 0.0
        },
        "train": {"schedule": "cosine", "eps": 1e-8, "label_smoothing": 0.0},
    }  # fmt: skip
    MODEL: ClassVar = {"input": ("features",), "output_head": ("values",)}
    PLACEHOLDERS: ClassVar = {"feature_dim": 1}
    UNUSED = ("label_smoothing", "r_drop", "loss_chunk")
    METRICS: ClassVar = {"loss": LOSS, "mae": Metric("mae")}
    HEADLINE = ("mae", "MAE", ".4f")
    UNIT = "numbers"
    LOSS_UNIT = "squared error, scaled"
    EXAMPLE = 'train = ["pairs.tsv"]'
    predictor = Regressor

    data: NumberData
    numbers: NumberSets

    @classmethod
    def row_length(cls, tables: Mapping[str, Any]) -> int | None:
        data = tables.get("data", {})
        length = data.get("context") or data.get("longest", NumberData.longest)
        return length if isinstance(length, int) else None

    # --- data and model

    @property
    def sets(self) -> Sequence[str]:
        return [name for name in self.numbers.rows if name != "train"]

    def check_data(self) -> None:
        self.numbers = make_sets(self.data)
        self.data = self.numbers.data

    def prepare_evaluation(self) -> None:
        self.check_data()

    def examples(self, name: str) -> tuple[str, NumberBatch]:
        return name, self.numbers.rows[name]

    def inputs(self, name: str, count: int) -> list[Tensor]:
        batch = self.numbers.rows[name]
        is_real = torch.ones(batch.source.shape[:2], dtype=torch.bool)
        is_real = is_real if batch.source_is_real is None else batch.source_is_real
        return [one[real] for one, real in zip(batch.source[:count], is_real, strict=False)]

    def references(self, name: str, count: int) -> list[str]:
        batch = self.numbers.rows[name]
        is_real = torch.ones(batch.target.shape[:2], dtype=torch.bool)
        is_real = is_real if batch.target_is_real is None else batch.target_is_real
        return [self.as_example(one[real]) for one, real in zip(batch.target[:count], is_real, strict=False)]

    def as_example(self, input: Tensor) -> str:
        return number_text(self.data.denormalize(input))

    def model_sizes(self) -> dict[str, int | None]:
        return {"feature_dim": len(self.numbers.channels)}

    def check_model(self, config: ModelConfig) -> None:
        horizon = self.data.horizon if self.data.context else 0
        self.check_positions(config, max(self.config.pack, horizon), "steps of a sequence")

    # --- training and evaluation

    def stream(self) -> Examples:
        rows, windows, starts = self.config.batch_tokens // self.config.pack, self.numbers.windows, self.numbers.starts
        if windows is not None and starts is not None:
            resident = windows.to(self.device)
            return Examples(len(starts), rows, self.config.seed, lambda chosen: resident.batch(starts[chosen]))
        train = self.numbers.rows["train"].to(self.device)
        return Examples(len(train.source), rows, self.config.seed, lambda chosen: train.rows(chosen.to(self.device)))

    def objective(self) -> Objective:
        return squared_error

    def _parts(self, batch: NumberBatch) -> Iterator[NumberBatch]:
        return (batch.rows(slice(at, at + TOGETHER)).to(self.device) for at in range(0, len(batch.source), TOGETHER))

    def evaluate(self, model: Any) -> dict[str, float]:
        """The squared error under teacher forcing; the MAE of autoregressive predictions if `train.metric` is "mae"."""
        loss, count = self.sum_loss(squared_error, model, self._parts(self.numbers.rows["valid"]))
        metrics = {"valid_loss": loss / count}
        if self.config.metric == "mae":
            metrics["mae"] = self.score(self.bundle(model).predictor, self.examples("valid"))[0]["mae"]
        return metrics

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        (name, batch), model, data = examples, predictor.bundle.model, self.data
        predicted, forced = [], []
        for part in self._parts(batch):
            predicted.append(autoregress(model, part.source, part.source_is_real, part.target.shape[1]).cpu())
            if not data.context:
                with torch.inference_mode():
                    forced.append(model(part.source, part.read, part.source_is_real).cpu())
        if data.context:
            return evaluate_series(batch, torch.cat(predicted), data, self.numbers.channels), None
        metrics = evaluate_pairs(batch, torch.cat(predicted), torch.cat(forced), data)
        if name == "test" and data.rule is not None:
            _, expected, outputs = self._rule_example(predictor)
            metrics["largest_of_example"] = max(abs(a - b) for a, b in zip(expected, outputs, strict=True))
        return metrics, None

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        if "windows" in metrics:
            return [
                f"MAE {metrics['mae']:.4f}  MSE {metrics['mse']:.4f}  (last value {metrics['last_mae']:.4f}, "
                f"{metrics['last_mse']:.4f}; last season {metrics['seasonal_mae']:.4f}, {metrics['seasonal_mse']:.4f})",
                f"{metrics['windows']:,} windows, in units of each channel's standard deviation",
            ]
        lines = [
            f"MAE {metrics['mae']:.4f}  within {metrics['tolerance']:g}: {metrics['within']:.2%}  "
            f"largest error {metrics['largest']:.4f}",
            f"{metrics['sequences']:,} sequences; MAE {metrics['forced_mae']:.4f} with teacher forcing, "
            f"{metrics['naive_mae']:.4f} without a model",
        ]
        if "largest_of_example" in metrics:
            lines.append(f"10 20 30 40 50: largest error {metrics['largest_of_example']:.4f}")
        return lines

    # --- report

    def _rule_example(self, predictor: Any) -> tuple[list[float], list[float], list[float]]:
        rule = self.data.rule
        assert rule is not None
        expected = [rule.multiply * number + rule.add for number in SHOWN_SEQUENCE]
        return SHOWN_SEQUENCE, expected, predictor.predict([SHOWN_SEQUENCE])[0].series

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        scored = {name: one.metrics for name, one in evaluations.items()}
        if self.data.context:
            return [*(_forecasts(name, metrics) for name, metrics in scored.items()), *self._windows(predictor)]
        return [*([_errors(scored)] if scored else []), self._sequences(predictor)]

    def _windows(self, predictor: Any) -> list[Section]:
        """A window of the last set, as it was and as it is forecast."""
        windows, starts = self.numbers.windows, self.numbers.starts
        assert windows is not None and starts is not None
        batch = [windows.batch(starts[-1:]), *self.numbers.rows.values()][-1]
        source, target = (self.data.denormalize(part[len(part) // 2]) for part in (batch.source, batch.target))
        forecast = predictor.forecast(source)
        sections = []
        for at, channel in enumerate(self.numbers.channels):
            before = source[-BEFORE:, at].tolist()
            lines = {
                localize("input"): list(enumerate(before, 1 - len(before))),
                localize("actual"): list(enumerate(target[:, at].tolist(), 1)),
                localize("forecast"): list(enumerate(forecast[:, at].tolist(), 1)),
            }
            chart = Chart(channel, lines, "step", "value", "Step 0 is the last input.")
            sections.append(Section(f"A window: {channel}", [chart]))
        return sections

    def _sequences(self, predictor: Any) -> Section:
        batch = [*self.numbers.rows.values()][-1]
        rows = [] if self.data.rule is None else [self._rule_example(predictor)]
        for row in range(min(LISTED, len(batch.source))):
            source, target = (
                self.data.denormalize(part[row])[:, 0][is_real[row]].tolist()  # type: ignore[index]
                for part, is_real in ((batch.source, batch.source_is_real), (batch.target, batch.target_is_real))
            )
            rows.append((source, target, predictor.predict([source], steps=len(target))[0].series))
        texts = [[" ".join(f"{number:.2f}" for number in numbers) for numbers in row] for row in rows]
        return Section("Sequences", [Table(["input", "expected", "predicted"], texts, preformatted=True)])


def _errors(scored: Mapping[str, Metrics]) -> Section:
    names = {
        "mae": "MAE", "largest": "largest error", "within": "within tolerance", "forced_mae": "MAE, teacher forcing",
        "naive_mae": "MAE, baseline", "sequences": "sequences",
    }  # fmt: skip
    rows = [[name, *(metrics[key] for key in names)] for name, metrics in scored.items()]
    note = (
        "Predictions are autoregressive: each one is the next input, errors included. Teacher forcing: the decoder "
        "reads the true numbers instead. Baseline: the input repeated, or the mean where the lengths differ."
    )
    return Section("Errors", [note, Table(["set", *names.values()], rows)])


def _forecasts(name: str, metrics: Metrics) -> Section:
    """The model beside two baselines: overall, by channel, by step."""
    names = {"": "this model", "last_": "last value", "seasonal_": "last season"}
    kinds = {key: localize(kind) for key, kind in names.items()}
    rows = [
        [kind, *(metrics[f"{key}{one}"] for one in ("mae", "mse")), *metrics[f"{key}mae_by_channel"]]
        for key, kind in kinds.items()
    ]
    steps = {kind: list(enumerate(metrics[f"{key}mae_by_step"], 1)) for key, kind in kinds.items()}
    chart = Chart("MAE by step", steps, "steps ahead", "standard deviations")
    note = f"{metrics['windows']:,} windows; errors in standard deviations of each channel, lower is better."
    table = Table(["forecast", "MAE", "MSE", *metrics["channels"]], rows, fixed=3)
    return Section(f"Forecasts on {name}", [note, table, chart])
