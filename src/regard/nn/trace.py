"""Tracing: read any activation by its name, or replace it.

    with trace(model) as t:
        model(tokens)
    t["decoder.0.attention.weights"]        # [B, H, Nq, Nk]

A name is a module and a stage: `encoder.0.attention.weights`, `decoder.3.cross.scores`,
`decoder.3.feedforward.hidden`, `decoder.3.output`. In the order of computation:

    encoder.embedding           tokens, patches or features as vectors      [B, N, dim]
    encoder.positions           the position of each token                  [B|1, N]
    encoder.position_encoding   the vectors added for them, if any          [B|1, N, dim]
    encoder.embedded            their sum, the first residual stream        [B, N, dim]
    encoder.0                   a block: attention, cross, feedforward, each with

        before   the residual stream that enters it                         [B, N, dim]
        norm     the output of its norm
        …        its own stages, up to `output`
        sum      before + output
        after    the residual stream that leaves it: `sum` (pre-LN), or `norm` of it (post-LN)

    encoder.0.output            of the block: `after` of its feedforward
    encoder.output              of the stack, after the final norm
    logits                      of tokens or classes; `pooled` before it, `values` of a model of numbers

The stages of attention:

    q k v      projected (normalised, rotated) queries, keys, values   [B, H, N, D]
    mask       the Mask, before it is applied
    scores     q · k                                               [B, H, Nq, Nk]
    scaled     after scale and position bias
    masked     -inf for masked pairs
    weights    after softmax
    heads      the weighted sum of values of each head             [B, H, Nq, Dv]
    output     after the output projection                         [B, Nq, dim]

and of the feed-forward layer: `up` [B, N, ff_dim] before the activation, `hidden` after it, `output` [B, N, dim].

An intervention uses the same names (with * and ?) and is a function from the value to its replacement.

    trace(model, {"decoder.0.attention.heads": zero_heads(3)})           # ablate a head
    trace(model, {"decoder.*.attention.mask": drop(causal)})             # attend to future tokens
    trace(model, {"encoder.1.attention.weights": replace(uniform)})      # other weights

Tracing uses the reference implementation of attention, which gives the same results as the fused one, and leaves the
model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import UserError, suggest
from regard.nn.mask import Mask

Edit = Callable[[Any], Any]
Value = TypeVar("Value")  # a tensor, or a Mask


class Traceable(nn.Module):
    """A module whose activations have names. Without a trace, `mark` returns its value unchanged."""

    tap: Trace | None = None  # the trace in progress
    path = ""  # the name of the module in it
    stages: tuple[str, ...] = ()

    def mark(self, stage: str, value: Tensor, part: str = "") -> Tensor:
        """`part` names a part of the module that the stage belongs to, such as "attention." of a block."""
        return value if self.tap is None else self.tap.see(self.path + part + stage, value)

    def joined(self, dim: int) -> AbstractContextManager[None]:
        """In this context, the values of a stage that is marked repeatedly (a loop over time) are joined along `dim`.

        An intervention still acts on each value when it is computed, because later ones depend on it.
        """
        names = [self.path + stage for stage in self.stages]
        return nullcontext() if self.tap is None else self.tap.joined(names, dim)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tap"}  # a copy is not traced

    if TYPE_CHECKING:  # nn.Module does not declare the type of a call

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Trace:
    """The recorded values: `t[name]` is the latest, `t.history(name)` all of them, `t.names` all names."""

    def __init__(self, model: nn.Module, edits: Mapping[str, Edit] | None = None, *, only: str = "*") -> None:
        """Record activations of `model` in a `with` block: those that match `only` ("": none); `edits` intervene."""
        self._modules = {
            f"{name.replace('blocks.', '')}." if name else "": module
            for name, module in model.named_modules()
            if isinstance(module, Traceable)
        }
        self.names = [path + stage for path, module in self._modules.items() for stage in module.stages]
        self._edits, self._only = dict(edits or {}), only
        self._seen: dict[str, list[Any]] = {}
        if not self.names:
            kind = type(model).__name__
            raise UserError(
                f"trace: {kind} has no activations to read; of an exported model, use the run it comes from"
            )
        for pattern in (*self._edits, only or "*"):
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise UserError(f"trace: no activation is called {pattern!r}; {suggest(pattern, self.names)}")

    def __enter__(self) -> Trace:
        if any(module.tap is not None for module in self._modules.values()):
            raise UserError("trace: this model is already being traced; pass all edits to the outer trace")
        for path, module in self._modules.items():
            module.tap, module.path = self, path
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for module in self._modules.values():
            module.tap = None

    def see(self, name: str, value: Value) -> Value:
        """Edit a value that was computed, and record it."""

        def kind(value: object) -> str:
            return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

        for pattern, edit in self._edits.items():
            if fnmatchcase(name, pattern):
                old, value = value, edit(value)
                if kind(value) != kind(old):
                    raise UserError(f"trace: the edit of {name!r} returned {kind(value)} instead of {kind(old)}")
        if fnmatchcase(name, self._only):
            self.record(name, value)
        return value

    def record(self, name: str, value: Any) -> None:
        """Keep a value. A subclass may keep less of it, such as one position."""
        self._seen.setdefault(name, []).append(value)

    @contextmanager
    def joined(self, names: list[str], dim: int) -> Iterator[None]:
        before = {name: len(self._seen.get(name, ())) for name in names}
        yield
        for name, count in before.items():
            values = self._seen.get(name, [])
            if len(values) > count + 1:
                values[count:] = [torch.cat(values[count:], dim)]

    def __getitem__(self, name: str) -> Any:
        return self.history(name)[-1]

    def history(self, name: str) -> list[Any]:
        """One value per forward pass, oldest first; a decoder with a cache has one per step."""
        if name not in self._seen:
            known = "was not computed in this trace" if name in self.names else "is not the name of an activation"
            raise UserError(f"trace: {name!r} {known}; {suggest(name, self._seen or self.names)}")
        return self._seen[name]

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def stack(self, pattern: str) -> Tensor:
        """All layers at once: `t.stack("decoder.*.attention.weights")` is [layers, B, H, Nq, Nk]."""
        values = {name: self[name] for name in self._seen if fnmatchcase(name, pattern)}
        if not values:
            raise UserError(f"trace: no recorded activation matches {pattern!r}; {suggest(pattern, self._seen)}")
        shapes = {name: getattr(value, "shape", None) for name, value in values.items()}
        if None in shapes.values() or len(set(shapes.values())) > 1:
            raise UserError(f"trace: {pattern!r} matches activations of different shapes: {', '.join(shapes)}")
        return torch.stack(list(values.values()))


trace = Trace


def zero_heads(*heads: int) -> Edit:
    """For `….heads`: set the output of these heads to zero."""

    def edit(value: Tensor) -> Tensor:
        missing = [head for head in heads if not 0 <= head < value.shape[1]]
        if missing:
            raise UserError(f"zero_heads: no head {missing[0]}: this layer has heads 0 to {value.shape[1] - 1}")
        gate = torch.ones(value.shape[1], device=value.device, dtype=value.dtype)
        gate[list(heads)] = 0
        return value * gate[:, None, None]

    return edit


def replace(value: Tensor) -> Edit:
    """Replace the activation by `value`, broadcast to its shape."""

    def edit(old: Any) -> Tensor:
        try:
            return value.to(old).expand_as(old)
        except (RuntimeError, TypeError):
            what = f"shape {tuple(old.shape)}" if isinstance(old, Tensor) else f"a {type(old).__name__}"
            raise UserError(
                f"replace: a value of shape {tuple(value.shape)} cannot replace {what}: "
                "pass a tensor that broadcasts to it"
            ) from None

    return edit


def drop(part: Mask) -> Edit:
    """For `….mask`: remove one part, such as `causal`. Padding stays masked."""
    return lambda mask: mask.without(part)
