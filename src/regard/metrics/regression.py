"""Regression metrics: the errors of a model, and those of simple predictions without a model.

    MAE   mean of |y - ŷ|           MSE   mean of (y - ŷ)²

Predictions are autoregressive: the model reads its own outputs. A forecast of a time series is compared with two that
need no model, the last value and the last season, in units of each channel's standard deviation in the training data;
a sequence with the source itself (or, where lengths differ, with the mean).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.data.numeric import NumberBatch, NumberData, last_season, last_value
from regard.models import EncoderDecoder
from regard.predict.regressor import autoregress

TOGETHER = 1024  # rows


def evaluate_regression(
    model: EncoderDecoder, batch: NumberBatch, data: NumberData, channels: tuple[str, ...]
) -> dict[str, Any]:
    """The metrics of a set, as plain values."""
    device = next(model.parameters()).device
    predicted, forced = [], []
    for at in range(0, len(batch.source), TOGETHER):
        part = batch.rows(slice(at, at + TOGETHER)).to(device)
        predicted.append(autoregress(model, part.source, part.source_is_real, part.target.shape[1]).cpu())
        if not data.context:
            with torch.inference_mode():
                forced.append(model(part.source, part.read, part.source_is_real).cpu())
    if data.context:
        return evaluate_series(batch, torch.cat(predicted), data, channels)
    return evaluate_pairs(batch, torch.cat(predicted), torch.cat(forced), data)


def evaluate_series(
    batch: NumberBatch, predicted: Tensor, data: NumberData, channels: tuple[str, ...]
) -> dict[str, Any]:
    """Of windows [n, horizon, channels]: over all, by channel and by step, compared with the two simple forecasts."""
    metrics: dict[str, Any] = {"windows": len(predicted), "channels": list(channels)}
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


def evaluate_pairs(batch: NumberBatch, predicted: Tensor, forced: Tensor, data: NumberData) -> dict[str, Any]:
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


def format_regression(metrics: dict[str, Any]) -> list[str]:
    """Metrics as text: the first line has the most important ones."""
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
