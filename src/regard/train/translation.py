"""A translation run, from a recipe to a folder.

    [data]   which pairs      -> checked line by line, then tokenised into RUN/data
    [text]   which tokenizer  -> RUN/tokenizer.json, or source.json and target.json
    [model]  which network    -> RUN/model.safetensors
    [train]  how it learns    -> RUN/checkpoints, RUN/metrics.jsonl
    [decode] how it answers   -> RUN/scores.json, RUN/report.html

The recipe travels into the folder, complete, so that the folder alone can go on, be tested and be moved.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.commands import program
from regard.data.batch import Batches
from regard.data.config import DataConfig, Files
from regard.data.pack import Packs
from regard.data.read import Pair, check, pairs
from regard.data.store import Store, prepare
from regard.decode.config import read_config
from regard.decode.translate import Translator
from regard.errors import UserError, suggest
from regard.explore.translation import Result, write_report
from regard.models import ModelConfig, build
from regard.recipe import RECIPE, with_preset
from regard.run import WEIGHTS, fill, load_tokenizers, make_folder, read_weights, weights_of, write_weights
from regard.score import Scores, score
from regard.settings import from_dict, read_toml, to_dict, write_toml, write_whole
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.average import average
from regard.train.checkpoint import whole
from regard.train.config import TrainConfig
from regard.train.objective import translation
from regard.train.trainer import Trainer, read_metrics

TABLES = ("data", "text", "model", "train", "decode")
CONTENTS = (
    "tokenizer.json", "source.json", "target.json", WEIGHTS, "metrics.jsonl", "scores.json", "report.html",
    "checkpoints", "data", "tensorboard",
)  # fmt: skip
PICTURED = 60  # letters of a line whose attention is drawn: a longer one makes the picture too large to read


class TranslationRun:
    """What the tables of a recipe say, made real in `folder`."""

    def __init__(self, tables: Mapping[str, Any], folder: Path, device: torch.device) -> None:
        for name, table in tables.items():
            if name not in TABLES:
                raise UserError(f"[{name}]: unknown table; {suggest(name, TABLES)}")
            if not isinstance(table, dict):
                raise UserError(f"{name} = {table!r}: write a table [{name}]")
        self.folder, self.device = folder, device
        self.data = from_dict(DataConfig, {"train": (), **tables.get("data", {})}, "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.config = from_dict(TrainConfig, tables.get("train", {}), "train.")
        self.search = read_config(tables.get("decode", {}))
        self.model_fields = dict(tables.get("model", {}))
        self._model_config(8, 8)  # a mistake in [model] shows before the data is read
        self.tests = {name: files for name, files in self.data.test.items() if files}
        if self.data.valid:
            self.tests = {"valid": self.data.valid, **self.tests}

    def prepare(self) -> None:
        """Check the data, make the tokenizers, write the recipe. A folder that holds another run is left alone."""
        self.fresh = not (self.folder / RECIPE).exists()
        self._refuse_foreign_folder()
        self._check_data()
        self.source, self.target = self._tokenizers()
        self.model_config = self._model_config(len(self.source), len(self.target))
        self._check_vocabulary()
        recipe = {
            "data": to_dict(self.data),
            "text": to_dict(self.text),
            "model": to_dict(self.model_config),
            "train": to_dict(self.config),
            "decode": to_dict(self.search),
        }
        if (self.folder / RECIPE).exists() and read_toml(self.folder / RECIPE) != recipe:
            raise UserError(
                f"{self.folder}: holds a run with other settings (see {RECIPE} there): name another folder with -o, "
                f"or go on with that one:  {program()} resume {shlex.quote(str(self.folder))}"
            )
        make_folder(self.folder)
        with self._or_nothing():
            write_toml(self.folder / RECIPE, recipe)
            for name, tokenizer in self._named_tokenizers().items():
                tokenizer.save(self.folder / f"{name}.json")
            store = self._store("train", self.data.train, self.data.max_length)
            self.train_pairs = store.pairs()
            self.valid_pairs = self._store("valid", self.data.valid).pairs() if self.data.valid else None
            self._check_reach()
        if dropped := store.index["dropped"]:
            print(f"left out: {dropped:,} pairs longer than data.max_length = {self.data.max_length}", file=sys.stderr)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """A run that cannot begin leaves nothing behind, so that the next try may have other settings."""
        try:
            yield
        except BaseException:
            for name in (*CONTENTS, RECIPE) if self.fresh else ():
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            with suppress(OSError):  # something else is in it
                self.folder.rmdir()
            raise

    def _refuse_foreign_folder(self) -> None:
        """The recipe is the mark of a run, and the first file in it: without one, nothing there is ours."""
        found = [name for name in CONTENTS if os.path.lexists(self.folder / name)]
        if found and self.fresh:
            raise UserError(f"{self.folder}: holds {found[0]} but no {RECIPE}, so it is no run: name another with -o")

    def _check_data(self) -> None:
        """Every line of every set, before anything else: a mistake in a test set must not show after training."""
        for files in (self.data.train, *self.tests.values()):
            report = check(files, self.data)
            for line in report.notes:
                print(f"note: {line}", file=sys.stderr)
            if report.bad_count:
                more = f"\n  and {report.bad_count - len(report.bad):,} more" * (report.bad_count > len(report.bad))
                listed = "".join(f"\n  {problem}" for problem in report.bad)
                print(f"left out: {report.bad_count:,} bad lines of {', '.join(files)}{listed}{more}", file=sys.stderr)

    def _store(self, name: str, files: Files, max_length: int | None = None) -> Store:
        folder = self.folder / "data" / name
        return prepare(files, self.data, folder, self.source, self.target, max_length=max_length)

    def _tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Those of the run, or new ones."""
        wanted = ("tokenizer",) if self.text.joint else ("source", "target")
        found = {} if self.fresh else load_tokenizers(self.folder)
        if not all(name in found for name in wanted):
            read = partial(pairs, self.data.train, self.data)
            if self.text.joint:
                found = {"tokenizer": self._learn(side for pair in read() for side in (pair.source, pair.target))}
            else:
                found = {"source": self._learn(pair.source for pair in read())}
                found["target"] = self._learn(pair.target for pair in read())
        return found[wanted[0]], found[wanted[-1]]

    def _learn(self, lines: Iterable[str]) -> Tokenizer:
        try:
            return Tokenizer.train(lines, kind=self.text.kind, vocab_size=self.text.vocab)
        except UserError as error:
            raise UserError(str(error).replace("vocab_size", "text.vocab")) from None

    def _named_tokenizers(self) -> dict[str, Tokenizer]:
        return {"tokenizer": self.source} if self.text.joint else {"source": self.source, "target": self.target}

    def _model_config(self, source: int, target: int) -> ModelConfig:
        """[model] with the sizes of the two vocabularies."""
        fields = with_preset(self.model_fields if self.text.joint else {"share": False, **self.model_fields})
        config = from_dict(ModelConfig, {**fields, "vocab": source, "target_vocab": target}, "model.")
        if self.text.joint:
            config = dataclasses.replace(config, target_vocab=None)
        if config.shape not in ("encoder-decoder", "recurrent") or config.source != "tokens":
            raise UserError(
                f"model.shape = {config.shape!r}, model.source = {config.source!r}: sentence pairs need "
                "shape = 'encoder-decoder' or 'recurrent', and source = 'tokens'"
            )
        if config.shape == "recurrent" and self.config.pack:
            raise UserError(
                f"train.pack = {self.config.pack}: a recurrent model reads one sentence a row; set pack = 0"
            )
        return config

    def _check_vocabulary(self) -> None:
        for name, size in (("vocab", len(self.source)), ("target_vocab", len(self.target))):
            if self.model_fields.get(name, size) != size:
                raise UserError(
                    f"model.{name} = {self.model_fields[name]}: the tokenizer has {size} pieces, and they decide; "
                    f"leave {name} out and set text.vocab"
                )

    def _check_reach(self) -> None:
        """Learned positions end."""
        model = self.model_config
        if model.shape == "recurrent" or model.position != "learned":
            return
        for name, stored in (("train", self.train_pairs), ("valid", self.valid_pairs)):
            longest = (
                0 if stored is None else max(int(stored.sources.lengths.max()), int(stored.targets.lengths.max()) - 1)
            )
            if longest > model.max_length:
                raise UserError(
                    f"data.{name} has a sentence of {longest} tokens, but model.position = 'learned' ends at "
                    f"model.max_length = {model.max_length}: raise that"
                )

    def trainer(self) -> Trainer:
        torch.manual_seed(self.config.seed)
        model, config = build(self.model_config).to(self.device), self.config
        objective = partial(translation, label_smoothing=config.label_smoothing, r_drop=config.r_drop)
        evaluate = None if self.valid_pairs is None else self.evaluate
        with self._or_nothing():
            stream: Batches | Packs
            if config.pack:
                rows = config.batch_tokens // config.pack
                stream = Packs(self.train_pairs, rows, config.pack, config.seed, self.device)
            else:
                stream = Batches(self.train_pairs, config.batch_tokens, config.seed)
            return Trainer(model, stream, objective, config, self.folder, evaluate)

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Validation figures: the loss without smoothing, and greedy BLEU over the split text if that chooses."""
        assert self.valid_pairs is not None
        batches = Batches(self.valid_pairs, max(self.config.batch_tokens, int(self.valid_pairs.sizes.max())), seed=0)
        loss, tokens = 0.0, 0
        for rows in batches.plan(0):
            part, count = translation(model, self.valid_pairs.batch(rows).to(self.device))
            loss, tokens = loss + part.item(), tokens + int(count)
        figures = {"valid_loss": loss / tokens}
        if self.config.metric == "bleu":
            result = _try(Translator(model, self.source, self.target), list(pairs(self.data.valid, self.data)))
            figures["bleu"] = _score(result).tokenised_bleu
        return figures

    def finish(self, trainer: Trainer) -> dict[str, Scores]:
        """Settle the final weights, score the test sets with them as [decode] asks, write the report."""
        weights = self._final_weights(trainer)
        write_weights(self.folder / WEIGHTS, weights)
        fill(trainer.model, weights, WEIGHTS)
        translator = Translator(trainer.model, self.source, self.target, self.search)  # type: ignore[arg-type]
        results = {name: _try(translator, list(pairs(files, self.data))) for name, files in self.tests.items()}
        scores = {name: _score(result) for name, result in results.items()}
        content = {name: dataclasses.asdict(figures) for name, figures in scores.items()}
        write_whole(self.folder / "scores.json", json.dumps(content, indent=1).encode())
        self._report(translator, results, scores)
        return scores

    def _final_weights(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """The mean of the last checkpoints, or the best ones, or the last, as [train] says."""
        if self.config.average > 1:
            count = min(self.config.average, len(whole(self.folder / "checkpoints")))
            if count < self.config.average:
                print(
                    f"note: train.average = {self.config.average}, but there are {count} checkpoints", file=sys.stderr
                )
            return average(self.folder, count)
        if (self.folder / WEIGHTS).exists() and trainer.evaluate is not None:
            return read_weights(self.folder / WEIGHTS)  # the best
        with trainer.judged_weights():
            return {name: tensor.clone() for name, tensor in weights_of(trainer.model).items()}

    def _report(self, translator: Translator, results: Mapping[str, Result], scores: Mapping[str, Scores]) -> None:
        """report.html over the first test set, or the validation set; without either, over the training curve."""
        name = next((name for name in results if name != "valid"), "valid")
        lines = results[name].lines if results else [(*next(pairs(self.data.train, self.data))[:2], "")]
        short = [source for source, *_ in lines if len(source) <= PICTURED]
        shown = short[0] if short else min((source for source, *_ in lines), key=len)
        title, metrics = self.folder.resolve().name, read_metrics(self.folder)
        path, result = self.folder / "report.html", results.get(name, Result(()))
        write_report(path, title, translator, metrics, result, shown, scores.get(name), name)


def _try(translator: Translator, lines: list[Pair]) -> Result:
    answers = translator.translate([pair.source for pair in lines])
    return Result([(pair.source, pair.target, answer) for pair, answer in zip(lines, answers, strict=True)])


def _score(result: Result) -> Scores:
    return score([got for *_, got in result.lines], [expected for _, expected, _ in result.lines])
