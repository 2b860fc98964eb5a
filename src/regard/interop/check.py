"""Comparison with transformers: the same input through both models.

`compare` feeds the same random ids or pixels to both and reports the largest difference of the outputs. Both compute
in float32 with a different order of operations, so values agree to a relative error of about 1e-6; a wrong weight map
gives errors as large as the values. Rows have different lengths, which covers padding; only real tokens are compared.
An export is compared on real inputs instead, from text to text too (`regard.interop.verify`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import MissingExtra, UserError
from regard.interop.folder import read_json
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Model, Recurrent

TOLERANCE = 2e-5  # relative to the largest value
NEW_TOKENS = 24  # generated for each of these texts
TEXTS = (
    "A dog runs on the beach.", "Two men are playing football.", "What is the time?", "It costs 1,250 euros!",
    "the quick brown fox jumps over the lazy dog", "ROMEO:", "Ein Mann fährt mit dem Fahrrad.", "Guten Morgen",
    "정말 재미있는 영화였다", "나는 학교에 간다.", "돈이 아깝다 ㅠㅠ", "2021년 3월 3일", "ok", "I don't know 🙂",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    largest: float  # max |ours - theirs|
    scale: float  # max |theirs|
    count: int  # values compared
    peer: str = "transformers"  # whose values they are compared with
    tolerance: float = TOLERANCE
    mean: float = 0.0  # of |ours - theirs|
    on_average: bool = False  # the tolerance is that of the mean; else of the largest, as a part of `scale`

    @property
    def within_tolerance(self) -> bool:
        return self.mean <= self.tolerance if self.on_average else self.largest <= self.tolerance * max(1.0, self.scale)

    @property
    def summary(self) -> str:
        values = f"{self.count:,} values up to {self.scale:.1f}"
        mean = f", {self.mean:.1e} on average" if self.on_average else ""
        return f"largest difference from {self.peer}: {self.largest:.1e} in {values}{mean}"


def compare(model: Model, folder: str | Path) -> Difference:
    """Compare `model` with the transformers model in `folder` on the same random inputs."""
    peer = load_peer(folder)
    own = copy.deepcopy(model).float().cpu().eval()
    with torch.no_grad():
        pairs = _outputs(own, peer, torch.Generator().manual_seed(0))
    return measure(pairs)


def measure(pairs: Sequence[tuple[Tensor, Tensor]], **options: Any) -> Difference:
    """The difference of (ours, theirs); values that are not numbers differ infinitely."""
    differences = [(ours - theirs).abs().nan_to_num(math.inf) for ours, theirs in pairs]
    scale, count = max(theirs.abs().max().item() for _, theirs in pairs), sum(one.numel() for one in differences)
    mean = math.fsum(one.sum().item() for one in differences) / count
    return Difference(max(one.max().item() for one in differences), scale, count, mean=mean, **options)


@dataclass(frozen=True)
class Agreement:
    """Outputs for the same inputs: how many are identical, and the first pair that is not."""

    identical: int
    compared: int
    first: tuple[str, str, str] | None  # input, our output, theirs
    peer: str = "transformers"
    kind: str = "texts"  # of the inputs
    reason: str = ""  # why none are compared
    within: float | None = None  # of numbers: "identical" up to this part of the largest one

    @classmethod
    def of(cls, inputs: Sequence[str], ours: Sequence[str], theirs: Sequence[str], **options: Any) -> Agreement:
        pairs = [*zip(inputs, ours, theirs, strict=True)]
        different = [pair for pair in pairs if pair[1] != pair[2]]
        return cls(len(pairs) - len(different), len(pairs), different[0] if different else None, **options)

    @property
    def enough(self) -> bool:
        """Two tokens of the same probability may change places by rounding, so not all need be identical."""
        return self.identical >= 0.9 * self.compared

    @property
    def summary(self) -> str:
        if not self.compared:
            return f"outputs: not compared, because {self.reason}"
        equal = (
            f"identical to those of {self.peer}"
            if self.within is None
            else f"within {self.within:g} of the largest value"
        )
        return f"outputs for {self.compared} {self.kind}: {self.identical} {equal}"


def load_peer(folder: str | Path) -> Any:
    """The transformers model in `folder`, in float32."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtra("hf", "transformers", "the comparison with transformers") from None
    name = read_json(Path(folder) / "config.json")["architectures"][0]
    try:
        with quiet():
            kind = getattr(transformers, name)
            return kind.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:  # transformers raises many classes
        raise UserError(f"{folder}: transformers cannot load it as {name}: {error}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and progress bars of transformers."""
    from transformers import logging

    loud = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(loud)
        logging.enable_progress_bar()


def encoder_inputs(peer: Any, ids: Tensor, is_real: Tensor) -> dict[str, Tensor]:
    """The arguments of an encoder of transformers; the first token of a Longformer is global, as it is in Regard."""
    match peer.config.model_type:
        case "fnet":
            return {"input_ids": ids}
        case "longformer":
            first = torch.zeros_like(ids)
            first[:, 0] = 1
            return {"input_ids": ids, "attention_mask": is_real.long(), "global_attention_mask": first}
    return {"input_ids": ids, "attention_mask": is_real.long()}


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
            images = torch.rand(shape, generator=generator)
            mean, std = (torch.tensor(values)[:, None, None] for values in (config.pixel_mean, config.pixel_std))
            pixels = ((images - mean) / std).expand(-1, peer.config.num_channels, -1, -1)  # one that is gray, in RGB
            inputs, out = (images,), peer(pixel_values=pixels)
        case Encoder():
            ids, is_real = tokens(config.vocab_size or 0)
            types = torch.randint(max(1, config.token_types), ids.shape, generator=generator)
            if peer.config.model_type == "fnet":  # whose transform in transformers includes padding
                is_real = torch.ones_like(is_real)
            if peer.config.model_type == "longformer":  # which takes this id for padding wherever it is
                padding = peer.config.pad_token_id
                ids = ids.masked_fill(ids == padding, 0 if padding else 1)
            inputs = (ids, is_real, types if config.token_types else None)
            out = peer(**encoder_inputs(peer, ids, is_real), token_type_ids=types)
    logits = out.get("logits", out.get("prediction_logits"))  # the second in BertForPreTraining
    if logits is not None:
        keep = is_real if config.per_token else slice(None)
        return [(model(*inputs)[keep], logits[keep])]
    states = out.last_hidden_state[is_real]
    if not isinstance(model, Encoder):  # no output layer: logits with the input embeddings, as Regard computes them
        return [(model(*inputs)[is_real], states @ peer.get_input_embeddings().weight.T)]
    own = model.encode(*inputs)
    pooled = [] if model.pooler is None else [(model.pooled(own), out.pooler_output)]
    return [(own[is_real], states), *pooled]
