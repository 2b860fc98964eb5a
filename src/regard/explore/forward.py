"""Forward: what goes into a pass of a model and what comes out, with a label for each position.

An `Input` is encoded as in training:

encoder-decoder   source … </s>      target  <s> …         reads <s> and the tokens before, predicts the next
decoder           tokens             as they are; an empty text becomes the token that begins one
encoder           <s> … </s>         BERT's [CLS] … [SEP]; [MASK] in the text is the token of that name
patches           an image of `image_size` pixels per side, cut into patches of `patch_size`: position n (after [CLS],
                  where the model has it) is the patch in row n // across, column n % across (Dosovitskiy et al. 2021)
features          vectors [regions, size] from another model
numbers           see `regard.explore.numbers`

An `Output` is what the model predicts at every position; `difference` is how much that changes:

    p = softmax(logits)                                    the probability of each token (or class) at a position
    loss = -mean log p(expected token)                     where the expected one is known: the text itself, shifted
    KL(p ‖ p') = Σ_y p(y) log(p(y) / p'(y))   in nats      how far p' of the changed model is from p

The outputs of a model that gives a vector (a sentence embedding) are compared by the cosine of the two vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.data.captions import open_features
from regard.data.images import open_pixels
from regard.data.tags import split_words
from regard.errors import UserError
from regard.explore.changes import PartName
from regard.models.config import ModelConfig
from regard.predict.bundle import Bundle
from regard.text.labels import label as token_label
from regard.text.labels import labels as token_labels
from regard.text.labels import pending_bytes
from regard.text.tokenizer import Tokenizer

TOP = 8  # most probable tokens kept for each position
Kind = Literal["next", "target", "masked", "tags", "classes", "vector", "values"]


@dataclass(frozen=True)
class Grid:
    """Patches of an image: `down` rows of `across`; `first` positions before them are no patch ([CLS])."""

    down: int
    across: int
    first: int

    @property
    def labels(self) -> tuple[str, ...]:
        patches = tuple(f"{row},{column}" for row in range(self.down) for column in range(self.across))
        return ("[CLS]",) * self.first + patches


def grid_of(config: ModelConfig) -> Grid:
    side = config.image_size // config.patch_size
    return Grid(side, side, config.source_length - side * side)


@dataclass(frozen=True)
class Input:
    """One input, encoded for the model.

    read       the label of the token read at each position that has an output
    expected   the id of the correct token at each of them, None where it is unknown
    written    labels of the tokens that an encoder-decoder predicts: `read` shifted by one
    """

    source: Tensor  # ids [1, N], an image [1, C, H, W] or features [1, R, F]
    source_labels: tuple[str, ...]
    target: Tensor | None = None  # [1, T]
    read: tuple[str, ...] = ()
    expected: tuple[int | None, ...] = ()
    written: tuple[str, ...] = ()
    text: str | None = None
    image: Tensor | None = None  # [C, H, W] between 0 and 1, for display
    grid: Grid | None = None  # the patches of the image

    def labels(self, part: PartName) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels of the queries and of the keys."""
        if part == "cross":
            return self.written, self.source_labels
        own = self.read if part == "decoder" and self.target is not None else self.source_labels
        return own, own


class InputReader:
    """Texts and images to ids and pixels and back, for one model."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.config = bundle, bundle.config
        self.like = next(bundle.model.parameters())  # the device and the precision of the model
        config, tokenizers = bundle.config, bundle.tokenizers
        self.tags = config.output_head == "classes" and config.per_token
        self.writes = config.architecture in ("encoder-decoder", "recurrent") and config.output_head == "tokens"
        sizes = {"source": config.vocab_size if config.input == "tokens" else None}
        sizes["target"] = config.target_size if self.writes else None
        for side, size in sizes.items():
            tokenizer = tokenizers.get(side, tokenizers.get("tokenizer"))
            if size is not None and tokenizer is not None and len(tokenizer) > size:
                raise UserError(
                    f"the {side} tokenizer has {len(tokenizer):,} tokens, but the model's vocabulary has {size:,}: "
                    "they do not belong together"
                )

    @property
    def mask(self) -> str | None:
        """How a masked token is typed, for a model that predicts masked tokens."""
        masked = self.config.architecture == "encoder" and self.config.output_head == "tokens"
        tokenizer = self.bundle.source if masked else None
        return None if tokenizer is None or tokenizer.mask is None else tokenizer.token(tokenizer.mask)

    def read(self, text: str | None, image: Any = None, *, truncate: bool = False) -> Input:
        """A text, or an image (or features). A text beyond the learned positions is refused, or truncated."""
        if self.config.input != "tokens":
            if image is None:
                raise UserError(f"this model reads {self.config.input}, not text: give an image")
            return self._read_features(image) if self.config.input == "features" else self._read_image(image)
        if image is not None:
            raise UserError("this model reads text, not images: give a text")
        if text is None:
            raise UserError("no input text: give the text that the model reads")
        return self._read_text(text, truncate)

    def _read_text(self, text: str, truncate: bool) -> Input:
        tokenizer = self.bundle.source
        match self.config.architecture:
            case "decoder":
                ids = tokenizer.encode(text) or ([] if tokenizer.bos is None else [tokenizer.bos])
                expected: list[int | None] = [*ids[1:], None]
            case "encoder":
                ids = self._with_masks(tokenizer, self._as_words(text) if self.tags else text)
                limit = self.bundle.limits.positions
                if truncate and limit is not None and len(ids) > limit:
                    ids = [*ids[: limit - 1], ids[-1]]
                expected = [None if id == tokenizer.mask else id for id in ids]
            case _:
                ids, expected = [*tokenizer.encode(text), tokenizer.special_id("eos")], []
        if not ids:
            raise UserError("the text is empty; give at least one word")
        self._check_length(len(ids))
        labels = token_labels(tokenizer, ids)
        source = torch.tensor([ids], device=self.bundle.device)
        return Input(source, labels, read=labels, expected=tuple(expected), text=text)

    def _as_words(self, text: str) -> str:
        """The words of a text as a tagger reads them: with one space between them, perhaps before punctuation too."""
        punctuation = self.bundle.tables["data"].get("punctuation", "attached")
        return " ".join(text[begin:end] for begin, end in split_words(text, punctuation))

    def _with_masks(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """<s> … </s>, where [MASK] in the text is the token of that name, if there is one."""
        mask = tokenizer.mask
        ids = [] if tokenizer.bos is None else [tokenizer.bos]
        for index, piece in enumerate([text] if mask is None else text.split(tokenizer.token(mask))):
            ids += [mask] if index and mask is not None else []
            ids += tokenizer.encode(piece)
        return ids if tokenizer.eos is None else [*ids, tokenizer.eos]

    def _read_features(self, features: Any) -> Input:
        if isinstance(features, str | Path):
            features = open_features(features)
        features, size = torch.as_tensor(features, dtype=torch.float32), self.config.feature_dim
        if features.dim() != 2 or features.shape[1] != size:
            raise UserError(f"features have shape {tuple(features.shape)}: give [regions, feature_dim = {size}]")
        return Input(features[None].to(self.like), tuple(f"region {index}" for index in range(len(features))))

    def _read_image(self, image: Any) -> Input:
        """A file, resized to the model's size, or numbers [channels, height, width] that are read as they are."""
        config = self.config
        if isinstance(image, str | Path):
            pixels = shown = open_pixels(image, config.channels, config.image_size)[0].float() / 255
        else:
            pixels = torch.as_tensor(image if isinstance(image, Tensor) else np.asarray(image), dtype=torch.float32)
            shape = (config.channels, config.image_size, config.image_size)
            if tuple(pixels.shape) != shape:
                raise UserError(f"the image has shape {tuple(pixels.shape)}: give {shape}, or the name of a file")
            low, high = float(pixels.min()), float(pixels.max())
            normalised = low < 0 or high > 1  # such as by mean and standard deviation: stretched for display
            shown = (pixels - low) / (high - low) if normalised and high > low else pixels.clamp(0, 1)
        grid = grid_of(config)
        return Input(pixels[None].to(self.like), grid.labels, image=shown, grid=grid)

    def with_target(self, input: Input, ids: Sequence[int]) -> Input:
        """The same source with a target: the decoder reads <s> and `ids`, and is expected to predict `ids` and </s>."""
        begin, end = self.bundle.target_frame
        read, written = [begin, *ids], [*ids, end]
        self._check_length(len(read))
        return replace(
            input,
            target=torch.tensor([read], device=self.bundle.device),
            read=self._labels(read),
            expected=tuple(written),
            written=self._labels(written),
        )

    def label(self, id: int, pending: bytes = b"") -> str:
        """The class, or the token of an output id; a model may have more output rows than its tokenizer has tokens.

        `pending`: the bytes of an incomplete character before it.
        """
        if self.config.output_head == "classes":
            return self.bundle.classes[id]
        target = self.bundle.target
        return token_label(target, id, pending) if id < len(target) else f"#{id}"

    def pending(self, input: Input) -> list[bytes]:
        """For each position that has an output the bytes of an incomplete character that its tokens end with."""
        if self.config.output_head != "tokens" or not (self.writes or self.config.architecture == "decoder"):
            return [b""] * len(input.read)
        ids = (input.source if input.target is None else input.target)[0].tolist()
        return [pending_bytes(self.bundle.target, ids[: at + 1]) for at in range(len(ids))]

    def _labels(self, ids: Sequence[int]) -> tuple[str, ...]:
        return token_labels(self.bundle.target, ids)

    def decode(self, ids: Sequence[int]) -> str:
        target = self.bundle.target
        return target.decode([id for id in ids if id < len(target)])

    def _check_length(self, length: int) -> None:
        limit = self.bundle.limits.positions
        if limit is not None and length > limit:
            raise UserError(
                f"the text has {length:,} tokens, but the model has {limit:,} learned positions (max_length): "
                "give a shorter one"
            )


@dataclass(frozen=True)
class Choice:
    """One of the most probable tokens (or classes) of a position."""

    id: int
    label: str
    probability: float


@dataclass(frozen=True)
class Position:
    """One position: after `read`, `top` are the most probable tokens, `expected` is the correct one."""

    at: int
    read: str
    top: tuple[Choice, ...]
    expected: Choice | None = None


@dataclass(frozen=True)
class Output:
    """
    kind        next     the token after each one of a text (decoder)
                target   the tokens of a target, given those before (encoder-decoder)
                masked   the token at each position of a text (encoder with token logits)
                tags     the class of each token; only the first of a word has a label in training
                classes  the class of the whole: one position
                vector   states or a pooled vector: no positions
                values   numbers, in the scale of the data: no positions
    loss        mean cross-entropy of `expected`, in nats per token; None where nothing is expected
    generated   what an encoder-decoder generates: the best of `hypotheses`, which have a score each
    """

    kind: Kind
    positions: tuple[Position, ...]
    loss: float | None
    logits: Tensor  # [positions, vocab_size or classes]; "vector": [N, dim] or [1, dim]; "values": [T, channels]
    generated: str | None = None
    hypotheses: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the logits."""
        return {
            "kind": self.kind,
            "loss": self.loss,
            "generated": self.generated,
            "hypotheses": [{"text": text, "score": score} for text, score in self.hypotheses],
            "positions": [asdict(position) for position in self.positions],
        }


def read_output(reader: InputReader, input: Input, logits: Tensor, hypotheses: Sequence[tuple[str, float]]) -> Output:
    """The output for `input` from logits [positions, vocab_size] or [classes], or from states."""
    architecture, head, tags = reader.config.architecture, reader.config.output_head, reader.tags
    logits, read, expected = logits.float().cpu(), input.read, input.expected
    kind: Kind = "masked" if architecture == "encoder" else "next" if architecture == "decoder" else "target"
    if tags:
        kind, expected = "tags", (None,) * len(read)
    elif architecture == "encoder" and head == "classes":
        kind, logits, read, expected = "classes", logits[None], ("",), (None,)
    elif architecture == "encoder" and head != "tokens":
        return Output("vector", (), None, torch.atleast_2d(logits))
    log_p = logits.log_softmax(dim=-1)
    values, ids = log_p.exp().topk(min(TOP, logits.shape[-1]), dim=-1)
    positions, losses, pending = [], [], reader.pending(input)
    for at, correct in enumerate(expected):
        best = zip(ids[at].tolist(), values[at].tolist(), strict=True)
        before = pending[at] if at < len(pending) else b""
        choice = None
        if correct is not None:
            losses.append(-float(log_p[at, correct]))
            choice = Choice(correct, reader.label(correct, before), float(log_p[at, correct].exp()))
        positions.append(
            Position(at, read[at], tuple(Choice(id, reader.label(id, before), p) for id, p in best), choice)
        )
    loss = sum(losses) / len(losses) if losses else None
    generated = hypotheses[0][0] if hypotheses else None
    return Output(kind, tuple(positions), loss, logits, generated, tuple(hypotheses))


@dataclass(frozen=True)
class Difference:
    """How the output after a change differs from the one before.

    divergence   KL(before ‖ after) at every position, in nats; of vectors 1 - cosine; of numbers |after - before|
    flipped      the positions whose most probable token (or class) has changed
    """

    divergence: tuple[float, ...]
    flipped: tuple[int, ...]
    loss: float | None  # after - before

    @property
    def mean_divergence(self) -> float:
        return sum(self.divergence) / max(1, len(self.divergence))


def difference(before: Output, after: Output) -> Difference:
    if before.kind == "values":
        return Difference(tuple((after.logits - before.logits).abs().amax(dim=-1).tolist()), (), None)
    if before.kind == "vector":
        cosine = torch.cosine_similarity(before.logits.double(), after.logits.double(), dim=-1)
        return Difference(tuple((1 - cosine).clamp_min(0).tolist()), (), None)
    p, q = before.logits.log_softmax(dim=-1), after.logits.log_softmax(dim=-1)
    divergence = (p.exp() * (p - q)).sum(dim=-1).clamp_min(0)  # rounding may leave -1e-9
    flipped = (p.argmax(dim=-1) != q.argmax(dim=-1)).nonzero()[:, 0].tolist()
    loss = None if before.loss is None or after.loss is None else after.loss - before.loss
    return Difference(tuple(divergence.tolist()), tuple(flipped), loss)
