"""Text classification: labelled texts in, an encoder out that predicts the class of a text.

    [data]    tables with a column of texts and one of labels         `regard.data.labels`
    [text]    one tokenizer                                           `regard.text.config`
    loss      -w_y log p(y)  of a text with class y                   summed over texts
    metrics   accuracy, macro-F1, calibration                         `regard.metrics.classification`

The encoder reads  <s> text </s>.  `model.pooling` says how its states become one vector per text: "cls" takes the first
(Devlin et al. 2018), "mean" their mean. Class weights w_y have a mean of 1 over the training texts; "balanced" gives
every class the same part of the loss. Batches are padded texts of similar length, or packed rows of one shape
(`train.pack`).

The texts are rows of files, or long documents that are joined from them (`regard.data.joined`), or generated
(`regard.data.listops`). For the latter, what the first operator alone tells is printed beside the accuracy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.columns import Store
from regard.data.encode import group_weights, store_labelled
from regard.data.labels import Example, LabelData, balanced_weights
from regard.data.listops import root_baseline
from regard.data.pack import ClassBatch, ClassPacks, Labelled
from regard.data.sets import Group, file_groups, file_names, fingerprint
from regard.data.streams import Batches, Stream, sample_rows
from regard.errors import UserError, suggest
from regard.messages import localize
from regard.metrics.classification import evaluate_classes, format_classes
from regard.models.config import ModelConfig
from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle
from regard.predict.classifier import TextClassifier
from regard.text.config import TextConfig
from regard.training.objective import WordDropout, cross_entropy, make_word_dropout, repeat_batch
from regard.training.results import AttentionInput, Chart, Matrix, Section, Table
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric, Objective

HOLD_OUT = 0  # seed of what `data.valid_fraction` holds out: the same for every train.seed
LISTED = 20  # errors in the report
MATRIX = 40  # classes of a confusion matrix; more cannot be read
DRAWN = (4, 80)  # characters of a text whose attention is drawn
WORDED, SOME = 1_000, 10_000  # generated texts from which the vocabulary, and the baseline, are taken


def class_logits(model: Encoder, batch: ClassBatch) -> Tensor:
    """[R, D, classes] for the D texts of a row, or [R, N, classes] for its tokens."""
    assert model.classifier is not None
    if batch.document is None:
        logits: Tensor = model(batch.text, batch.is_real)
        return logits if model.config.per_token else logits[:, None]
    states = model.encode(batch.text, batch.document > 0, document=batch.document)
    if not model.config.per_token:
        states = model.pooled_documents(states, batch.document, batch.labels.shape[1])
    packed: Tensor = model.classifier(states)
    return packed


def classification(
    model: Encoder,
    batch: ClassBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    weight: Tensor | None = None,
    word_dropout: WordDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of texts, or of tokens with a class); `weight` [classes] are class weights."""
    read = repeat_batch(batch) if r_drop else batch
    read = replace(read, text=word_dropout(read.text)) if word_dropout is not None and model.training else read
    return cross_entropy(class_logits(model, read), read.labels, label_smoothing, r_drop, weight), batch.tokens


class ClassificationTask(Task):
    """A classifier of texts or of images: [data] has `classes` and `valid_fraction`."""

    METRICS: ClassVar = {
        "loss": LOSS, "accuracy": Metric("accuracy", higher=True), "f1": Metric("macro_f1", higher=True)
    }  # fmt: skip
    HEADLINE = ("accuracy", "accuracy", ".2%")
    COLUMNS: ClassVar = {
        "accuracy": "accuracy", "macro_f1": "macro-F1", "loss": "loss", "calibration_error": "calibration error",
        "majority": "most frequent class", "examples": "examples",
    }  # fmt: skip
    OPTIONS = ("test", "files", "out")
    format_metrics = staticmethod(format_classes)

    @property
    def sets(self) -> Sequence[str]:
        return [*(["valid"] if self.data.valid_fraction else []), *super().sets]

    def use(self, bundle: Bundle) -> None:
        super().use(bundle)
        self.data = replace(self.data, classes=bundle.classes)

    @staticmethod
    def validation(metrics: Metrics) -> dict[str, float]:
        return {"valid_loss": metrics["loss"], "accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"]}

    def class_records(self, labels: Tensor, probabilities: Tensor) -> list[dict[str, Any]]:
        """For each row of probabilities [N, C] the correct class, the predicted one and the probabilities."""
        classes, predicted = self.data.classes, probabilities.argmax(dim=1)
        return [
            {"reference": classes[label], "label": classes[best], "probabilities": dict(zip(classes, row, strict=True))}
            for label, best, row in zip(labels.tolist(), predicted.tolist(), probabilities.tolist(), strict=True)
        ]


def class_sections(evaluations: Mapping[str, Evaluation]) -> list[Section]:
    """The last set by class, its confusion matrix and its reliability diagram.

    A reliability diagram (Guo et al. 2017) plots accuracy over the predicted probability. On the diagonal the
    probability is calibrated; below it the model is overconfident.
    """
    if not evaluations:
        return []
    name, metrics = [(name, one.metrics) for name, one in evaluations.items()][-1]
    classes, counts = metrics["classes"], metrics["confusion"]
    sums = [sum(row) for row in counts]
    rows = list(zip(classes, metrics["precision"], metrics["recall"], metrics["f1"], sums, strict=True))
    sections = [Section(f"Classes of {name}", [Table(["class", "precision", "recall", "F1", "examples"], rows)])]
    if len(classes) <= MATRIX:
        fractions = [[count / max(total, 1) for count in row] for row, total in zip(counts, sums, strict=True)]
        matrix = Matrix(
            f"Confusion matrix on {name}", fractions, classes, classes, "class", "predicted class",
            "Each row is a class; its cells are the fraction of it that was predicted as each class.",
        )  # fmt: skip
        table = Table(["class", *classes], [[label, *row] for label, row in zip(classes, counts, strict=True)], fixed=1)
        sections.append(Section("Confusion matrix", [matrix, table]))
    points = [(one["confidence"], one["accuracy"]) for one in metrics["bins"]]
    low = min(1 / len(classes), *(min(point) for point in points))
    lines = {name: points, localize("calibrated"): [(low, low), (1.0, 1.0)]}
    chart = Chart(
        "Reliability", lines, "predicted probability", "accuracy",
        f"Expected calibration error {metrics['calibration_error']:.4f} over {metrics['examples']:,} examples.",
    )  # fmt: skip
    return [*sections, Section("Calibration", [chart])]


class TextClassification(ClassificationTask):
    NAME = "text-classification"
    TABLES: ClassVar = {"data": LabelData, "text": TextConfig}
    DEFAULTS: ClassVar = {
        "model": {"architecture": "encoder", "output_head": "classes", "pooling": "mean"},
        "train": {
            "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.01,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    PLACEHOLDERS: ClassVar = {"vocab_size": 8, "classes": 2}
    UNUSED = ("loss_chunk",)
    UNIT = "texts"
    LOSS_UNIT = "nats per text"
    EXAMPLE = 'train = ["train.tsv"]'
    predictor = TextClassifier

    data: LabelData
    train_texts: Labelled
    valid_texts: Labelled | None

    # --- data

    @property
    def sets(self) -> Sequence[str]:
        return super().sets if self.data.listops is None else ["valid", "test"]

    def check_data(self) -> None:
        """A label that does not occur in training is a mistake in another set."""
        for name, files in self.files.items():
            report = self.data.read(files).check()
            report.print()
            if name == "train":
                self.data = self.data.with_classes(report)
                if missing := [label for label in self.data.classes if label not in report.totals]:
                    raise UserError(
                        f"data.classes: {', '.join(file_names(files))} has no text of {missing[0]!r}; remove it, or "
                        "set data.names to what the label is in the file"
                    )
        weights = self.data.class_weights
        for label in weights if isinstance(weights, dict) else ():
            if label not in self.data.classes:
                raise UserError(f"data.class_weights: {label!r} is not a class; {suggest(label, self.data.classes)}")

    def _store(self, name: str) -> Store:
        files, data = self.files.get(name, self.data.train), self.data
        groups = [self._made(name)] if data.is_made else (data.read(group.files) for group in file_groups(files))

        def state() -> str:
            return fingerprint((), data.fingerprint(files), name) if data.is_made else data.fingerprint(files)

        return store_labelled(groups, data, self.folder / "data" / name, self.tokenizer, state)

    def _made(self, name: str) -> Iterator[Example]:
        """The texts of a set that is generated, or joined from those of files."""
        if self.data.join is None:
            yield from self.data.expressions(name)  # type: ignore[arg-type]
            return
        rows = ((one.text, one.label) for one in self._texts(name))
        for number, (text, label) in enumerate(self.data.join.documents(rows, name), 1):
            yield Example(text, label, f"data.join, {name}", number)

    def prepare_data(self) -> None:
        store = self._store("train")
        if cut := store.index["truncated"]:
            texts = f"{cut:,} text{'s' * (cut != 1)}"
            print(localize(f"truncated: {texts} longer than data.max_length = {self.data.max_length}"), file=sys.stderr)
        everything = Labelled.of(store)
        everything.weights = group_weights(store, self.data.weights)
        if self.data.is_made:
            valid = Labelled.of(self._store("valid")) if "valid" in self.sets else None
            self.train_texts, self.valid_texts = everything, valid
            return
        chosen, held_out = self._split(everything.labels)
        self.train_texts, self.valid_texts = everything.choose(chosen), None
        if self.data.valid:
            self.valid_texts = Labelled.of(self._store("valid"))
        elif fraction := self.data.valid_fraction:
            if not len(held_out):
                raise UserError(f"data.valid_fraction = {fraction}: holds out none of {len(everything):,} texts")
            self.valid_texts = everything.choose(held_out)

    def _split(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the training files that are trained on, and those held out for validation."""
        held_out = sample_rows(labels, self.data.valid_fraction, HOLD_OUT, keep=True)
        rest = (~held_out).nonzero()[:, 0]
        sampled = sample_rows(labels[rest], self.data.fraction, self.config.seed, keep=False)
        return rest[sampled], held_out.nonzero()[:, 0]

    def _numbers(self, rows: Sequence[Example]) -> Tensor:
        return torch.tensor([self.data.classes.index(one.label) for one in rows])

    def examples(self, name: str) -> list[Example]:
        return list(self._made(name)) if self.data.is_made else self._texts(name)

    def _texts(self, name: str) -> list[Example]:
        """Of the training files: "train", the rows that are trained on, and "valid", those held out."""
        if name in self.data.sets:
            return self.read_files(self.data.sets[name])
        rows = self.read_files(self.data.train)
        chosen, held_out = self._split(self._numbers(rows))
        return [rows[i] for i in (chosen if name == "train" else held_out).tolist()]

    def inputs(self, name: str, count: int) -> list[str]:
        return [one.text for one in self.examples(name)[:count]]

    def references(self, name: str, count: int) -> list[str]:
        return [one.label for one in self.examples(name)[:count]]

    def read_files(self, files: Sequence[str] | Sequence[Group]) -> list[Example]:
        return list(self.data.read(files))

    def stream(self) -> Stream:
        config, data = self.config, self.train_texts
        if not config.pack:
            return Batches(data, config.batch_tokens, config.seed, self.device)
        return ClassPacks(data, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    # --- tokenizer and model

    def training_texts(self) -> Iterable[str]:
        if self.data.listops is not None:
            return (one.text for one in islice(self._made("train"), WORDED))
        end = "" if self.data.join is None else self.data.join.separator
        return (one.text + end for one in self.data.read(self.data.train))

    def model_sizes(self) -> dict[str, int | None]:
        return {"vocab_size": len(self.tokenizer), "classes": len(self.data.classes)}

    def check_model(self, config: ModelConfig) -> None:
        self.check_positions(config, self.data.max_length, "data.max_length")

    # --- training and evaluation

    def class_weight(self) -> Tensor | None:
        """[classes], with a mean of 1 over the training texts, as often as they occur."""
        weights, texts = self.data.class_weights, self.train_texts
        counts = texts.labels.bincount(texts.weights, minlength=len(self.data.classes))
        if weights == "none":
            return None
        if isinstance(weights, str):
            return torch.tensor(balanced_weights(counts.tolist()), device=self.device)
        raw = torch.tensor([weights.get(name, 1.0) for name in self.data.classes])
        return (raw * counts.sum() / (raw * counts).sum()).to(self.device)

    def objective(self) -> Objective:
        word_dropout = make_word_dropout(self.data.word_dropout, self.tokenizer)
        return self.make_objective(classification, weight=self.class_weight(), word_dropout=word_dropout)

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss, accuracy and macro-F1 on the validation texts, in the precision of training."""
        assert self.valid_texts is not None
        probabilities, labels = [], []
        budget = max(self.config.batch_tokens, self.valid_texts.longest_row)
        batches = Batches(self.valid_texts, budget, 0, self.device)
        for rows in batches.plan(0):
            batch = self.valid_texts.batch(rows, batches.width).to(self.device)
            with self.autocast():
                logits = class_logits(model, batch)
            probabilities.append(logits[:, 0].float().softmax(dim=-1).cpu())
            labels.append(self.valid_texts.labels[rows])
        return self.validation(evaluate_classes(torch.cat(probabilities), torch.cat(labels), self.data.classes))

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        probabilities = predictor.probabilities([one.text for one in examples])
        metrics = evaluate_classes(probabilities, self._numbers(examples), self.data.classes)
        if self.data.listops is not None:
            metrics["root_operator"] = root_baseline(self._known, [one[:2] for one in examples])
        return metrics, probabilities

    @cached_property
    def _known(self) -> list[tuple[str, str]]:
        """Training expressions, from which the baseline takes the most frequent value of each operator."""
        return [one[:2] for one in islice(self._made("train"), SOME)]

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        rows = self.class_records(self._numbers(evaluation.examples), evaluation.predictions)
        return [{"text": one.text, **row} for one, row in zip(evaluation.examples, rows, strict=True)]

    # --- report

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        if not evaluations:
            return []
        last = [*evaluations.values()][-1]
        best, predicted = (part.tolist() for part in last.predictions.max(dim=1))
        labels = [self.data.classes[number] for number in predicted]
        rows = [(one.text, one.label, *given) for one, *given in zip(last.examples, labels, best, strict=True)]
        errors = sorted((row for row in rows if row[1] != row[2]), key=lambda row: -float(row[3]))
        note = f"{len(errors):,} of {len(rows):,} are wrong. The most confident errors:"
        table = Table(["text", "class", "predicted class", "probability"], errors[:LISTED])
        return [*class_sections(evaluations), Section("Errors", [note, table])]

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        texts = [one.text for evaluation in [*evaluations.values()][-1:] for one in evaluation.examples]
        return [AttentionInput(text) for text in texts if DRAWN[0] <= len(text) <= DRAWN[1]][:1]
