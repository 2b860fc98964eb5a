"""The configuration of a whole model: a stack, its input and its output.

    architecture     input                        output_head
    encoder-decoder  tokens, patches, features    tokens; with features also values
    decoder          tokens                       tokens
    encoder          tokens, patches, features    none (states), pooled, classes, tokens
    recurrent        tokens                       tokens

The table is flat, so that one key changes both stacks: an experiment is one line of a recipe, such as `heads = 4` or
`architecture = "recurrent"`, the encoder-decoder before the Transformer. That one uses these fields,

    dim  embed_dim  layers  decoder_layers  cell  cross_attention  attention_score  attention_scale  bias  dropout
    attention_dropout  embed_dropout  vocab_size  target_vocab_size  share_embeddings  tie_embeddings  embed_scale
    logit_scale  logit_bias

and ignores the others: it has one head and no positions, norms or feed-forward layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from regard.errors import UserError
from regard.nn.config import SOFTMAX, Score, StackConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(StackConfig):
    """Architecture and sizes of a model, immutable; a wrong value raises an error when the config is created."""

    architecture: Literal["encoder-decoder", "decoder", "encoder", "recurrent"] = "encoder-decoder"
    decoder_layers: int | None = None  # encoder-decoder, recurrent; None: layers
    attention_score: Score = None  # type: ignore[assignment]  # default: "additive" for recurrent, else "dot"
    causal: bool = True  # encoder-decoder; False: in training the decoder sees the tokens that it has to predict
    cell: Literal["lstm", "gru"] = "gru"  # recurrent
    cross_attention: bool = True  # recurrent; False: the whole source is one vector, as before 2015
    embed_dim: int | None = None  # recurrent: width of the embeddings and the readout; None: dim
    pruned: dict[str, tuple[int, ...]] | None = None  # removed heads by layer: {"decoder.0.cross": (1, 3)}
    # input
    input: Literal["tokens", "patches", "features"] = "tokens"
    vocab_size: int | None = None  # source tokens, and target tokens unless target_vocab_size is set
    target_vocab_size: int | None = None
    token_types: int = 0  # BERT's sentences A and B
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    stem: Literal["linear", "conv"] = "linear"  # how patches are embedded: one matrix, or overlapping convolutions
    pixel_mean: tuple[float, ...] = (0.0,)  # of pixels between 0 and 1, for all channels or for each:
    pixel_std: tuple[float, ...] = (1.0,)  # (pixel - mean) / std
    feature_dim: int = 2048  # size of a feature vector; with output_head = "values" also of an output vector
    embed_scale: bool = True  # token embeddings times sqrt(dim)
    # output
    share_embeddings: bool = True  # source and target use one embedding matrix
    tie_embeddings: bool = True  # the output layer uses the (target) embedding matrix
    logit_scale: float = 1.0
    logit_bias: bool = False
    output_head: Literal["none", "pooled", "classes", "tokens", "values"] = "tokens"
    pooling: Literal["cls", "mean", "none"] = "cls"  # how states become one vector; none: a class for every token
    pooler: bool = False  # a tanh layer after pooling (BERT)
    head_layer: bool = False  # a layer and norm before token logits (BERT's masked LM)
    classes: int | None = None
    init: Literal["xavier", "normal"] = "xavier"  # normal: std 0.02, as GPT-2
    # derived from the fields above
    target_size: int = field(init=False, repr=False)  # tokens of the target

    LEAST: ClassVar[dict[str, int]] = {
        **StackConfig.LEAST, "vocab_size": 1, "target_vocab_size": 1, "decoder_layers": 1, "embed_dim": 1,
        "image_size": 1, "patch_size": 1, "channels": 1, "feature_dim": 1, "classes": 2, "token_types": 0,
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.attention_score is None:
            object.__setattr__(self, "attention_score", "additive" if self.architecture == "recurrent" else "dot")
        object.__setattr__(self, "target_size", self.target_vocab_size or self.vocab_size or 0)
        super().__post_init__()
        if self.input == "patches":
            object.__setattr__(self, "grid", (self.image_size // self.patch_size, int(self.has_cls)))

    def _check_combinations(self) -> None:
        """Check that input and output head fit the architecture, and the architecture's own combinations."""
        if self.architecture != "recurrent":
            self._check_decoder()
            super()._check_combinations()
        elif self.attention_score == "concat":
            raise UserError(
                "attention_score = 'concat': in a recurrent model this is the additive score; "
                "use attention_score = 'additive'"
            )
        if not self.causal and (self.architecture, self.output_head) != ("encoder-decoder", "tokens"):
            raise UserError(
                f"causal = false with architecture = {self.architecture!r}, output_head = {self.output_head!r}: remove "
                "it, or use architecture = 'encoder-decoder' and output_head = 'tokens'"
            )
        kinds = {kind for kind, _ in self.pattern}
        if self.architecture != "recurrent" and kinds - {*SOFTMAX}:
            self._check_kinds(sorted(kinds - {*SOFTMAX}))
        if not self.cross_attention and self.architecture != "recurrent":
            raise UserError(
                f"cross_attention = false: architecture = {self.architecture!r} has no other way to its source; "
                "remove it, or use architecture = 'recurrent'"
            )
        if self.output_head == "tokens" and self.architecture == "encoder" and self.input != "tokens":
            raise UserError(
                f"output_head = 'tokens' with input = {self.input!r}: there are no tokens to predict; "
                "use output_head = 'classes', 'pooled' or 'none'"
            )
        if self.vocab_size is None and (self.input == "tokens" or self.output_head == "tokens"):
            raise UserError("vocab_size is not set: set the number of tokens, such as vocab_size = 8000")
        if self.architecture in ("decoder", "recurrent") and self.input != "tokens":
            raise UserError(
                f"input = {self.input!r}: a {self.architecture} model reads tokens; "
                "use architecture = 'encoder-decoder' or 'encoder'"
            )
        if self.target_vocab_size not in (None, self.vocab_size) and self.input == "tokens" and self.share_embeddings:
            raise UserError(
                f"share_embeddings = true needs one vocabulary, but vocab_size = {self.vocab_size} and "
                f"target_vocab_size = {self.target_vocab_size}: "
                "set share_embeddings = false, or remove target_vocab_size"
            )
        if self.output_head == "values" and (self.architecture, self.input) != ("encoder-decoder", "features"):
            raise UserError(
                f"output_head = 'values' with architecture = {self.architecture!r}, input = {self.input!r}: "
                "use architecture = 'encoder-decoder' and input = 'features'"
            )
        if self.architecture != "encoder" and self.output_head not in ("tokens", "values"):
            raise UserError(
                f"output_head = {self.output_head!r}: a {self.architecture} model predicts tokens; "
                "use output_head = 'tokens' or architecture = 'encoder'"
            )
        if self.output_head == "classes" and self.classes is None:
            raise UserError("classes is not set: output_head = 'classes' needs their number, such as classes = 2")
        if self.pooling == "none" and (self.input != "tokens" or self.output_head == "pooled" or self.pooler):
            raise UserError(
                f"pooling = 'none' with input = {self.input!r}, output_head = {self.output_head!r}, pooler = "
                f"{str(self.pooler).lower()}: for one class per token use input = 'tokens', output_head = 'classes' "
                "and pooler = false"
            )
        for name, plain in {"position_axes": 1, "shifted_window": None, "stem": "linear"}.items():
            if getattr(self, name) != plain and self.input != "patches":
                raise UserError(
                    f"{name} = {getattr(self, name)!r}: needs input = 'patches', but input = {self.input!r}; remove it"
                )
        if self.input == "patches":
            self._check_images()
        if self.pruned is not None:
            self._check_pruned(self.pruned)

    def _check_decoder(self) -> None:
        """Check that no layer of a decoder needs later tokens."""
        if self.architecture == "encoder":
            return
        for kind, _ in self.pattern:
            if kind in ("linformer", "fourier"):
                raise UserError(
                    f"mixer = {self.mixer!r}: {kind} mixes tokens with later ones, so a decoder cannot use it; "
                    "use architecture = 'encoder', or another mixer such as 'window' or 'linear'"
                )
        if self.global_projections:
            raise UserError(
                "global_projections = true: the global tokens of a decoder cannot attend to later tokens; remove it, "
                "or use architecture = 'encoder'"
            )

    def _check_kinds(self, kinds: list[str]) -> None:
        """Check mixers that are not softmax attention."""
        if not self.causal:
            raise UserError(f"causal = false: mixer = '{kinds[0]}' of a decoder is always causal; remove one of them")
        if (
            self.attention_dropout
            and self.architecture != "encoder-decoder"
            and not {"linformer", *SOFTMAX} & {kind for kind, _ in self.pattern}
        ):
            raise UserError(
                f"attention_dropout = {self.attention_dropout}: mixer {self.mixer!r} has no attention weights; set it "
                "to 0 (dropout is that of the output of each layer)"
            )

    def _check_images(self) -> None:
        side = self.image_size // self.patch_size
        if self.image_size % self.patch_size:
            raise UserError(
                f"patch_size = {self.patch_size} does not divide image_size = {self.image_size}: change one of them"
            )
        if self.position_limit is not None and self.position_limit < self.source_length:
            raise UserError(
                f"max_length = {self.max_length} is too short for {self.source_length} patches: "
                f"set max_length = {self.source_length}"
            )
        for name in ("pixel_mean", "pixel_std"):
            values = getattr(self, name)
            if len(values) not in (1, self.channels) or len(values) != len(self.pixel_mean):
                raise UserError(f"{name} = {list(values)}: set one number for all channels, or {self.channels}")
        if min(self.pixel_std) <= 0:
            raise UserError(f"pixel_std = {list(self.pixel_std)}: must be greater than 0")
        if self.shifted_window is not None and self.window is not None:
            raise UserError(f"window = {self.window} and shifted_window = {self.shifted_window}: remove one of them")
        if self.shifted_window is not None and self.shifted_window >= side:
            raise UserError(
                f"shifted_window = {self.shifted_window}: the image has {side} x {side} patches, which are one window; "
                f"use less than {side}, or remove it"
            )
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise UserError(f"stem = 'conv' has stride 2, so patch_size = {self.patch_size} must be a power of two")

    def _check_pruned(self, pruned: dict[str, tuple[int, ...]]) -> None:
        counts = {"encoder": self.layers, "decoder": self.decoder_layers or self.layers}
        if self.architecture in ("encoder", "decoder"):
            counts = {self.architecture: self.layers}
        for name, heads in pruned.items():
            if not re.fullmatch(r"(encoder|decoder)\.\d+\.attention|decoder\.\d+\.cross", name):
                raise UserError(f"pruned: {name!r} is not a layer; write encoder.0.attention or decoder.0.cross")
            stack, layer, part = name.split(".")
            missing = int(layer) >= counts.get(stack, 0) or (part == "cross" and self.architecture != "encoder-decoder")
            if missing or self.architecture == "recurrent":
                raise UserError(
                    f"pruned: this model has no {name}; it has architecture = {self.architecture!r}, layers = {counts}"
                )
            if part == "attention" and (kind := self.mixer_of(int(layer))) not in SOFTMAX:
                raise UserError(f"pruned: {name} has mixer = '{kind}', whose heads cannot be pruned; remove it")
            if not all(0 <= head < self.heads for head in heads):
                raise UserError(f"pruned: {name} = {list(heads)}: its heads are 0 to {self.heads - 1}")
            if not self.kept_heads(name):
                raise UserError(f"pruned: {name} = {list(heads)}: these are all its heads; keep at least one")

    def kept_heads(self, layer: str) -> tuple[int, ...]:
        """The heads of one attention layer that were not removed."""
        removed = (self.pruned or {}).get(layer, ())
        return tuple(head for head in range(self.heads) if head not in removed)

    @property
    def position_limit(self) -> int | None:
        """The number of positions that a learned encoding or a Linformer has parameters for; None: no limit."""
        limited = self.position == "learned" or any(kind == "linformer" for kind, _ in self.pattern)
        return self.max_length if limited and self.architecture != "recurrent" else None

    @property
    def source_length(self) -> int:
        """The positions of an image, [CLS] included."""
        return (self.image_size // self.patch_size) ** 2 + self.has_cls

    @property
    def stem_widths(self) -> tuple[int, ...]:
        """Channels after each convolution of the stem: they double up to dim while a patch shrinks to one position."""
        count = self.patch_size.bit_length() - 1 if self.stem == "conv" else 0
        return tuple(max(1, self.dim >> (count - 1 - at)) for at in range(count))

    @property
    def has_cls(self) -> bool:
        """Whether the patches of an image are preceded by a [CLS] vector."""
        return self.pooling == "cls" and self.architecture == "encoder"

    @property
    def per_token(self) -> bool:
        """Whether there is an output for every position, and not one for the whole input."""
        return self.output_head in ("tokens", "values") or (self.output_head == "classes" and self.pooling == "none")

    @property
    def token_dim(self) -> int:
        """Width of the token embeddings."""
        return self.embed_dim if self.architecture == "recurrent" and self.embed_dim is not None else self.dim
