"""Prediction through CTranslate2: the search itself runs in C++, on a folder that `regard export --ctranslate2` writes.

    Translator    beam search or greedy search of a batch in one call         `regard translate DIR`
    Generator     sampling, one token after the other                         `regard generate DIR`

The engine ranks the hypotheses of a beam by log P alone; here the `beam` best are ranked again by the score of
`regard.predict.config`, so a length penalty has its usual meaning. What the engine cannot do is refused by name.
Sampling has its random numbers from the engine, which cannot be seeded for a single text: a seed is refused too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import RECIPE, model_config
from regard.predict.bundle import Bundle, Predictor
from regard.predict.config import SearchConfig
from regard.predict.constraints import Constraints
from regard.predict.ctranslate2_search import Names, open_engine, position_limit, refuse, search
from regard.predict.generator import LIMIT, Generator, Overflow, SampleWriter, Token
from regard.predict.outputs import Hypothesis
from regard.predict.scoring import SequenceScore
from regard.predict.translator import Translator
from regard.text.tokenizer import Tokenizer

SCORING: dict[str, Any] = {"max_batch_size": 2048, "batch_type": "tokens", "max_input_length": 0}  # 0: nothing is cut


def load_ctranslate2(
    folder: str | Path, device: str | torch.device, recipe: Mapping[str, Any], tokenizers: Mapping[str, Tokenizer]
) -> Bundle:
    """The model in a folder for CTranslate2, whose positions may end earlier than those of the model it comes from."""
    model: Any = CTranslate2Model(folder, device, recipe)
    bundle, config = Bundle(model, tokenizers, recipe, folder, predictor_of(model.config)), model.config
    if bundle.limits.positions is None and (limit := position_limit(config)) is not None:
        bundle.limits = replace(bundle.limits, positions=limit, source=limit, context=min(bundle.limits.context, limit))
    return bundle


def predictor_of(config: ModelConfig) -> type[Predictor[Any, Any]]:
    return CTranslate2Generator if config.architecture == "decoder" else CTranslate2Translator


class CTranslate2Model(nn.Module):
    """Where a bundle has its model: the config, and an engine that has the weights."""

    def __init__(self, folder: str | Path, device: str | torch.device, recipe: Mapping[str, Any]) -> None:
        super().__init__()
        self.config, self.folder = model_config(recipe, Path(folder) / RECIPE), str(folder)
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)  # a bundle asks for the device of one
        is_cuda = torch.device(device).type == "cuda"
        self.threads = 1 if is_cuda else torch.get_num_threads()
        self.engine = open_engine(folder, self.config, "cuda" if is_cuda else "cpu", self.threads)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of a decoder [B, N, vocab_size], which evaluation needs; each core computes some of the rows."""
        parts = tokens.split(max(1, -(-len(tokens) // self.threads)))
        with ThreadPoolExecutor(len(parts)) as pool:
            logits = pool.map(self.engine.forward_batch, (part.tolist() for part in parts))
            return torch.cat([torch.from_numpy(np.asarray(one)) for one in logits])


class CTranslate2Translator(Translator):
    """A `Translator` whose search runs in the engine."""

    ENSEMBLES = False

    def __init__(self, bundle: Bundle, config: SearchConfig | None = None) -> None:
        super().__init__(bundle, config)
        self.sources, self.targets = Names(self.source), Names(self.target)
        self.search_engine: Any = self.model.engine

    def _search(
        self, ids: Sequence[Sequence[int]], lines: Sequence[int], most: int, config: SearchConfig, first: int,
        constraints: Constraints | None,
    ) -> Iterator[tuple[Sequence[int], list[list[Hypothesis]]]]:  # fmt: skip
        if constraints is not None:
            raise UserError("prefixes and constraints: CTranslate2 does not compute them; remove them, or use the run")
        yield lines, search(self.search_engine, self.sources, self.targets, [ids[row] for row in lines], config)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[SequenceScore]:
        sources, targets = self._encode_pairs(pairs)
        results = self.search_engine.score_batch(
            [self.sources.of(ids) for ids in sources], [self.targets.of(ids[1:-1]) for ids in targets], **SCORING
        )
        return [
            SequenceScore.of(self.target, ids[1:], list(one.log_probs))
            for ids, one in zip(targets, results, strict=True)
        ]


class CTranslate2Generator(Generator):
    """A `Generator` whose sampling runs in the engine; samples of a prompt are generated one after the other."""

    SEEDS = False
    RANKS = False

    def __init__(self, bundle: Bundle, config: SearchConfig | None = None) -> None:
        super().__init__(bundle, config)
        self.fixed, self.search_engine = False, cast(Any, self.model.engine)

    @cached_property
    def names(self) -> Names:
        return Names(self.tokenizer)

    def _piece_scores(self, pieces: Sequence[list[int]], counted: Sequence[int]) -> list[list[float]]:
        results = self.search_engine.score_batch([self.names.of(ids) for ids in pieces], **SCORING)
        return [list(one.log_probs)[before:] for one, before in zip(results, counted, strict=True)]

    def _stream(
        self, ids: list[int], config: SearchConfig, stops: Sequence[str], overflow: Overflow, context: int, prompt: int,
        top: int = 0,
    ) -> Iterator[Token]:  # fmt: skip
        refuse(config, ("seed",))
        if overflow != "stop":
            raise UserError(f"overflow = {overflow!r}: CTranslate2 ends where the context does; use overflow = 'stop'")
        limit, room = config.max_length or LIMIT, context - len(ids) + 1
        ends = (limit, "limit") if limit <= room else (room, "context")
        for number in range(config.n_best):
            writer = SampleWriter(self.tokenizer, stops, *ends, number, prompt)
            steps = self.search_engine.generate_tokens(
                self.names.of(ids), max_length=ends[0], min_length=config.min_length, sampling_topk=config.top_k,
                sampling_topp=config.top_p, sampling_temperature=config.temperature,
                no_repeat_ngram_size=config.no_repeat_ngram, return_log_prob=True,
                end_token=[] if self.tokenizer.eos is None else [self.tokenizer.eos],
            )  # fmt: skip
            for step in steps:
                yield writer.add(step.token_id, step.log_prob)
                if writer.ended:
                    break
            if not writer.ended:  # the engine does not report </s>
                yield writer.add(self.tokenizer.special_id("eos"), 0.0)
