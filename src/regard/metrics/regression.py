"""How far off numbers are, and how far off one would be without learning anything.

    MAE   mean of |y - ŷ|           MSE   mean of (y - ŷ)²

All figures are of free-running numbers: the model reads what it has written itself. A forecast of a series stands
beside two that need no model, the last value and the last season, in units of each channel's deviation in the
training data; a rule for sequences beside saying the source again (or, where lengths differ, the mean).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.data.numeric import NumberData
from regard.data.series import NumberBatch, last_season, last_value
from regard.models import EncoderDecoder
from regard.predict.regressor import autoregress

TOGETHER = 1024  # rows


def evaluate_regression(
    model: EncoderDecoder, batch: NumberBatch, data: NumberData, channels: tuple[str, ...]
) -> dict[str, Any]:
    """The figures of a set, as plain values."""
    device = next(model.parameters()).device
    written, forced = [], []
    for at in range(0, len(batch.source), TOGETHER):
        part = batch.rows(slice(at, at + TOGETHER)).to(device)
        written.append(autoregress(model, part.source, part.source_is_real, part.target.shape[1]).cpu())
        if not data.context:
            with torch.inference_mode():
                forced.append(model(part.source, part.read, part.source_is_real).cpu())
    if data.context:
        return judge_series(batch, torch.cat(written), data, channels)
    return judge_pairs(batch, torch.cat(written), torch.cat(forced), data)


def judge_series(batch: NumberBatch, written: Tensor, data: NumberData, channels: tuple[str, ...]) -> dict[str, Any]:
    """Of windows [n, horizon, channels]: over all, by channel and by step, beside the two simple forecasts."""
    figures: dict[str, Any] = {"windows": len(written), "channels": list(channels)}
    forecasts = {
        "": written,
        "last_": last_value(batch.source, data.horizon),
        "seasonal_": last_season(batch.source, data.horizon, data.period),
    }
    for name, found in forecasts.items():
        error = (found - batch.target).double()
        figures |= {f"{name}mae": error.abs().mean().item(), f"{name}mse": error.square().mean().item()}
        figures[f"{name}mae_by_channel"] = error.abs().mean(dim=(0, 1)).tolist()
        figures[f"{name}mae_by_step"] = error.abs().mean(dim=(0, 2)).tolist()
    return figures


def judge_pairs(batch: NumberBatch, written: Tensor, forced: Tensor, data: NumberData) -> dict[str, Any]:
    """Of padded sequences, in the units of the data; `forced` was written while the true numbers were read."""
    assert batch.source_is_real is not None and batch.target_is_real is not None
    is_real, unit = batch.target_is_real, data.std[0]
    error, led = (((found - batch.target)[is_real] * unit).double().abs() for found in (written, forced))
    same = torch.equal(batch.source_is_real, is_real)
    naive = (batch.source - batch.target)[is_real] if same else batch.target[is_real]  # scaled numbers: their mean is 0
    return {
        "sequences": len(batch.source),
        "mae": error.mean().item(),
        "mse": error.square().mean().item(),
        "largest": error.max().item(),
        "within": (error <= data.tolerance).double().mean().item(),
        "tolerance": data.tolerance,
        "forced_mae": led.mean().item(),
        "naive_mae": (naive * unit).double().abs().mean().item(),
    }


def tell_numbers(figures: dict[str, Any]) -> list[str]:
    """The figures in words."""
    if "windows" in figures:
        return [
            f"MAE {figures['mae']:.4f}  MSE {figures['mse']:.4f}  (last value {figures['last_mae']:.4f}, "
            f"{figures['last_mse']:.4f}; last season {figures['seasonal_mae']:.4f}, {figures['seasonal_mse']:.4f})",
            f"{figures['windows']:,} windows, in units of each channel's deviation",
        ]
    return [
        f"MAE {figures['mae']:.4f}  within {figures['tolerance']:g}: {figures['within']:.2%}  "
        f"largest error {figures['largest']:.4f}",
        f"{figures['sequences']:,} sequences; MAE {figures['forced_mae']:.4f} when the true numbers are read, "
        f"{figures['naive_mae']:.4f} without learning",
        *(
            [f"10 20 30 40 50: largest error {figures['largest_of_example']:.4f}"]
            if "largest_of_example" in figures
            else []
        ),
    ]
