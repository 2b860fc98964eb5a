"""Masked language modelling: text in, an encoder out that guesses what was hidden, from both sides.

    [data]   files, folders, tables of text                        `regard.data.documents`
    [text]   one tokenizer, to which <mask> is added                `regard.text.config`
    [mask]   how much is hidden, and how                            `regard.data.masked`
    loss     that of each hidden token, given all that is shown     Devlin et al. 2018
    figures  loss and share of right guesses on hidden tokens

The text needs no labels; a classifier that starts from such a run (`train.init_from`) needs far fewer of them. Batches
are packed rows of `train.pack` tokens, left out the model's `max_length`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import PairBatch
from regard.data.documents import TextData
from regard.data.masked import MaskConfig, MaskedBatch, MaskedPacks, prepare_texts
from regard.data.store import Store
from regard.errors import UserError, suggest
from regard.explore.masked import write_report
from regard.models import Encoder, ModelConfig
from regard.models.folder import load, load_recipe, load_tokenizers
from regard.models.recipe import with_preset
from regard.predict.mask_predictor import MaskPredictor
from regard.settings import from_dict, to_dict
from regard.tasks.text import TextRun
from regard.text.config import TextConfig
from regard.text.tokenizer import MASK_NAMES, Tokenizer
from regard.train.metric import LOSS, Metric
from regard.train.objective import Loss, balance, surprise, whole
from regard.train.parallel import HALF
from regard.train.run import Figures
from regard.train.trainer import Objective, read_metrics
from regard.train.vocabulary import chunked

JUDGING = 0  # seed of what is hidden when a model is judged: the same for every model
COUNTED = 1 << 24  # tokens that are counted at once


def hidden_states(model: Encoder, batch: MaskedBatch) -> Tensor:
    """What the encoder makes of the positions to be guessed, [R, M, dim]."""
    states = model.encode(batch.ids, batch.document > 0, document=batch.document)
    return states.gather(1, batch.positions[..., None].expand(-1, -1, states.shape[-1]))


def masked_tokens(
    model: Encoder, batch: MaskedBatch, label_smoothing: float = 0.0, loss: Loss = whole
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of hidden tokens)."""
    assert model.output_head is not None
    total = loss(hidden_states(model, batch), model.output_head, batch.labels, label_smoothing, 0.0)
    return total + balance(model, batch.tokens), batch.tokens


class MaskedRun(TextRun):
    NAME = "masked"
    predictor = MaskPredictor
    TABLES = ("data", "text", "mask", "model", "train")
    DEFAULTS: ClassVar = {
        "model": {"architecture": "encoder", "output_head": "tokens", "head_layer": True, "logit_bias": True},
        "train": {
            "schedule": "cosine", "warmup": 500, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    METRICS: ClassVar = {"loss": LOSS, "accuracy": Metric("accuracy", higher=True)}
    HEADLINE = ("loss", "loss")
    EXAMPLE = 'train = ["input.txt"]'
    EVALUATE = ("test",)

    train_text: Store
    valid_text: Store | None

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        complete = super().complete(tables)
        if not complete["train"].get("pack"):
            complete["train"]["pack"] = with_preset(complete["model"]).get("max_length", ModelConfig.max_length)
        return complete

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(TextData, {"train": (), **tables.get("data", {})}, "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.masking = from_dict(MaskConfig, tables.get("mask", {}), "mask.")
        if self.config.r_drop:
            raise UserError(f"train.r_drop = {self.config.r_drop}: is not for masked text; leave it out")
        if self.config.pack < 4:
            raise UserError(f"train.pack = {self.config.pack}: two tokens and the two ends make 4; give 4 or more")
        self._model_config(8)  # a mistake in [model] shows before the data is read

    def own_tables(self) -> dict[str, Any]:
        return {"data": to_dict(self.data), "text": to_dict(self.text), "mask": to_dict(self.masking)}

    # --- text

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        tokenizer = super().make_tokenizers()["tokenizer"]
        return {"tokenizer": tokenizer if tokenizer.mask is not None else tokenizer.with_special_tokens(MASK_NAMES[:1])}

    def _store(self, name: str) -> Store:
        """A set as a store in the run's folder."""
        begin, end = self.span(name)
        return prepare_texts(
            self.pieces(name), self.folder / "data" / name, self.tokenizer, self.config.pack,
            fingerprint=f"{self.prints[name]} {begin} {end}", characters=end - begin,
        )  # fmt: skip

    def prepare_data(self) -> None:
        self.keep_surveys()
        self.train_text = self._store("train")
        self.valid_text = self._store("valid") if "valid" in self.sets else None

    # --- model

    def settle_model(self) -> ModelConfig:
        if self.tokenizer.mask is None:  # one that train.init_from has brought
            raise UserError(
                f"train.init_from = {self.config.init_from!r}: its tokenizer has no {MASK_NAMES[0]}; take the run of a "
                "masked language model, or leave init_from out"
            )
        size = len(self.tokenizer)
        if self.model_fields.get("vocab_size", size) != size:
            raise UserError(
                f"model.vocab_size = {self.model_fields['vocab_size']}: the tokenizer has {size} pieces; leave it out"
            )
        return self._model_config(size)

    def _model_config(self, vocab_size: int) -> ModelConfig:
        config = from_dict(ModelConfig, {**with_preset(self.model_fields), "vocab_size": vocab_size}, "model.")
        if (config.architecture, config.input, config.output_head) != ("encoder", "tokens", "tokens"):
            raise UserError(
                f"model.architecture = {config.architecture!r}, model.input = {config.input!r}, "
                f"model.output_head = {config.output_head!r}: a "
                "masked language model needs architecture = 'encoder', input = 'tokens' and output_head = 'tokens'"
            )
        if config.position == "learned" and config.max_length < self.config.pack:
            raise UserError(
                f"train.pack = {self.config.pack}: is longer than model.max_length = {config.max_length} of the "
                "learned positions; lower pack or raise max_length"
            )
        return config

    # --- loss and figures

    def _packs(self, text: Store, seed: int, device: torch.device) -> MaskedPacks:
        config = self.config
        rows = config.batch_tokens // config.pack
        return MaskedPacks(text.sources, self.tokenizer, self.masking, rows, config.pack, seed, device)

    def stream(self) -> MaskedPacks:
        return self._packs(self.train_text, self.config.seed, self.device)

    def objective(self) -> Objective:
        config = self.config
        loss = partial(chunked, chunk=config.loss_chunk)
        return partial(masked_tokens, label_smoothing=config.label_smoothing, loss=loss)

    @property
    def judged(self) -> bool:
        return self.valid_text is not None

    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss and right guesses over the validation text, in the precision of training."""
        assert self.valid_text is not None
        half = HALF.get(self.config.precision) if next(model.parameters()).is_cuda else None
        found = self._judge(model, self.valid_text, half=half)
        return {"valid_loss": found["loss"], "accuracy": found["accuracy"]}

    @torch.inference_mode()
    def _judge(
        self, model: Any, text: Store, frequency: Tensor | None = None, half: torch.dtype | None = None
    ) -> Figures:
        """`frequency` [vocab_size], log-probabilities by counting, gives the unigram loss of the same tokens."""
        device = next(model.parameters()).device
        count, make = self._packs(text, JUDGING, device).open(0)
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right guesses, unigram loss
        tokens = 0
        for number in range(count):
            batch = make(number)
            assert isinstance(batch, MaskedBatch)
            with torch.autocast(device.type, half, enabled=half is not None):
                logits = model.output_head(hidden_states(model, batch))
            known = batch.labels != PairBatch.IGNORE
            sums[0] += surprise(logits, batch.labels)
            sums[1] += (logits.argmax(dim=-1) == batch.labels)[known].sum()
            if frequency is not None:
                sums[2] -= frequency.to(device)[batch.labels[known]].sum()
            tokens += int(batch.tokens)
        loss, accuracy, unigram = (sums / max(tokens, 1)).tolist()
        figures: Figures = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
        return figures | {"unigram_loss": None if frequency is None else unigram, "tokens": tokens}

    def _frequency(self) -> Tensor:
        """log p of each token by how often it occurs in the training text, every one counted once more."""
        counts = torch.ones(len(self.tokenizer), dtype=torch.float64)
        flat = self.train_text.sources.flat
        for at in range(0, len(flat), COUNTED):
            counts += flat[at : at + COUNTED].long().bincount(minlength=len(counts))
        counts[sorted(self.tokenizer.specials)] = 1
        return (counts / counts.sum()).log()

    def score(self, model: Any, names: Iterable[str] | None = None) -> dict[str, Figures]:
        """Of all sets, unless `names` says which."""
        frequency = self._frequency()
        return {
            name: self._judge(model, self._store(name), frequency) for name in (self.sets if names is None else names)
        }

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        filler = MaskPredictor(self.bundle(model))
        batch = self._packs(self.valid_text or self.train_text, JUDGING, torch.device("cpu")).open(0)[1](0)
        assert isinstance(batch, MaskedBatch)
        title, path = self.folder.resolve().name, self.folder / "report.html"
        write_report(path, title, filler, read_metrics(self.folder), scores, batch)

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """The figures of the recipe's sets."""
        tables, wanted = load_recipe(folder), options["test"]
        run = cls(tables, folder, device)
        if wanted is not None and wanted not in run.sets:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, run.sets)}")
        if not run.sets:
            raise UserError(
                f"{folder}: its recipe names no validation or test text, so there is nothing to judge it by"
            )
        model, run.tokenizers = load(folder, device), load_tokenizers(folder)
        run.check_data()
        run.train_text = run._store("train")
        return run.score(model, [name for name in run.sets if wanted in (None, name)])

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        return [
            f"loss {figures['loss']:.4f}  perplexity {figures['perplexity']:.3f}  right {figures['accuracy']:.2%}",
            f"{figures['tokens']:,} hidden tokens; their frequency alone gives a loss of {figures['unigram_loss']:.4f}",
        ]
