"""An exported Hugging Face folder as a user of transformers reads it, for the comparison with the run.

    Peer(bundle, folder).values(source, is_real)    the logits of the model of transformers, for the same ids or pixels
    Peer(bundle, folder).outputs(inputs)            from text to text, or from image to class, by greedy search

`outputs` uses the folder's own tokenizer and image processor. This covers the special tokens that they add, the names
of classes, and what is done to pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.images import MODES
from regard.errors import MissingExtra
from regard.interop.check import encoder_inputs, load_peer, quiet
from regard.interop.folder import PREPROCESSOR
from regard.predict.bundle import Bundle
from regard.text.words import encode_words

ROWS = 8  # of a batch


def unreadable(bundle: Bundle) -> str:
    """Why there are no inputs for both, or nothing."""
    config = bundle.config
    if config.input == "patches":
        return "" if config.channels in MODES else f"an image file has no {config.channels} channels"
    if not bundle.tokenizers:
        return "the model has no tokenizer"
    is_masked = config.architecture == "encoder" and config.output_head == "tokens"
    return "its tokenizer has no mask token" if is_masked and bundle.tokenizer.mask is None else ""


class Peer:
    """The model of transformers in a folder, with its tokenizers or its image processor."""

    def __init__(self, bundle: Bundle, folder: str | Path) -> None:
        self.bundle, self.config, self.folder = bundle, bundle.config, Path(folder)
        self.model = load_peer(folder)
        self.mixes_padding = self.model.config.model_type == "fnet"  # into the outputs of the other tokens
        from transformers import AutoTokenizer

        def tokenizer(path: Path) -> Any:
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)

        if bundle.config.input == "tokens":
            self.tokenizer = tokenizer(self.folder)
            separate = self.folder / "target"
            self.target = tokenizer(separate) if separate.is_dir() else self.tokenizer

    def values(self, source: Tensor, is_real: Tensor | None, target: Tensor, target_is_real: Tensor | None) -> Tensor:
        """Logits, or the vectors of an encoder; of an encoder-decoder for `target`, which else is not used."""

        def mask(ids: Tensor, real: Tensor | None) -> Tensor:
            return torch.ones_like(ids) if real is None else real.long()

        with quiet():
            match self.config.architecture:
                case "encoder-decoder":
                    output = self.model(
                        input_ids=source, attention_mask=mask(source, is_real),
                        decoder_input_ids=target, decoder_attention_mask=mask(target, target_is_real),
                    )  # fmt: skip
                case "decoder":
                    output = self.model(input_ids=source, attention_mask=mask(source, is_real))
                case _ if self.config.input == "patches":
                    output = self.model(pixel_values=self._pixels(source))
                case _:
                    output = self.model(**encoder_inputs(self.model, source, mask(source, is_real)))
        names = {"none": "last_hidden_state", "pooled": "pooler_output"}
        return output[names.get(self.config.output_head, "logits")]

    def outputs(self, inputs: Sequence[Any], new_tokens: int) -> list[str]:
        """One for each input, as `regard.interop.verify` writes them."""
        with quiet(), torch.inference_mode():
            at = range(0, len(inputs), 1 if self.mixes_padding else ROWS)
            batches = (inputs[begin : begin + at.step] for begin in at)
            return [output for batch in batches for output in self._outputs(batch, new_tokens)]

    def _outputs(self, inputs: Sequence[Any], new_tokens: int) -> Iterator[str]:
        config, search = self.config, {"max_new_tokens": new_tokens, "num_beams": 1, "do_sample": False}
        match config.architecture, config.output_head:
            case "encoder-decoder", _:
                yield from self.target.batch_decode(self.model.generate(**self._read(inputs), **search), True)
            case "decoder", _:
                for text in inputs:
                    batch = self._read([text])
                    output = self.model.generate(**batch, **search)
                    yield self.tokenizer.decode(output[0, batch["input_ids"].shape[1] :], True)
            case _, "classes" if config.per_token:
                words = [text.split() for text in inputs]
                best = self._logits(self._read(inputs, truncation=True)).argmax(dim=-1)
                longest = self.bundle.limits.source or config.max_length
                for part in encode_words(self.bundle.tokenizer, words, longest):
                    yield " ".join(self._name(best[part.sentence, first]) for first in part.first)
            case _, "classes" if config.input == "patches":
                yield from map(
                    self._name, self.model(pixel_values=self._pixels(torch.stack([*inputs]))).logits.argmax(-1)
                )
            case _, "classes":
                yield from map(self._name, self._logits(self._read(inputs, truncation=True)).argmax(dim=-1))
            case _:
                batch = self._read([f"{text} {self.tokenizer.mask_token}" for text in inputs])
                masked = batch["input_ids"] == self.tokenizer.mask_token_id
                yield from map(self.bundle.tokenizer.token, self._logits(batch)[masked].argmax(dim=-1).tolist())

    def _read(self, texts: Sequence[str], **options: Any) -> Any:
        return self.tokenizer(
            [*texts], padding=len(texts) > 1, return_tensors="pt", return_token_type_ids=False, **options
        )

    def _logits(self, batch: Any) -> Tensor:
        logits: Tensor = self.model(**encoder_inputs(self.model, batch["input_ids"], batch["attention_mask"])).logits
        return logits

    def _name(self, number: Tensor) -> str:
        return str(self.model.config.id2label[int(number)])

    def _pixels(self, images: Tensor) -> Tensor:
        """Bytes or numbers from 0 to 1 [B, C, side, side] as images, and what the image processor makes of them."""
        try:
            from PIL import Image
        except ModuleNotFoundError:
            raise MissingExtra("images", "pillow", "the comparison with transformers") from None
        from transformers import AutoImageProcessor

        if images.is_floating_point():
            images = (images * 255).round().byte()
        processor = AutoImageProcessor.from_pretrained(str(self.folder / PREPROCESSOR), local_files_only=True)
        files = [Image.fromarray(one.permute(1, 2, 0).squeeze(-1).numpy()) for one in images.cpu()]
        pixels: Tensor = processor(images=files, return_tensors="pt")["pixel_values"]
        return pixels
