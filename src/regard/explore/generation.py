"""Generation, one token after another: the distribution before and after the sampling options, and the KV cache.

    steps = generate_steps(inside.look("The key"), SearchConfig(sample=True, temperature=0.8, top_k=40), count=8)
    steps[0].choices[0].probability      p = softmax(logits): what the model predicts
    steps[0].choices[0].kept             p' ∝ p^(1 / temperature), of the tokens that top_k and top_p keep; 0: cut
    steps[0].label                       the token that was sampled from p'
    steps[0].cache.used                  bytes of keys and values: 2 · layers · kv_heads · length · head_dim · bytes

The sampled tokens are those of `regard generate` and `regard translate --sample` with the same seed: token n of an
output is decided by number n of the stream of random numbers of its seed. So an output can be continued from any
prefix, with other options or with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.recurrent import RecurrentState
from regard.nn.trace import trace
from regard.predict.config import SearchConfig
from regard.predict.sampling import Uniform, distribution, sample_token

if TYPE_CHECKING:
    from regard.explore.inside import Inside, Look

SHOWN = 12  # most probable tokens of each step
MOST = 64  # steps of one call


@dataclass(frozen=True)
class Candidate:
    """A token with its probability before and after the options; kept = 0: it cannot be sampled."""

    id: int
    label: str
    probability: float
    kept: float


@dataclass(frozen=True)
class CacheSize:
    """What a generation keeps of the tokens it has read: keys and values, or a state that does not grow."""

    tokens: int
    used: int  # bytes of the keys and values, or of the states, of all layers
    memory: int  # bytes of the keys and values of the encoder's output
    layers: tuple[int, ...]  # tokens stored by each layer; a layer with a window drops old ones, a state has 0


@dataclass(frozen=True)
class GenerationStep:
    """One token: what could follow, what was sampled, and the cache with which it was computed."""

    id: int
    label: str
    text: str  # what the output reads up to here
    choices: tuple[Candidate, ...]  # most probable first; the sampled one is among them
    count: int  # tokens that can be sampled
    cut: float  # the probability of the others, before the options
    uniform: float  # the random number that decides
    cache: CacheSize
    ended: bool


class Generation(list[GenerationStep]):
    """The steps, one after another."""

    def _repr_html_(self) -> str:
        """A notebook shows every token with its probability before and after the options."""
        from regard.explore.html import table

        rows = []
        for step in self:
            (one,) = (choice for choice in step.choices if choice.id == step.id)
            numbers = f"{one.probability:.4f}", f"{one.kept:.4f}", f"{step.count:,}", f"{step.cache.used:,}"
            rows.append((step.label, *numbers))
        return table(("token", "p", "p after the options", "tokens to sample from", "KV cache, bytes"), rows)


@torch.inference_mode()
def generate_steps(
    look: Look,
    config: SearchConfig,
    prefix: Sequence[int] = (),
    count: int = 1,
    interrupt: Callable[[], None] = lambda: None,
) -> Generation:
    """The next `count` tokens, sampled from p' ∝ p^(1 / temperature) of those that top_k and top_p keep of p.

    They follow `prefix`, and are fewer where the output or the positions of the model end.

    `interrupt` is called before every step, and ends the generation by raising an error.
    """
    inside, bundle = look.inside, look.inside.bundle
    check_generates(inside)
    if not 1 <= count <= MOST:
        raise UserError(f"count = {count}: must be from 1 to {MOST}")
    size = inside.config.target_size if inside.reader.writes else inside.config.vocab_size or 0
    if any(not 0 <= id < size for id in prefix):
        raise UserError(f"prefix: has an id that is not one of the vocabulary's, 0 to {size - 1}")
    if inside.reader.writes:
        begin, eos = bundle.target_frame
        read, known = [begin, *prefix], len(bundle.target)
    else:
        eos, known = cast(int, bundle.source.eos), len(bundle.source)
        read = [*look.input.source[0].tolist(), *prefix]
    limit, steps = bundle.limits.positions, Generation()
    uniform = Uniform(config.seed, [0], 1).following(len(prefix) + count)[0, len(prefix) :]
    written, model = list(prefix), cast(Any, inside.model)
    if prefix and prefix[-1] == eos:
        return steps
    with inside.lock, trace(model, inside.edits(look.changes, look.input), only=""):
        state = model.start(look.input.source) if inside.reader.writes else model.start()
        tokens = torch.tensor([read], device=inside.device)
        for number in uniform:
            interrupt()
            if limit is not None and len(read) > limit:
                break
            logits = model.step(tokens, state)[:, -1, :known].float()
            if not bool(logits.isfinite().all()):
                raise UserError("the model's output is not a number (NaN) under these changes; undo one of them")
            id = int(sample_token(logits, config, number[None].to(inside.device))[0])
            written.append(id)
            steps.append(_step(inside, logits, config, id, float(number), written, measure(state), id == eos))
            if id == eos:
                break
            read.append(id)
            tokens = torch.tensor([[id]], device=inside.device)
    return steps


def check_generates(inside: Inside) -> None:
    """Raise for a model that generates no tokens."""
    config = inside.config
    if config.architecture == "encoder" or config.output_head != "tokens":
        raise UserError(
            f"architecture = {config.architecture!r}, output_head = {config.output_head!r}: this model generates no "
            "tokens; open a decoder or an encoder-decoder"
        )


def _step(
    inside: Inside,
    logits: Tensor,
    config: SearchConfig,
    id: int,
    uniform: float,
    written: Sequence[int],
    cache: CacheSize,
    ended: bool,
) -> GenerationStep:
    before = logits.double().softmax(dim=-1)[0]
    after = distribution(logits, config)[0]
    if config.top_k == 1:  # of equally probable tokens the first
        after = torch.zeros_like(after).index_fill(0, torch.tensor([id], device=after.device), 1.0)
    best = before.topk(min(SHOWN, len(before))).indices.tolist()
    shown = best if id in best else [*best[:-1], id]
    label = inside.reader.label
    choices = tuple(Candidate(one, label(one), float(before[one]), float(after[one])) for one in shown)
    kept = after > 0
    text = inside.reader.decode(written[:-1] if ended else written)
    cut = float(before[~kept].sum())
    return GenerationStep(id, label(id), text, choices, int(kept.sum()), cut, uniform, cache, ended)


def measure(state: Any) -> CacheSize:
    """The size of the state of a generation, as it is in memory, without buffers for tokens to come."""
    if isinstance(state, RecurrentState):
        used = sum(part.nbytes for layer in state.layers for part in layer)
        return CacheSize(state.length, used, state.k.nbytes + state.v.nbytes, (0,) * len(state.layers))
    cache, used, layers = state.cache, 0, []
    numbers = sorted({*cache.states, *cache.stored_layers})
    for layer in numbers:
        pair = cache.states[layer] if layer in cache.states else cache.stored(layer)[1]
        used += sum(tensor.numel() * tensor.element_size() for tensor in pair)
        layers.append(0 if layer in cache.states else pair[0].shape[2])
    memory = sum(tensor.nbytes for pair in cache.memory.values() for tensor in pair)
    return CacheSize(cache.length, used, memory, tuple(layers))
