"""The configuration of a stack of Transformer blocks.

Every variant of the architecture is a field here, not a class of its own. A config is immutable and validates itself
when it is created; its errors name the field, the value and the remedy.

    paper (2017)   norm_order="post", activation="relu",   position="sinusoidal"
    GPT-2 (2019)   norm_order="pre",  activation="gelu-tanh", position="learned"
    T5 (2020)      norm_order="pre",  norm="rms", position="t5", bias=False, attention_scale=1.0
    today          norm_order="pre",  norm="rms", activation="swiglu", position="rope", kv_heads < heads, qk_norm=True
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from regard.errors import UserError, suggest
from regard.settings import check_fields

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "swiglu", "geglu"]
PositionKind = Literal["sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none"]
Norm = Literal["layer", "rms", "none"]
Score = Literal["dot", "multiplicative", "additive", "concat"]
Path = Literal["fused", "reference", "flex"]
Mixer = Literal["full", "window", "bigbird", "linformer", "linear", "performer", "gated-linear", "fourier"]
SOFTMAX = ("full", "window", "bigbird")  # the mixers that are softmax attention with a mask
# those that compute the packed texts of an encoder as rows of their own: in tensors whose shapes depend on the batch
BY_TEXT = ("linformer", "fourier")
# here because costs are computed without PyTorch:
LONG = 512  # keys from which on attention with a window skips masked blocks (`regard.nn.banded`)
CHUNK, GATED_CHUNK = 64, 32  # tokens that linear attention computes in parallel (`regard.nn.sums`)
RANK = 16  # of the matrix W₂ W₁ of the gates; also the root that is taken of them


def chunk_size(length: int, is_gated: bool) -> int:
    return min(length, GATED_CHUNK if is_gated else CHUNK)


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The settings of one stack; `dim` is the width of the residual stream."""

    dim: int = 512
    layers: int = 6
    # attention
    heads: int = 8
    kv_heads: int | None = None  # fewer than heads: grouped-query; 1: multi-query; None: heads
    head_dim: int | None = None  # d_k; None: dim / heads
    value_dim: int | None = None  # d_v; None: head_dim
    attention_score: Score = "dot"
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim) for dot, else 1
    qk_norm: bool = False  # RMS normalisation of the queries and keys of each head, before rotation
    # how the tokens of a layer are mixed: a kind, or a pattern over the layers such as "window, window(64), full",
    # which is repeated; "": window if `window` is set, else full
    mixer: str = ""
    window: int | None = None  # self-attention attends only to tokens less than this far away
    dilation: int = 1  # window: only to every n-th token of it, so that it is n times as wide (Longformer)
    global_tokens: int = 0  # window, bigbird: the first n tokens attend to all tokens, and all tokens to them
    global_projections: bool = False  # window: global tokens have projections of their own (Longformer)
    block_size: int = 64  # bigbird: tokens of a block; window and global_tokens are counted in tokens all the same
    random_blocks: int = 3  # bigbird: blocks of keys, chosen at random, for each block of queries
    mixer_seed: int = 0  # bigbird: of the random blocks; performer: of the random features
    projected_length: int = 256  # linformer: keys and values are projected to this length
    features: int | None = None  # performer: random features per head; None: as many as d_k · ln(d_k)
    shifted_window: int | None = None  # patches: windows of n x n patches, shifted by n / 2 in every second layer
    attention: Path = "fused"  # which implementation computes it; the results are the same
    # feed-forward
    ff_dim: int = 2048
    activation: Activation = "relu"
    experts: int = 0  # 0: one dense feed-forward
    experts_per_token: int = 2
    # norms, residual connections, dropout
    norm: Norm = "layer"
    norm_order: Literal["pre", "post"] = "post"
    norm_eps: float = 1e-5
    final_norm: bool | None = None  # a norm after the last block; None: if norm_order is "pre"
    embed_norm: bool = False  # a norm before the first block
    embed_projection: bool = False  # a linear layer after it (FNet)
    residual: bool = True
    bias: bool = True  # in the linear layers
    dropout: float = 0.1  # on the output of each sub-layer
    attention_dropout: float = 0.0  # on the attention weights
    embed_dropout: float = 0.1  # on embeddings + positions
    # positions
    position: PositionKind = "sinusoidal"
    pairs: Literal["interleaved", "halves"] = "interleaved"  # the layout of sin/cos pairs in a vector
    position_axes: int = 1  # 2: sinusoidal and rope use the rows and columns of image patches
    max_length: int = 512  # of learned positions and of linformer; others have no limit
    rope_base: float = 10000.0
    position_distance: int = 128  # relative: clipped at it; t5: the last bucket starts there
    position_buckets: int = 32  # t5
    # derived from the fields above
    key_heads: int = field(init=False, repr=False)  # heads of keys and values
    key_dim: int = field(init=False, repr=False)  # of a query or key
    val_dim: int = field(init=False, repr=False)  # of a value
    scale: float = field(init=False, repr=False)  # of the attention scores
    ends_with_norm: bool = field(init=False, repr=False)
    pattern: tuple[tuple[Mixer, int | None], ...] = field(init=False, repr=False)  # kind and window of each layer
    # (patches per row, positions before the first patch) of an image; None: the input is a sequence
    grid: tuple[int, int] | None = field(init=False, repr=False, default=None)

    LEAST: ClassVar[dict[str, int]] = {
        "dim": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "value_dim": 1, "ff_dim": 1, "window": 1,
        "dilation": 1, "global_tokens": 0, "block_size": 1, "random_blocks": 0, "mixer_seed": 0, "projected_length": 1,
        "features": 1, "shifted_window": 1, "experts": 0, "experts_per_token": 1, "max_length": 1,
        "position_distance": 1, "position_buckets": 4,
    }  # fmt: skip
    # the hash of random blocks takes no more, nor do products of positions; and what no model needs
    MOST: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("window", "dilation", "global_tokens", "block_size", "mixer_seed"), 2**31 - 1),
        "random_blocks": 1024, "projected_length": 2**16, "features": 2**16,
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self, ("dropout", "attention_dropout", "embed_dropout"), **self.LEAST)
        for name in ("norm_eps", "rope_base"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)}: must be greater than 0")
        key_dim = self.dim // self.heads if self.head_dim is None else self.head_dim
        scale = key_dim**-0.5 if self.attention_score == "dot" and key_dim else 1.0
        derived = {
            "key_heads": self.heads if self.kv_heads is None else self.kv_heads,
            "key_dim": key_dim,
            "val_dim": key_dim if self.value_dim is None else self.value_dim,
            "scale": scale if self.attention_scale is None else self.attention_scale,
            "ends_with_norm": self.norm_order == "pre" if self.final_norm is None else self.final_norm,
            "pattern": self._parse_mixer(),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_combinations()

    @property
    def all_full(self) -> bool:
        """Whether every layer is full attention."""
        return all(kind == "full" for kind, _ in self.pattern)

    @property
    def feature_count(self) -> int:
        """The number of random features of a Performer: d ln d by default."""
        return max(1, int(self.key_dim * math.log(self.key_dim))) if self.features is None else self.features

    def mixer_of(self, layer: int) -> Mixer:
        """How layer `layer` mixes tokens."""
        return self.pattern[layer % len(self.pattern)][0]

    def window_of(self, layer: int) -> int | None:
        """The window of layer `layer`; None: it has none."""
        return self.pattern[layer % len(self.pattern)][1]

    def reach_of(self, layer: int) -> int | None:
        """How far back layer `layer` of a decoder attends, itself included; None: to all tokens."""
        size = self.window_of(layer)
        if size is None or self.mixer_of(layer) != "window" or self.global_tokens:
            return None
        return (size - 1) * self.dilation + 1

    def _parse_mixer(self) -> tuple[tuple[Mixer, int | None], ...]:
        """Kind and window of each layer of the pattern `mixer`."""
        if not self.mixer:
            return (("full" if self.window is None else "window", self.window),)
        pattern: list[tuple[Mixer, int | None]] = []
        for part in self.mixer.split(","):
            match = re.fullmatch(r"\s*([\w-]*)\s*(?:\(\s*(\d+)\s*\))?\s*", part)
            kind = next((kind for kind in get_args(Mixer) if match is not None and kind == match[1]), None)
            if match is None or kind is None:
                raise UserError(
                    f"mixer = {self.mixer!r}: {part.strip()!r} is unknown; {suggest(part, get_args(Mixer))}"
                )
            size = None if match[2] is None else int(match[2])
            if size is not None and (kind not in ("window", "bigbird") or size < 1):
                raise UserError(
                    f"mixer = {self.mixer!r}: only window(n) and bigbird(n) have a size, of 1 or more tokens"
                )
            if kind in ("window", "bigbird") and size is None:
                if self.window is None:
                    raise UserError(
                        f"mixer = {self.mixer!r} needs a window: set window, such as window = 256, or write {kind}(256)"
                    )
                size = self.window
            pattern.append((kind, size))
        if self.window is not None and not any(size == self.window for _, size in pattern):
            raise UserError(f"window = {self.window}: no layer of mixer = {self.mixer!r} uses it; remove one of them")
        return tuple(pattern)

    def _check_mixer(self) -> None:
        """Check the fields of mixers: each has to be used by a layer, and to fit the rest."""
        kinds = {kind for kind, _ in self.pattern}
        uses: dict[str, tuple[Mixer, ...]] = {
            "dilation": ("window",), "global_tokens": ("window", "bigbird"), "global_projections": ("window",),
            "block_size": ("bigbird",), "random_blocks": ("bigbird",), "mixer_seed": ("bigbird", "performer"),
            "projected_length": ("linformer",), "features": ("performer",),
        }  # fmt: skip
        for name, users in uses.items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and not kinds & {*users}:
                raise UserError(
                    f"{name} = {getattr(self, name)}: no layer uses it; remove it, or set mixer = '{users[0]}'"
                )
        sizes = {name: getattr(self, name) or 0 for name in self.MOST}
        sizes["window"] = max((size for _, size in self.pattern if size is not None), default=0)
        for name, size in sizes.items():
            if size > self.MOST[name]:
                raise UserError(f"{name} = {size}: must be an integer from {self.LEAST[name]} to {self.MOST[name]}")
        if self.mixer and self.shifted_window is not None:
            raise UserError(f"mixer = {self.mixer!r} and shifted_window = {self.shifted_window}: remove one of them")
        if self.global_projections and not self.global_tokens:
            raise UserError(
                "global_projections = true: there are no global tokens; set global_tokens = 1, or remove it"
            )
        if self.global_projections and self.position in ("relative", "t5", "alibi"):
            raise UserError(
                f"position = {self.position!r} is added to scores, but not to those of global tokens with "
                "global_projections = true: use position = 'learned' or 'rope', or remove global_projections"
            )
        if self.global_projections and self.attention_score != "dot":
            raise UserError(
                f"attention_score = {self.attention_score!r}: global projections have dot-product scores; remove one"
            )
        other = sorted(kinds - {*SOFTMAX})
        if other and self.attention_score != "dot":
            raise UserError(
                f"attention_score = {self.attention_score!r}: mixer = '{other[0]}' computes no scores of pairs; "
                "remove attention_score, or use mixer = 'full'"
            )
        if other and self.position in ("relative", "t5", "alibi"):
            raise UserError(
                f"position = {self.position!r} is added to the scores of pairs, which mixer = '{other[0]}' does not "
                "compute: use position = 'learned' or 'sinusoidal'"
            )
        if self.position == "rope" and kinds == {"fourier"}:
            raise UserError(
                "position = 'rope' rotates queries and keys, and mixer = 'fourier' has none: use position = 'learned'"
            )
        if self.position == "rope" and "linformer" in kinds:
            raise UserError(
                "position = 'rope' rotates each key by its position, and mixer = 'linformer' adds the keys of all "
                "positions: use position = 'learned'"
            )

    def _check_combinations(self) -> None:
        """Check the fields that have to fit each other: heads, then positions, experts and attention."""
        if self.head_dim is None and self.dim % self.heads:
            most = min(self.heads, self.dim)
            near = next(h for step in range(most) for h in (most - step, most + step) if self.dim % h == 0)
            raise UserError(
                f"heads = {self.heads} does not divide dim = {self.dim}: use heads = {near}, "
                f"or set head_dim to give each head its own size"
            )
        if self.heads % self.key_heads:
            raise UserError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}: "
                "each key/value head serves the same number of query heads"
            )
        if self.position == "rope" and self.key_dim % 2:
            raise UserError(
                f"position = 'rope' rotates pairs of elements, but head_dim = {self.key_dim} is odd: "
                "choose dim and heads (or head_dim) so that head_dim is even"
            )
        if self.position == "sinusoidal" and self.dim % 2:
            raise UserError(
                f"position = 'sinusoidal' needs sin/cos pairs, but dim = {self.dim} is odd: use an even dim"
            )
        if self.position_axes not in (1, 2):
            raise UserError(f"position_axes = {self.position_axes}: use 1 for text, 2 for images")
        if self.position_axes == 2 and self.position not in ("sinusoidal", "rope"):
            raise UserError(
                f"position_axes = 2: position = {self.position!r} has no rows and columns; use 'sinusoidal' or "
                "'rope', or set position_axes = 1"
            )
        name, size = ("dim", self.dim) if self.position == "sinusoidal" else ("head_dim", self.key_dim)
        if self.position_axes == 2 and size % 4:
            raise UserError(f"position_axes = 2: two axes share the pairs, so {name} = {size} must be divisible by 4")
        if self.position == "t5" and self.position_buckets % 2:
            raise UserError(f"position_buckets = {self.position_buckets}: must be even, half for each direction")
        if self.position == "t5" and self.position_distance <= self.position_buckets // 2:
            raise UserError(
                f"position_distance = {self.position_distance}: must exceed position_buckets / 2 = "
                f"{self.position_buckets // 2}, where the logarithmic buckets begin"
            )
        self._check_mixer()
        if self.experts and self.experts_per_token > self.experts:
            raise UserError(
                f"experts_per_token = {self.experts_per_token} exceeds experts = {self.experts}: "
                "lower one or raise the other"
            )
        if self.attention == "flex" and self.attention_dropout:
            raise UserError(
                f"attention = 'flex' has no attention dropout, but attention_dropout = {self.attention_dropout}: "
                "set it to 0, or use attention = 'fused'"
            )
        if self.attention_score != "dot" and self.attention != "reference":
            raise UserError(
                f"attention_score = {self.attention_score!r} with attention = {self.attention!r}: "
                "set attention = 'reference' (or attention_score = 'dot')"
            )
        if self.attention_score != "dot" and self.key_heads != self.heads:
            raise UserError(
                f"kv_heads = {self.kv_heads}: attention_score = {self.attention_score!r} has parameters per head; "
                "remove kv_heads"
            )
