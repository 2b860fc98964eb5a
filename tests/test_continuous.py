"""Continuous batching: prompts that join and leave a running batch get the tokens that they get alone."""

from __future__ import annotations

import random

import pytest
import torch

from regard.models.config import ModelConfig
from regard.models.transformer import Decoder
from regard.predict import SearchConfig
from regard.predict.bundle import Bundle
from regard.predict.continuous import ContinuousBatch
from regard.predict.generator import Generator, Sample
from regard.text.tokenizer import Tokenizer

pytestmark = pytest.mark.grid

BYTES = Tokenizer.train(["To be, or not to be, that is the question.\n", "한국어 텍스트와 😀 이모지\n"], "byte")
SHAPE = {"architecture": "decoder", "dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "norm_order": "pre"}
PROMPTS = ["To be", "한국어", "q", "that is the question, or not", "😀 이모지", "be" * 30]


def make(**changes: object) -> Generator:
    torch.manual_seed(3)
    config = ModelConfig(**{**SHAPE, "max_length": 128, "vocab_size": len(BYTES), "position": "rope", **changes})
    return Generator(Bundle(Decoder(config).double(), {"tokenizer": BYTES}))


def run(
    generator: Generator, requests: list[tuple[str, SearchConfig, tuple[str, ...]]], seed: int = 0
) -> list[list[Sample]]:
    """Every request, joining at a random step."""
    batch, choose = ContinuousBatch(generator), random.Random(seed)
    results: list[dict[int, Sample]] = [{} for _ in requests]
    waiting = list(range(len(requests)))
    choose.shuffle(waiting)
    while waiting or batch.rows:
        tokens = batch.step()
        if waiting and choose.random() < 0.4:
            number = waiting.pop()
            prompt, config, stops = requests[number]
            tokens += batch.join(number, BYTES.encode(prompt), config, stops)
        for number, token in tokens:
            results[number].setdefault(token.sample, Sample()).take(token)
    assert not batch.cache._layers and not batch.cache.states, "an empty batch keeps no memory"
    return [[samples[index] for index in sorted(samples)] for samples in results]


@pytest.mark.parametrize("position", ["rope", "learned", "alibi", "sinusoidal", "t5", "relative", "none"])
def test_a_prompt_gets_the_tokens_that_it_gets_alone(position: str) -> None:
    generator = make(position=position)
    requests = [
        (prompt, SearchConfig(sample=True, n_best=1 + number % 3, seed=number, max_length=5 + 7 * number), ())
        for number, prompt in enumerate(PROMPTS)
    ]
    for seed in range(3):
        for (prompt, config, _), samples in zip(requests, run(generator, requests, seed), strict=True):
            alone = generator.generate(prompt, config=config)
            assert [(one.ids, one.text, one.ended) for one in samples] == [
                (one.ids, one.text, one.ended) for one in alone
            ]
            torch.testing.assert_close(
                [one.log_probabilities for one in samples], [one.log_probabilities for one in alone]
            )


@pytest.mark.parametrize(
    "changes",
    [{"window": 4}, {"kv_heads": 1}, {"experts": 2}, {"qk_norm": True}, {"mixer": "linear, full"},
     {"mixer": "performer, gated-linear"}],
)  # fmt: skip
def test_every_kind_of_attention(changes: dict[str, object]) -> None:
    generator = make(**changes)
    requests = [(prompt, SearchConfig(sample=True, top_k=1, max_length=20), ()) for prompt in PROMPTS]
    alone = [generator.generate(prompt, config=config)[0].ids for prompt, config, _ in requests]
    assert [samples[0].ids for samples in run(generator, requests)] == alone


def test_settings_of_each_request_are_its_own() -> None:
    generator = make()
    configs = [
        SearchConfig(sample=True, temperature=0.5, seed=3, max_length=20),
        SearchConfig(sample=True, top_p=0.5, max_length=20),
        SearchConfig(sample=True, top_k=3, max_length=20, min_length=10),
        SearchConfig(sample=True, no_repeat_ngram=1, max_length=20),
    ]
    requests = [("To be", config, stops) for config in configs for stops in ((), ("e",))]
    for (prompt, config, stops), samples in zip(requests, run(generator, requests), strict=True):
        (one,) = generator.generate(prompt, config=config, stops=stops)
        assert [(samples[0].ids, samples[0].text, samples[0].ended)] == [(one.ids, one.text, one.ended)]


def test_the_context_ends_a_generation() -> None:
    generator = make(max_length=16)
    config = SearchConfig(sample=True, top_k=1, max_length=50)
    ((sample,),) = run(generator, [("To be", config, ())])
    assert sample.ended == "context" and sample.ids == generator.generate("To be", config=config)[0].ids


def test_a_request_that_leaves_does_not_disturb_the_others() -> None:
    generator, config = make(), SearchConfig(sample=True, n_best=2, max_length=12)
    batch = ContinuousBatch(generator)
    samples: dict[tuple[int, int], list[int]] = {}
    for number, prompt in enumerate(PROMPTS[:4]):
        for request, token in batch.join(number, BYTES.encode(prompt), config):
            samples.setdefault((request, token.sample), []).append(token.id)
    for step in range(11):
        if step == 4:
            batch.leave(1)
            batch.leave(3)
            assert {row.request for row in batch.rows} == {0, 2}
        for request, token in batch.step():
            samples.setdefault((request, token.sample), []).append(token.id)
    for number in (0, 2):
        alone = generator.generate(PROMPTS[number], config=config)
        assert [samples[number, index] for index in (0, 1)] == [one.ids for one in alone]
