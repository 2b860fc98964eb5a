"""Translation: sentence pairs in, an encoder-decoder out.

    [data]    two files whose lines belong together, or a table       `regard.data.pairs`
    [text]    one tokenizer for both sides, or two                    `regard.text.config`
    loss      cross-entropy of each target token, given those before  `regard.training.objective`
    metrics   BLEU and chrF of the translations                       `regard.metrics.bleu`

Batches are padded sentences of similar length, or packed rows of one shape (`train.pack`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar

from regard.data.batch import Pairs
from regard.data.columns import Store
from regard.data.encode import group_weights, store_pairs
from regard.data.mixture import Mixture
from regard.data.pack import Packs
from regard.data.pairs import Pair, PairData
from regard.data.sets import file_names
from regard.data.streams import Batches, Stream
from regard.errors import UserError
from regard.messages import localize
from regard.metrics.bleu import bleu_metric, score, sentence_chrf
from regard.models.config import ModelConfig
from regard.predict.config import SearchConfig
from regard.predict.translator import Translator
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.training.objective import translation
from regard.training.results import AttentionInput, Examples, Section
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric, Objective

DRAWN = 60  # characters of a text whose attention is drawn: a longer one makes the figure too large to read
LISTED = 12  # examples in the report


class Translation(Task):
    NAME = "translation"
    TABLES: ClassVar = {"data": PairData, "text": TextConfig, "decode": SearchConfig}
    METRICS: ClassVar = {"loss": LOSS, "bleu": Metric("bleu", higher=True), "chrf": Metric("chrf", higher=True)}
    HEADLINE = ("bleu", "BLEU", ".2f")
    COLUMNS: ClassVar = {
        "bleu": "BLEU", "tokenised_bleu": "tokenised BLEU", "chrf": "chrF", "exact": "exact match", "lines": "lines"
    }  # fmt: skip
    EXAMPLE = 'train = ["a.en", "a.de"]'
    OPTIONS: ClassVar[tuple[str, ...]] = ("test", "files", "out", "beam", "tokenize")
    predictor = Translator

    decode: SearchConfig
    train_pairs: Pairs | Mixture
    valid_pairs: Pairs | None

    # --- data

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        super().read_tables(tables)
        if self.data.generator is not None:  # a rule has one correct translation
            self.HEADLINE = ("exact", "exact match", ".2%")

    @property
    def sets(self) -> Sequence[str]:
        return super().sets if self.data.generator is None else ["test"]

    def check_data(self) -> None:
        for files in self.files.values():
            self.data.read(files).check().print()

    def groups(self, name: str) -> Iterable[Iterable[Pair]]:
        """The pairs of a set, "train" or one of `sets`, by groups of files."""
        groups: list[Iterable[Pair]] = self.data.groups(name)
        return groups

    def lines(self, name: str) -> Iterator[Pair]:
        """The pairs of a set."""
        return chain.from_iterable(self.groups(name))

    def weights(self) -> list[float]:
        """Those of the groups of the training data."""
        weights: list[float] = self.data.weights
        return weights

    def prepare_data(self) -> None:
        self.train_pairs = self._pairs("train", self.data.max_length)
        self.valid_pairs = self._pairs("valid") if self.data.valid else None
        self._check_lengths()

    def _store(self, name: str, max_length: int | None) -> Store:
        files = self.files.get(name, ())
        return store_pairs(
            self.groups(name), self.folder / "data" / name, self.source, self.target, max_length=max_length,
            name=", ".join(file_names(files)) or "data.generator", state=lambda: self.data.fingerprint(files),
        )  # fmt: skip

    def _pairs(self, name: str, max_length: int | None = None) -> Pairs:
        """The tokens of a set, stored in the run's folder; pairs longer than `max_length` are left out."""
        store = self._store(name, max_length)
        if dropped := store.index["dropped"]:
            count = f"{dropped:,} pair{'s' * (dropped != 1)}"
            first = f", the first in {store.index['first_dropped']}" if "first_dropped" in store.index else ""
            print(localize(f"left out: {count} longer than data.max_length = {max_length}{first}"), file=sys.stderr)
        pairs = Pairs(store.columns["source"], store.columns["target"])
        pairs.weights = group_weights(store, self.weights()) if name == "train" else None
        return pairs

    def _check_lengths(self) -> None:
        for name, stored in (("train", self.train_pairs), ("valid", self.valid_pairs)):
            if stored is not None:
                self.check_positions(self.model_config, stored.longest, f"data.{name}: tokens of the longest sentence")

    def stream(self) -> Stream:
        config = self.config
        if not config.pack:
            return Batches(self.train_pairs, config.batch_tokens, config.seed, self.device)
        return Packs(self.train_pairs, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    # --- tokenizers and model

    def tokenizer_names(self) -> tuple[str, ...]:
        return ("tokenizer",) if self.text.joint else ("source", "target")

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        read = partial(self.lines, "train")
        if self.text.joint:
            return {"tokenizer": self.learn_tokenizer(side for pair in read() for side in (pair.source, pair.target))}
        source = self.learn_tokenizer((pair.source for pair in read()), side=0)
        return {"source": source, "target": self.learn_tokenizer((pair.target for pair in read()), side=1)}

    @property
    def source(self) -> Tokenizer:
        return self.tokenizers[self.tokenizer_names()[0]]

    @property
    def target(self) -> Tokenizer:
        return self.tokenizers[self.tokenizer_names()[-1]]

    def model_sizes(self) -> dict[str, int | None]:
        return {"vocab_size": len(self.source), "target_vocab_size": None if self.text.joint else len(self.target)}

    def model_defaults(self) -> dict[str, Any]:
        return {} if self.text.joint else {"share_embeddings": False}

    def check_model(self, config: ModelConfig) -> None:
        if config.architecture == "recurrent" and self.config.pack:
            raise UserError(
                f"train.pack = {self.config.pack}: a recurrent model reads one sentence per row; set pack = 0"
            )

    # --- training and evaluation

    def objective(self) -> Objective:
        return self.make_objective(translation)

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss without label smoothing; BLEU and chrF of greedy search if `train.metric` is one of them."""
        assert self.valid_pairs is not None
        loss, tokens = self.loss_of(model, self.valid_pairs)
        metrics = {"valid_loss": loss / tokens}
        if self.config.metric in ("bleu", "chrf"):
            greedy = Translator(self.bundle(model), SearchConfig())
            result, _ = Translation.score(self, greedy, list(self.lines("valid")))
            spaced = "tok:13a" in result["signature"]  # else only sacrebleu can split the text into words
            metrics |= {"bleu": result["tokenised_bleu" if spaced else "bleu"], "chrf": result["chrf"]}
        return metrics

    def loss_of(self, model: Any, data: Pairs) -> tuple[float, int]:
        """(summed loss without label smoothing, target tokens)."""
        batches = Batches(data, max(self.config.batch_tokens, data.longest_row), seed=0).plan(0)
        return self.sum_loss(translation, model, map(data.batch, batches))

    def examples(self, name: str) -> list[Pair]:
        return list(self.lines(name))

    def inputs(self, name: str, count: int) -> list[str]:
        return [pair.source for pair in islice(self.lines(name), count)]

    def references(self, name: str, count: int) -> list[str]:
        return [pair.target for pair in islice(self.lines(name), count)]

    def read_files(self, files: Sequence[str]) -> list[Pair]:
        return list(self.data.read(tuple(files)))

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        tokenize = options.pop("tokenize", None)
        if tokenize is not None:
            bleu_metric(tokenize)  # a mistake shows before everything is translated
        sources, references = [pair.source for pair in examples], [pair.target for pair in examples]
        hypotheses = [prediction.text for prediction in predictor.predict(sources, **options)]
        return score(hypotheses, references, tokenize), list(zip(sources, references, hypotheses, strict=True))

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        return [
            {"source": source, "reference": reference, "hypothesis": text, "chrf": sentence_chrf(text, reference)}
            for source, reference, text in evaluation.predictions or ()
        ]

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        return [
            f"BLEU {metrics['bleu']:.2f}  tokenised BLEU {metrics['tokenised_bleu']:.2f}  chrF {metrics['chrf']:.2f}",
            f"{metrics['lines']:,} lines, exact match {metrics['exact']:.1%}",
            f"signature of BLEU: {metrics['signature']}; {metrics['reference_tokens']:,} reference tokens when split",
        ]

    # --- report

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        """Examples of the first test set."""
        name = next((name for name in evaluations if name != "valid"), "valid")
        if name not in evaluations:
            return []
        rows, exact = evaluations[name].predictions, evaluations[name].metrics["exact"]
        if exact < 0.5:  # translations that differ from the reference need not be wrong
            return [Section(f"Translations of {name}", [Examples(rows[:LISTED], graded=False)])]
        wrong, correct = ([row for row in rows if (row[1] == row[2]) == equal] for equal in (False, True))
        return [
            Section(f"Wrong ({len(wrong):,})", [Examples(wrong[:LISTED])] if wrong else ["None."]),
            Section(f"Correct ({len(correct):,})", [Examples(correct[:LISTED])]),
        ]

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        """The first text that is short enough to draw."""
        rows = [row for one in [*evaluations.values()][::-1] for row in one.predictions or ()]
        sources = [source for source, *_ in rows] or [pair.source for pair in islice(self.lines("train"), 1)]
        if not sources:
            return []
        short = next((source for source in sources if len(source) <= DRAWN), min(sources, key=len))
        return [AttentionInput(short, predictor.predict([short])[0].text)]
