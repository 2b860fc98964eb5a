"""What a whole model is: a stack's parts, plus what goes in and what comes out.

    shape            source                       head
    encoder-decoder  tokens, patches, features    target tokens
    decoder          tokens                       the next token
    encoder          tokens, patches, features    none (states), pooled, classes, tokens

One flat table, so that one key changes both stacks: `heads = 4` in a recipe is the whole experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.nn.config import StackConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig(StackConfig):
    shape: Literal["encoder-decoder", "decoder", "encoder"] = "encoder-decoder"
    decoder_layers: int | None = None  # encoder-decoder: None: as many as layers
    # what goes in
    source: Literal["tokens", "patches", "features"] = "tokens"
    vocab: int | None = None  # source tokens, and target tokens unless target_vocab says otherwise
    target_vocab: int | None = None
    token_types: int = 0  # BERT's segments
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    feature_dim: int = 2048
    embed_scale: bool = True  # token vectors times sqrt(dim)
    # what comes out
    share: bool = True  # source and target use one table
    tie: bool = True  # the output layer is the (target) table
    logit_scale: float = 1.0
    logit_bias: bool = False
    head: Literal["none", "pooled", "classes", "tokens"] = "tokens"
    pool: Literal["cls", "mean"] = "cls"
    pooler: bool = False  # a tanh layer after pooling (BERT)
    head_layer: bool = False  # a layer and norm before token logits (BERT's masked LM)
    classes: int | None = None
    init: Literal["xavier", "normal"] = "xavier"  # normal: 0.02, residual outputs by 1/sqrt(2 layers) (GPT-2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "vocab",
            "target_vocab",
            "decoder_layers",
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

    def _check_source(self) -> None:
        if self.vocab is None and (self.source == "tokens" or self.head == "tokens"):
            raise UserError("vocab is not set: give the number of tokens, such as vocab = 8000")
        if self.shape == "decoder" and self.source != "tokens":
            raise UserError(
                f"source = {self.source!r}: a decoder reads tokens; use shape = 'encoder-decoder' or 'encoder'"
            )
        if self.source == "patches" and self.image_size % self.patch_size:
            raise UserError(
                f"patch_size = {self.patch_size} does not divide image_size = {self.image_size}: change one of them"
            )
        if self.source == "patches" and self.position == "learned" and self.max_length < self.source_length:
            raise UserError(
                f"max_length = {self.max_length} is too short for {self.source_length} patches: "
                f"set max_length = {self.source_length}"
            )
        if self.target_vocab not in (None, self.vocab) and self.source == "tokens" and self.share:
            raise UserError(
                f"share = true needs one vocabulary, but vocab = {self.vocab} and target_vocab = {self.target_vocab}: "
                "set share = false, or leave target_vocab out"
            )

    def _check_head(self) -> None:
        if self.shape != "encoder" and self.head != "tokens":
            raise UserError(
                f"head = {self.head!r}: a {self.shape} model writes tokens; use head = 'tokens' or shape = 'encoder'"
            )
        if self.head == "classes" and self.classes is None:
            raise UserError("classes is not set: head = 'classes' needs the number of classes, such as classes = 2")
        if self.head == "tokens" and self.shape == "encoder" and self.source != "tokens":
            raise UserError(f"head = 'tokens' over source = {self.source!r}: masked tokens need source = 'tokens'")

    @property
    def source_length(self) -> int:
        """Positions that a picture takes, the [CLS] vector included."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "cls" and self.shape == "encoder")

    @property
    def target_size(self) -> int:
        return self.target_vocab or self.vocab or 0
