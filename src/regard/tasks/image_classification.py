"""Image classification: labelled pictures in, an encoder over patches out (ViT: Dosovitskiy et al. 2021).

    [data]      idx files, or a folder a class                     `regard.data.pictures`
    [augment]   crop, flip, erase, mixup                           `regard.data.augment`
    loss        -Σ_c t_c log p_c        t: (1 - ε)(λ e_a + (1 - λ) e_b) + ε / C, of two mixed pictures
    figures     accuracy, macro-F1, calibration                    `regard.metrics.classification`

`train.batch_tokens` counts patches ([CLS] included): 512 pictures of 49 patches are 25,088. All batches have one
shape, so `train.cuda_graph` applies. Mean and standard deviation of the pixels go into the model
(`model.pixel_mean`, `pixel_std`), which then reads plain pixels between 0 and 1 wherever it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.augment import AugmentConfig, Draws, augment
from regard.data.images import ImageData, Images, Listed, find_set, folder_classes, list_set, make_images
from regard.data.picturestream import PictureBatch, PictureStream
from regard.data.sets import Files
from regard.errors import UserError, suggest
from regard.explore.pictures import Tried, write_report
from regard.metrics.classification import evaluate_classes, tell_classes
from regard.models import Encoder, ModelConfig
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.image_classifier import ImageClassifier
from regard.settings import from_dict, to_dict
from regard.text.tokenizer import Tokenizer
from regard.train.metric import LOSS, Metric
from regard.train.objective import balance
from regard.train.run import Figures, TaskRun
from regard.train.trainer import Objective, read_metrics

MEASURED = 10_000  # pictures whose mean and deviation are taken


def recognition(
    model: Encoder, batch: PictureBatch, label_smoothing: float = 0.0, crop: int = 0
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of pictures) of augmented pictures."""
    logits = model(augment(batch.pixels.float() / 255, batch.draws, crop))
    return mixed_loss(logits, batch.labels, batch.draws, label_smoothing) + balance(model, batch.tokens), batch.tokens


def mixed_loss(logits: Tensor, labels: Tensor, draws: Draws, label_smoothing: float = 0.0) -> Tensor:
    """The summed loss of logits [B, C], where each picture is two in the proportion that was drawn."""
    chance = logits.float().log_softmax(dim=-1)
    classes = torch.arange(chance.shape[1], device=chance.device)
    own, other = ((which[:, None] == classes).float() for which in (labels, labels[draws.partner]))
    target = draws.share[:, None] * own + (1 - draws.share[:, None]) * other
    target = (1 - label_smoothing) * target + label_smoothing / chance.shape[1]
    return -(target * chance).sum()


class PicturesRun(TaskRun):
    NAME = "image-classification"
    predictor = ImageClassifier
    TABLES = ("data", "augment", "model", "train")
    DEFAULTS: ClassVar = {
        "model": {
            "architecture": "encoder", "input": "patches", "output_head": "classes", "norm_order": "pre",
            "activation": "gelu"
        },
        "train": {
            "schedule": "cosine", "warmup": 500, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05,
            "label_smoothing": 0.1,
        },
    }  # fmt: skip
    METRICS: ClassVar = {"loss": LOSS, "accuracy": Metric("accuracy", higher=True)}
    HEADLINE = ("accuracy", "accuracy")
    UNIT = "pictures"
    EXAMPLE = 'train = ["photos/train"]'
    EVALUATE = ("test", "files")

    listed: dict[str, Listed]
    sets: dict[str, Images]  # "train", and those that are judged
    classes: tuple[str, ...]

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """A picture is a row of `train.pack` patches."""
        complete = super().complete(tables)
        try:
            complete["train"].setdefault("pack", _model_config(complete["model"], 2).source_length)
        except UserError:  # a mistake in [model] is told by `read_tables`, and pack = 0 must not be told before
            complete["train"].setdefault("pack", 1)
        return complete

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(ImageData, {"train": (), **tables.get("data", {})}, "data.")
        self.augment = from_dict(AugmentConfig, tables.get("augment", {}), "augment.")
        self.classes = self.data.classes
        for name in ("r_drop", "loss_chunk"):
            if getattr(self.config, name):
                raise UserError(f"train.{name} = {getattr(self.config, name)}: is for tokens; leave it out")
        config = _model_config(self.model_fields, 2)
        if self.config.pack != config.source_length:
            raise UserError(
                f"train.pack = {self.config.pack}: a picture has {config.source_length} patches, and they decide; "
                "leave it out"
            )
        if self.augment.crop >= config.image_size:
            raise UserError(f"augment.crop = {self.augment.crop}: a picture has {config.image_size} pixels a side")

    def own_tables(self) -> dict[str, Any]:
        return {"data": {**to_dict(self.data), "classes": list(self.classes)}, "augment": to_dict(self.augment)}

    # --- data

    @property
    def files(self) -> dict[str, Files]:
        named = {"train": self.data.train, "valid": self.data.valid, **self.data.test}
        return {name: files for name, files in named.items() if files}

    def find_data(self) -> None:
        for files in self.files.values():
            find_set(files, self.data)

    def check_data(self) -> None:
        """Which pictures there are; they are decoded, and refused, in `prepare_data`."""
        self.classes = self.data.classes or folder_classes(self.data.train, self.data)
        self.listed = {name: list_set(files, self.data, self.classes) for name, files in self.files.items()}
        if not self.classes:
            count = int(self.listed["train"].labels.max()) + 1
            self.classes = tuple(map(str, range(count)))
            self.listed = {name: list_set(files, self.data, self.classes) for name, files in self.files.items()}
        if len(self.classes) < 2:
            raise UserError(f"data.train: has {len(self.classes)} class; there must be 2 or more to tell apart")
        if len(self.listed["train"].labels) < 2:
            raise UserError("data.train: has one picture; give more")

    def prepare_data(self) -> None:
        channels, side = self.model_config.channels, self.model_config.image_size
        self.sets = {
            name: make_images(listed, self.folder / "data" / name, channels, side, self.data.skip_bad)
            for name, listed in self.listed.items()
        }
        if self.data.valid_fraction:
            rest, held = self.sets["train"].split(self.data.valid_fraction)
            self.sets = {"train": rest, "valid": held, **{k: v for k, v in self.sets.items() if k != "train"}}

    # --- model

    def tokenizer_names(self) -> tuple[str, ...]:
        return ()

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        return {}

    def settle_model(self) -> ModelConfig:
        """[model] with the number of classes, and with the pixels' mean and deviation unless it has them."""
        return _model_config({**self._pixel_figures(), **self.model_fields}, len(self.classes))

    def _pixel_figures(self) -> dict[str, list[float]]:
        """Of idx pictures, whose pixels are known by now; of files, the middle of the range."""
        pixels = self.listed["train"].pixels
        if pixels is None:
            return {"pixel_mean": [0.5], "pixel_std": [0.5]}
        some = pixels[:MEASURED].double() / 255
        return {"pixel_mean": [round(some.mean().item(), 4)], "pixel_std": [max(round(some.std().item(), 4), 1e-4)]}

    # --- loss and figures

    def stream(self) -> PictureStream:
        config, side = self.config, self.model_config.image_size
        rows = config.batch_tokens // config.pack
        return PictureStream(self.sets["train"], self.augment, rows, side, config.seed, self.device)

    def objective(self) -> Objective:
        return partial(recognition, label_smoothing=self.config.label_smoothing, crop=self.augment.crop)

    @property
    def judged(self) -> bool:
        return "valid" in self.sets

    def evaluate(self, model: Any) -> dict[str, float]:
        found = self._judge(model, "valid")
        return {"valid_loss": found["loss"], "accuracy": found["accuracy"]}

    def _judge(self, model: Any, name: str) -> Figures:
        found = self._probabilities(ImageClassifier(self.bundle(model)), name)
        return dataclasses.asdict(evaluate_classes(found, self.sets[name].labels, self.classes))

    def _probabilities(self, recogniser: ImageClassifier, name: str) -> Tensor:
        pixels = self.sets[name].pixels
        return recogniser.probabilities(lambda begin, end: pixels[torch.arange(begin, end)], len(pixels))

    def score(self, model: Any) -> dict[str, Figures]:
        return {name: self._judge(model, name) for name in self.sets if name != "train"}

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        recogniser, name = ImageClassifier(self.bundle(model)), [*self.sets][-1]
        tried = Tried(name, self.sets[name], self._probabilities(recogniser, name))
        batch = next(iter(self.stream())).to(self.device)
        seen = augment(batch.pixels.float() / 255, batch.draws, self.augment.crop)[:12].cpu()
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, recogniser, read_metrics(self.folder), scores, tried, seen)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """The figures of the recipe's sets, or of the pictures given with --files."""
        recogniser, files = ImageClassifier(bundles.load(folder, device)), options["files"]
        run = cls(recogniser.bundle.recipe, folder, device)
        run.model_config, run.tokenizers = recogniser.bundle.config, {}
        if files:
            run.classes, config = recogniser.classes, recogniser.model.config
            listed = list_set(files, dataclasses.replace(run.data, folder="."), run.classes)
            with TemporaryDirectory() as room:
                kept = make_images(listed, Path(room, "files"), config.channels, config.image_size, run.data.skip_bad)
                run.sets = {"files": kept}
                return {"files": run._judge(recogniser.model, "files")}
        run.check_data()
        run.model_config = recogniser.model.config
        run.prepare_data()
        names, wanted = [name for name in run.sets if name != "train"], options["test"]
        if wanted is not None and wanted not in names:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, names)}")
        if not names:
            raise UserError(f"{folder}: its recipe names no test pictures; give some with --files")
        return {name: run._judge(recogniser.model, name) for name in names if wanted in (None, name)}

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        return tell_classes(figures)


def _model_config(given: Mapping[str, Any], classes: int) -> ModelConfig:
    """[model] with as many classes as there are."""
    fields = with_preset(given)
    if fields.get("classes", classes) != classes and classes > 2:
        raise UserError(f"model.classes = {fields['classes']}: the data has {classes}, and they decide; leave it out")
    config = from_dict(ModelConfig, {**fields, "classes": classes}, "model.")
    if (config.architecture, config.input, config.output_head) != ("encoder", "patches", "classes"):
        raise UserError(
            f"model.architecture = {config.architecture!r}, model.input = {config.input!r}, "
            f"model.output_head = {config.output_head!r}: a "
            "classifier of pictures needs architecture = 'encoder', input = 'patches' and output_head = 'classes'"
        )
    return config
