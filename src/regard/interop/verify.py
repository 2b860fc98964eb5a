"""Verification of an export: the exported model against the run that it comes from, on the same inputs.

    values    logits, log-probabilities, or the numbers of a regression, for the same tokens: the largest difference
    outputs   what a user gets, from text to text, with greedy search: how many are identical

An exported model has the interface of a model and its folder is a bundle, so one comparison serves every format; that
for transformers is a `Peer`. The logits of a decoder are computed in two steps, which covers the keys and values that
one step hands to the next; transformers computes them in one.
Batches have several sizes and lengths, padding included. CTranslate2 has no logits to compare: there the values are the
log-probabilities of the tokens of the run's own greedy outputs, or of the texts of a language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import pad_rows
from regard.interop.check import NEW_TOKENS, TEXTS, Agreement, Difference, measure
from regard.interop.peer import Peer
from regard.predict.beam import greedy
from regard.predict.bundle import Bundle, Predictor
from regard.predict.captioner import Captioner, as_input
from regard.predict.classifier import ImageClassifier, TextClassifier
from regard.predict.config import SearchConfig
from regard.predict.ctranslate2 import CTranslate2Model
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.regressor import Regressor, autoregress
from regard.predict.tagger import Tagger
from regard.predict.translator import Translator
from regard.text.tokenizer import MASK_NAMES

INPUTS = 32  # that are compared
ROWS = 7  # of a batch: the last one is smaller
STEPS = 8  # of a regression
TOLERANCE, INT8_TOLERANCE = 1e-4, 0.15  # of the largest value
MEAN_TOLERANCE = 0.05  # of int8 log-probabilities, nats per token: probabilities that are off by 5 % on average


def generated_inputs(bundle: Bundle, count: int) -> list[Any]:
    """Inputs for a model whose data is not here: sentences, random pixels, random vectors."""
    config, generator = bundle.config, torch.Generator().manual_seed(0)
    if config.input == "tokens":
        return [*TEXTS, *(f"{one} {other}" for one, other in pairwise((*TEXTS, *reversed(TEXTS))))][:count]
    if config.input == "patches":
        shape = (count, config.channels, config.image_size, config.image_size)
        return [*torch.randint(256, shape, generator=generator, dtype=torch.uint8)]
    length = bundle.tables["data"].get("context") or 5
    return [torch.randn(length, config.feature_dim, generator=generator) for _ in range(count)]


def fitting(bundle: Bundle, inputs: Sequence[Any]) -> list[Any]:
    """Texts cut to what the model can read, with space for what it generates and for a mask."""
    if bundle.config.input != "tokens":
        return [*inputs]
    config, limits = bundle.config, bundle.limits
    room = limits.source or config.max_length
    if config.architecture == "encoder" and config.output_head == "tokens":
        room = limits.context
    room = limits.context // 2 if config.architecture == "decoder" else room - 3
    texts = []
    for text in inputs:
        for name in MASK_NAMES:
            text = text.replace(name, "")
        ids = bundle.source.encode(text)
        texts.append(text if len(ids) <= room else bundle.source.decode(ids[: max(1, room)]))
    return [text for text in texts if text.strip() and bundle.source.encode(text)]


@torch.inference_mode()
def compare_values(bundle: Bundle, other: Bundle | Peer, inputs: Sequence[Any], *, int8: bool, peer: str) -> Difference:
    """The logits or values of both models, or log-probabilities."""
    tolerance = INT8_TOLERANCE if int8 else TOLERANCE
    if isinstance(other, Bundle) and isinstance(other.model, CTranslate2Model):
        tolerance = MEAN_TOLERANCE if int8 else TOLERANCE
        pairs = _log_probabilities(bundle, other, inputs)
        return measure(pairs, peer=peer, tolerance=tolerance, on_average=int8)
    return measure(_values(bundle, other, inputs), peer=peer, tolerance=tolerance)


def _values(bundle: Bundle, other: Bundle | Peer, inputs: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
    """The logits or values of real tokens by both, batch by batch."""
    model: Any = bundle.model
    exported: Any = other.model
    pairs: list[tuple[Tensor, Tensor]] = []
    for source, is_real in _batches(bundle, inputs, 1 if isinstance(other, Peer) and other.mixes_padding else ROWS):
        if isinstance(other, Peer):
            is_pair = bundle.config.architecture == "encoder-decoder"
            target, keep = _target(bundle, source, is_real) if is_pair else (source, is_real)
            ours = (model(source, target, is_real, keep) if is_pair else model(source, is_real)).float()
            theirs = other.values(source, is_real, target, keep)
            keep = keep if ours.dim() == 3 else None
        elif bundle.config.architecture == "encoder":
            ours, theirs = model(source, is_real).float(), exported(source, is_real)
            keep = is_real if ours.dim() == 3 else None
        else:
            if bundle.config.architecture == "decoder":
                target, keep, states = source, is_real, [model.start(), exported.start()]
            else:
                target, keep = _target(bundle, source, is_real)
                states = [one.start(source, is_real) for one in (model, exported)]
            parts = [part for part in target.tensor_split(2, dim=1) if part.shape[1]]
            ours, theirs = (
                torch.cat([one.step(part, state).float() for part in parts], dim=1)
                for one, state in zip((model, exported), states, strict=True)
            )
        pairs.append((ours, theirs) if keep is None else (ours[keep], theirs[keep]))
    return pairs


def _log_probabilities(bundle: Bundle, other: Bundle, inputs: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """log p of each token by both: of the greedy outputs of an encoder-decoder, or of the texts themselves."""
    texts: Sequence[Any] = inputs
    if bundle.config.architecture != "decoder":
        texts = [*zip(inputs, _outputs(bundle.predictor, inputs), strict=True)]
    predictors: tuple[Any, ...] = (bundle.predictor, other.predictor)
    scores = ([score.tokens for score in one.score(texts)] for one in predictors)
    ours, theirs = (torch.tensor([token.log_probability for row in rows for token in row]) for rows in scores)
    return [(ours, theirs)]


def _batches(bundle: Bundle, inputs: Sequence[Any], size: int = ROWS) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What the model reads: [B, N] ids, [B, N, features] or [B, C, side, side], and which of it is real."""
    config, rows = bundle.config, [*inputs]
    if config.input == "tokens":
        adds = {"encoder": (True, True), "decoder": (False, False)}.get(config.architecture, (False, True))
        if config.output_head == "tokens" and config.architecture == "encoder":
            rows = [torch.tensor(MaskPredictor(bundle).encode(_with_mask(text))) for text in inputs]
        else:
            ids = bundle.source.encode_batch(inputs, add_bos=adds[0], add_eos=adds[1])
            rows = [torch.tensor(row) for row in ids]
    for at in range(0, len(rows), size):
        some = rows[at : at + size]
        if config.input == "patches":
            yield as_input(torch.stack(some)).to(bundle.device), None
            continue
        source, is_real = pad_rows(some)
        yield source.to(bundle.device), None if bool(is_real.all()) else is_real.to(bundle.device)


def _target(bundle: Bundle, source: Tensor, is_real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the decoder of an encoder-decoder reads, [B, T] or [B, T, features]: its own output; and which is real."""
    model: Any = bundle.model
    if bundle.config.output_head == "values":
        values = autoregress(model, source, is_real, STEPS)
        return torch.cat((torch.zeros_like(values[:, :1]), values[:, :-1]), dim=1), None
    (bos, eos), limit = bundle.target_frame, _new_tokens(bundle)
    rows = greedy(model, source, is_real, bos=bos, eos=eos, limit=limit)
    return pad_rows([torch.tensor([bos, *row])[:limit] for row in rows])


def _with_mask(text: str) -> str:
    return f"{text} {MASK_NAMES[0]}"


def compare_outputs(
    bundle: Bundle, other: Bundle | Peer, inputs: Sequence[Any], *, int8: bool = False, **options: str
) -> Agreement:
    """The greedy outputs of both; none of an encoder whose output is vectors."""
    if bundle.predictor_class is None:
        return Agreement.of((), (), (), reason="the outputs are vectors", **options)
    names = [one if isinstance(one, str) else f"input {number}" for number, one in enumerate(inputs, start=1)]
    if isinstance(other, Bundle) and isinstance(bundle.predictor, Regressor):
        tolerance = INT8_TOLERANCE if int8 else TOLERANCE
        return _compare_numbers(_forecasts(bundle, inputs), _forecasts(other, inputs), tolerance, **options)
    if isinstance(other, Peer):
        theirs = other.outputs(inputs, _new_tokens(bundle))
    else:
        theirs = _outputs(other.predictor, inputs)
    return Agreement.of(names, _outputs(bundle.predictor, inputs), theirs, **options)


def _new_tokens(bundle: Bundle) -> int:
    """How many tokens are generated for an input, within the positions of the model."""
    if bundle.config.architecture == "decoder":
        return min(NEW_TOKENS, max(1, bundle.limits.context // 2))
    return min(NEW_TOKENS, bundle.limits.positions or NEW_TOKENS)


def _outputs(predictor: Predictor[Any, Any], inputs: Sequence[Any]) -> list[str]:
    """One output for each input, as text; a class or a token without its probability."""
    search = SearchConfig(max_length=_new_tokens(predictor.bundle))  # and not what [decode] of the recipe says
    match predictor:
        case Translator():
            return [one.text for one in predictor.predict(inputs, config=search)]
        case Generator():
            return [one.text for one in predictor.predict(inputs, config=replace(search, sample=True, top_k=1))]
        case TextClassifier():
            return [one.label for one in predictor.predict(inputs)]
        case Tagger():
            return [" ".join(one.tags) for one in predictor.predict([text.split() for text in inputs])]
        case MaskPredictor():
            return [one.masks[-1][0].token for one in predictor.predict([*map(_with_mask, inputs)], top=1)]
        case ImageClassifier():
            pixels = torch.stack([*inputs])
            best = predictor.probabilities(lambda begin, end: pixels[begin:end], len(inputs)).argmax(dim=1)
            return [predictor.classes[number] for number in best.tolist()]
        case Captioner():
            batches = _batches(predictor.bundle, inputs)
            return [one.text for batch in batches for one in predictor.decode(*batch, config=search)]
    raise TypeError(type(predictor))


@torch.inference_mode()
def _forecasts(bundle: Bundle, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The numbers that follow each input."""
    model: Any = bundle.model
    return [row.float() for batch in _batches(bundle, inputs) for row in autoregress(model, *batch, STEPS)]


def _compare_numbers(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float, **options: str) -> Agreement:
    """Which outputs agree to a part of the largest number."""
    most = tolerance * max(1.0, *(float(row.abs().max()) for row in ours))
    pairs = [*enumerate(zip(ours, theirs, strict=True), start=1)]
    different = [(number, *pair) for number, pair in pairs if not float((pair[0] - pair[1]).abs().max()) <= most]
    first = next(((f"input {number}", _as_text(one), _as_text(other)) for number, one, other in different), None)
    return Agreement(len(pairs) - len(different), len(pairs), first, within=tolerance, **options)


def _as_text(values: Tensor) -> str:
    return " ".join(f"{value:.4g}" for value in values.flatten().tolist())
