"""Classification: labelled texts in, an encoder out that names the class of a text.

    [data]   tables with a column of texts and one of labels       `regard.data.labels`
    [text]   one tokenizer                                         `regard.text.config`
    loss     -w_y log p(y)  of a text with class y                 summed over texts
    figures  accuracy, macro-F1, calibration                       `regard.metrics.classification`

The encoder reads  <s> text </s>.  `model.pool` says what its states are made into, one vector a text: "cls" takes the
first one (Devlin et al. 2018), "mean" the mean of all. Class weights w_y are made so that their mean over the training
texts is 1; "balanced" gives every class the same part of the loss. Batches are padded texts of similar length, or
packed rows of one shape (`train.pack`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import Batches, Stream
from regard.data.labelled import ClassBatch, ClassPacks, Labelled, balanced_weights, draw, prepare_labelled
from regard.data.labels import Example, LabelData, check_examples, choose_classes, read_labelled
from regard.data.sets import find_files
from regard.errors import UserError, suggest
from regard.explore.classification import Answer, write_report
from regard.metrics.classification import ClassMetrics, evaluate_classes, tell_classes
from regard.models import Encoder, ModelConfig
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.text_classifier import TextClassifier
from regard.settings import from_dict, to_dict
from regard.tasks.word_dropout import WordDropout
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.metric import LOSS, Metric
from regard.train.objective import balance, surprise, twice
from regard.train.parallel import HALF
from regard.train.run import Figures, TaskRun
from regard.train.trainer import Objective, read_metrics

HOLD_OUT = 0  # seed of what `data.valid_fraction` holds out: the same whatever train.seed is


def class_logits(model: Encoder, batch: ClassBatch) -> Tensor:
    """[R, D, classes] for the D texts of a row."""
    assert model.classifier is not None
    if batch.document is None:
        logits: Tensor = model(batch.text, batch.is_real)
        return logits[:, None]
    states = model.encode(batch.text, batch.document > 0, document=batch.document)
    packed: Tensor = model.classifier(model.pooled_documents(states, batch.document, batch.labels.shape[1]))
    return packed


def classification(
    model: Encoder,
    batch: ClassBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    weight: Tensor | None = None,
    word_dropout: WordDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of texts); `weight` [classes] is what each class counts."""
    read = twice(batch) if r_drop else batch
    read = replace(read, text=word_dropout(read.text)) if word_dropout is not None and model.training else read
    total = surprise(class_logits(model, read), read.labels, label_smoothing, r_drop, weight)
    return total + balance(model, batch.tokens), batch.tokens


class ClassificationRun(TaskRun):
    NAME = "classification"
    predictor = TextClassifier
    TABLES = ("data", "text", "model", "train")
    DEFAULTS: ClassVar = {
        "model": {"architecture": "encoder", "output_head": "classes", "pooling": "mean"},
        "train": {
            "schedule": "cosine", "warmup": 200, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.01,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    METRICS: ClassVar = {
        "loss": LOSS, "accuracy": Metric("accuracy", higher=True), "f1": Metric("macro_f1", higher=True)
    }  # fmt: skip
    HEADLINE = ("accuracy", "accuracy")
    UNIT = "texts"
    EXAMPLE = 'train = ["train.tsv"]'
    EVALUATE = ("test", "files")

    classes: tuple[str, ...]
    train_texts: Labelled
    valid_texts: Labelled | None

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(LabelData, {"train": (), **tables.get("data", {})}, "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.classes = self.data.classes
        if self.config.loss_chunk:
            raise UserError(f"train.loss_chunk = {self.config.loss_chunk}: is for large vocabularies; leave it out")
        self._model_config(8, len(self.classes) or 2)  # a mistake in [model] shows before the data is read

    def own_tables(self) -> dict[str, Any]:
        return {"data": {**to_dict(self.data), "classes": list(self.classes)}, "text": to_dict(self.text)}

    # --- data

    def find_data(self) -> None:
        for files in (self.data.train, *self.data.sets.values()):
            find_files(files, self.data.folder)

    def check_data(self) -> None:
        """Every file once; a label that training does not know is a mistake elsewhere."""
        for name, files in {"train": self.data.train, **self.data.sets}.items():
            report = check_examples(files, self.data, self.classes)
            report.print(files)
            if name == "train":
                self.classes = choose_classes(self.data, report)
                if missing := [label for label in self.classes if label not in report.counts]:
                    raise UserError(
                        f"data.classes: {', '.join(files)} has no text of {missing[0]!r}; leave it out, or set "
                        "data.names to what the label is in the file"
                    )
        self._check_weights()

    def _check_weights(self) -> None:
        weights = self.data.class_weights
        for name in weights if isinstance(weights, dict) else ():
            if name not in self.classes:
                raise UserError(f"data.class_weights: {name!r} is no class; {suggest(name, self.classes)}")

    def prepare_data(self) -> None:
        folder = self.folder / "data"
        store = prepare_labelled(self.data.train, self.data, folder / "train", self.tokenizer, self.classes)
        if cut := store.index["cut"]:
            texts = f"{cut:,} text{'s' * (cut != 1)}"
            print(f"cut: {texts} longer than data.max_length = {self.data.max_length}", file=sys.stderr)
        everything = Labelled.of(store)
        held = self._held(everything.labels)
        self.valid_texts = None
        if self.data.valid:
            valid = prepare_labelled(self.data.valid, self.data, folder / "valid", self.tokenizer, self.classes)
            self.valid_texts = Labelled.of(valid)
        elif self.data.valid_fraction:
            if not len(held):
                raise UserError(
                    f"data.valid_fraction = {self.data.valid_fraction}: holds out none of {len(everything):,} texts"
                )
            self.valid_texts = everything.choose(held)
        self.train_texts = everything.choose(self._kept(everything.labels, self.config.seed))

    def _held(self, labels: Tensor) -> Tensor:
        """The rows of the training files that are held out."""
        return draw(labels, self.data.valid_fraction, HOLD_OUT, keep=True).nonzero()[:, 0]

    def _kept(self, labels: Tensor, seed: int) -> Tensor:
        """The rows that are learned from."""
        rest = torch.ones(len(labels), dtype=torch.bool)
        rest[self._held(labels)] = False
        rows = rest.nonzero()[:, 0]
        return rows[draw(labels[rows], self.data.fraction, seed, keep=False)]

    # --- tokenizer and model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers["tokenizer"]

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        lines = (one.text for one in read_labelled(self.data.train, self.data, self.classes))
        return {"tokenizer": self.learn_tokenizer(lines, self.text, self.data.folder)}

    def settle_model(self) -> ModelConfig:
        for name, size in (("vocab_size", len(self.tokenizer)), ("classes", len(self.classes))):
            if self.model_fields.get(name, size) != size:
                raise UserError(
                    f"model.{name} = {self.model_fields[name]}: the data decides, and says {size}; leave {name} out"
                )
        return self._model_config(len(self.tokenizer), len(self.classes))

    def _model_config(self, vocab_size: int, classes: int) -> ModelConfig:
        fields = {**with_preset(self.model_fields), "vocab_size": vocab_size, "classes": classes}
        config = from_dict(ModelConfig, fields, "model.")
        if (config.architecture, config.input, config.output_head) != ("encoder", "tokens", "classes"):
            raise UserError(
                f"model.architecture = {config.architecture!r}, model.input = {config.input!r}, "
                f"model.output_head = {config.output_head!r}: a "
                "classifier of texts needs architecture = 'encoder', input = 'tokens' and output_head = 'classes'"
            )
        if config.position == "learned" and config.max_length < self.data.max_length:
            raise UserError(
                f"data.max_length = {self.data.max_length}: is beyond model.max_length = {config.max_length} of the "
                "learned positions; lower the one or raise the other"
            )
        return config

    # --- loss and figures

    def stream(self) -> Stream:
        config, data = self.config, self.train_texts
        if not config.pack:
            return Batches(data, config.batch_tokens, config.seed)
        return ClassPacks(data, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    def class_weight(self) -> Tensor | None:
        """[classes], with a mean of 1 over the training texts."""
        given, counts = self.data.class_weights, self.train_texts.labels.bincount(minlength=len(self.classes))
        if given == "none":
            return None
        if isinstance(given, str):
            return torch.tensor(balanced_weights(counts.tolist()))
        raw = torch.tensor([given.get(name, 1.0) for name in self.classes])
        return raw * counts.sum() / (raw * counts).sum()

    def objective(self) -> Objective:
        weight = self.class_weight()
        return partial(
            classification,
            label_smoothing=self.config.label_smoothing,
            r_drop=self.config.r_drop,
            weight=None if weight is None else weight.to(self.device),
            word_dropout=WordDropout.of(self.data.word_dropout, self.tokenizer),
        )

    @property
    def judged(self) -> bool:
        return self.valid_texts is not None

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss, accuracy and macro-F1 on the validation texts, in the precision of training."""
        assert self.valid_texts is not None
        device = next(model.parameters()).device
        half = HALF.get(self.config.precision) if device.type == "cuda" else None
        found, right = [], []
        batches = Batches(self.valid_texts, max(self.config.batch_tokens, self.valid_texts.longest_row), seed=0)
        for rows in batches.plan(0):
            batch = self.valid_texts.batch(rows).to(device)
            with torch.autocast(device.type, half, enabled=half is not None):
                logits = class_logits(model, batch)
            found.append(logits[:, 0].float().softmax(dim=-1).cpu())
            right.append(self.valid_texts.labels[rows])
        figures = evaluate_classes(torch.cat(found), torch.cat(right), self.classes)
        return {"valid_loss": figures.loss, "accuracy": figures.accuracy, "macro_f1": figures.macro_f1}

    def texts(self, name: str) -> list[Example]:
        """The rows of a set that is judged."""
        if name != "valid" or self.data.valid:
            return list(read_labelled(self.data.sets[name], self.data, self.classes))
        rows = list(read_labelled(self.data.train, self.data, self.classes))
        labels = torch.tensor([self.classes.index(one.label) for one in rows])
        return [rows[i] for i in self._held(labels).tolist()]

    def training_examples(self, seed: int) -> list[Example]:
        """The rows that training learns from: without what is held out, and the drawn fraction of the rest."""
        rows = list(read_labelled(self.data.train, self.data, self.classes))
        labels = torch.tensor([self.classes.index(one.label) for one in rows])
        return [rows[i] for i in self._kept(labels, seed).tolist()]

    @property
    def judged_sets(self) -> list[str]:
        return list({**({"valid": ()} if self.data.valid_fraction else {}), **self.data.sets})

    def score(self, model: Any) -> dict[str, Figures]:
        self.classifier = TextClassifier(self.bundle(model))
        self.answers: list[Answer] = []
        scores = {}
        for name in self.judged_sets:
            figures, self.answers = _try(self.classifier, self.texts(name))
            scores[name] = dataclasses.asdict(figures)
        return scores

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, self.classifier, read_metrics(self.folder), scores, self.answers)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """The figures of the recipe's sets, or of the files given with --files."""
        wanted, files = options["test"], options["files"]
        classifier = TextClassifier(bundles.load(folder, device))
        run = cls(classifier.bundle.recipe, folder, device)
        run.classes = classifier.classes
        if files:
            data = dataclasses.replace(run.data, folder=".")
            return {"files": dataclasses.asdict(_try(classifier, list(read_labelled(files, data, run.classes)))[0])}
        if wanted is not None and wanted not in run.judged_sets:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, run.judged_sets)}")
        names = [name for name in run.judged_sets if wanted in (None, name)]
        if not names:
            raise UserError(f"{folder}: its recipe names no test set; give files with --files")
        return {name: dataclasses.asdict(_try(classifier, run.texts(name))[0]) for name in names}

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        return tell_classes(figures)


def _try(classifier: TextClassifier, rows: list[Example]) -> tuple[ClassMetrics, list[Answer]]:
    classes = classifier.classes
    found = classifier.probabilities([one.text for one in rows])
    right = torch.tensor([classes.index(one.label) for one in rows])
    best, given = (part.tolist() for part in found.max(dim=1))
    answers = [Answer(one.text, one.label, classes[i], p) for one, i, p in zip(rows, given, best, strict=True)]
    return evaluate_classes(found, right, classes), answers
