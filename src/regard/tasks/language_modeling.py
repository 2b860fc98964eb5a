"""Language modelling: text in, a decoder out that knows what may come next.

    [data]   files, folders, tables of text                       `regard.data.documents`
    [text]   one tokenizer                                        `regard.text.config`
    loss     that of each token, given the ones before            Radford et al. 2019
    figures  perplexity and bits per byte over the whole text     `regard.metrics.perplexity`

Batches are rows of `train.pack` tokens cut from one long text (`regard.data.blocks`); that many tokens are the
context. Left out, it is the model's `max_length`.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.blocks import BlockBatch, Blocks
from regard.data.documents import TextData, pieces, survey
from regard.data.tokens import Tokens, prepare_tokens
from regard.errors import UserError, suggest
from regard.explore.language import write_report
from regard.metrics.perplexity import perplexity
from regard.models import Decoder, ModelConfig
from regard.models.folder import load_recipe
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.config import read_config
from regard.predict.generator import Generator, check_vocabulary
from regard.settings import from_dict, to_dict
from regard.tasks.text import TextRun
from regard.text.config import TextConfig
from regard.train.objective import Loss, balance, whole
from regard.train.run import Figures
from regard.train.trainer import Objective, read_metrics
from regard.train.vocabulary import chunked

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def next_token(
    model: Decoder, batch: BlockBatch, label_smoothing: float = 0.0, r_drop: float = 0.0, loss: Loss = whole
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of tokens): each token of a row from those before it."""
    rows = BlockBatch(torch.cat((batch.ids, batch.ids))) if r_drop else batch  # two ways to drop: see `objective`
    total = loss(model.states(rows.read), model.output_head, rows.labels, label_smoothing, r_drop)
    return total + balance(model, batch.tokens), batch.tokens


class LanguageRun(TextRun):
    NAME = "language"
    predictor = Generator
    DEFAULTS: ClassVar = {
        "model": {"architecture": "decoder"},
        "train": {
            "schedule": "cosine", "warmup": 200, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
            "label_smoothing": 0.0,
        },
        "decode": {"sample": True},
    }  # fmt: skip
    HEADLINE = ("loss", "loss")
    EXAMPLE = 'train = ["input.txt"]'
    EVALUATE = ("test", "text", "stride", "context")

    train_text: Tokens
    valid_text: Tokens | None

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        complete = super().complete(tables)
        if not complete["train"].get("pack"):
            complete["train"]["pack"] = with_preset(complete["model"]).get("max_length", ModelConfig.max_length)
        return complete

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(TextData, {"train": (), **tables.get("data", {})}, "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.search = read_config(tables.get("decode", {}))
        self._model_config(8)  # a mistake in [model] shows before the data is read

    def own_tables(self) -> dict[str, Any]:
        return {"data": to_dict(self.data), "text": to_dict(self.text), "decode": to_dict(self.search)}

    # --- text

    def _tokens(self, name: str) -> Tokens:
        """A set as a store in the run's folder."""
        begin, end = self.span(name)
        folder, print = self.folder / "data" / name, f"{self.prints[name]} {begin} {end}"
        store = prepare_tokens(self.pieces(name), folder, self.tokenizer, fingerprint=print, characters=end - begin)
        if len(store) < 2:
            raise UserError(f"data.{name}: has {len(store)} token; give text of at least 2, or leave the set out")
        return store

    def prepare_data(self) -> None:
        self.keep_surveys()
        self.train_text = self._tokens("train")
        self.valid_text = self._tokens("valid") if "valid" in self.sets else None

    # --- tokenizer and model

    def settle_model(self) -> ModelConfig:
        config = self._model_config(len(self.tokenizer))
        check_vocabulary(config, self.tokenizer, "model.")
        return config

    def _model_config(self, vocab_size: int) -> ModelConfig:
        fields = with_preset(self.model_fields)
        if "vocab_size" not in self.model_fields:  # a preset's is that of its tokenizer
            fields["vocab_size"] = vocab_size
        config = from_dict(ModelConfig, fields, "model.")
        if config.architecture != "decoder":
            raise UserError(
                f"model.architecture = {config.architecture!r}: a language model needs architecture = 'decoder'"
            )
        if config.position == "learned" and config.max_length < self.config.pack:
            raise UserError(
                f"train.pack = {self.config.pack}: is longer than model.max_length = {config.max_length} of the "
                "learned positions; lower pack or raise max_length"
            )
        return config

    # --- loss and figures

    def stream(self) -> Blocks:
        config = self.config
        return Blocks(self.train_text, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    def objective(self) -> Objective:
        config = self.config
        loss = partial(chunked, chunk=config.loss_chunk)
        return partial(next_token, label_smoothing=config.label_smoothing, r_drop=config.r_drop, loss=loss)

    @property
    def judged(self) -> bool:
        return self.valid_text is not None

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss over all of the validation text, in the precision of training."""
        assert self.valid_text is not None
        half = HALF.get(self.config.precision) if next(model.parameters()).is_cuda else None
        # Compiled code is for the shapes of training: to make some for these would take longer than to do without.
        with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
            return {"valid_loss": perplexity(model, self.valid_text, self.config.pack, half=half).loss}

    def score(
        self, model: Any, names: Iterable[str] | None = None, context: int | None = None, stride: int | None = None
    ) -> dict[str, Figures]:
        """Of all sets, unless `names` says which."""
        texts = {name: self._tokens(name) for name in (self.sets if names is None else names)}
        size = self.config.pack if context is None else context
        return {name: dataclasses.asdict(perplexity(model, text, size, stride)) for name, text in texts.items()}

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        text = self.valid_text or self.train_text
        start = self.tokenizer.decode(text.slice(0, min(len(text), max(1, self.config.pack // 8))).tolist())
        generator = Generator(self.bundle(model))
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, generator, read_metrics(self.folder), scores, start)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """Perplexity of the recipe's sets, or of the files given with --text."""
        tables, wanted, files = load_recipe(folder), options["test"], options["text"]
        context, stride = options["context"], options["stride"]
        if context is not None and context < 1:
            raise UserError(f"--context {context}: give 1 or more tokens")
        generator = Generator(bundles.load(folder, device))
        context = context or generator.context
        if files:
            data = TextData(train=tuple(files))
            found = survey(data.train, data)
            for line in found.notes:
                print(f"note: {line}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as place:
                stream = iter(pieces(data.train, data))
                text = prepare_tokens(
                    stream, Path(place) / "text", generator.tokenizer, fingerprint="", characters=found.characters
                )
                return {"text": dataclasses.asdict(perplexity(generator.model, text, context, stride))}
        if not isinstance(tables.get("data"), dict):
            raise UserError(f"{folder}: its recipe names no text; give some with --text FILE")
        run = cls(tables, folder, device)
        if wanted is not None and wanted not in run.sets:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, run.sets)}")
        if not run.sets:
            raise UserError(f"{folder}: its recipe names no validation or test text; give some with --text FILE")
        run.tokenizers = {"tokenizer": generator.tokenizer}
        run.check_data()
        return run.score(generator.model, run.sets if wanted is None else [wanted], context, stride)

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        lines = [
            f"loss {figures['loss']:.4f}  perplexity {figures['perplexity']:.3f}  "
            f"bits per character {figures['bits_per_character']:.4f}  per byte {figures['bits_per_byte']:.4f}",
            f"{figures['tokens']:,} tokens, {figures['characters']:,} characters, {figures['bytes']:,} bytes in "
            f"{figures['documents']:,} documents; context {figures['context']}, stride {figures['stride']}",
        ]
        if figures["unknown"]:
            lines.append(f"{figures['unknown']:,} tokens stand for text that the vocabulary lacks")
        return lines
