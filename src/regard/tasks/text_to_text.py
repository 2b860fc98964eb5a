"""Text to text: one encoder-decoder for several tasks, distinguished by a prefix.

    [data.tasks.NAME]   pairs, labelled texts, or text for span corruption   `regard.data.mixture`
    loss                cross-entropy of each target token                   as in translation
    metrics             loss; BLEU, chrF and exact match of the outputs

Translation, classification and summarization become the same problem, and so does pre-training: a run with nothing but
`kind = "denoise"` learns the language, and another one starts from it (`train.init_from`).   Raffel et al. 2020, T5
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar

from regard.data.batch import Pairs
from regard.data.columns import Store
from regard.data.documents import TextData
from regard.data.encode import group_weights, store_documents, store_pairs
from regard.data.mixture import (
    SENTINELS,
    Denoised,
    Mixture,
    TasksData,
    TextTask,
    find_sentinels,
    read_tasks,
    tasks_fingerprint,
)
from regard.data.pairs import Pair
from regard.errors import UserError, listed, suggest
from regard.files import make_folder
from regard.predict.config import SearchConfig
from regard.settings import from_dict, to_dict
from regard.tasks.translation import Translation
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.training.results import Examples, Section
from regard.training.task import Evaluation, Metrics

EVALUATION_SEED = 0  # of the spans that are corrupted in evaluation
LISTED = 8  # examples of each set in the report


class TextToText(Translation):
    NAME = "text-to-text"
    TABLES: ClassVar = {**Translation.TABLES, "data": TasksData}
    HEADLINE = ("loss", "loss", ".4f")
    COLUMNS = {  # noqa: RUF012
        "loss": "loss", "exact": "exact match", "bleu": "BLEU", "chrf": "chrF", "tokens": "target tokens"
    }  # fmt: skip
    EXAMPLE = '[data.tasks.german] prefix = "to German: ", train = ["a.en", "a.de"]'
    OPTIONS = ("test", "files", "task", "out", "beam", "tokenize")

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data, self.tasks = read_tasks(tables.get("data", {}))
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.decode = from_dict(SearchConfig, tables.get("decode", {}), "decode.")
        if not self.text.joint:
            raise UserError("text.joint = false: all tasks share one tokenizer here; remove it")

    def own_tables(self) -> dict[str, Any]:
        tables = super().own_tables()
        return {**tables, "data": {**to_dict(self.data), "tasks": {n: one.table() for n, one in self.tasks.items()}}}

    # --- data

    @property
    def paired(self) -> list[TextTask]:
        """The tasks whose data are pairs."""
        return [one for one in self.tasks.values() if not isinstance(one.data, TextData)]

    @property
    def denoising(self) -> list[TextTask]:
        return [one for one in self.tasks.values() if isinstance(one.data, TextData)]

    @property
    def sets(self) -> Sequence[str]:
        return [f"{one.name}.{name}" for one in (*self.paired, *self.denoising) for name in one.sets]

    @property
    def has_validation(self) -> bool:
        return self.valid_pairs is not None

    def find_files(self) -> None:
        for one in self.tasks.values():
            one.paths()

    def check_data(self) -> None:
        for one in self.tasks.values():
            one.check()

    def groups(self, name: str) -> Iterator[Iterator[Pair]]:
        """The pairs of a set "TASK.SET", by groups of files; "train" and "valid" are those of all tasks together."""
        task, _, part = name.partition(".")
        parts = ((one, name) for one in self.paired if name == "train" or name in one.sets)
        for one, own in [(self.tasks[task], part)] if part else parts:
            yield from one.groups(own)

    def weights(self) -> list[float]:
        return [weight for one in self.paired for weight in one.weights]

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        pairs = (side for pair in self.lines("train") for side in (pair.source, pair.target))
        texts = (piece.text for one in self.denoising for group in one.texts("train") for piece in group)
        tokenizer = self.learn_tokenizer(chain(pairs, texts))
        return {"tokenizer": tokenizer.with_special_tokens(SENTINELS) if self.denoising else tokenizer}

    def prepare_data(self) -> None:
        if self.denoising:
            find_sentinels(self.source)
        make_folder(self.folder / "data")
        pairs = self._pairs("train", self.data.max_length) if self.paired else None
        self.train_pairs = Mixture(pairs, [self._denoised(one, "train", self.config.seed) for one in self.denoising])
        valid = self._pairs("valid") if any("valid" in one.sets for one in self.paired) else None
        held_out = [self._denoised(one, "valid", EVALUATION_SEED) for one in self.denoising if "valid" in one.sets]
        self.valid_pairs = Mixture(valid, held_out).at(0) if valid is not None or held_out else None
        self._check_lengths()

    def _store(self, name: str, max_length: int | None) -> Store:
        return store_pairs(
            self.groups(name), self.folder / "data" / name, self.source, self.target,
            name=f"data.tasks, {name}", max_length=max_length,
            state=lambda: tasks_fingerprint(self.tasks.values(), name),
        )  # fmt: skip

    def _denoised(self, one: TextTask, name: str, seed: int) -> Denoised:
        prefix = self.source.encode(one.options.prefix)
        if (length := self.data.max_length - len(prefix)) < 8:
            raise UserError(
                f"data.tasks.{one.name}.prefix: has {len(prefix)} tokens, too many for max_length; shorten it"
            )
        folder, state = self.folder / "data" / f"{one.name}-{name}", tasks_fingerprint([one], name)
        store = store_documents(one.texts(name), folder, self.source, length, state)
        weights = group_weights(store, one.weights) if name == "train" else None
        return Denoised(store.columns["text"], self.source, one.options, prefix, seed, weights)

    # --- evaluation

    def examples(self, name: str) -> Any:
        """(lines, their tokens); of a denoising task (None, its corrupted texts)."""
        task, _, part = name.partition(".")
        if isinstance(self.tasks[task].data, TextData):
            return None, self._denoised(self.tasks[task], part, EVALUATION_SEED).at(0)
        lines = list(self.lines(name))
        sources = self.source.encode_batch([pair.source for pair in lines], add_eos=True)
        targets = self.target.encode_batch([pair.target for pair in lines], add_bos=True, add_eos=True)
        return lines, Pairs(sources, targets)

    def inputs(self, name: str, count: int) -> list[str]:
        """Lines; of a denoising task whole texts, as nobody can type the tokens that replace removed ones."""
        task, _, part = name.partition(".")
        if not isinstance(self.tasks[task].data, TextData):
            return super().inputs(name, count)
        pieces, prefix = chain.from_iterable(self.tasks[task].texts(part)), self.tasks[task].options.prefix
        return [prefix + text for piece in islice(pieces, count) if (text := piece.text.strip())]

    def references(self, name: str, count: int) -> list[str]:
        is_pairs = not isinstance(self.tasks[name.partition(".")[0]].data, TextData)
        return super().references(name, count) if is_pairs else []

    def read_files(self, files: Sequence[str]) -> Any:
        """Of one of the tasks, the only one or --task, by its kind and with its prefix."""
        names = list(self.tasks)
        name = (self.file_options or {}).get("task", names[0] if len(names) == 1 else None)
        if name is None:
            raise UserError(f"--files {' '.join(files)}: which task? Name it with --task: {listed(names, 'or')}")
        if name not in self.tasks:
            raise UserError(f"--task {name}: is not a task of the recipe; {suggest(name, names)}")
        one = self.tasks[name]
        data = dataclasses.replace(one.data, test={"files": tuple(files)}, folder=".")
        self.tasks[name] = dataclasses.replace(one, data=data)
        make_folder(self.folder / "data")
        return self.examples(f"{name}.files")

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        lines, pairs = examples
        if others := predictor.bundle.others:
            raise UserError(f"{others[0].name}: the loss of an ensemble is not computed for text-to-text; name one run")
        loss, tokens = self.loss_of(predictor.bundle.model, pairs)
        metrics = {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "tokens": tokens}
        if lines is None:
            return metrics, None
        scores, rows = super().score(predictor, lines, **options)
        return {**metrics, **scores}, rows

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        first = f"loss {metrics['loss']:.4f}  perplexity {metrics['perplexity']:.3f}"
        if "bleu" not in metrics:
            return [first, f"{metrics['tokens']:,} target tokens"]
        first += f"  exact match {metrics['exact']:.2%}  chrF {metrics['chrf']:.2f}"
        second = f"{metrics['lines']:,} lines, {metrics['tokens']:,} target tokens"
        if metrics["reference_tokens"] < 4 * metrics["lines"]:  # BLEU counts sequences of four words
            return [first, second]
        return [f"{first}  BLEU {metrics['bleu']:.2f}", f"{second}; BLEU {metrics['signature']}"]

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        return [
            Section(f"Outputs on {name}", [Examples(one.predictions[:LISTED], graded=False)])
            for name, one in evaluations.items()
            if one.predictions and not name.endswith(".valid")
        ]
