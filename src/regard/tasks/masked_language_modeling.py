"""Masked language modeling: text in, an encoder out that predicts masked tokens from both sides.

    [data]    files, folders, tables of text                               `regard.data.documents`
    [text]    one tokenizer, to which <mask> is added                      `regard.text.config`
    [mask]    how many tokens are masked, and how                          `regard.data.pack`
    loss      cross-entropy of each masked token, given the others         Devlin et al. 2018
    metrics   loss and accuracy on masked tokens

The text needs no labels; a classifier that starts from such a run (`train.init_from`) needs far fewer of them. Batches
are packed rows of `train.pack` tokens; its default is the model's `max_length`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import PairBatch
from regard.data.columns import Store
from regard.data.documents import Piece, TextData
from regard.data.encode import group_weights, store_documents
from regard.data.pack import MaskConfig, MaskedBatch, MaskedPacks
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Encoder
from regard.predict.mask_predictor import MaskPredictor
from regard.tasks.language_modeling import PlainTextTask
from regard.text.config import TextConfig
from regard.text.tokenizer import MASK_NAMES, Tokenizer
from regard.training.objective import cross_entropy, token_loss
from regard.training.results import AttentionInput, Section, Table
from regard.training.task import Evaluation, Metrics
from regard.training.trainer import LOSS, Metric, Objective

EVALUATION_SEED = 0  # of the tokens that are masked in evaluation: the same for every model
COUNTED = 1 << 24  # tokens that are counted at once
LISTED, LONGEST, CANDIDATES = 12, 40, 3  # examples in the report, their most tokens, and the predictions for each
DRAWN = 24  # tokens whose attention is drawn


def masked_states(model: Encoder, batch: MaskedBatch) -> Tensor:
    """The encoder's states of the masked positions, [R, M, dim]."""
    states = model.encode(batch.ids, batch.document > 0, document=batch.document)
    return states.gather(1, batch.positions[..., None].expand(-1, -1, states.shape[-1]))


def masked_tokens(
    model: Encoder, batch: MaskedBatch, label_smoothing: float = 0.0, loss_chunk: int = -1
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of masked tokens)."""
    assert model.output_head is not None
    states = masked_states(model, batch)
    return token_loss(states, model.output_head, batch.labels, label_smoothing, 0.0, loss_chunk), batch.tokens


class MaskedLanguageModeling(PlainTextTask):
    NAME = "masked-language-modeling"
    TABLES: ClassVar = {"data": TextData, "text": TextConfig, "mask": MaskConfig}
    DEFAULTS: ClassVar = {
        "model": {"architecture": "encoder", "output_head": "tokens", "head_layer": True, "logit_bias": True},
        "train": {
            "schedule": "cosine", "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    UNUSED = ("r_drop",)
    METRICS: ClassVar = {"loss": LOSS, "accuracy": Metric("accuracy", higher=True)}
    HEADLINE = ("loss", "loss", ".4f")
    COLUMNS: ClassVar = {
        "loss": "loss", "perplexity": "perplexity", "accuracy": "accuracy", "unigram_loss": "unigram loss",
        "tokens": "masked tokens",
    }  # fmt: skip
    LOSS_UNIT = "nats per masked token"
    EXAMPLE = 'train = ["input.txt"]'
    OPTIONS = ("test", "files", "column")
    predictor = MaskPredictor

    mask: MaskConfig

    # --- data, tokenizer and model

    def store(self, groups: Sequence[Iterable[Piece]], folder: Path, fingerprint: str, characters: int) -> Store:
        return store_documents(groups, folder, self.tokenizer, self.config.pack, fingerprint, characters)

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        tokenizer = super().make_tokenizers()["tokenizer"]
        return {"tokenizer": tokenizer if tokenizer.mask is not None else tokenizer.with_special_tokens(MASK_NAMES[:1])}

    def settle_model(self) -> ModelConfig:
        if self.tokenizer.mask is None:  # the tokenizer of train.init_from
            raise UserError(
                f"train.init_from = {self.config.init_from!r}: its tokenizer has no {MASK_NAMES[0]}; use the run of a "
                "masked language model, or remove init_from"
            )
        return super().settle_model()

    def check_model(self, config: ModelConfig) -> None:
        if self.config.pack < 4:
            raise UserError(f"train.pack = {self.config.pack}: must be 4 or more: two tokens, <s> and </s>")
        super().check_model(config)

    # --- training and evaluation

    def _packs(self, text: Store, seed: int, device: torch.device, weights: Tensor | None = None) -> MaskedPacks:
        config = self.config
        rows = config.batch_tokens // config.pack
        return MaskedPacks(text.columns["text"], self.tokenizer, self.mask, rows, config.pack, seed, device, weights)

    def stream(self) -> MaskedPacks:
        weights = group_weights(self.train_text, self.data.weights)
        return self._packs(self.train_text, self.config.seed, self.device, weights)

    def objective(self) -> Objective:
        return self.make_objective(masked_tokens)

    def evaluate(self, model: Any) -> dict[str, float]:
        """Loss and accuracy over the validation text, in the precision of training."""
        assert self.valid_text is not None
        with self.autocast():
            metrics = self._measure(model, self.valid_text)
        return {"valid_loss": metrics["loss"], "accuracy": metrics["accuracy"]}

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        unigram = None if self.file_options is not None else self._unigram  # of --files there is no training text
        return self._measure(predictor.bundle.model, examples, unigram), None

    @torch.inference_mode()
    def _measure(self, model: Any, text: Store, unigram: Tensor | None = None) -> Metrics:
        """With `unigram` log-probabilities [vocab_size], also the loss of a unigram model on the same tokens."""
        count, make = self._packs(text, EVALUATION_SEED, self.device).open(0)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct predictions, unigram loss
        tokens = 0
        for number in range(count):
            batch = make(number)
            assert isinstance(batch, MaskedBatch)
            logits = model.output_head(masked_states(model, batch))
            known = batch.labels != PairBatch.IGNORE
            sums[0] += cross_entropy(logits, batch.labels)
            sums[1] += (logits.argmax(dim=-1) == batch.labels)[known].sum()
            if unigram is not None:
                sums[2] -= unigram.to(self.device)[batch.labels[known]].sum()
            tokens += int(batch.tokens)
        loss, accuracy, unigram_loss = (sums / max(tokens, 1)).tolist()
        metrics: Metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
        return metrics | {"unigram_loss": None if unigram is None else unigram_loss, "tokens": tokens}

    @cached_property
    def _unigram(self) -> Tensor:
        """log p of each token by its count in the training text plus one."""
        counts = torch.ones(len(self.tokenizer), dtype=torch.float64)
        flat = self.train_text.columns["text"].flat
        for at in range(0, len(flat), COUNTED):
            counts += flat[at : at + COUNTED].long().bincount(minlength=len(counts))
        counts[sorted(self.tokenizer.specials)] = 1
        return (counts / counts.sum()).log()

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        unigram = metrics["unigram_loss"]
        baseline = "" if unigram is None else f"; a unigram model has a loss of {unigram:.4f}"
        return [
            "loss {loss:.4f}  perplexity {perplexity:.3f}  accuracy {accuracy:.2%}".format_map(metrics),
            f"{metrics['tokens']:,} masked tokens{baseline}",
        ]

    # --- report

    def _texts(self) -> Iterator[tuple[list[int], dict[int, int]]]:
        """(ids before masking, {position: id of a masked token}) of single texts that are short enough to show."""
        batch = self._packs(self.valid_text or self.train_text, EVALUATION_SEED, torch.device("cpu")).open(0)[1](0)
        assert isinstance(batch, MaskedBatch)
        for row in range(len(batch.ids)):
            labels = dict(zip(batch.positions[row].tolist(), batch.labels[row].tolist(), strict=True))
            labels = {at: label for at, label in labels.items() if label != PairBatch.IGNORE}
            for number in range(1, int(batch.document[row].max()) + 1):
                positions = (batch.document[row] == number).nonzero()[:, 0].tolist()
                inside = {at - positions[0]: label for at, label in labels.items() if at in positions}
                if inside and 6 <= len(positions) <= LONGEST:
                    yield [labels.get(at, int(batch.ids[row, at])) for at in positions], inside

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        rows, tokenizer = [], self.tokenizer
        for ids, labels in self._texts():
            position, label = min(labels.items())
            masked = [tokenizer.mask if at == position else id for at, id in enumerate(ids)]
            tokens = [*map(tokenizer.token, ids[:position]), "▢", *map(tokenizer.token, ids[position + 1 :])]
            shown = "".join(tokens[1:-1])
            candidates = predictor.candidates(masked, CANDIDATES)[0]
            predictions = ", ".join(f"{one.token} {one.probability:.2f}" for one in candidates)
            rows.append([shown.replace("▁", " "), tokenizer.token(label), predictions])
            if len(rows) == LISTED:
                break
        return [Section("Predictions", [Table(["text", "masked token", "most probable tokens"], rows)])] if rows else []

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        short = next((ids for ids, _ in self._texts() if len(ids) <= DRAWN), None)
        return [] if short is None else [AttentionInput(self.tokenizer.decode(short[1:-1]))]
