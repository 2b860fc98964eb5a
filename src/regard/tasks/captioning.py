"""Captioning: pictures in, sentences out; the decoder looks at the patches by cross attention.

    [data]   pictures or features with captions, or scenes that are composed      `regard.data.captions`, `.scenes`
    [text]   one tokenizer, for the captions
    loss     that of each token, given the picture and the tokens before          `regard.train.objective`
    figures  exact matches, BLEU, chrF; of scenes, how much of each noun's
             attention lies on its item                                           `regard.explore.captions`

It is translation with another source (Vinyals et al. 2015; with attention: Xu et al. 2015): nothing but the first
layer of the encoder and the reading of the data differs. `train.batch_tokens` counts patches, or regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import PairBatch, Stream
from regard.data.captions import CaptionData, Captioned, read_captions
from regard.data.captionsets import (
    CaptionSet,
    SceneStream,
    Targets,
    feature_set,
    file_stream,
    picture_set,
    scene_makers,
    scene_sets,
)
from regard.data.scenes import SceneMaker
from regard.data.sets import Files, find_files
from regard.errors import UserError, suggest
from regard.explore.captions import Judged, noun_attention, write_examples, write_report
from regard.metrics.bleu import score
from regard.models import EncoderDecoder, ModelConfig
from regard.models.recipe import with_preset
from regard.predict import bundle as bundles
from regard.predict.captioner import Captioner, as_input
from regard.predict.config import SearchConfig, read_config
from regard.settings import from_dict, to_dict
from regard.tasks.word_dropout import WordDropout
from regard.text.config import TextConfig
from regard.text.tokenizer import Tokenizer
from regard.train.metric import LOSS, Metric
from regard.train.objective import translation
from regard.train.run import Figures, TaskRun
from regard.train.trainer import Objective, read_metrics

TOGETHER = 500  # pictures that are judged at once
REGIONS = 36  # of a picture, where a batch of features is sized by tokens


def captioning(
    model: EncoderDecoder,
    batch: PairBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    word_dropout: WordDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of tokens); the pixels of a batch are bytes."""
    target = word_dropout(batch.target) if word_dropout is not None and model.training else batch.target
    ready = dataclasses.replace(batch, source=as_input(batch.source), target=target)
    return translation(model, ready, label_smoothing=label_smoothing, r_drop=r_drop)


class CaptioningRun(TaskRun):
    NAME = "captioning"
    predictor = Captioner
    DEFAULTS: ClassVar = {
        "text": {"kind": "word"},
        "model": {"architecture": "encoder-decoder", "input": "patches", "norm_order": "pre", "activation": "gelu"},
        "train": {"schedule": "cosine", "warmup": 500, "eps": 1e-8, "weight_decay": 0.01, "label_smoothing": 0.0},
    }
    METRICS: ClassVar = {"loss": LOSS, "exact": Metric("exact", higher=True)}
    HEADLINE = ("exact", "exact")
    EXAMPLE = 'train = ["captions.jsonl"]'
    EVALUATE = ("test", "files", "beam")

    sets: dict[str, CaptionSet]  # "train" (not of scenes), and those that are judged
    rows: dict[str, list[Captioned]]
    makers: tuple[SceneMaker, SceneMaker]

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Pictures are rows of as many patches; features may have any number of regions."""
        complete = super().complete(tables)
        with suppress(UserError):  # a mistake in [model] is told by `read_tables`
            config = _model_config(complete["model"], 8)
            if config.input == "patches":
                complete["train"].setdefault("pack", config.source_length)
        return complete

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        self.data = from_dict(CaptionData, tables.get("data", {}), "data.")
        self.text = from_dict(TextConfig, tables.get("text", {}), "text.")
        self.search = read_config(tables.get("decode", {}))
        config = _model_config(self.model_fields, 8)
        if self.config.loss_chunk:
            raise UserError(f"train.loss_chunk = {self.config.loss_chunk}: is for language models; leave it out")
        if self.data.scenes is not None and (config.input, config.channels) != ("patches", 1):
            raise UserError(
                f"model.input = {config.input!r}, model.channels = {config.channels}: scenes are grey pictures; set "
                "input = 'patches' and channels = 1"
            )
        wanted = config.source_length if config.input == "patches" else 0
        if self.config.pack != wanted:
            raise UserError(f"train.pack = {self.config.pack}: follows from the pictures, {wanted}; leave it out")

    def own_tables(self) -> dict[str, Any]:
        return {"data": to_dict(self.data), "text": to_dict(self.text), "decode": to_dict(self.search)}

    # --- data

    @property
    def source(self) -> str:
        return _model_config(self.model_fields, 8).input

    @property
    def files(self) -> dict[str, Files]:
        named = {"train": self.data.train, "valid": self.data.valid, **self.data.test}
        return {name: files for name, files in named.items() if files}

    def find_data(self) -> None:
        scenes = self.data.scenes
        for files in self.files.values() if scenes is None else (scenes.items, scenes.test_items):
            find_files(files, self.data.folder)

    def check_data(self) -> None:
        """All tables, and all features; pictures are decoded, and refused, in `prepare_data`."""
        scenes = self.data.scenes
        if scenes is not None:
            self.makers = scene_makers(scenes, self.data.folder, _model_config(self.model_fields, 8).image_size)
            return
        self.width = None if "feature_dim" not in self.model_fields else int(self.model_fields["feature_dim"])
        self.rows = {}
        for name, files in self.files.items():
            self.rows[name], self.width = read_captions(files, self.data, self.source, self.width)

    def prepare_data(self) -> None:
        scenes, config = self.data.scenes, self.model_config
        if scenes is not None:
            self.sets = scene_sets(scenes, *(maker.to(self.device) for maker in self.makers))
            captions = self.makers[0].all_captions(scenes.language)
        else:
            self.sets = {name: self._file_set(name, rows) for name, rows in self.rows.items()}
            captions = self.sets["train"].captions
        self.targets = Targets.of(self.tokenizer, captions, self.data.max_length)
        if config.position == "learned" and config.max_length < self.targets.target.shape[1]:
            raise UserError(
                f"model.max_length = {config.max_length}: the learned positions end before the longest caption, of "
                f"{self.targets.target.shape[1]} tokens; raise it"
            )

    def _file_set(self, name: str, rows: list[Captioned]) -> CaptionSet:
        config = self.model_config
        if config.input == "features":
            return feature_set(rows, config.feature_dim)
        return picture_set(rows, self.folder / "data" / name, config.channels, config.image_size, self.data)

    # --- tokenizer and model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers["tokenizer"]

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        scenes = self.data.scenes
        lines = self.makers[0].all_captions(scenes.language) if scenes else [row.caption for row in self.rows["train"]]
        return {"tokenizer": self.learn_tokenizer(filter(None, lines), self.text, self.data.folder)}

    def settle_model(self) -> ModelConfig:
        fields = dict(self.model_fields)
        if self.source == "features":
            fields["feature_dim"] = self.width
        elif self.data.scenes is not None:
            fields = {"pixel_mean": [0.1], "pixel_std": [0.25], **fields}  # most of a canvas is black
        else:
            fields = {"pixel_mean": [0.5], "pixel_std": [0.5], **fields}
        return _model_config(fields, len(self.tokenizer))

    # --- loss and figures

    def stream(self) -> Stream:
        config, scenes = self.config, self.data.scenes
        rows = max(1, config.batch_tokens // (config.pack or REGIONS))
        if scenes is None:
            return file_stream(self.sets["train"], self.targets, rows, config.seed)
        targets = self.targets.to(self.device)
        stream = SceneStream(self.makers[0], targets, rows, scenes.train, config.seed, scenes.common)
        if scenes.common and scenes.common * stream.batches >= config.steps:
            raise UserError(
                f"data.scenes.common = {scenes.common}: with {stream.batches:,} batches an epoch, {config.steps:,} "
                "steps never come to the other scenes; give fewer, or raise train.steps"
            )
        return stream

    def objective(self) -> Objective:
        return partial(
            captioning,
            label_smoothing=self.config.label_smoothing,
            r_drop=self.config.r_drop,
            word_dropout=WordDropout.of(self.data.word_dropout, self.tokenizer),
        )

    @property
    def judged(self) -> bool:
        return "valid" in self.sets

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss, and the share of captions that greedy search finds to the letter if that chooses."""
        valid, loss, tokens = self.sets["valid"], 0.0, 0
        targets = Targets.of(self.tokenizer, valid.captions, self.data.max_length)
        for rows in torch.arange(len(valid)).split(TOGETHER):
            part, count = captioning(model, targets.batch(rows, *valid.sources(rows)).to(self.device))
            loss, tokens = loss + part.item(), tokens + int(count)
        figures = {"valid_loss": loss / tokens}
        if self.config.metric == "exact":
            figures["exact"] = self._judge(Captioner(self.bundle(model), SearchConfig()), valid).figures["exact"]
        return figures

    def _judge(self, captioner: Captioner, data: CaptionSet) -> Judged:
        found: list[str] = []
        for rows in torch.arange(len(data)).split(TOGETHER):
            found += [one.text for one in captioner.decode(*data.sources(rows), batch=TOGETHER)]
        figures = dataclasses.asdict(score(found, data.captions))
        return Judged(data, found, figures | noun_attention(captioner, data))

    def score(self, model: Any) -> dict[str, Figures]:
        captioner = Captioner(self.bundle(model))
        self.results = {name: self._judge(captioner, data) for name, data in self.sets.items() if name != "train"}
        return {name: result.figures for name, result in self.results.items()}

    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        captioner, title = Captioner(self.bundle(model)), self.folder.resolve().name
        path = self.folder / "report.html"
        write_report(path, title, captioner, read_metrics(self.folder), self.results)
        if self.data.scenes is not None:  # they exist nowhere else: a few to try `regard caption` with
            write_examples(self.folder / "data" / "examples", [*self.sets.values()][-1])

    @classmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """The figures of the recipe's sets, or of the captions given with --files."""
        changes = {} if options["beam"] is None else {"beam": options["beam"]}
        captioner = Captioner(bundles.load(folder, device))
        captioner.config = captioner.configured(**changes)
        run, config, files = cls(captioner.bundle.recipe, folder, device), captioner.model.config, options["files"]
        run.tokenizers, run.model_config = {"tokenizer": captioner.tokenizer}, config
        if files:
            rows, _ = read_captions(files, dataclasses.replace(run.data, folder="."), config.input, config.feature_dim)
            with TemporaryDirectory() as room:
                run.folder = Path(room)
                return {"files": run._judge(captioner, run._file_set("files", rows)).figures}
        run.check_data()
        run.prepare_data()
        names, wanted = [name for name in run.sets if name != "train"], options["test"]
        if wanted is not None and wanted not in names:
            raise UserError(f"--test {wanted}: the recipe has no such set; {suggest(wanted, names)}")
        if not names:
            raise UserError(f"{folder}: its recipe names no test set; give a table of captions with --files")
        return {name: run._judge(captioner, run.sets[name]).figures for name in names if wanted in (None, name)}

    @staticmethod
    def tell(figures: Figures) -> list[str]:
        lines = [f"exact {figures['exact']:.2%}  BLEU {figures['bleu']:.2f}  chrF {figures['chrf']:.2f}"]
        if "inside" in figures:
            lines.append(
                f"attention of nouns on their items: {figures['inside']:.1%} (best head {figures['inside_best']:.1%}), "
                f"by chance {figures['inside_chance']:.1%}"
            )
        return [*lines, f"{figures['lines']:,} pictures"]


def _model_config(given: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    config = from_dict(
        ModelConfig, {**with_preset(given), "vocab_size": vocab_size, "target_vocab_size": None}, "model."
    )
    if config.architecture != "encoder-decoder" or config.input == "tokens" or config.output_head != "tokens":
        raise UserError(
            f"model.architecture = {config.architecture!r}, model.input = {config.input!r}, "
            f"model.output_head = {config.output_head!r}: captions "
            "need architecture = 'encoder-decoder', input = 'patches' or 'features', and output_head = 'tokens'"
        )
    return config
