"""Image captioning: images in, sentences out; the decoder attends to the patches by cross-attention.

    [data]    images or features with captions, or composed scenes            `regard.data.captions`, `.scenes`
    [text]    one tokenizer, for the captions
    loss      cross-entropy of each token, given the image and the tokens before   `regard.training.objective`
    metrics   exact match, BLEU, chrF; for scenes, how much of each noun's attention lies on its item

It is translation with another input (Vinyals et al. 2015; with attention: Xu et al. 2015): only the first layer of the
encoder and the reading of the data differ. `train.batch_tokens` counts patches, or regions.

In a scene the position of every item is known, so attention can be measured: when the model predicts a noun, how much
of its cross-attention lies inside the boxes of the items that it names?

    inside = Σ_p w_p c_p        w_p: weight of patch p, mean of the heads of the last layer
                                c_p: fraction of the patch that the boxes cover
    chance = Σ_p c_p / P        the same for uniform attention
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data import streams
from regard.data.batch import PairBatch, pad_rows
from regard.data.captions import (
    CaptionData,
    Captioned,
    CaptionSet,
    SceneStream,
    Targets,
    feature_set,
    image_set,
    read_captions,
    scene_generators,
    scene_sets,
)
from regard.data.scenes import SceneGenerator, coverage
from regard.errors import UserError
from regard.files import make_folder, write_atomically
from regard.metrics.bleu import score, sentence_chrf
from regard.models.config import ModelConfig
from regard.models.transformer import EncoderDecoder
from regard.predict.captioner import Captioner, as_input
from regard.predict.config import SearchConfig
from regard.text.config import TextConfig
from regard.training.objective import WordDropout, make_word_dropout, translation
from regard.training.results import AttentionInput, Examples, Images, Section
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric, Objective

BATCH = 500  # images that are evaluated at once
REGIONS = 36  # of an image, where a batch of features is sized by tokens
MEASURED, TOGETHER = 256, 64  # scenes whose attention is measured, and at once
SAVED = 8  # scenes that are saved as files
LISTED, DRAWN = 12, 3  # in the report: captions, and images with attention maps


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


class ImageCaptioning(Task):
    NAME = "image-captioning"
    TABLES: ClassVar = {"data": CaptionData, "text": TextConfig, "decode": SearchConfig}
    DEFAULTS: ClassVar = {
        "text": {"kind": "word"},
        "model": {"architecture": "encoder-decoder", "input": "patches", "norm_order": "pre", "activation": "gelu"},
        "train": {"schedule": "cosine", "eps": 1e-8, "weight_decay": 0.01, "label_smoothing": 0.0},
    }
    UNUSED = ("loss_chunk",)
    METRICS: ClassVar = {"loss": LOSS, "exact": Metric("exact", higher=True)}
    HEADLINE = ("exact", "exact match", ".2%")
    COLUMNS: ClassVar = {
        "exact": "exact match", "bleu": "BLEU", "chrf": "chrF", "inside": "attention on the item",
        "inside_best": "of the best head", "inside_chance": "by chance", "lines": "images",
    }  # fmt: skip
    EXAMPLE = 'train = ["captions.jsonl"]'
    OPTIONS = ("test", "files", "out", "beam")
    predictor = Captioner

    data: CaptionData
    decode: SearchConfig
    captioned: dict[str, CaptionSet]  # "train" (not of scenes) and `sets`
    rows: dict[str, list[Captioned]]
    generators: tuple[SceneGenerator, SceneGenerator]
    feature_dim: int | None = None

    # --- model

    @property
    def draft(self) -> ModelConfig:
        """[model] before the tokenizer is known."""
        return self.make_model_config(self.PLACEHOLDERS)

    def model_sizes(self) -> dict[str, int | None]:
        sizes = {"vocab_size": len(self.tokenizer), "target_vocab_size": None}
        return {**sizes, "feature_dim": self.feature_dim} if self.draft.input == "features" else sizes

    def model_defaults(self) -> dict[str, Any]:
        if self.model_fields.get("input") == "features":
            return {}
        mean, std = (0.5, 0.5) if self.data.scenes is None else (0.1, 0.25)  # most of a scene is black
        return {"pixel_mean": [mean], "pixel_std": [std]}

    def check_model(self, config: ModelConfig) -> None:
        if self.data.scenes is not None and (config.input, config.channels) != ("patches", 1):
            raise UserError(
                f"model.input = {config.input!r}, model.channels = {config.channels}: scenes are grayscale images; set "
                "input = 'patches' and channels = 1"
            )

    # --- data

    @property
    def sets(self) -> Sequence[str]:
        return [name for name in self.captioned if name != "train"]

    def find_files(self) -> None:
        scenes = self.data.scenes
        for files in self.files.values() if scenes is None else (scenes.items, scenes.test_items):
            self.data.find(files)

    def check_data(self) -> None:
        """All tables and features; images are decoded, and refused, in `prepare_data`."""
        config, scenes = self.draft, self.data.scenes
        if scenes is not None:
            self.generators = scene_generators(scenes, self.data.folder, config.image_size)
            return
        self.feature_dim, self.rows = self.model_fields.get("feature_dim"), {}
        for name, files in self.files.items():
            self.rows[name], self.feature_dim = read_captions(files, self.data, config.input, self.feature_dim)

    def prepare_data(self) -> None:
        scenes = self.data.scenes
        if scenes is not None:
            self.captioned = scene_sets(*(one.to(self.device) for one in self.generators))
            captions = self.generators[0].all_captions()
            self._save_scenes(self.folder / "data" / "examples")
        else:
            self.captioned = {name: self._file_set(name, rows) for name, rows in self.rows.items()}
            captions = self.captioned["train"].captions
        self.targets = Targets.of(self.tokenizer, captions, self.data.max_length)
        self.check_positions(self.model_config, self.targets.target.shape[1], "tokens of the longest caption")

    def prepare_evaluation(self) -> None:
        self.check_data()
        self.prepare_data()

    def _file_set(self, name: str, rows: list[Captioned]) -> CaptionSet:
        config = self.model_config
        if config.input == "features":
            return feature_set(rows, config.feature_dim)
        return image_set(rows, self.folder / "data" / name, config.channels, config.image_size, self.data)

    def _save_scenes(self, folder: Path) -> None:
        """A few scenes as PNG files, to try `regard caption` with, and captions.jsonl, which a recipe can read."""
        with suppress(ImportError):
            from PIL import Image

            if (folder / "captions.jsonl").exists():
                return
            make_folder(folder)
            data, lines = [*self.captioned.values()][-1], []
            rows = torch.arange(min(SAVED, len(data)))
            for number, image in enumerate(data.sources(rows)[0].cpu()):
                pixels = (as_input(image) * 255).round().to(torch.uint8)[0].numpy()
                Image.fromarray(pixels).save(folder / f"{number}.png")
                lines.append(json.dumps({"image": f"{number}.png", "caption": data.captions[number]}))
            write_atomically(folder / "captions.jsonl", ("\n".join(lines) + "\n").encode())

    def examples(self, name: str) -> CaptionSet:
        return self.captioned[name]

    def inputs(self, name: str, count: int) -> list[Tensor]:
        captioned = self.captioned[name]
        source, is_real = captioned.sources(torch.arange(min(count, len(captioned))))
        return [one.cpu() if is_real is None else one[is_real[row]].cpu() for row, one in enumerate(source)]

    def references(self, name: str, count: int) -> list[str]:
        return self.captioned[name].captions[:count]

    def read_files(self, files: Sequence[str]) -> CaptionSet:
        config = self.model_config
        rows, _ = read_captions(tuple(files), self.data, config.input, config.feature_dim)
        return self._file_set("files", rows)

    def training_texts(self) -> Iterable[str]:
        if self.data.scenes is None:
            return (row.caption for row in self.rows["train"])
        return filter(None, self.generators[0].all_captions())

    def stream(self) -> streams.Stream:
        config, scenes = self.config, self.data.scenes
        rows = max(1, config.batch_tokens // (config.pack or REGIONS))
        if scenes is None:
            train, targets = self.captioned["train"], self.targets
            return streams.Examples(
                len(train), rows, config.seed, lambda chosen: targets.batch(chosen, *train.sources(chosen))
            )
        targets = self.targets.to(self.device)
        stream = SceneStream(self.generators[0], targets, rows, config.seed)
        if scenes.common and scenes.common * stream.batches >= config.steps:
            raise UserError(
                f"data.scenes.common = {scenes.common}: with {stream.batches:,} batches per epoch, {config.steps:,} "
                "steps never reach the other scenes; lower it, or raise train.steps"
            )
        return stream

    # --- training and evaluation

    def objective(self) -> Objective:
        word_dropout = make_word_dropout(self.data.word_dropout, self.tokenizer)
        return self.make_objective(captioning, word_dropout=word_dropout)

    def evaluate(self, model: Any) -> dict[str, float]:
        """The loss; the exact matches of greedy search if `train.metric` is "exact"."""
        valid = self.captioned["valid"]
        targets = Targets.of(self.tokenizer, valid.captions, self.data.max_length)
        parts = (targets.batch(rows, *valid.sources(rows)) for rows in torch.arange(len(valid)).split(BATCH))
        loss, tokens = self.sum_loss(captioning, model, parts)
        metrics = {"valid_loss": loss / tokens}
        if self.config.metric == "exact":
            metrics["exact"] = self.score(Captioner(self.bundle(model), SearchConfig()), valid)[0]["exact"]
        return metrics

    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        captions: list[str] = []
        for rows in torch.arange(len(examples)).split(BATCH):
            predictions = predictor.decode(*examples.sources(rows), batch=BATCH, **options)
            captions += [prediction.text for prediction in predictions]
        return score(captions, examples.captions) | noun_attention(predictor, examples), captions

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        pairs = zip(evaluation.examples.captions, evaluation.predictions, strict=True)
        return [{"reference": one, "hypothesis": text, "chrf": sentence_chrf(text, one)} for one, text in pairs]

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        lines = [f"exact match {metrics['exact']:.2%}  BLEU {metrics['bleu']:.2f}  chrF {metrics['chrf']:.2f}"]
        if "inside" in metrics:
            lines.append(
                f"attention of nouns on their items: {metrics['inside']:.1%} (best head {metrics['inside_best']:.1%}), "
                f"by chance {metrics['inside_chance']:.1%}"
            )
        return [*lines, f"{metrics['lines']:,} images"]

    # --- report

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        """Captions of the last set, errors first."""
        if not evaluations:
            return []
        name, last = [*evaluations.items()][-1]
        rows = list(zip(range(len(last.predictions)), last.examples.captions, last.predictions, strict=True))
        wrong = [row for row in rows if row[1] != row[2]]
        listed = (wrong + [row for row in rows if row[1] == row[2]])[:LISTED]
        parts: list[Any] = [f"{len(wrong):,} of {len(rows):,} differ from the reference caption; they are shown first."]
        source = last.examples.sources(torch.tensor([row for row, *_ in listed]))[0].cpu()
        if source.dim() == 4:
            numbers = [str(number) for number in range(1, len(listed) + 1)]
            parts.append(Images(f"Images of {name}", as_input(source), numbers, "The images, by number."))
        parts.append(Examples([(str(n), expected, predicted) for n, (_, expected, predicted) in enumerate(listed, 1)]))
        return [Section(f"Captions of {name}", parts)]

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        if not evaluations:
            return []
        data = [*evaluations.values()][-1].examples
        source = as_input(data.sources(torch.arange(min(DRAWN, len(data))))[0].cpu())
        return [AttentionInput(one, caption, caption) for one, caption in zip(source, data.captions, strict=False)]


@torch.inference_mode()
def noun_attention(captioner: Captioner, data: CaptionSet) -> dict[str, float]:
    """How much of each noun's attention lies on its items; {} where their positions are unknown."""
    if data.scenes is None or data.phrases is None:
        return {}
    config, tokenizer = captioner.model.config, captioner.target
    across, count = config.image_size // config.patch_size, min(MEASURED, len(data))
    inside: list[Tensor] = []  # [layers, heads] each
    chance: list[Tensor] = []
    for rows in torch.arange(count).split(TOGETHER):
        covers = [coverage(data.scenes.rows(rows), group, config.image_size, across) for group in (0, 1)]
        ids = tokenizer.encode_batch([data.captions[row] for row in rows.tolist()], add_eos=True)
        target, _ = pad_rows([torch.tensor(one) for one in ids])
        weights = captioner.attention(data.sources(rows)[0], target)  # [layers, B, heads, T, patches]
        for at, row in enumerate(rows.tolist()):
            for before, noun, group in data.phrases[row].nouns():
                begin, end = (len(tokenizer.encode(text)) for text in (before, f"{before} {noun}".strip()))
                noun_weights = weights[:, at, :, begin:end].mean(dim=2)  # [layers, heads, patches]
                inside.append(noun_weights @ covers[group][at])
                chance.append(covers[group][at].mean())
    mean = torch.stack(inside).mean(dim=0)
    return {
        "inside": mean[-1].mean().item(),
        "inside_best": mean.max().item(),
        "inside_chance": torch.stack(chance).mean().item(),
    }
