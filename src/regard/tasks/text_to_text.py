"""Text to text: one encoder-decoder that learns several tasks, told apart by a prefix.

    [data.tasks.NAME]   pairs, labelled texts, or text with holes         `regard.data.mixture`, `regard.data.denoise`
    loss                that of each target token, given the ones before  as in translation
    figures             loss; BLEU, chrF and exact matches of what it writes

Translating, classifying and summarising are then the same thing, and so is pre-training: a run with nothing but
`kind = "denoise"` learns the language, and another starts from it (`train.init_from`).   Raffel et al. 2020, T5
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from regard.data.batch import Batches, Pairs, Stream
from regard.data.denoise import SENTINELS, Denoised, Mixture, find_sentinels
from regard.data.documents import TextData
from regard.data.masked import prepare_texts
from regard.data.mixture import TextTask, fingerprint, read_tasks
from regard.data.pack import Packs
from regard.data.pairs import Pair
from regard.data.store import digest_of, prepare_pairs
from regard.errors import UserError, suggest
from regard.explore.texttotext import write_report
from regard.files import make_folder
from regard.metrics.bleu import Splitting, bleu_metric
from regard.models.folder import load_recipe
from regard.predict import bundle as bundles
from regard.predict.config import read_config
from regard.predict.translator import Translator
from regard.settings import from_dict, to_dict
from regard.tasks.translation import TranslationRun, score_of, tell_dropped, try_pairs
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.run import Figures
from regard.train.trainer import read_metrics

JUDGING = 0  # seed of the holes that a model is judged by


class TextToTextRun(TranslationRun):
    NAME = "text-to-text"
    HEADLINE = ("loss", "loss")
    EXAMPLE = '[data.tasks.german] prefix = "to German: ", train = ["a.en", "a.de"]'
    EVALUATE = ("test", "beam", "tokenize")

    splitting: Splitting | None = None  # of the text that BLEU is counted over

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.common, self.tasks = read_tasks(tables.get("data", {}))
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.search = read_config(tables.get("decode", {}))
        if not self.text.joint:
            raise UserError("text.joint = false: all tasks share one tokenizer here; leave it out")
        self._model_config(8, 8)  # a mistake in [model] shows before the data is read
        self.tests = {f"{one.name}.{name}": files for one in self.tasks.values() for name, files in one.sets.items()}

    def own_tables(self) -> dict[str, Any]:
        tasks = {name: one.table() for name, one in self.tasks.items()}
        return {
            "data": {**to_dict(self.common), "tasks": tasks}, "text": to_dict(self.text), "decode": to_dict(self.search)
        }  # fmt: skip

    # --- data

    @property
    def fixed(self) -> list[TextTask]:
        """The tasks whose pairs are given."""
        return [one for one in self.tasks.values() if not isinstance(one.data, TextData)]

    @property
    def noisy(self) -> list[TextTask]:
        return [one for one in self.tasks.values() if isinstance(one.data, TextData)]

    def find_data(self) -> None:
        for one in self.tasks.values():
            one.paths()

    def check_data(self) -> None:
        for one in self.tasks.values():
            one.check()

    def lines(self, name: str) -> Iterator[Pair]:
        """Of a set "TASK.SET"; "train" and "valid" are those of all tasks together."""
        if name in ("train", "valid"):
            return chain.from_iterable(one.lines(name) for one in self.fixed if name == "train" or one.validated)
        task, _, part = name.partition(".")
        return self.tasks[task].lines(part)

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        pairs = (side for pair in self.lines("train") for side in (pair.source, pair.target))
        texts = (piece.text for one in self.noisy for piece in one.texts("train"))
        tokenizer = self.learn_tokenizer(chain(pairs, texts), self.text, self.common.folder)
        return {"tokenizer": tokenizer.with_special_tokens(SENTINELS) if self.noisy else tokenizer}

    def prepare_data(self) -> None:
        if self.noisy:
            find_sentinels(self.source)
        make_folder(self.folder / "data")
        fixed = self._pairs("train", self.common.max_length) if self.fixed else None
        self.mixture = Mixture(fixed, [self._denoised(one, "train", self.config.seed) for one in self.noisy])
        valid = self._pairs("valid") if any(one.validated for one in self.fixed) else None
        held = [self._denoised(one, "valid", JUDGING) for one in self.noisy if one.validated]
        self.train_pairs = self.mixture.at(0)
        self.valid_pairs = Mixture(valid, held).at(0) if valid is not None or held else None
        self._check_reach()

    def _pairs(self, name: str, max_length: int | None = None) -> Pairs:
        def read() -> Iterator[Pair]:
            for one in self.fixed:
                if name == "train" or one.validated:
                    for _ in range(one.options.repeat if name == "train" else 1):
                        yield from one.lines(name)

        def print_now() -> str:
            return fingerprint(self.tasks, name, digest_of(self.source), max_length)

        store = prepare_pairs(
            read, self.folder / "data" / name, self.source, self.target, name=f"data.tasks, {name}",
            print_now=print_now, max_length=max_length,
        )  # fmt: skip
        tell_dropped(store)
        return store.pairs()

    def _denoised(self, one: TextTask, name: str, seed: int) -> Denoised:
        prefix = self.source.encode(one.options.prefix)
        if (length := self.common.max_length - len(prefix)) < 8:
            raise UserError(
                f"data.tasks.{one.name}.prefix: has {len(prefix)} tokens, too many for max_length; shorten it"
            )
        folder, print = self.folder / "data" / f"{one.name}-{name}", fingerprint({one.name: one}, name)
        texts = prepare_texts(one.texts(name), folder, self.source, length, fingerprint=print).sources
        rows = torch.arange(len(texts)).repeat(one.options.repeat if name == "train" else 1)
        return Denoised(texts.choose(rows), self.source, one.noise, prefix, seed)

    def stream(self) -> Stream:
        config = self.config
        if not config.pack:
            return Batches(self.mixture, config.batch_tokens, config.seed)
        return Packs(self.mixture, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    # --- figures

    @property
    def judged_sets(self) -> list[str]:
        return [*self.tests, *(f"{one.name}.{name}" for one in self.noisy for name in one.noise_sets)]

    def score(
        self, model: Any, translator: Translator | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Figures]:
        """Of all sets, unless `names` says which."""
        translator = translator or Translator(self.bundle(model))
        self.results, scores = {}, {}
        for name in self.judged_sets if names is None else names:
            task, _, part = name.partition(".")
            if isinstance(self.tasks[task].data, TextData):
                scores[name] = self._figures(model, self._denoised(self.tasks[task], part, JUDGING).at(0))
                continue
            lines = list(self.lines(name))
            sources = self.source.encode_batch([pair.source for pair in lines], add_eos=True)
            targets = self.target.encode_batch([pair.target for pair in lines], add_bos=True, add_eos=True)
            self.results[name] = try_pairs(translator, lines)
            written = dataclasses.asdict(score_of(self.results[name], self.splitting))
            scores[name] = {**self._figures(model, Pairs(sources, targets)), **written}
        return scores

    def _figures(self, model: Any, given: Pairs) -> Figures:
        loss, tokens = self.loss_of(model, given)
        return {"loss": loss / tokens, "perplexity": math.exp(min(loss / tokens, 700.0)), "tokens": tokens}

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        translator = Translator(self.bundle(model))
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, translator, read_metrics(self.folder), scores, self.results)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """The figures of the recipe's sets."""
        if options["tokenize"] is not None:
            bleu_metric(options["tokenize"])  # a mistake shows before anything is written
        run, wanted = cls(load_recipe(folder), folder, device), options["test"]
        if wanted is not None and wanted not in run.judged_sets:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, run.judged_sets)}")
        if not run.judged_sets:
            raise UserError(f"{folder}: its recipe names no validation or test set, so there is nothing to judge it by")
        changes = {} if options["beam"] is None else {"beam": options["beam"]}
        translator = Translator(bundles.load(folder, device))
        translator.config = translator.configured(**changes)
        run.tokenizers, run.splitting = {"tokenizer": translator.source}, options["tokenize"]
        return run.score(translator.model, translator, run.judged_sets if wanted is None else [wanted])

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        told = f"loss {figures['loss']:.4f}  perplexity {figures['perplexity']:.3f}"
        if "bleu" not in figures:
            return [told, f"{figures['tokens']:,} target tokens"]
        told += f"  exact {figures['exact']:.2%}  chrF {figures['chrf']:.2f}"
        more = f"{figures['lines']:,} lines, {figures['tokens']:,} target tokens"
        if figures["reference_tokens"] < 4 * figures["lines"]:  # BLEU counts four words in a row
            return [told, more]
        return [f"{told}  BLEU {figures['bleu']:.2f}", f"{more}; BLEU {figures['signature']}"]
