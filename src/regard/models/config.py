"""What a whole model is: a stack's parts, plus what goes in and what comes out.

    shape            source                       head
    encoder-decoder  tokens, patches, features    target tokens; of features also values
    decoder          tokens                       the next token
    encoder          tokens, patches, features    none (states), pooled, classes, tokens
    recurrent        tokens                       target tokens

One flat table, so that one key changes both stacks: `heads = 4` in a recipe is the whole experiment.
So is `architecture = "recurrent"`, the encoder-decoder before the Transformer. It reads of this table

    dim  embed_dim  layers  decoder_layers  cell  score  attention_scale  bias  dropout  attention_dropout
    embed_dropout  vocab_size  target_vocab_size  share  tie  embed_scale  logit_scale  logit_bias

and nothing else: it has one head, no positions, no norms and no feed-forward layers, so the fields that
describe those mean nothing to it, just as `patch_size` means nothing to a model that reads tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.nn.config import Score, StackConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(StackConfig):
    architecture: Literal["encoder-decoder", "decoder", "encoder", "recurrent"] = "encoder-decoder"
    decoder_layers: int | None = None  # encoder-decoder, recurrent: None: as many as layers
    attention_score: Score = None  # type: ignore[assignment]  # left out: "additive" for recurrent, else "dot"
    cell: Literal["lstm", "gru"] = "gru"  # recurrent
    embed_dim: int | None = None  # recurrent: width of the token vectors and the readout; None: dim
    # what goes in
    input: Literal["tokens", "patches", "features"] = "tokens"
    vocab_size: int | None = None  # source tokens, and target tokens unless target_vocab_size says otherwise
    target_vocab_size: int | None = None
    token_types: int = 0  # BERT's segments
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    stem: Literal["linear", "conv"] = "linear"  # a patch by one matrix, or overlapping ones by convolutions
    pixel_mean: tuple[float, ...] = (0.0,)  # of pixels between 0 and 1, for all channels or each: subtracted,
    pixel_std: tuple[float, ...] = (1.0,)  # and divided by
    feature_dim: int = 2048  # numbers of a feature; output_head = "values": also of a step that is written
    embed_scale: bool = True  # token vectors times sqrt(dim)
    # what comes out
    share_embeddings: bool = True  # source and target use one table
    tie_embeddings: bool = True  # the output layer is the (target) table
    logit_scale: float = 1.0
    logit_bias: bool = False
    output_head: Literal["none", "pooled", "classes", "tokens", "values"] = "tokens"
    pooling: Literal["cls", "mean"] = "cls"
    pooler: bool = False  # a tanh layer after pooling (BERT)
    head_layer: bool = False  # a layer and norm before token logits (BERT's masked LM)
    classes: int | None = None
    init: Literal["xavier", "normal"] = "xavier"  # normal: 0.02, residual outputs by 1/sqrt(2 blocks) (GPT-2)

    def __post_init__(self) -> None:
        if self.attention_score is None:
            object.__setattr__(self, "attention_score", "additive" if self.architecture == "recurrent" else "dot")
        super().__post_init__()
        for name in (
            "vocab_size",
            "target_vocab_size",
            "decoder_layers",
            "embed_dim",
            "image_size",
            "patch_size",
            "channels",
            "feature_dim",
        ):
            self._at_least(name, 1)
        self._at_least("classes", 2)
        self._at_least("token_types", 0)
        self._check_source()
        self._check_head()
        self._check_pruned()

    def _check_heads(self) -> None:
        if self.architecture != "recurrent":
            super()._check_heads()

    def _check_pruned(self) -> None:
        """Every place that has lost heads exists in this model."""
        counts = {"encoder": self.layers, "decoder": self.decoder_layers or self.layers}
        if self.architecture in ("encoder", "decoder"):
            counts = {self.architecture: self.layers}
        for place in self.pruned or {}:
            stack, layer, part = place.split(".")
            missing = int(layer) >= counts.get(stack, 0) or (part == "cross" and self.architecture != "encoder-decoder")
            if missing or self.architecture == "recurrent":
                raise UserError(
                    f"pruned: this model has no {place}; it has architecture = {self.architecture!r}, layers = {counts}"
                )

    def _check_combinations(self) -> None:
        if self.architecture != "recurrent":
            super()._check_combinations()
        elif self.attention_score == "concat":
            raise UserError(
                "attention_score = 'concat' over a recurrent model is its additive score: use "
                "attention_score = 'additive'"
            )

    def _check_source(self) -> None:
        if self.output_head == "tokens" and self.architecture == "encoder" and self.input != "tokens":
            raise UserError(
                f"output_head = 'tokens' over input = {self.input!r}: there are no tokens to name; "
                "use output_head = 'classes', 'pooled' or 'none'"
            )
        if self.vocab_size is None and (self.input == "tokens" or self.output_head == "tokens"):
            raise UserError("vocab_size is not set: give the number of tokens, such as vocab_size = 8000")
        if self.architecture in ("decoder", "recurrent") and self.input != "tokens":
            raise UserError(
                f"input = {self.input!r}: a {self.architecture} model reads tokens; "
                "use architecture = 'encoder-decoder' or 'encoder'"
            )
        if self.input == "patches" and self.image_size % self.patch_size:
            raise UserError(
                f"patch_size = {self.patch_size} does not divide image_size = {self.image_size}: change one of them"
            )
        self._check_pictures()
        if self.input == "patches" and self.position == "learned" and self.max_length < self.source_length:
            raise UserError(
                f"max_length = {self.max_length} is too short for {self.source_length} patches: "
                f"set max_length = {self.source_length}"
            )
        if self.target_vocab_size not in (None, self.vocab_size) and self.input == "tokens" and self.share_embeddings:
            raise UserError(
                f"share_embeddings = true needs one vocabulary, but vocab_size = {self.vocab_size} and "
                f"target_vocab_size = {self.target_vocab_size}: "
                "set share_embeddings = false, or leave target_vocab_size out"
            )

    def _check_pictures(self) -> None:
        side = self.image_size // self.patch_size
        for name in ("pixel_mean", "pixel_std"):
            values = getattr(self, name)
            if len(values) not in (1, self.channels) or len(values) != len(self.pixel_mean):
                raise UserError(f"{name} = {list(values)}: give one number for all channels, or {self.channels}")
        if min(self.pixel_std) <= 0:
            raise UserError(f"pixel_std = {list(self.pixel_std)}: must be greater than 0")
        for name, plain in {"position_axes": 1, "shifted_window": None, "stem": "linear"}.items():
            if getattr(self, name) != plain and self.input != "patches":
                raise UserError(
                    f"{name} = {getattr(self, name)!r}: is for pictures, but input = {self.input!r}; leave it out"
                )
        if self.shifted_window is not None and self.window is not None:
            raise UserError(f"window = {self.window}: beside shifted_window = {self.shifted_window}; leave one out")
        if self.shifted_window is not None and self.shifted_window >= side:
            raise UserError(
                f"shifted_window = {self.shifted_window}: the picture has {side} x {side} patches, so one square would "
                f"hold it all; use less than {side}, or leave it out"
            )
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise UserError(f"stem = 'conv' halves the sides, so patch_size = {self.patch_size} must be 2, 4, 8, 16 …")

    def _check_head(self) -> None:
        if self.output_head == "values" and (self.architecture, self.input) != ("encoder-decoder", "features"):
            raise UserError(
                f"output_head = 'values' with architecture = {self.architecture!r}, input = "
                f"{self.input!r}: numbers are written by "
                "architecture = 'encoder-decoder' from input = 'features'"
            )
        if self.architecture != "encoder" and self.output_head not in ("tokens", "values"):
            raise UserError(
                f"output_head = {self.output_head!r}: a {self.architecture} model writes tokens; use "
                "output_head = 'tokens' or architecture = 'encoder'"
            )
        if self.output_head == "classes" and self.classes is None:
            raise UserError(
                "classes is not set: output_head = 'classes' needs the number of classes, such as classes = 2"
            )

    @property
    def position_limit(self) -> int | None:
        """The longest sequence that the positions reach: learned ones have a row each; None: no limit."""
        return self.max_length if self.position == "learned" and self.architecture != "recurrent" else None

    @property
    def source_length(self) -> int:
        """Positions that a picture takes, the [CLS] vector included."""
        return (self.image_size // self.patch_size) ** 2 + self.has_cls

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Channels after each convolution of the stem: they double up to dim, while a patch shrinks to one place."""
        count = self.patch_size.bit_length() - 1 if self.stem == "conv" else 0
        return tuple(max(1, self.dim >> (count - 1 - at)) for at in range(count))

    @property
    def has_cls(self) -> bool:
        """Whether a vector of its own stands before the patches of a picture."""
        return self.pooling == "cls" and self.architecture == "encoder"

    @property
    def grid(self) -> tuple[int, int] | None:
        """(patches of a row, positions before them) of a model that reads pictures."""
        return (self.image_size // self.patch_size, int(self.has_cls)) if self.input == "patches" else None

    @property
    def token_dim(self) -> int:
        """Width of a token's vector."""
        return self.embed_dim if self.architecture == "recurrent" and self.embed_dim is not None else self.dim

    @property
    def target_size(self) -> int:
        return self.target_vocab_size or self.vocab_size or 0
