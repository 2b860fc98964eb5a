"""Search in CTranslate2 without PyTorch: what `regard translate DIR "one line"` starts in a fifth of the time.

`import torch` takes longer than everything else that a short command does, and a folder that `regard export
--ctranslate2` writes does not need it: a tokenizer makes token names of the text, the engine searches, and a tokenizer
makes text of what it finds. `PlainTranslator` is that and no more; `regard.predict.ctranslate2` has the predictors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from regard.errors import MissingExtra, UserError
from regard.models.config import ModelConfig
from regard.models.recipe import RECIPE, model_config, read_recipe
from regard.predict.config import SearchConfig, read_config, recipe_config
from regard.predict.outputs import Hypothesis, Limits, ScoredText, TextPrediction
from regard.settings import to_dict
from regard.text.sentencepiece import load_tokenizers
from regard.text.tokenizer import Tokenizer

MODEL = "model.bin"  # in the folder
POSITIONS = 1024  # rows of a table of positions that have no limit of their own


def is_ctranslate2(folder: str | Path) -> bool:
    return (Path(folder) / MODEL).is_file()


def open_engine(folder: str | Path, config: ModelConfig, device: str, threads: int) -> Any:
    """The engine of a folder; like ours, one core per batch, which is faster than all cores on each."""
    try:
        import ctranslate2
    except ImportError:
        raise MissingExtra("ctranslate2", "ctranslate2", str(folder)) from None
    kind = ctranslate2.Generator if config.architecture == "decoder" else ctranslate2.Translator
    return kind(str(folder), device=device, inter_threads=threads, intra_threads=1)


def position_limit(config: ModelConfig) -> int | None:
    """Where the positions of an exported model end, which may be earlier than those of the model it comes from."""
    has_table = config.position not in ("relative", "t5") and not (
        config.architecture == "decoder" and config.position in ("rope", "alibi")
    )
    return config.position_limit or (POSITIONS if has_table else None)


class Names:
    """Token names, which the engine reads and writes, and ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name, self.id = cache(tokenizer.name), cache(tokenizer.token_to_id)

    def of(self, ids: Sequence[int]) -> list[str]:
        return [self.name(id) for id in ids]

    def ids(self, names: Sequence[str]) -> list[int]:
        return [cast(int, self.id(name)) for name in names]


def refuse(config: SearchConfig, names: Sequence[str]) -> None:
    """An error for settings that the engine does not have."""
    for name in names:
        value, plain = getattr(config, name), type(config).__dataclass_fields__[name].default
        if value != plain:
            raise UserError(f"{name} = {value}: CTranslate2 does not compute it; remove it, or use the run itself")


def search(
    engine: Any, sources: Names, targets: Names, lines: Sequence[Sequence[int]], config: SearchConfig
) -> list[list[Hypothesis]]:
    """The n best hypotheses of each line by our score; a length counts </s>, which one of `most` tokens lacks."""
    refuse(config, ("sample", "coverage_penalty"))
    if not lines:
        return []
    most = max(config.limit(len(ids)) for ids in lines)
    # By log P alone the first finished is the best, and the engine may end early; else all are ranked again.
    kept = config.n_best if config.length_penalty == 0 else config.beam
    # Source tokens of a batch. In int8 the states are most of the memory that a step reads, and those of a small batch
    # stay in the cache of a core; in fp32 it is the weights, which a large batch reads less often.
    room = max(512 // config.beam, 256) if "int8" in engine.compute_type else 2048
    results = engine.translate_batch(
        [sources.of(ids) for ids in lines], max_batch_size=room, batch_type="tokens", beam_size=config.beam,
        num_hypotheses=kept, length_penalty=0.0, return_scores=True, max_decoding_length=most,
        max_input_length=0, min_decoding_length=max(config.min_length, 1), no_repeat_ngram_size=config.no_repeat_ngram,
    )  # fmt: skip

    def hypothesis(names: Sequence[str], total: float) -> Hypothesis:
        tokens = targets.ids(names)
        return Hypothesis(tokens, total / config.penalty(min(len(tokens) + 1, most)), total, len(tokens) < most)

    ranked = []
    for one in results:
        found = map(hypothesis, one.hypotheses, one.scores)
        ranked.append(sorted(found, key=lambda one: -one.score)[: config.n_best])
    return ranked


@dataclass(frozen=True)
class PlainBundle:
    """The part of a `regard.predict.bundle.Bundle` that the command reads."""

    name: str
    tables: Mapping[str, Any]
    limits: Limits


class PlainTranslator:
    """From lines to translations: the part of a `Translator` that the command uses, without constraints."""

    def __init__(
        self,
        folder: str,
        recipe: Mapping[str, Any],
        model: ModelConfig,
        tokenizers: Mapping[str, Tokenizer],
        device: str,
        changes: Mapping[str, Any],
    ) -> None:
        positions = position_limit(model)
        threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        self.engine = open_engine(folder, model, device, threads)
        self.bundle = PlainBundle(
            folder, {"data": {}, **recipe}, Limits(positions, positions, positions or model.max_length)
        )
        self.source = tokenizers.get("source") or tokenizers["tokenizer"]
        self.target = tokenizers.get("target") or tokenizers["tokenizer"]
        config = recipe_config(recipe, str(Path(folder) / RECIPE))
        self.config = (read_config(to_dict(config), changes) if changes else config).within(positions)
        self.names = Names(self.source), Names(self.target)

    def predict(
        self, inputs: Sequence[str], *, failed: dict[int, str], done: Callable[[Sequence[int]], object], **options: Any
    ) -> list[TextPrediction]:
        """A translation of each line; a blank line gives "", as one that is too long, whose row is in `failed`."""
        ids = self.source.encode_batch(inputs, add_eos=True)
        failed.update(
            {row: reason for row, line in enumerate(ids) if (reason := self.bundle.limits.too_long(len(line)))}
        )
        rows = [row for row, text in enumerate(inputs) if text.strip() and row not in failed]
        predictions = [TextPrediction((ScoredText("", 0.0, 0.0),)) for _ in ids]
        for row, some in zip(
            rows, search(self.engine, *self.names, [ids[row] for row in rows], self.config), strict=True
        ):
            texts = self.target.decode_batch(one.tokens for one in some)
            scored = (ScoredText(text, one.score, one.log_probability) for text, one in zip(texts, some, strict=True))
            predictions[row] = TextPrediction(tuple(scored))
        done(rows)
        return predictions


def open_plain(folder: str, device: str | None, changes: Mapping[str, Any]) -> PlainTranslator | None:
    """The translator of a folder for CTranslate2; None if it is not an encoder-decoder with its tokenizers."""
    recipe = read_recipe(folder, saved=True)
    model, tokenizers = model_config(recipe, Path(folder) / RECIPE), load_tokenizers(folder)
    if model.architecture != "encoder-decoder" or not tokenizers:
        return None
    return PlainTranslator(folder, recipe, model, tokenizers, device or "auto", changes)
