"""Comparison with transformers: the same random input through both models, and the largest difference of the outputs.

Both compute in float32 with a different order of operations, so values agree to a relative error of about 1e-6; a wrong
weight map gives errors as large as the values. Rows have different lengths, which covers padding; only real tokens are
compared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import MissingExtra, UserError
from regard.interop.folder import read_json
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Model, Recurrent

TOLERANCE = 2e-5  # relative to the largest value


@dataclass(frozen=True)
class Difference:
    largest: float  # max |ours - theirs|
    scale: float  # max |theirs|
    count: int  # values compared

    @property
    def within_tolerance(self) -> bool:
        return self.largest <= TOLERANCE * max(1.0, self.scale)

    @property
    def summary(self) -> str:
        values = f"{self.count:,} values up to {self.scale:.1f}"
        return f"largest difference from transformers: {self.largest:.1e} in {values}"


def compare(model: Model, folder: str | Path) -> Difference:
    """Compare `model` with the transformers model in `folder` on the same random inputs."""
    peer = load_peer(folder)
    own = copy.deepcopy(model).float().cpu().eval()
    with torch.no_grad():
        pairs = _outputs(own, peer, torch.Generator().manual_seed(0))
    differences = [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    scales = [theirs.abs().max().item() for _, theirs in pairs]
    return Difference(max(differences), max(scales), sum(theirs.numel() for _, theirs in pairs))


def load_peer(folder: str | Path) -> Any:
    """The transformers model in `folder`, in float32."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtra("hf", "transformers", "--check") from None
    name = read_json(Path(folder) / "config.json")["architectures"][0]
    log, loud = transformers.logging, transformers.logging.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        kind = getattr(transformers, name)
        return kind.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:  # transformers raises many classes
        raise UserError(f"{folder}: transformers cannot load it as {name}: {error}") from error
    finally:
        log.set_verbosity(loud)
        log.enable_progress_bar()


def _outputs(model: Model, peer: Any, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    config = model.config
    longest = min(24, config.max_length)

    def tokens(vocab_size: int) -> tuple[Tensor, Tensor]:
        """ids [3, N] and which are real: a full row, a short one and one of a single token."""
        ids = torch.randint(vocab_size, (3, longest), generator=generator)
        return ids, torch.arange(longest) < torch.tensor([longest, (longest + 1) // 2, 1])[:, None]

    is_real: Any = slice(None)
    match model:
        case EncoderDecoder() | Recurrent():
            source, source_is_real = tokens(config.vocab_size or 0)
            target, is_real = tokens(config.target_size)
            inputs: tuple[Any, ...] = (source, target, source_is_real, is_real)
            out = peer(
                input_ids=source, attention_mask=source_is_real.long(),
                decoder_input_ids=target, decoder_attention_mask=is_real.long(),
            )  # fmt: skip
        case Decoder():
            ids, is_real = tokens(config.vocab_size or 0)
            inputs, out = (ids, is_real), peer(input_ids=ids, attention_mask=is_real.long())
        case Encoder() if config.input == "patches":
            shape = (3, config.channels, config.image_size, config.image_size)
            images = torch.randn(shape, generator=generator)
            inputs, out = (images,), peer(pixel_values=images)
        case Encoder():
            ids, is_real = tokens(config.vocab_size or 0)
            types = torch.randint(max(1, config.token_types), ids.shape, generator=generator)
            inputs = (ids, is_real, types if config.token_types else None)
            out = peer(input_ids=ids, attention_mask=is_real.long(), token_type_ids=types)
    logits = out.get("logits", out.get("prediction_logits"))  # the second in BertForPreTraining
    if logits is not None:
        keep = is_real if config.output_head == "tokens" else slice(None)
        return [(model(*inputs)[keep], logits[keep])]
    states = out.last_hidden_state[is_real]
    if not isinstance(model, Encoder):  # no output layer: logits with the input embeddings, as Regard computes them
        return [(model(*inputs)[is_real], states @ peer.get_input_embeddings().weight.T)]
    own = model.encode(*inputs)
    pooled = [] if model.pooler is None else [(model.pooled(own), out.pooler_output)]
    return [(own[is_real], states), *pooled]
