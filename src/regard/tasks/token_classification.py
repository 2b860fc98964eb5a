"""Token classification: tagged sentences in, an encoder out that predicts a tag for every word.

    [data]    CoNLL columns, or tables with lists of tokens and tags        `regard.data.tags`
    [text]    one tokenizer                                                 `regard.text.config`
    loss      -log p(tag)  of each word, at its first token                 summed over words
    metrics   F1 of entities by seqeval, accuracy                           `regard.metrics.tagging`

Named entities (people, places, …) and parts of speech are predicted in the same way: the output head is one matrix from
each state of the encoder to the logits of the tags,

    logits = W x + b          x [B, N, dim], W [classes, dim] -> [B, N, classes]

and only the first token of a word has a label (Devlin et al. 2018, section 5.4). An encoder that was pretrained on text
without labels (`train.init_from`) needs far fewer tagged sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

from regard.data.encode import group_weights, store_tagged
from regard.data.pack import Tagged, TagPacks
from regard.data.sets import file_groups
from regard.data.streams import Batches, Stream
from regard.data.tags import Scheme, Sentence, TagData, check_sets, is_prefixed, with_classes
from regard.messages import localize
from regard.metrics.tagging import evaluate_tags, format_tags, require_seqeval
from regard.models.config import ModelConfig
from regard.predict.bundle import Bundle
from regard.predict.tagger import Tagger
from regard.tasks.text_classification import classification
from regard.text.config import TextConfig
from regard.training.objective import make_word_dropout
from regard.training.results import AttentionInput, Section, Table
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric, Objective

LISTED = 20  # errors in the report
DRAWN = (4, 80)  # characters of a text whose attention is drawn


class TokenClassification(Task):
    NAME = "token-classification"
    TABLES: ClassVar = {"data": TagData, "text": TextConfig}
    DEFAULTS: ClassVar = {
        "model": {"architecture": "encoder", "output_head": "classes", "pooling": "none", "pooler": False},
        "train": {
            "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.01,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    PLACEHOLDERS: ClassVar = {"vocab_size": 8, "classes": 2}
    UNUSED = ("loss_chunk",)
    METRICS: ClassVar = {
        "loss": LOSS, "f1": Metric("f1", higher=True), "accuracy": Metric("accuracy", higher=True)
    }  # fmt: skip
    HEADLINE = ("f1", "F1", ".4f")
    COLUMNS: ClassVar = {
        "f1": "F1", "precision": "precision", "recall": "recall", "entities": "entities", "accuracy": "accuracy",
        "loss": "loss", "words": "words", "sentences": "sentences",
    }  # fmt: skip
    UNIT = "words"
    LOSS_UNIT = "nats per word"
    EXAMPLE = 'train = ["train.conll"]'
    OPTIONS = ("test", "files", "out")
    predictor = Tagger
    format_metrics = staticmethod(format_tags)

    data: TagData
    train_sentences: Tagged
    valid_sentences: list[Sentence] | None = None

    # --- data

    @property
    def sets(self) -> Sequence[str]:
        return super().sets if self.data.generator is None else ["test"]

    def lines(self, name: str) -> Iterator[Sentence]:
        """The sentences of a set: "train" or one of `sets`."""
        if self.data.generator is not None:
            return self.data.generator.sentences(name)  # type: ignore[arg-type]
        return iter(self.data.read(self.files[name]))

    def check_data(self) -> None:
        """A tag that does not occur in training is a mistake in another set."""
        if self.data.generator is not None:
            scheme = Scheme()
            for one in self.lines("train"):
                scheme.add(one)
            self.data = with_classes(self.data, scheme)
        else:
            self.data, found = check_sets(self.data)
            for report, _ in found.values():
                report.print()
        if is_prefixed(self.data.classes) and self.sets:
            require_seqeval()  # not only after training

    def prepare_data(self) -> None:
        files = self.data.train
        groups = (self.data.read(group.files) for group in file_groups(files)) if files else [self.lines("train")]
        store = store_tagged(
            groups, self.data, self.folder / "data" / "train", self.tokenizer, lambda: self.data.fingerprint(files)
        )
        if split := store.index["split"]:
            count = f"{split:,} sentence{'s' * (split != 1)}"
            print(localize(f"split: {count} longer than data.max_length = {self.data.max_length}"), file=sys.stderr)
        self.train_sentences = Tagged.of(store)
        self.train_sentences.weights = group_weights(store, self.data.weights)

    def examples(self, name: str) -> list[Sentence]:
        return list(self.lines(name))

    def inputs(self, name: str, count: int) -> list[str]:
        return [" ".join(one.words) for one in islice(self.lines(name), count)]

    def references(self, name: str, count: int) -> list[str]:
        return [" ".join(one.tags) for one in islice(self.lines(name), count)]

    def read_files(self, files: Sequence[str]) -> list[Sentence]:
        return self.data.read(files).read()

    def stream(self) -> Stream:
        config, data = self.config, self.train_sentences
        if not config.pack:
            return Batches(data, config.batch_tokens, config.seed, self.device)
        return TagPacks(data, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    # --- tokenizer and model

    def training_texts(self) -> Iterable[str]:
        return (" ".join(one.words) for one in self.lines("train"))

    def model_sizes(self) -> dict[str, int | None]:
        return {"vocab_size": len(self.tokenizer), "classes": len(self.data.classes)}

    def check_model(self, config: ModelConfig) -> None:
        self.check_positions(config, self.data.max_length, "data.max_length")

    def use(self, bundle: Bundle) -> None:
        super().use(bundle)
        self.data = replace(self.data, classes=bundle.classes)

    # --- training and evaluation

    def objective(self) -> Objective:
        word_dropout = make_word_dropout(self.data.word_dropout, self.tokenizer)
        return self.make_objective(classification, word_dropout=word_dropout)

    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss, F1 and accuracy on the validation sentences, in the precision of training."""
        if self.valid_sentences is None:
            self.valid_sentences = self.examples("valid")
        with self.autocast():
            metrics, _ = self.score(self.bundle(model).predictor, self.valid_sentences)
        return {"valid_loss": metrics["loss"], "f1": metrics["f1"], "accuracy": metrics["accuracy"]}

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        probabilities = predictor.probabilities([one.words for one in examples])
        metrics = evaluate_tags(probabilities, [one.tags for one in examples], self.data.classes)
        names = self.data.classes
        return metrics, [[names[number] for number in rows.argmax(dim=-1).tolist()] for rows in probabilities]

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        return [
            {"words": [*one.words], "reference": [*one.tags], "tags": tags}
            for one, tags in zip(evaluation.examples, evaluation.predictions, strict=True)
        ]

    # --- report

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        if not evaluations:
            return []
        name, last = [*evaluations.items()][-1]
        metrics, sections = last.metrics, []
        if types := metrics.get("types"):
            rows = [[kind, one["precision"], one["recall"], one["f1"], one["entities"]] for kind, one in types.items()]
            sections += [
                Section(f"Entities of {name}", [Table(["type", "precision", "recall", "F1", "entities"], rows)])
            ]
        counts = [sum(row) for row in metrics["confusion"]]
        tags = [*zip(metrics["classes"], metrics["tag_f1"], counts, strict=True)]
        sections += [Section(f"Tags of {name}", [Table(["tag", "F1", "words"], tags)])]
        wrong = [(one, tags) for one, tags in zip(last.examples, last.predictions, strict=True) if [*one.tags] != tags]
        note = f"{len(wrong):,} of {len(last.examples):,} sentences have a wrong tag. The first of them:"
        rows = [[_tagged(one.words, one.tags), _tagged(one.words, tags)] for one, tags in wrong[:LISTED]]
        return [*sections, Section("Errors", [note, Table(["sentence", "predicted tags"], rows)])]

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        texts = [" ".join(one.words) for evaluation in [*evaluations.values()][-1:] for one in evaluation.examples]
        return [AttentionInput(text) for text in texts if DRAWN[0] <= len(text) <= DRAWN[1]][:1]


def _tagged(words: Sequence[str], tags: Sequence[str]) -> str:
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))
