"""Sampling against an independent filter, against transformers' warpers, and by frequency; settings of a search."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import EncoderDecoder
from regard.predict import SearchConfig, greedy, sample
from regard.predict.config import read_config
from regard.predict.sampling import Uniform, distribution, pick

BOS, EOS = 2, 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(vocab_size: int = 20, dtype: torch.dtype = torch.float64) -> EncoderDecoder:
    config = ModelConfig(vocab_size=vocab_size, dim=16, layers=2, heads=2, ff_dim=32, dropout=0.0, embed_dropout=0.0)
    return EncoderDecoder(config).to(dtype).eval()


def padded(rows: int = 7, longest: int = 8) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, longest + 1, (rows,))
    lengths[0] = longest
    return torch.randint(4, 20, (rows, longest)), torch.arange(longest) < lengths[:, None]


def filtered(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition, token by token: temperature, then the k likeliest, then the nucleus of what is left."""
    weights = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: top_k or len(order)]
    total, nucleus, held = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        nucleus.append(token)
        held += weights[token] / total
        if held >= top_p:
            break
    whole = sum(weights[token] for token in nucleus)
    return [weights[token] / whole if token in nucleus else 0.0 for token in range(len(weights))]


SETTINGS = [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.7), (0.8, 7, 0.5), (1.3, 1, 0.9), (1.0, 99, 1e-6)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_distribution_is_the_definitions(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(30, 25, dtype=torch.float64) * 2
    config = SearchConfig(sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = [filtered(row, temperature, top_k, top_p) for row in logits.tolist()]
    torch.testing.assert_close(distribution(logits, config), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(30, 25, dtype=torch.float64) * 2
    scores = process.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = process.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = process.TopPLogitsWarper(top_p)(None, scores)
    config = SearchConfig(sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(distribution(logits, config), scores.softmax(dim=-1))


def test_equally_likely_tokens_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for config in (SearchConfig(sample=True, top_k=2), SearchConfig(sample=True, top_p=0.6)):
        assert (distribution(logits, config) > 0).tolist() == [[True, True, True, False]]


def test_a_temperature_near_zero_takes_the_likeliest() -> None:
    logits = torch.randn(5, 9)
    chosen = distribution(logits, SearchConfig(sample=True, temperature=1e-320))
    assert (chosen == torch.nn.functional.one_hot(logits.argmax(1), 9)).all()


def test_pick_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for chance, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.74, 3), (0.75, 4), (1 - 2**-53, 4)):
        assert pick(probabilities, torch.tensor([chance], dtype=torch.float64)).tolist() == [token]


def test_draws_have_the_models_frequencies() -> None:
    """Pearson's chi-squared over the first token of 4,000 draws, well within its mean plus five deviations."""
    model, source = make_model(), torch.tensor([[5, 6, 7]])
    config = SearchConfig(sample=True, n_best=4000, max_length=1, temperature=1.5, top_k=8, seed=11)
    counts: Counter[int] = Counter((one.tokens or [EOS])[0] for one in sample(model, source, None, config, BOS, EOS)[0])
    with torch.inference_mode():
        logits = model(source, torch.tensor([[BOS]]))[0, -1].tolist()
    expected = {token: 4000 * p for token, p in enumerate(filtered(logits, 1.5, 8, 1.0)) if p > 0}
    assert set(counts) <= set(expected) and len(expected) == 8
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    assert statistic < 7 + 5 * math.sqrt(2 * 7)


def test_a_line_does_not_depend_on_its_neighbours() -> None:
    model, (source, is_real) = make_model(), padded()
    config = SearchConfig(sample=True, n_best=3, max_length=12, top_p=0.95, seed=4)
    whole = sample(model, source, is_real, config, BOS, EOS)
    order = torch.randperm(7)
    mixed = sample(model, source[order], is_real[order], config, BOS, EOS, lines=order.tolist())
    for row in range(7):
        alone = sample(model, source[row : row + 1, is_real[row]], None, config, BOS, EOS, lines=[row])[0]
        for other in (alone, mixed[order.tolist().index(row)]):
            assert [one.tokens for one in other] == [one.tokens for one in whole[row]]
            assert [one.score for one in other] == pytest.approx([one.score for one in whole[row]], abs=1e-9)


def test_seed_line_and_draw_each_change_the_numbers() -> None:
    source = torch.tensor([[5, 6, 7]] * 2)
    model = make_model()

    def sample_token(seed: int) -> list[list[int]]:
        config = SearchConfig(sample=True, n_best=2, max_length=10, seed=seed)
        return [one.tokens for some in sample(model, source, None, config, BOS, EOS) for one in some]

    assert sample_token(1) == sample_token(1) != sample_token(2)
    numbers = Uniform(1, [0, 1], 2).following(150)
    assert len(numbers.unique()) == 600 and numbers.min() >= 0 and numbers.max() < 1
    assert torch.equal(Uniform(1, [1], 2).following(150), numbers[2:])  # in another batch


def test_one_token_to_choose_from_is_greedy_search() -> None:
    model, (source, is_real) = make_model(), padded()
    found = sample(model, source, is_real, SearchConfig(sample=True, top_k=1, max_length=9), BOS, EOS)
    expected = greedy(model, source, is_real, bos=BOS, eos=EOS, limit=9)
    assert [some[0].tokens for some in found] == expected


def test_samples_are_scored_by_the_model_and_sorted() -> None:
    model, (source, is_real) = make_model(), padded()
    config = SearchConfig(sample=True, n_best=4, temperature=0.7, top_k=9, length_penalty=0.6, max_length=9)
    for row, some in enumerate(sample(model, source, is_real, config, BOS, EOS)):
        assert [one.score for one in some] == sorted((one.score for one in some), reverse=True)
        for one in some:
            tokens = [*one.tokens, EOS] if one.finished else one.tokens
            with torch.inference_mode():
                logits = model(source[row : row + 1, is_real[row]], torch.tensor([[BOS, *tokens[:-1]]]))[0]
            total = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].sum().item()
            assert one.log_probability == pytest.approx(total, abs=1e-9)
            assert one.score == pytest.approx(total / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-9)


def test_rules_bind_samples_too() -> None:
    model, (source, is_real) = make_model(), padded()
    config = SearchConfig(sample=True, n_best=3, min_length=3, max_length=8, no_repeat_ngram=1)
    for some in sample(model, source, is_real, config, BOS, EOS):
        for one in some:
            assert 3 <= len(one.tokens) <= 8 and len(set(one.tokens)) == len(one.tokens)
    assert sample(model, source[:0], None, config, BOS, EOS) == []


def test_broken_weights_are_an_error() -> None:
    model = make_model()
    with torch.no_grad():
        model.target_embedding.tokens.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        sample(model, *padded(), SearchConfig(sample=True), BOS, EOS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam": 0}, "beam = 0: must be 1 or more"),
        ({"beam": 2.5}, "beam = 2.5: expected an integer"),
        ({"n_best": 3}, "n_best = 3: .*set beam = 3"),
        ({"max_length": 0}, "max_length = 0: must be 1 or more"),
        ({"max_length": 3, "min_length": 4}, "max_length = 3: .*min_length = 4"),
        ({"max_ratio": -1.0}, r"max_ratio = -1.0: must be 0 or more"),
        ({"coverage_penalty": -0.1}, "coverage_penalty = -0.1: must be 0 or more"),
        ({"length_penalty": 1000}, "length_penalty = 1000.0: must be from -10 to 10"),
        ({"length_penalty": float("nan")}, "length_penalty = nan: must be a finite number"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram = -1: must be 0 or more"),
        ({"sample": True, "temperature": 0.0}, "temperature = 0.0: must be greater than 0; top_k = 1"),
        ({"sample": True, "top_p": 1.5}, "top_p = 1.5: must be greater than 0 and at most 1"),
        ({"sample": True, "top_k": -2}, "top_k = -2: must be 0 or more"),
        ({"sample": True, "seed": -2}, "seed = -2: must be 0 or more"),
        ({"sample": True, "beam": 4}, "beam = 4: has no effect on sampling; .*sample = false"),
        ({"top_k": 4}, "top_k = 4: has no effect on beam search; .*sample = true"),
        ({"bean": 4}, "decode.bean: unknown setting; did you mean 'beam'"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(values)


def test_a_change_of_kind_drops_what_was_for_the_other() -> None:
    recipe = {"beam": 5, "early_stopping": True, "length_penalty": 0.6}
    assert read_config(recipe, {"sample": True, "top_k": 3}) == SearchConfig(sample=True, top_k=3, length_penalty=0.6)
    assert read_config(recipe, {"beam": 2}) == SearchConfig(beam=2, early_stopping=True, length_penalty=0.6)
    drawn = {"sample": True, "top_p": 0.9, "length_penalty": 0.6}
    assert read_config(drawn, {"beam": 2}) == SearchConfig(beam=2, length_penalty=0.6)
    assert read_config(drawn, {"top_k": 2}) == SearchConfig(sample=True, top_p=0.9, top_k=2, length_penalty=0.6)
    with pytest.raises(UserError, match="beam = 3: has no effect on sampling"):
        read_config(recipe, {"sample": True, "beam": 3})
