"""Image classification: labelled images in, an encoder over patches out (ViT: Dosovitskiy et al. 2021).

    [data]      idx files, or a folder per class                     `regard.data.images`
    [augment]   crop, flip, erase, mixup                             `regard.data.augment`
    loss        -Σ_c t_c log p_c        t = (1 - ε)(λ e_a + (1 - λ) e_b) + ε / C  for two mixed images
    metrics     accuracy, macro-F1, calibration                      `regard.metrics.classification`

`train.batch_tokens` counts patches ([CLS] included): 512 images of 49 patches are 25,088. All batches have one
shape, so `train.cuda_graph` applies. Mean and standard deviation of the pixels become part of the model
(`model.pixel_mean`, `pixel_std`), which then reads plain pixels between 0 and 1 wherever it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.augment import Augmentation, AugmentConfig, ImageBatch, ImageStream, augment
from regard.data.images import ImageData, Images, Listed, list_set, make_images
from regard.errors import UserError
from regard.metrics.classification import evaluate_classes
from regard.models.config import ModelConfig
from regard.models.transformer import Encoder
from regard.predict.classifier import ImageClassifier
from regard.tasks.text_classification import ClassificationTask, class_sections
from regard.training import results
from regard.training.results import AttentionInput, Section
from regard.training.task import Evaluation, Metrics
from regard.training.trainer import Objective

MEASURED = 10_000  # images whose mean and standard deviation are taken
LISTED, AUGMENTED, DRAWN = 12, 12, 3  # images in the report: errors, augmented ones, those with attention maps


def image_loss(model: Encoder, batch: ImageBatch, label_smoothing: float = 0.0, crop: int = 0) -> tuple[Tensor, Tensor]:
    """(summed loss, number of images) of augmented images."""
    logits = model(augment(batch.pixels.float() / 255, batch, crop))
    return mixed_loss(logits, batch.labels, batch, label_smoothing), batch.tokens


def mixed_loss(logits: Tensor, labels: Tensor, augmentation: Augmentation, label_smoothing: float = 0.0) -> Tensor:
    """The summed loss of logits [B, C], where each image is a mixture of two in sampled proportions."""
    log_probabilities = logits.float().log_softmax(dim=-1)
    classes = torch.arange(log_probabilities.shape[1], device=log_probabilities.device)
    own, other = ((which[:, None] == classes).float() for which in (labels, labels[augmentation.partner]))
    target = augmentation.weight[:, None] * own + (1 - augmentation.weight[:, None]) * other
    target = (1 - label_smoothing) * target + label_smoothing / log_probabilities.shape[1]
    return -(target * log_probabilities).sum()


class ImageClassification(ClassificationTask):
    NAME = "image-classification"
    TABLES: ClassVar = {"data": ImageData, "augment": AugmentConfig}
    DEFAULTS: ClassVar = {
        "model": {
            "architecture": "encoder", "input": "patches", "output_head": "classes", "norm_order": "pre",
            "activation": "gelu"
        },
        "train": {
            "schedule": "cosine", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05,
            "label_smoothing": 0.1,
        },
    }  # fmt: skip
    PLACEHOLDERS: ClassVar = {"classes": 2}
    UNUSED = ("r_drop", "loss_chunk")
    UNIT = "images"
    LOSS_UNIT = "nats per image"
    EXAMPLE = 'train = ["photos/train"]'
    predictor = ImageClassifier

    data: ImageData
    augment: AugmentConfig
    listed: dict[str, Listed]
    images: dict[str, Images]  # "train" and `sets`

    def check_model(self, config: ModelConfig) -> None:
        if self.augment.crop >= config.image_size:
            raise UserError(f"augment.crop = {self.augment.crop}: must be below model.image_size = {config.image_size}")

    # --- data

    def check_data(self) -> None:
        """Which images there are; they are decoded, and refused, in `prepare_data`."""
        classes, self.listed = self.data.classes, {}
        for name, files in self.files.items():  # "train" is the first
            self.listed[name] = list_set(files, self.data, classes)
            classes = self.listed[name].classes
        if len(classes) < 2:
            raise UserError(f"data.train: has {len(classes)} class; classification needs 2 or more")
        if len(self.listed["train"].labels) < 2:
            raise UserError("data.train: has one image; give more")
        self.data = replace(self.data, classes=classes)

    def prepare_data(self) -> None:
        self.images = {name: self._decoded(listed, self.folder / "data" / name) for name, listed in self.listed.items()}
        if self.data.valid_fraction:
            rest, held_out = self.images.pop("train").split(self.data.valid_fraction)
            self.images = {"train": rest, "valid": held_out, **self.images}

    def _decoded(self, listed: Listed, folder: Path) -> Images:
        config = self.model_config
        return make_images(listed, folder, config.channels, config.image_size, self.data.skip_bad)

    def prepare_evaluation(self) -> None:
        self.check_data()
        self.prepare_data()

    def examples(self, name: str) -> Images:
        return self.images[name]

    def inputs(self, name: str, count: int) -> list[Tensor]:
        images = self.images[name]
        return [*images[torch.arange(min(count, len(images)))].cpu()]

    def references(self, name: str, count: int) -> list[str]:
        return [self.data.classes[label] for label in self.images[name].labels[:count].tolist()]

    def read_files(self, files: Sequence[str]) -> Images:
        return self._decoded(list_set(tuple(files), self.data, self.data.classes), self.folder / "files")

    def stream(self) -> ImageStream:
        config, side = self.config, self.model_config.image_size
        rows = config.batch_tokens // config.pack
        return ImageStream(self.images["train"], self.augment, rows, side, config.seed, self.device)

    # --- model

    def model_sizes(self) -> dict[str, int | None]:
        return {"classes": len(self.data.classes)}

    def model_defaults(self) -> dict[str, Any]:
        """Mean and standard deviation of idx images, whose pixels are known here; 0.5 for image files."""
        pixels = self.listed["train"].images if hasattr(self, "listed") else None
        if not isinstance(pixels, Tensor):
            return {"pixel_mean": [0.5], "pixel_std": [0.5]}
        sample = pixels[:MEASURED].double() / 255
        mean, std = round(sample.mean().item(), 4), max(round(sample.std().item(), 4), 1e-4)
        return {"pixel_mean": [mean], "pixel_std": [std]}

    # --- training and evaluation

    def objective(self) -> Objective:
        return self.make_objective(image_loss, crop=self.augment.crop)

    def evaluate(self, model: Any) -> dict[str, float]:
        return self.validation(self.score(self.bundle(model).predictor, self.images["valid"])[0])

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        probabilities = predictor.probabilities(lambda begin, end: examples[torch.arange(begin, end)], len(examples))
        return evaluate_classes(probabilities, examples.labels, self.data.classes), probabilities

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        return self.class_records(evaluation.examples.labels, evaluation.predictions)

    # --- report

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        batch = next(iter(self.stream())).to(self.device)
        seen = augment(batch.pixels.float() / 255, batch, self.augment.crop)[:AUGMENTED].cpu()
        augmented = results.Images("Augmented images", seen, [""] * len(seen), "Training images after [augment].")
        errors = [self._errors(*item) for item in [*evaluations.items()][-1:]]
        return [*class_sections(evaluations), *errors, Section("Training images", [augmented])]

    def _errors(self, name: str, evaluation: Evaluation) -> Section:
        """The most confident errors."""
        labels, classes = evaluation.examples.labels, self.data.classes
        best, predicted = evaluation.predictions.max(dim=1)
        wrong = (predicted != labels).nonzero()[:, 0]
        if not len(wrong):
            return Section("Errors", [f"None: all {len(labels):,} images of {name} are classified correctly."])
        worst = wrong[best[wrong].argsort(descending=True)][:LISTED]
        captions = [
            f"{classes[int(labels[row])]}\n{classes[int(predicted[row])]} {float(best[row]):.2f}" for row in worst
        ]
        note = f"The most confident of {len(wrong):,} errors in {name}: the class, the prediction and its probability."
        pixels = evaluation.examples[worst].float() / 255
        return Section("Errors", [results.Images("Errors", pixels, captions, note)])

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        """Images of different classes."""
        images = [one.examples for one in evaluations.values()][-1] if evaluations else self.images["train"]
        rows = [int((images.labels == label).nonzero()[0]) for label in images.labels.unique()[:DRAWN]]
        pixels = images[torch.tensor(rows)].float() / 255
        titles = [self.data.classes[int(images.labels[row])] for row in rows]
        return [AttentionInput(image, title=title) for image, title in zip(pixels, titles, strict=True)]
