"""Language modeling: text in, a decoder out that predicts the next token.

    [data]    files, folders, tables of text                          `regard.data.documents`
    [text]    one tokenizer                                           `regard.text.config`
    loss      cross-entropy of each token, given those before         Radford et al. 2019
    metrics   perplexity and bits per byte over the whole text        `regard.metrics.perplexity`

Batches are rows of `train.pack` tokens from one long text (`regard.data.streams`); that is also the context length.
Its default is the model's `max_length`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.columns import Store
from regard.data.documents import TextData, pieces, survey
from regard.data.encode import store_tokens
from regard.data.streams import BlockBatch, Blocks
from regard.errors import UserError
from regard.metrics.perplexity import perplexity
from regard.models import Decoder, ModelConfig
from regard.predict.config import SearchConfig
from regard.predict.generator import Generator, check_vocabulary
from regard.tasks.plain_text import PlainTextTask, print_notes
from regard.text.config import TextConfig
from regard.training.objective import Loss, balance, token_loss, unchunked
from regard.training.parallel import HALF
from regard.training.results import AttentionInput, Chart, Section, Table
from regard.training.task import Evaluation, Metrics
from regard.training.trainer import Objective

SAMPLES, SAMPLE_TOKENS = 2, 150  # in the report
DRAWN = 24  # tokens whose attention is drawn
POINTS = 200  # of a curve over positions


def next_token(
    model: Decoder, batch: BlockBatch, label_smoothing: float = 0.0, r_drop: float = 0.0, loss: Loss = unchunked
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of tokens): each token of a row from those before it."""
    rows = BlockBatch(torch.cat((batch.ids, batch.ids))) if r_drop else batch  # two dropout masks: see `objective`
    total = loss(model.states(rows.read), model.output_head, rows.labels, label_smoothing, r_drop)
    return total + balance(model, batch.tokens), batch.tokens


class LanguageModeling(PlainTextTask):
    NAME = "language-modeling"
    TABLES: ClassVar = {"data": TextData, "text": TextConfig, "decode": SearchConfig}
    DEFAULTS: ClassVar = {
        "model": {"architecture": "decoder"},
        "train": {
            "schedule": "cosine", "warmup": 200, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
            "label_smoothing": 0.0,
        },
        "decode": {"sample": True},
    }  # fmt: skip
    MODEL: ClassVar = {"architecture": ("decoder",)}
    HEADLINE = ("loss", "loss", ".4f")
    COLUMNS: ClassVar = {
        "loss": "loss", "perplexity": "perplexity", "bits_per_character": "bits per character",
        "bits_per_byte": "bits per byte", "tokens": "tokens",
    }  # fmt: skip
    EXAMPLE = 'train = ["input.txt"]'
    OPTIONS = ("test", "files", "context", "stride")
    predictor = Generator

    decode: SearchConfig
    train_text: Store
    valid_text: Store | None

    # --- data and model

    def prepare_data(self) -> None:
        self.keep_surveys()
        self.train_text = self.examples("train")
        self.valid_text = self.examples("valid") if "valid" in self.sets else None

    def examples(self, name: str) -> Store:
        """The tokens of a set, stored in the run's folder."""
        begin, end = self.span(name)
        folder, print = self.folder / "data" / name, f"{self.fingerprints[name]} {begin} {end}"
        store = store_tokens(self.pieces(name), folder, self.tokenizer, text_fingerprint=print, characters=end - begin)
        if len(store) < 2:
            raise UserError(f"data.{name}: has {len(store)} token; give text of at least 2, or remove the set")
        return store

    def read_files(self, files: Sequence[str]) -> Store:
        data = TextData(train=tuple(files))
        surveyed = survey(data.train, data)
        print_notes(surveyed)
        self.temporary = TemporaryDirectory()  # exists as long as the task
        return store_tokens(
            iter(pieces(data.train, data)), Path(self.temporary.name) / "text", self.tokenizer,
            text_fingerprint="", characters=surveyed.characters,
        )  # fmt: skip

    def model_sizes(self) -> dict[str, int | None]:
        """The tokenizer's size, unless [model] has a larger vocabulary on purpose."""
        return {} if "vocab_size" in self.model_fields else {"vocab_size": len(self.tokenizer)}

    def settle_model(self) -> ModelConfig:
        config = super().settle_model()
        check_vocabulary(config, self.tokenizer, "model.")
        return config

    # --- training and evaluation

    def stream(self) -> Blocks:
        config, ids = self.config, self.train_text.tensor("ids")
        return Blocks(ids, config.batch_tokens // config.pack, config.pack, config.seed, self.device)

    def objective(self) -> Objective:
        config = self.config
        return partial(
            next_token, label_smoothing=config.label_smoothing, r_drop=config.r_drop, loss=token_loss(config.loss_chunk)
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss over the whole validation text, in the precision of training."""
        assert self.valid_text is not None
        half = HALF.get(self.config.precision) if next(model.parameters()).is_cuda else None
        # Compiled code is specialized to the shapes of training: compiling for these would cost more than it saves.
        with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
            return {"valid_loss": perplexity(model, self.valid_text, self.config.pack, half=half).loss}

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        context = options.get("context") or predictor.bundle.limits.context
        if options.get("context", 1) < 1:
            raise UserError(f"--context {options['context']}: must be 1 or more tokens")
        result = perplexity(predictor.bundle.model, examples, context, options.get("stride"))
        return dataclasses.asdict(result), None

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        lines = [
            f"loss {metrics['loss']:.4f}  perplexity {metrics['perplexity']:.3f}  "
            f"bits per character {metrics['bits_per_character']:.4f}  per byte {metrics['bits_per_byte']:.4f}",
            f"{metrics['tokens']:,} tokens, {metrics['characters']:,} characters, {metrics['bytes']:,} bytes in "
            f"{metrics['documents']:,} documents; context {metrics['context']}, stride {metrics['stride']}",
        ]
        if metrics["unknown"]:
            lines.append(f"{metrics['unknown']:,} tokens are unknown: their text is not in the vocabulary")
        return lines

    # --- report

    def _prompt(self) -> str:
        text = self.valid_text or self.train_text
        return self.tokenizer.decode(text.tensor("ids")[: max(1, self.config.pack // 8)].tolist())

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        curves = {name: _points(one.metrics["loss_per_position"]) for name, one in evaluations.items()}
        chart = Chart(
            "Loss by position", curves, "tokens of context", "nats per token",
            "The mean loss of tokens with that many tokens before them.",
        )  # fmt: skip
        prompt, decode = self._prompt(), self.decode
        limit = min(SAMPLE_TOKENS, decode.max_length or SAMPLE_TOKENS)
        samples = predictor.generate(prompt, n_best=SAMPLES, max_length=limit, min_length=0, overflow="slide")
        rows = [[number, prompt + sample.text] for number, sample in enumerate(samples, 1)]
        settings = f"temperature {decode.temperature:g}, top-k {decode.top_k or 'off'}, top-p {decode.top_p:g}"
        note = f"The first {len(prompt):,} characters are the prompt ({settings})."
        table = Table(["sample", "text"], rows, preformatted=True)
        return [*([Section("Loss by position", [chart])] if curves else []), Section("Samples", [note, table])]

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        return [AttentionInput(self.tokenizer.decode(self.tokenizer.encode(self._prompt())[:DRAWN]))]


def _points(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    """(tokens of context, loss); neighbouring positions are averaged where there are many."""
    known = [(position + 1, loss) for position, loss in enumerate(losses) if loss is not None]
    width = max(1, -(-len(known) // POINTS))
    groups = (known[at : at + width] for at in range(0, len(known), width))
    return [(group[len(group) // 2][0], sum(loss for _, loss in group) / len(group)) for group in groups]
