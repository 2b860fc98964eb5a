"""Language modeling: text in, a decoder out that predicts the next token.

    [data]    files, folders, tables of text                          `regard.data.documents`
    [text]    one tokenizer                                           `regard.text.config`
    loss      cross-entropy of each token, given those before         Radford et al. 2019
    metrics   perplexity and bits per byte over the whole text        `regard.metrics.perplexity`

Batches are rows of `train.pack` tokens from one long text (`regard.data.streams`); that is also the context length.
Its default is the model's `max_length`.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.columns import Store
from regard.data.documents import Piece, TextData
from regard.data.encode import store_tokens
from regard.data.sets import Sources
from regard.data.streams import BlockBatch, Blocks
from regard.errors import UserError
from regard.files import make_folder, write_atomically
from regard.metrics.perplexity import perplexity
from regard.models.config import ModelConfig
from regard.models.recipe import with_preset
from regard.models.transformer import Decoder
from regard.predict.config import SearchConfig
from regard.predict.generator import Generator, check_vocabulary
from regard.settings import check_fields
from regard.text.config import TextConfig
from regard.training.objective import repeat_batch, token_loss
from regard.training.results import AttentionInput, Chart, Section, Table
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import Objective

COUNTS = "data/characters.json"
SAMPLES, SAMPLE_TOKENS = 2, 150  # in the report
DRAWN = 24  # tokens whose attention is drawn
CHARACTERS = 80  # of a text that is taken as an input
WORD_ENDS = re.compile(r"^\S+\s+|\s+\S+$")  # parts of words at both ends of it
POINTS = 200  # of a curve over positions


def next_token(
    model: Decoder, batch: BlockBatch, label_smoothing: float = 0.0, r_drop: float = 0.0, loss_chunk: int = -1
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of tokens): each token of a row from those before it."""
    rows = repeat_batch(batch) if r_drop else batch
    total = token_loss(model.states(rows.read), model.output_head, rows.labels, label_smoothing, r_drop, loss_chunk)
    return total, batch.tokens


class PlainTextTask(Task):
    """A task that learns from plain text: [data] is a `TextData`, and rows have `train.pack` tokens.

        files -> check (one pass: are they readable? how many characters?) -> pieces of each set

    The counts are kept in RUN/data/characters.json, so that a resumed run need not read all files again.
    """

    data: TextData
    fingerprints: dict[str, str]  # of the sets
    characters: dict[str, int]  # by fingerprint

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """`train.pack` is the context length, by default the longest that the model can have."""
        complete = super().complete(tables)
        if not complete["train"].get("pack"):
            complete["train"]["pack"] = with_preset(complete["model"]).get("max_length", ModelConfig.max_length)
        return complete

    @property
    def files(self) -> dict[str, Sources]:
        """The files of each set; a validation fraction is part of the training files."""
        held_out = {"valid": self.data.train} if self.data.valid_fraction else {}
        return {"train": self.data.train, **held_out, **self.data.sets}

    def check_data(self) -> None:
        self.fingerprints = {name: self.data.fingerprint(files) for name, files in self.files.items()}
        try:
            counts = json.loads((self.folder / COUNTS).read_bytes()).items()
            self.characters = {key: int(count) for key, count in counts}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            self.characters = {}
        for name, key in self.fingerprints.items():
            if key not in self.characters:
                report = self.data.read(self.files[name]).check()
                report.print()
                self.characters[key] = report.totals["characters"]

    def prepare_data(self) -> None:
        make_folder(self.folder / "data")
        write_atomically(self.folder / COUNTS, json.dumps(self.characters, indent=1).encode())
        self.train_text, self.valid_text  # noqa: B018 - tokenise them now

    def prepare_evaluation(self) -> None:
        self.check_data()

    @cached_property
    def train_text(self) -> Store:
        return self.examples("train")

    @cached_property
    def valid_text(self) -> Store | None:
        return self.examples("valid") if "valid" in self.sets else None

    def examples(self, name: str) -> Store:
        begin, end = self.span(name)
        fingerprint = f"{self.fingerprints[name]} {begin} {end}"
        return self.store(self.groups(name), self.folder / "data" / name, fingerprint, end - begin)

    def read_files(self, files: Sequence[str]) -> Store:
        column = (self.file_options or {}).get("column", self.data.column)
        data = replace(self.data, train=tuple(files), valid=(), test={}, valid_fraction=0.0, column=column)
        try:
            report = data.read(files).check()
        except UserError as error:
            raise UserError(str(error).replace("Set column in [data]", "Name it with --column")) from None
        report.print()
        return self.store([data.read(files)], self.folder / "files", "", report.totals["characters"])

    def inputs(self, name: str, count: int) -> list[str]:
        """Texts of up to CHARACTERS from the beginning of the set, in whole words."""
        begin = " "  # so that the first word is not taken for a part of one
        for piece in chain.from_iterable(self.groups(name)):
            begin += piece.text
            if len(begin) >= count * CHARACTERS:
                break
        cuts = (begin[at : at + CHARACTERS] for at in range(0, len(begin), CHARACTERS))
        texts = (WORD_ENDS.sub("", cut).strip() or cut.strip() for cut in cuts)
        return [text for text in islice(texts, count) if text]

    def span(self, name: str) -> tuple[int, int]:
        """Which characters of its files a set has."""
        return self.data.span(name, self.characters[self.fingerprints[name]])

    @abstractmethod
    def store(self, groups: Sequence[Iterable[Piece]], folder: Path, fingerprint: str, characters: int) -> Store:
        """Tokenise a set and store it in `folder`."""

    def groups(self, name: str) -> list[Iterable[Piece]]:
        """The text of a set, by groups of files."""
        return self.data.groups(name, self.files[name], self.characters[self.fingerprints[name]])

    def training_texts(self) -> Iterable[str]:
        return (piece.text for group in self.groups("train") for piece in group)

    def check_model(self, config: ModelConfig) -> None:
        self.check_positions(config, self.config.pack, "train.pack")


@dataclass(frozen=True, kw_only=True)
class LanguageData(TextData):
    """Where the text is, and which of it is used."""

    repeat: float = 0.0  # fraction of the rows of a batch that repeat one passage: copying from the context is learned

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("repeat",))


class LanguageModeling(PlainTextTask):
    NAME = "language-modeling"
    TABLES: ClassVar = {"data": LanguageData, "text": TextConfig, "decode": SearchConfig}
    DEFAULTS: ClassVar = {
        "model": {"architecture": "decoder"},
        "train": {
            "schedule": "cosine", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
            "label_smoothing": 0.0,
        },
        "decode": {"sample": True},
    }  # fmt: skip
    SPLITS = True
    HEADLINE = ("loss", "loss", ".4f")
    COLUMNS: ClassVar = {
        "loss": "loss", "perplexity": "perplexity", "bits_per_character": "bits per character",
        "bits_per_byte": "bits per byte", "tokens": "tokens",
    }  # fmt: skip
    EXAMPLE = 'train = ["input.txt"]'
    OPTIONS = ("test", "files", "column", "context", "stride")
    predictor = Generator

    data: LanguageData
    decode: SearchConfig

    # --- data and model

    def store(self, groups: Sequence[Iterable[Piece]], folder: Path, fingerprint: str, characters: int) -> Store:
        store = store_tokens(groups, folder, self.tokenizer, fingerprint, characters)
        if len(store) < 2:
            raise UserError(f"data.{folder.name}: has {len(store)} token; give text of at least 2, or remove the set")
        return store

    def model_sizes(self) -> dict[str, int | None]:
        """The tokenizer's size, unless [model] has a larger vocabulary on purpose."""
        return {} if "vocab_size" in self.model_fields else {"vocab_size": len(self.tokenizer)}

    def settle_model(self) -> ModelConfig:
        config = super().settle_model()
        check_vocabulary(config, self.tokenizer, "model.")
        return config

    # --- training and evaluation

    def stream(self) -> Blocks:
        config, ids = self.config, self.train_text.columns["ids"]
        groups = list(zip(self.train_text.index["groups"], self.data.weights, strict=True))
        rows, repeat = config.batch_tokens // config.pack, self.data.repeat
        return Blocks(ids, rows, config.pack, config.seed, self.device, groups, repeat)

    def objective(self) -> Objective:
        return self.make_objective(next_token)

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss over the whole validation text, in the precision of training."""
        assert self.valid_text is not None
        # Compiled code is specialized to the shapes of training: compiling for these would cost more than it saves.
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        with self.autocast(), eager:
            return {"valid_loss": perplexity(model, self.valid_text, self.config.pack)["loss"]}

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        context = options.get("context") or predictor.bundle.limits.context
        if options.get("context", 1) < 1:
            raise UserError(f"--context {options['context']}: must be 1 or more tokens")
        return perplexity(predictor.bundle.model, examples, context, options.get("stride")), None

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
        return self.tokenizer.decode(text.columns["ids"][: max(1, self.config.pack // 8)].tolist())

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
