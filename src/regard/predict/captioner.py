"""Captions: an image in, a sentence out, by the same search as a translation.

The memory that the decoder attends to is the encoder's states of the patches, or of features that another model has
computed; beam search, sampling and their settings are those of `regard.predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import Labels, pad_rows
from regard.data.captions import open_features, pad_features
from regard.data.images import open_pixels
from regard.errors import UserError
from regard.models.transformer import EncoderDecoder
from regard.predict.bundle import ScoredText, SearchPredictor, TextPrediction, open_each
from regard.predict.config import SearchConfig
from regard.predict.scoring import SequenceScore, pair_scores


class Captioner(SearchPredictor["str | Path", TextPrediction]):
    """An encoder-decoder from images or features to text."""

    NEEDS = "an encoder-decoder from images or features to text, with its tokenizer"
    MODEL: ClassVar = {
        "architecture": ("encoder-decoder",), "input": ("patches", "features"), "output_head": ("tokens",)
    }  # fmt: skip
    model: EncoderDecoder
    COMMAND = "caption"
    ENSEMBLES = True

    def predict(
        self,
        inputs: Sequence[str | Path],
        *,
        key: str | None = None,
        config: SearchConfig | None = None,
        first: int = 0,
        failed: dict[int, str] | None = None,
        **options: Any,
    ) -> list[TextPrediction]:
        """A caption of each file: an image, or features (`key`: which tensor of the file).

        A file that cannot be read is an error, unless there is a dict `failed`, which gets its row and the reason.
        """
        model, predictions = self.model.config, list[TextPrediction]()
        if key is not None and model.input != "features":
            raise UserError(f"key = {key}: is for files of features, but this model reads images; remove it")
        for at in range(0, len(inputs), self.BATCH):
            opened = open_each(inputs[at : at + self.BATCH], lambda file: self._open(file, key), failed, at)
            blank = next((torch.zeros_like(one[0]) for one in opened if one is not None), None)
            if blank is None:  # every one has failed
                predictions += [TextPrediction((ScoredText("", 0.0, 0.0),)) for _ in opened]
                continue
            source, is_real = pad_features([blank if one is None else one[0] for one in opened])
            results = self.decode(source, is_real, first=first + at, config=config, **options)
            for one, result in zip(opened, results, strict=True):
                predictions.append(TextPrediction(result.n_best, one and one[1]))
        return predictions

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str | Path, str]]) -> list[SequenceScore]:
        """log P(caption | image) of each pair of a file and a caption, </s> included."""
        (begin, end), scores, limit = self.bundle.target_frame, list[SequenceScore](), self.bundle.limits.positions
        captions = [[begin, *ids, end] for ids in self.target.encode_batch([caption for _, caption in pairs])]
        for (_, text), caption in zip(pairs, captions, strict=True):
            if limit is not None and len(caption) > limit + 1:
                raise UserError(f"{text[:40]!r} …: {len(caption) - 1} tokens, but the model has {limit} positions")
        for at in range(0, len(pairs), self.BATCH):
            part = captions[at : at + self.BATCH]
            opened = [self._open(file, None)[0] for file, _ in pairs[at : at + self.BATCH]]
            source, is_real = pad_features(opened)
            inputs = as_input(source.to(self.device)), None if is_real is None else is_real.to(self.device)
            ids, real = (one.to(self.device) for one in pad_rows([torch.tensor(one) for one in part]))
            labels = torch.where(real, ids, Labels.IGNORE)[:, 1:]
            for caption, values in zip(part, pair_scores(self.models, *inputs, ids[:, :-1], labels), strict=True):
                scores.append(SequenceScore.of(self.target, caption[1:], values))
        return scores

    def _open(self, path: str | Path, key: str | None) -> tuple[Tensor, str]:
        """The input from one file, without a batch axis, and a note about it."""
        model = self.model.config
        if model.input == "features":
            counted = Path(path).suffix == ".npy" and key is not None and key.isdecimal() and len(key) < 19
            return open_features(path, int(key or 0) if counted else key, model.feature_dim), ""
        side = model.image_size
        pixels, (width, height) = open_pixels(path, model.channels, side)
        name = "image" if isinstance(path, bytes) else path  # what a server receives is the content of a file
        resized = f"{name}: {width} x {height} pixels are resized to {side} x {side}"
        return pixels, "" if (width, height) == (side, side) else resized

    def decode(
        self,
        source: Tensor,
        is_real: Tensor | None = None,
        *,
        batch: int = SearchPredictor.BATCH,
        first: int = 0,
        config: SearchConfig | None = None,
        **options: Any,
    ) -> list[TextPrediction]:
        """Captions of images [N, C, side, side] (bytes, or 0 to 1) or features [N, regions, size]."""
        config, predictions = self.configured(config, **options), []
        for rows in torch.arange(len(source)).split(batch):
            part = as_input(source[rows].to(self.device))
            for some in self.search(config, first, (rows.tolist(), part, None if is_real is None else is_real[rows])):
                scored = (ScoredText(self.target.decode(one.tokens), one.score, one.log_probability) for one in some)
                predictions.append(TextPrediction(tuple(scored)))
        return predictions

    @torch.inference_mode()
    def attention(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross-attention weights [layers, N, heads, T, positions] given `target` [N, T]; row t predicts token t."""
        from regard.nn.trace import trace

        read = torch.cat((torch.full_like(target[:, :1], self.target.special_id("bos")), target[:, :-1]), dim=1)
        with trace(self.model, only="decoder.*.cross.weights") as seen:
            self.model(as_input(source.to(self.device)), read.to(self.device))
        return seen.stack("decoder.*.cross.weights").float().cpu()


def as_input(source: Tensor) -> Tensor:
    """Bytes of pixels as numbers between 0 and 1; floating-point inputs are unchanged."""
    return source.float() / 255 if source.dtype == torch.uint8 else source
