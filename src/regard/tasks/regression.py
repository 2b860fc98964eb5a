"""Numbers: continuous values in, continuous values out, through an encoder-decoder that reads and writes vectors.

    [data]   pairs of sequences, or a series that is foretold      `regard.data.numeric`, `regard.data.series`
    loss     squared error of each number, given those before      Σ (y - ŷ)² over scaled numbers
    figures  errors of what it writes by itself                    `regard.predict.regressor`

Nothing else changes against translation: a matrix takes the place of the table of tokens, another that of the
output layer. All rows have one shape (sequences padded to data.longest, windows of data.context steps), so
`train.cuda_graph` applies; `train.batch_tokens` counts source steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.numeric import NumberData, NumberSets, Scale, make_sets
from regard.data.rows import Rows
from regard.data.series import NumberBatch
from regard.data.sets import find_files
from regard.errors import UserError, suggest
from regard.explore.numbers import Shown, write_report
from regard.metrics.regression import TOGETHER, evaluate_regression, tell_numbers
from regard.models import EncoderDecoder, ModelConfig
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.regressor import Regressor
from regard.settings import from_dict, to_dict
from regard.text.tokenizer import Tokenizer
from regard.train.metric import LOSS, Metric
from regard.train.run import Figures, TaskRun
from regard.train.trainer import Objective, read_metrics

MATERIAL = [10.0, 20.0, 30.0, 40.0, 50.0]  # a sequence that every report of pairs shows


def squared_error(model: EncoderDecoder, batch: NumberBatch) -> tuple[Tensor, Tensor]:
    """(summed squared error, how many numbers) under teacher forcing."""
    error = (model(batch.source, batch.read, batch.source_is_real).float() - batch.target).square()
    if batch.target_is_real is not None:
        error = error * batch.target_is_real[..., None]
    return error.sum(), batch.tokens


class NumbersRun(TaskRun):
    NAME = "numbers"
    predictor = Regressor
    TABLES = ("data", "model", "train")
    DEFAULTS: ClassVar = {
        "model": {
            "input": "features",
            "output_head": "values",
            "norm_order": "pre",
            "dropout": 0.0,
            "embed_dropout": 0.0,
        },
        "train": {"schedule": "cosine", "warmup": 200, "eps": 1e-8, "label_smoothing": 0.0},
    }
    METRICS: ClassVar = {"loss": LOSS, "mae": Metric("mae")}
    HEADLINE = ("mae", "MAE")
    UNIT = "numbers"
    EXAMPLE = 'train = ["pairs.tsv"]'
    EVALUATE = ("test",)

    sets: NumberSets

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        complete = super().complete(tables)
        data = complete.get("data", {})
        length = data.get("context") or data.get("longest", NumberData.longest)
        if not complete["train"].get("pack") and isinstance(length, int):
            complete["train"]["pack"] = length
        return complete

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(NumberData, tables.get("data", {}), "data.")
        length = self.data.context or self.data.longest
        if self.config.pack != length:
            raise UserError(f"train.pack = {self.config.pack}: follows from the data, {length} steps; leave it out")
        for name in ("label_smoothing", "r_drop", "loss_chunk"):
            if getattr(self.config, name):
                raise UserError(f"train.{name} = {getattr(self.config, name)}: is for tokens; leave it out")
        self._model_config(1)

    def own_tables(self) -> dict[str, Any]:
        return {"data": to_dict(self.data)}

    # --- data

    def find_data(self) -> None:
        find_files([*self.data.train, *self.data.valid, *sum(self.data.test.values(), ())], self.data.folder)

    def check_data(self) -> None:
        self.sets = make_sets(self.data)
        self.data = self.sets.data

    def prepare_data(self) -> None:
        """All is in memory."""

    # --- model

    def tokenizer_names(self) -> tuple[str, ...]:
        return ()

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        return {}

    def settle_model(self) -> ModelConfig:
        channels = len(self.sets.channels)
        if (given := self.model_fields.get("feature_dim", channels)) != channels:
            raise UserError(f"model.feature_dim = {given}: the data has {channels} channels; leave feature_dim out")
        return self._model_config(channels)

    def _model_config(self, channels: int) -> ModelConfig:
        fields = {**with_preset(self.model_fields), "feature_dim": channels}
        config = from_dict(ModelConfig, fields, "model.")
        if (config.input, config.output_head) != ("features", "values"):
            raise UserError(
                f"model.input = {config.input!r}, model.output_head = {config.output_head!r}: numbers need "
                "input = 'features' and "
                "output_head = 'values'; leave both out"
            )
        longest = max(self.data.context, self.data.horizon) if self.data.context else self.data.longest
        if config.position == "learned" and config.max_length < longest:
            raise UserError(f"model.max_length = {config.max_length}: sequences have {longest} steps; raise it")
        return config

    # --- training

    def stream(self) -> Rows:
        rows, windows, starts = self.config.batch_tokens // self.config.pack, self.sets.windows, self.sets.starts
        if windows is not None and starts is not None:
            resident = windows.to(self.device)
            return Rows(len(starts), rows, self.config.seed, lambda chosen, *_: resident.batch(starts[chosen]))
        train = self.sets.rows["train"].to(self.device)

        def pick(chosen: Tensor, *_: int) -> NumberBatch:
            at = chosen.to(self.device)
            return train.each(lambda part: part[at])

        return Rows(len(train.source), rows, self.config.seed, pick)

    def objective(self) -> Objective:
        return squared_error

    @property
    def judged(self) -> bool:
        return "valid" in self.sets.rows

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """The squared error under teacher forcing, and the mean error of what it writes by itself if that chooses."""
        loss, count, batch = 0.0, 0, self.sets.rows["valid"]
        for at in range(0, len(batch.source), TOGETHER):
            total, numbers = squared_error(model, batch.rows(slice(at, at + TOGETHER)).to(self.device))
            loss, count = loss + total.item(), count + int(numbers)
        figures = {"valid_loss": loss / count}
        if self.config.metric == "mae":
            figures["mae"] = self._judge(model, "valid")["mae"]
        return figures

    # --- figures

    def score(self, model: Any) -> dict[str, Figures]:
        return {name: self._judge(model, name) for name in self.sets.rows if name != "train"}

    def _judge(self, model: Any, name: str) -> Figures:
        figures = evaluate_regression(model, self.sets.rows[name], self.data, self.sets.channels)
        if name == "test" and self.data.rule is not None:
            shown = self._material(Regressor(self.bundle(model)))
            figures["largest_of_example"] = max(abs(a - b) for a, b in zip(shown.expected, shown.written, strict=True))
        return figures

    def _material(self, predictor: Regressor) -> Shown:
        rule = self.data.rule
        assert rule is not None
        right = [rule.multiply * number + rule.add for number in MATERIAL]
        return Shown("", MATERIAL, right, predictor.predict([MATERIAL])[0].series)

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        predictor = Regressor(self.bundle(model))
        shown = self._shown_series(predictor) if self.data.context else self._shown_pairs(predictor)
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, model, read_metrics(self.folder), scores, shown)

    def _shown_series(self, predictor: Regressor) -> list[Shown]:
        """A window of the last set there is, as it was and as it is foretold."""
        windows, starts, scale = self.sets.windows, self.sets.starts, Scale.of(self.data)
        assert windows is not None and starts is not None
        batch = [windows.batch(starts[-1:]), *self.sets.rows.values()][-1]
        source, target = (scale.denormalize(part[len(part) // 2]) for part in (batch.source, batch.target))
        found = predictor.forecast(source)
        return [
            Shown(channel, source[:, at].tolist(), target[:, at].tolist(), found[:, at].tolist())
            for at, channel in enumerate(self.sets.channels)
        ]

    def _shown_pairs(self, predictor: Regressor) -> list[Shown]:
        batch, scale, shown = [*self.sets.rows.values()][-1], Scale.of(self.data), []
        if self.data.rule is not None:
            shown.append(self._material(predictor))
        for row in range(min(8, len(batch.source))):
            source, target = (
                scale.denormalize(part[row])[:, 0][is_real[row]].tolist()  # type: ignore[index]
                for part, is_real in ((batch.source, batch.source_is_real), (batch.target, batch.target_is_real))
            )
            shown.append(Shown("", source, target, predictor.predict([source], steps=len(target))[0].series))
        return shown

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        bundle = bundles.load(folder, device)
        run = cls(bundle.recipe, folder, device)
        run.model_config, run.tokenizers = bundle.config, {}
        run.check_data()
        names = [name for name in run.sets.rows if name != "train"]
        wanted = options["test"]
        if wanted is not None and wanted not in names:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, names)}")
        return {name: run._judge(bundle.model, name) for name in names if wanted in (None, name)}

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        return tell_numbers(figures)
