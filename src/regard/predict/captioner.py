"""Captions: a picture in, a sentence out, by the same search as a translation.

The memory that the decoder looks at is the encoder's states of the patches (or of given features); beam search,
sampling and their settings are those of `regard.predict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.models import EncoderDecoder
from regard.models.folder import load, load_recipe, load_tokenizers
from regard.models.recipe import RECIPE
from regard.predict.beam import beam
from regard.predict.config import SearchConfig
from regard.predict.sampling import sample
from regard.predict.translator import Translation, decode_config
from regard.text.tokenizer import Tokenizer


class Captioner:
    """An encoder-decoder from pictures or features to text."""

    def __init__(self, model: EncoderDecoder, tokenizer: Tokenizer, config: SearchConfig | None = None) -> None:
        self.model, self.tokenizer, self.config = model.eval(), tokenizer, config or SearchConfig()
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", changes: Mapping[str, Any] | None = None) -> Captioner:
        """The model in `folder`, searched as [decode] of its recipe says; `changes` are fields of a SearchConfig."""
        config = decode_config(load_recipe(folder), changes, Path(folder) / RECIPE)
        model, tokenizer = load(folder, device), load_tokenizers(folder).get("tokenizer")
        writes = isinstance(model, EncoderDecoder) and model.config.output_head == "tokens"
        if not writes or model.config.input == "tokens" or tokenizer is None:
            raise UserError(
                f"{folder}: architecture = {model.config.architecture!r}, input = {model.config.input!r}: "
                "writes no captions; "
                'train a model with  task = "captioning"'
            )
        assert isinstance(model, EncoderDecoder)
        return cls(model, tokenizer, config)

    def caption(self, source: Tensor, is_real: Tensor | None = None, batch: int = 64) -> list[str]:
        """One caption for each of pictures [N, C, side, side] (bytes, or 0 to 1) or features [N, regions, size]."""
        return [found[0].text for found in self.search(source, is_real, batch)]

    def search(
        self, source: Tensor, is_real: Tensor | None = None, batch: int = 64, first: int = 0
    ) -> list[list[Translation]]:
        """Up to `n_best` captions of each, best first; `first` is the number of the first one, for sampling."""
        bos, eos = self.tokenizer.special_id("bos"), self.tokenizer.special_id("eos")
        config, answers = self._reach(), []
        for at in range(0, len(source), batch):
            part = as_input(source[at : at + batch].to(self.device))
            real = None if is_real is None else is_real[at : at + batch].to(self.device)
            if config.sample:
                numbers = range(first + at, first + at + len(part))
                found = sample(self.model, part, real, config, bos, eos, lines=numbers)
            else:
                found = beam(self.model, part, real, config, bos, eos)
            answers += [
                [Translation(self.tokenizer.decode(one.tokens), one.score, one.log_probability) for one in some]
                for some in found
            ]
        return answers

    def _reach(self) -> SearchConfig:
        """Learned positions end, and so do captions."""
        model = self.model.config
        if model.position != "learned" or (self.config.max_length or model.max_length + 1) <= model.max_length:
            return self.config
        return replace(self.config, max_length=model.max_length)

    @torch.inference_mode()
    def attention(self, source: Tensor, target: Tensor) -> Tensor:
        """Cross attention [layers, N, heads, T, positions] while `target` [N, T] is written; row t writes token t."""
        from regard.nn.trace import trace

        read = torch.cat((torch.full_like(target[:, :1], self.tokenizer.special_id("bos")), target[:, :-1]), dim=1)
        with trace(self.model, only="decoder.*.cross.weights") as seen:
            self.model(as_input(source.to(self.device)), read.to(self.device))
        return seen.stack("decoder.*.cross.weights").float().cpu()


def as_input(source: Tensor) -> Tensor:
    """Bytes of pixels as numbers between 0 and 1; what is numbers already stays."""
    return source.float() / 255 if source.dtype == torch.uint8 else source
