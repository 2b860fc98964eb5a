"""Engines: ways to compute one decoding step of a model, behind one interface, chosen in one place.

    eager      the model itself: everything that PyTorch can run
    lean       tensors alone, for the short steps of a small model on a CPU      `regard.predict.lean`
    recorded   fixed shapes, replayed as a CUDA graph                            `regard.predict.recorded`

`start` reads the source, `step` reads one more token of each row and gives the logits of the next one; the state in
between is the engine's own, as long as its rows can be reordered. An engine that does not run the model's own code
computes what it knows and refuses the rest: `known` is a whitelist of modules, so that a norm, an activation or a
position that is added later is left to the eager engine until someone teaches the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.models.output_head import OutputHead
from regard.models.prune import PrunedMultiHead
from regard.models.transformer import Decoder, EncoderDecoder
from regard.nn.block import Block, Stack
from regard.nn.embedding import Tokens
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHead
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.position import T5, Learned, Position, Relative, Rotary, Sinusoidal
from regard.nn.score import LearnedScore
from regard.nn.trace import Traceable
from regard.predict.lean import Lean, LeanDecoder

KNOWN = {
    EncoderDecoder, Decoder, Stack, Block, MultiHead, FeedForward, Tokens, OutputHead, LayerNorm, RMSNorm, Position,
    Sinusoidal, Learned, Rotary, Relative, T5, nn.LayerNorm, nn.Linear, nn.Embedding, nn.Identity, nn.ModuleList,
    nn.ParameterList, LearnedScore, PrunedMultiHead,
}  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "gelu-tanh", "silu", "swiglu", "geglu")


class EngineState(Protocol):
    """What an engine remembers of a generation in progress, one row per hypothesis."""

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; a row may be taken more than once, or not at all.

        With `sources` the rows are groups of equal size, one for each of these sources, numbered as before, in their
        order, none twice: what was computed from a source may be kept once for its group.
        """


class Engine(Protocol):
    """A way to compute decoding steps; every model that generates is one."""

    def start(self, source: Tensor, is_real: Tensor | None = None) -> Any:
        """Read the source [B, …]; gives an `EngineState` of B rows."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Read `tokens` [B, n]; logits [B, n, vocab_size] of the token after each."""


def parts_of(*modules: nn.Module) -> list[nn.Module]:
    """These modules and all in them, as `modules()`, which takes ten times as long: checks precede every search."""
    parts = list(modules)
    for part in parts:  # which grows
        if part._modules:
            parts += [child for child in part._modules.values() if child is not None]
    return parts


def traced(parts: Iterable[nn.Module]) -> bool:
    """Whether activations are recorded or changed: by a trace, or by hooks of PyTorch."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or (isinstance(part, Traceable) and part.tap is not None)
        for part in parts
    )


def known(parts: Iterable[nn.Module]) -> bool:
    """Whether every module is one that engines know, as it was defined, with an activation that they know."""
    return all(
        type(part) in KNOWN
        and "forward" not in part.__dict__
        and (not isinstance(part, FeedForward) or part.activation in ACTIVATIONS)
        for part in parts
    )


class Snapshot:
    """The modules and weights of a model, to see before every search whether they are still the same.

    PyTorch counts changes of a tensor, but not those of a fused optimizer, through `.data` or in inference mode. An
    optimizer changes all numbers of a weight, which the first 16 show; to read all of them takes as long as a step.

    Between two searches all this has left the cache of a core, and the time is that of fetching it again. What is
    compared are therefore flat lists of the tables in which a module keeps its attributes, hooks, children and weights.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` has no hooks and is not traced; it is not kept alive."""
        tables = [part.__dict__ for part in parts_of(model)]
        self.attributes = [table for table in tables if "forward" not in table]
        self.activations = [(table, table["activation"]) for table in tables if "activation" in table]
        self.hooks = [table[name] for table in tables for name in ("_forward_hooks", "_forward_pre_hooks")]
        self.children = [table["_modules"] for table in tables if table["_modules"]]
        self.parameters = [table["_parameters"] for table in tables if table["_parameters"]]
        self.modules, self.weights = entries(self.children), entries(self.parameters)
        self.ids, self.counting = [*map(id, self.weights)], [one for one in self.weights if not one.is_inference()]
        self.pointers, self.versions = self._pointers(), self._versions()
        self.views = [weight.detach().reshape(-1)[:16] for weight in self.weights]
        self.sample = torch.cat(self.views)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            not any(self.hooks)
            and not any("forward" in table or table.get("tap") is not None for table in self.attributes)
            and all(table.get("activation") == name for table, name in self.activations)
            and entries(self.children) == self.modules
            and [*map(id, entries(self.parameters))] == self.ids
            and self._pointers() == self.pointers
            and self._versions() == self.versions
            and torch.equal(torch.cat(self.views), self.sample)
        )

    def _pointers(self) -> list[int]:
        return [*map(Tensor.data_ptr, self.weights)]

    def _versions(self) -> list[int]:
        return [weight._version for weight in self.counting]


def entries(tables: Iterable[dict[str, Any]]) -> list[Any]:
    """All that these tables have, without None."""
    return [one for table in tables for one in table.values() if one is not None]


_lean = WeakKeyDictionary[nn.Module, tuple[Snapshot, Any]]()  # engines, and the models they were made from


def lean(model: Any) -> Any:
    """The lean engine where it computes what the model does, else the model; one is made for the same weights once."""
    if type(model) not in (EncoderDecoder, Decoder):
        return model
    kept = _lean.get(model)
    if kept is not None and not (model.training or torch.is_autocast_enabled("cpu")) and kept[0].holds():
        return kept[1]
    # Biases, windows, experts, learned scores, uneven groups, traces and autocast are the model's own; those of an
    # encoder-decoder also rotation, normalised queries, values of another size, half precision and outputs that are not
    # tokens.
    config, is_decoder, parts = model.decoder.config, isinstance(model, Decoder), parts_of(model)
    decoding = parts_of(model.decoder, model.output_head, *(() if is_decoder else (model.target_embedding,)))
    is_known = (
        (config.attention_score, config.attention) == ("dot", "fused")
        and config.all_full
        and config.experts == 0
        and not config.embed_projection
        and (is_decoder or model.config.causal)
        and config.position in ("sinusoidal", "learned", "none", "rope")
        and (is_decoder or not (config.position == "rope" or config.qk_norm))
        and (is_decoder or config.key_dim == config.val_dim)
        and (is_decoder or model.output_head.project.weight.dtype in (torch.float32, torch.float64))
        and (is_decoder or getattr(model.target_embedding, "token_types", ...) is None)
        and next(model.parameters()).device.type == "cpu"
        and not (model.training or torch.is_autocast_enabled("cpu") or traced(parts))
        and not any(part.uneven for part in decoding if isinstance(part, PrunedMultiHead))
        and known(decoding)
    )
    if not is_known:
        return model
    engine = LeanDecoder(model) if is_decoder else Lean(model, encodes=_encodes(model))
    _lean[model] = Snapshot(model), engine
    return engine


def _encodes(model: EncoderDecoder) -> bool:
    """Whether the encoder, too, is one that a lean engine knows."""
    config, parts = model.encoder.config, parts_of(model.encoder)
    return (
        config.all_full
        and not config.embed_projection
        and config.shifted_window is None
        and config.experts == 0
        and isinstance(model.source_embedding, Tokens)
        and not any(part.uneven for part in parts if isinstance(part, PrunedMultiHead))
        and known(parts)
    )
