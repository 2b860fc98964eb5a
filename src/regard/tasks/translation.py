"""Translation: sentence pairs in, an encoder-decoder out.

    [data]   two files whose lines belong together, or a table      `regard.data.pairs`
    [text]   one tokenizer for both sides, or two                   `regard.text.config`
    loss     that of each target token, given the ones before       `regard.train.objective`
    figures  BLEU and chrF of what it writes                        `regard.metrics.bleu`

Batches are padded sentences of similar length, or packed rows of one shape (`train.pack`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.data.batch import Batches, Pairs, Stream
from regard.data.pack import Packs
from regard.data.pairs import Pair, PairData, find_pairs, read_pairs
from regard.data.sets import Files
from regard.data.store import Store, prepare
from regard.errors import UserError, suggest
from regard.explore.translation import Result, write_report
from regard.metrics.bleu import Scores, Splitting, bleu_metric, score
from regard.models import ModelConfig
from regard.models.folder import load_recipe
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.config import SearchConfig, read_config
from regard.predict.translator import Translator
from regard.settings import from_dict, to_dict
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.config import TrainConfig
from regard.train.metric import LOSS, Metric
from regard.train.objective import translation
from regard.train.run import Figures, TaskRun
from regard.train.trainer import Objective, read_metrics
from regard.train.vocabulary import chunked

PICTURED = 60  # letters of a line whose attention is drawn: a longer one makes the picture too large to read


def make_objective(config: TrainConfig) -> Objective:
    """The loss of sentence pairs as [train] asks for it."""
    loss = partial(chunked, chunk=config.loss_chunk)
    return partial(translation, label_smoothing=config.label_smoothing, r_drop=config.r_drop, loss=loss)


class TranslationRun(TaskRun):
    NAME = "translation"
    predictor = Translator
    METRICS: ClassVar = {"loss": LOSS, "bleu": Metric("bleu", higher=True), "chrf": Metric("chrf", higher=True)}
    HEADLINE = ("bleu", "BLEU")
    EXAMPLE = 'train = ["a.en", "a.de"]'
    EVALUATE: ClassVar[tuple[str, ...]] = ("test", "files", "beam", "tokenize")

    train_pairs: Pairs
    valid_pairs: Pairs | None

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(PairData, {"train": (), **tables.get("data", {})}, "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.search = read_config(tables.get("decode", {}))
        self._model_config(8, 8)  # a mistake in [model] shows before the data is read
        self.tests = {name: files for name, files in self.data.test.items() if files}
        if self.data.valid:
            self.tests = {"valid": self.data.valid, **self.tests}

    def own_tables(self) -> dict[str, Any]:
        return {"data": to_dict(self.data), "text": to_dict(self.text), "decode": to_dict(self.search)}

    def find_data(self) -> None:
        for files in (self.data.train, *self.tests.values()):
            find_pairs(files, self.data.folder)

    def check_data(self) -> None:
        for files in (self.data.train, *self.tests.values()):
            read_pairs(files, self.data).check().print(files)

    def lines(self, name: str) -> Iterator[Pair]:
        """The pairs of a set: "train", "valid" or one of the tests."""
        return iter(read_pairs({"train": self.data.train, **self.tests}[name], self.data))

    # --- tokenizers and model

    def tokenizer_names(self) -> tuple[str, ...]:
        return ("tokenizer",) if self.text.joint else ("source", "target")

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        read = partial(self.lines, "train")
        learn = partial(self.learn_tokenizer, text=self.text, folder=self.data.folder)
        if self.text.joint:
            return {"tokenizer": learn(side for pair in read() for side in (pair.source, pair.target))}
        source = learn((pair.source for pair in read()), side=0)
        return {"source": source, "target": learn((pair.target for pair in read()), side=1)}

    @property
    def source(self) -> Tokenizer:
        return self.tokenizers[self.tokenizer_names()[0]]

    @property
    def target(self) -> Tokenizer:
        return self.tokenizers[self.tokenizer_names()[-1]]

    def settle_model(self) -> ModelConfig:
        for name, size in (("vocab_size", len(self.source)), ("target_vocab_size", len(self.target))):
            if self.model_fields.get(name, size) != size:
                raise UserError(
                    f"model.{name} = {self.model_fields[name]}: the tokenizer has {size} pieces, and they decide; "
                    f"leave {name} out and set text.vocab_size"
                )
        return self._model_config(len(self.source), len(self.target))

    def _model_config(self, source: int, target: int) -> ModelConfig:
        """[model] with the sizes of the two vocabularies."""
        fields = with_preset(self.model_fields if self.text.joint else {"share_embeddings": False, **self.model_fields})
        config = from_dict(ModelConfig, {**fields, "vocab_size": source, "target_vocab_size": target}, "model.")
        if self.text.joint:
            config = dataclasses.replace(config, target_vocab_size=None)
        if config.architecture not in ("encoder-decoder", "recurrent") or config.input != "tokens":
            raise UserError(
                f"model.architecture = {config.architecture!r}, model.input = {config.input!r}: sentence pairs need "
                "architecture = 'encoder-decoder' or 'recurrent', and input = 'tokens'"
            )
        if config.architecture == "recurrent" and self.config.pack:
            raise UserError(
                f"train.pack = {self.config.pack}: a recurrent model reads one sentence a row; set pack = 0"
            )
        return config

    # --- data

    def prepare_data(self) -> None:
        store = self._store("train", self.data.train, self.data.max_length)
        self.train_pairs = store.pairs()
        self.valid_pairs = self._store("valid", self.data.valid).pairs() if self.data.valid else None
        self._check_reach()
        tell_dropped(store)

    def _store(self, name: str, files: Files, max_length: int | None = None) -> Store:
        folder = self.folder / "data" / name
        return prepare(files, self.data, folder, self.source, self.target, max_length=max_length)

    def _check_reach(self) -> None:
        """Learned positions end."""
        model = self.model_config
        if model.architecture == "recurrent" or model.position != "learned":
            return
        for name, stored in (("train", self.train_pairs), ("valid", self.valid_pairs)):
            longest = 0 if stored is None else stored.longest
            if longest > model.max_length:
                raise UserError(
                    f"data.{name} has a sentence of {longest} tokens, but model.position = 'learned' ends at "
                    f"model.max_length = {model.max_length}: raise that"
                )

    def stream(self) -> Stream:
        config = self.config
        if not config.pack:
            return Batches(self.train_pairs, config.batch_tokens, config.seed)
        return Packs(self.train_pairs, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    # --- loss and figures

    def objective(self) -> Objective:
        return make_objective(self.config)

    @property
    def judged(self) -> bool:
        return self.valid_pairs is not None

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss without smoothing, and BLEU and chrF of greedy search if one of them chooses."""
        assert self.valid_pairs is not None
        loss, tokens = self.loss_of(model, self.valid_pairs)
        figures = {"valid_loss": loss / tokens}
        if self.config.metric in ("bleu", "chrf"):
            found = score_of(try_pairs(Translator(self.bundle(model), SearchConfig()), list(self.lines("valid"))))
            spaced = "tok:13a" in found.signature  # else the text is not split, and only sacrebleu can
            figures |= {"bleu": found.tokenised_bleu if spaced else found.bleu, "chrf": found.chrf}
        return figures

    @torch.inference_mode()
    def loss_of(self, model: Any, given: Pairs) -> tuple[float, int]:
        """(summed loss without smoothing, target tokens)."""
        loss, tokens = 0.0, 0
        for rows in Batches(given, max(self.config.batch_tokens, given.longest_row), seed=0).plan(0):
            part, count = translation(model, given.batch(rows).to(self.device))
            loss, tokens = loss + part.item(), tokens + int(count)
        return loss, tokens

    def score(self, model: Any) -> dict[str, Figures]:
        translator = Translator(self.bundle(model))
        self.results = {name: try_pairs(translator, list(self.lines(name))) for name in self.tests}
        return {name: dataclasses.asdict(score_of(result)) for name, result in self.results.items()}

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        """report.html over the first test set, or the validation set; without either, over the training curve."""
        results, translator = self.results, Translator(self.bundle(model))
        name = next((name for name in results if name != "valid"), "valid")
        lines = results[name].lines if results else [(*next(self.lines("train"))[:2], "")]
        short = [source for source, *_ in lines if len(source) <= PICTURED]
        shown = short[0] if short else min((source for source, *_ in lines), key=len)
        title, metrics = self.folder.resolve().name, read_metrics(self.folder)
        path, result = self.folder / "report.html", results.get(name, Result(()))
        figures = Scores(**scores[name]) if name in scores else None
        write_report(path, title, translator, metrics, result, shown, figures, name)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """BLEU and chrF of the recipe's sets, or of other files."""
        wanted = options["test"]
        if options["tokenize"] is not None:
            bleu_metric(options["tokenize"])  # a mistake shows before everything is translated
        if options["files"]:
            config = PairData(train=tuple(options["files"]))
            sets = {"files": config.train}
        else:
            table = load_recipe(folder).get("data")
            if not isinstance(table, dict) or isinstance(table.get("train"), int):  # imported, or a demo
                raise UserError(f"{folder}: its recipe names no files; give some with --files")
            config = from_dict(PairData, table, "data.")
            sets = {"valid": config.valid, **config.test}
            if wanted is not None and wanted not in sets:
                raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, sets)}")
            sets = {name: files for name, files in sets.items() if files and wanted in (None, name)}
        if not sets:
            raise UserError(f"{folder}: its recipe names no test set; give files with --files")
        changes = {} if options["beam"] is None else {"beam": options["beam"]}
        translator = Translator(bundles.load(folder, device))
        translator.config = translator.configured(**changes)
        results = {name: try_pairs(translator, list(read_pairs(files, config))) for name, files in sets.items()}
        return {name: dataclasses.asdict(score_of(result, options["tokenize"])) for name, result in results.items()}

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        return [
            f"BLEU {figures['bleu']:.2f}  tokenised BLEU {figures['tokenised_bleu']:.2f}  chrF {figures['chrf']:.2f}",
            f"{figures['lines']:,} lines, {figures['exact']:.1%} exact",
            f"signature of BLEU: {figures['signature']}; {figures['reference_tokens']:,} reference tokens when split",
        ]


def tell_dropped(store: Store) -> None:
    if dropped := store.index["dropped"]:
        some = f"{dropped:,} pair{'s' * (dropped != 1)}"
        first = f", the first in {store.index['first_dropped']}" if "first_dropped" in store.index else ""
        print(f"left out: {some} longer than data.max_length = {store.index['max_length']}{first}", file=sys.stderr)


def try_pairs(translator: Translator, lines: list[Pair]) -> Result:
    """What a model makes of the sources."""
    answers = translator.translate([pair.source for pair in lines])
    return Result([(pair.source, pair.target, answer) for pair, answer in zip(lines, answers, strict=True)])


def score_of(result: Result, splitting: Splitting | None = None) -> Scores:
    return score([got for *_, got in result.lines], [expected for _, expected, _ in result.lines], splitting)
