"""Beam search against brute force, a slow uncached search, the model's own probabilities and transformers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.interop.convert import config_to_hf, weights_to_hf
from regard.models.config import ModelConfig
from regard.models.folder import weights_of
from regard.models.transformer import EncoderDecoder, Recurrent
from regard.nn.trace import trace
from regard.predict import Hypothesis, SearchConfig
from regard.predict.beam import beam
from regard.predict.next_token import largest
from test_decode import slow_greedy

pytestmark = pytest.mark.grid

BOS, EOS = 2, 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Hidden:
    """The state of a recurrent model: nothing but a vector for each row."""

    vector: Tensor

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.vector = self.vector[rows]


class Minimal(nn.Module):
    """A GRU over what was written, begun from the mean of the source: no attention, no cache."""

    def __init__(self, vocab_size: int, dim: int = 8, sharpness: float = 4.0) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(vocab_size, dim), nn.GRUCell(dim, dim)
        self.out, self.sharpness = nn.Linear(dim, vocab_size), sharpness

    def start(self, source: Tensor, is_real: Tensor | None = None) -> Hidden:
        real = torch.ones_like(source) if is_real is None else is_real.long()
        total = (self.table(source) * real[..., None]).sum(dim=1)
        return Hidden(total / real.sum(dim=1, keepdim=True).clamp_min(1))

    def step(self, tokens: Tensor, state: Hidden) -> Tensor:
        state.vector = self.cell(self.table(tokens[:, 0]), state.vector)
        return self.out(state.vector)[:, None] * self.sharpness


def transformer(vocab_size: int = 20, dtype: torch.dtype = torch.float64, **changes: object) -> EncoderDecoder:
    """Random, but with moods: scaled logits make some continuations much likelier than others."""
    sizes = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
    config = ModelConfig(**{**sizes, "vocab_size": vocab_size, "logit_scale": 2.0, "tie_embeddings": False, **changes})  # type: ignore[arg-type]
    return EncoderDecoder(config).to(dtype).eval()


def recurrent(**changes: object) -> Recurrent:
    sizes = {
        "dim": 16,
        "layers": 1,
        "attention_score": "additive",
        "dropout": 0.0,
        "embed_dropout": 0.0,
        "vocab_size": 20,
    }
    return Recurrent(ModelConfig(**{**sizes, "architecture": "recurrent", **changes})).double().eval()  # type: ignore[arg-type]


def padded(rows: int = 6, longest: int = 9, vocab_size: int = 20) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, longest + 1, (rows,))
    lengths[0] = longest
    return torch.randint(4, vocab_size, (rows, longest)), torch.arange(longest) < lengths[:, None]


@torch.inference_mode()
def log_probability(model: nn.Module, source: Tensor, is_real: Tensor | None, tokens: list[int]) -> float:
    """Σ log p by teacher forcing, without a cache where the model has a forward pass; `tokens` with </s>, if any."""
    read = torch.tensor([[BOS, *tokens[:-1]]])
    if isinstance(model, EncoderDecoder | Recurrent):
        logits = model(source, read, is_real)[0]
    else:
        state = model.start(source, is_real)
        logits = torch.cat([model.step(read[:, at : at + 1], state)[0] for at in range(len(tokens))])
    return logits.log_softmax(dim=-1)[torch.arange(len(tokens)), torch.tensor(tokens)].sum().item()


def with_end(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha  # Wu et al. 2016, eq. 14


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0, -0.5])
@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_a_beam_that_holds_everything_finds_what_brute_force_finds(kind: str, alpha: float) -> None:
    vocab_size, longest = 4, 3
    model = Minimal(vocab_size).double() if kind == "recurrent" else transformer(vocab_size)
    source = torch.tensor([[1, 2, 0]])
    others = [token for token in range(vocab_size) if token != EOS]
    endings = [[*before, EOS] for size in range(longest) for before in itertools.product(others, repeat=size)]
    endings += [list(whole) for whole in itertools.product(others, repeat=longest)]  # cut off at the limit
    ranked = sorted(((log_probability(model, source, None, one), one) for one in endings),
                    key=lambda pair: -pair[0] / penalty(len(pair[1]), alpha))  # fmt: skip
    config = SearchConfig(beam=vocab_size**longest, n_best=len(endings), max_length=longest, length_penalty=alpha)
    found = beam(model, source, None, config, BOS, EOS)[0]
    assert [with_end(one) for one in found] == [one for _, one in ranked]
    for one, (total, tokens) in zip(found, ranked, strict=True):
        assert one.log_probability == pytest.approx(total, abs=1e-9)
        assert one.score == pytest.approx(total / penalty(len(tokens), alpha), abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beam_one_is_greedy(dtype: torch.dtype, alpha: float) -> None:
    model = transformer(dtype=dtype)
    source, is_real = padded(16)
    config = SearchConfig(max_length=12, length_penalty=alpha)
    found = [one.tokens for (one,) in beam(model, source, is_real, config, BOS, EOS)]
    assert found == [slow_greedy(model, row, real, 12) for row, real in zip(source, is_real, strict=True)]
    assert len({len(tokens) for tokens in found}) > 1  # some end early, so that rows left the batch


@pytest.mark.parametrize(
    "model", [lambda: transformer(), lambda: transformer(position="t5"), lambda: Minimal(20), lambda: recurrent()]
)
def test_scores_are_the_models_own_probabilities(model) -> None:  # type: ignore[no-untyped-def]
    model = model().double()
    source, is_real = padded()
    config = SearchConfig(beam=5, n_best=5, length_penalty=0.6, max_length=10)
    for row, found in enumerate(beam(model, source, is_real, config, BOS, EOS)):
        for one in found:
            length = len(with_end(one))
            total = log_probability(model, source[row : row + 1], is_real[row : row + 1], with_end(one))
            assert one.log_probability == pytest.approx(total, abs=1e-9)
            assert one.score == pytest.approx(total / penalty(length, 0.6), abs=1e-9)
            assert one.finished or length == 10


@pytest.mark.parametrize("early", [True, False])
def test_n_best_is_sorted_distinct_and_begins_with_the_best(early: bool) -> None:
    model, (source, is_real) = transformer(), padded()
    config = SearchConfig(beam=6, n_best=6, early_stopping=early, max_length=15)
    found = beam(model, source, is_real, config, BOS, EOS)
    for some in found:
        scores = [one.score for one in some]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(with_end(one)) for one in some}) == len(some) == 6
    fewer = beam(model, source, is_real, SearchConfig(beam=6, n_best=2, early_stopping=early, max_length=15), BOS, EOS)
    assert fewer == [some[:2] for some in found]


@torch.inference_mode()
def uncached(model: EncoderDecoder, source: Tensor, config: SearchConfig, limit: int) -> list[tuple[float, list[int]]]:
    """The algorithm on one sentence with lists and sorting, everything computed anew at every step."""
    memory, live, done = model.encode(source), [(0.0, [])], []
    for length in range(1, limit + 1):
        every: list[tuple[float, list[int]]] = []
        for total, tokens in live:
            logits = model.output_head(model.states(torch.tensor([[BOS, *tokens]]), memory))[0, -1]
            every += [(total + p, [*tokens, y]) for y, p in enumerate(logits.log_softmax(-1).tolist())]
        every = sorted(every, key=lambda pair: -pair[0])[: 2 * config.beam]
        ends = [one for one in every[: config.beam] if one[1][-1] == EOS or length == limit]
        done += [(total / penalty(length, config.length_penalty), tokens) for total, tokens in ends]
        done = sorted(done, key=lambda pair: -pair[0])[: config.beam]
        live = [one for one in every if one[1][-1] != EOS][: config.beam]
        if len(done) == config.beam:
            if config.early_stopping:
                break
            # brute force over every length that is left, instead of the bound that the search uses
            ahead = range(length + 1, limit + 1)
            if all(live[0][0] / penalty(at, config.length_penalty) <= done[-1][0] for at in ahead):
                break
    return done


@pytest.mark.parametrize("position", ["sinusoidal", "rope", "learned", "alibi", "relative"])
@pytest.mark.parametrize(("size", "alpha", "early"), [(4, 0.0, False), (3, 0.8, False), (4, 0.8, True)])
def test_cached_batches_equal_a_slow_uncached_search(position: str, size: int, alpha: float, early: bool) -> None:
    model = transformer(position=position, max_length=16)
    source, is_real = padded(5)
    config = SearchConfig(beam=size, n_best=size, length_penalty=alpha, early_stopping=early, max_length=8)
    for row, found in enumerate(beam(model, source, is_real, config, BOS, EOS)):
        expected = uncached(model, source[row : row + 1, is_real[row]], config, 8)
        assert [with_end(one) for one in found] == [tokens for _, tokens in expected]
        assert [one.score for one in found] == pytest.approx([score for score, _ in expected], abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_neighbours_and_order_do_not_matter(dtype: torch.dtype) -> None:
    model = transformer(dtype=dtype)
    source, is_real = padded(12)
    config = SearchConfig(beam=4, n_best=4, length_penalty=0.6, max_length=14)
    whole = beam(model, source, is_real, config, BOS, EOS)
    order = torch.randperm(12)
    mixed = beam(model, source[order], is_real[order], config, BOS, EOS)
    single = [beam(model, source[row : row + 1, is_real[row]], None, config, BOS, EOS)[0] for row in range(12)]
    exact = dtype == torch.float64
    for row in range(12):
        for other in (mixed[order.tolist().index(row)], single[row]):
            # rounding differs between shapes: scores agree to its size, and then the tokens do, unless two tie
            scores = [one.score for one in whole[row]]
            assert [one.score for one in other] == pytest.approx(scores, abs=1e-10 if exact else 1e-4)
            if exact or all(a - b > 1e-4 for a, b in itertools.pairwise(scores)):
                assert [one.tokens for one in other] == [one.tokens for one in whole[row]]


def test_default_limit_follows_from_the_own_source_not_from_the_padding() -> None:
    model = transformer(logit_bias=True)
    with torch.no_grad():
        model.output_head.bias[EOS] = -1e4  # never ends
    source = torch.randint(4, 20, (2, 9))
    is_real = torch.arange(9) < torch.tensor([[2], [9]])
    found = beam(model, source, is_real, SearchConfig(beam=2, n_best=2), BOS, EOS)
    assert [[len(one.tokens) for one in some] for some in found] == [[54, 54], [68, 68]]  # 2 · source + 50
    assert not any(one.finished for some in found for one in some)
    shorter = beam(model, source, is_real, SearchConfig(max_ratio=0.5, max_length=53), BOS, EOS)
    assert [len(some[0].tokens) for some in shorter] == [51, 53]


def test_equal_scores_are_decided_by_token_id() -> None:
    class Uniform:
        def start(self, source: Tensor, is_real: Tensor | None = None) -> Hidden:
            return Hidden(torch.zeros(len(source)))

        def step(self, tokens: Tensor, state: Hidden) -> Tensor:
            return torch.zeros(len(tokens), 1, 50)

    source = torch.zeros(3, 2, dtype=torch.long)
    found = beam(Uniform(), source, None, SearchConfig(beam=3, n_best=3, max_length=2), BOS, EOS)
    assert [[one.tokens for one in some] for some in found] == [[[0, 0], [0, 1], [0, 2]]] * 3


def test_largest_orders_ties_by_column() -> None:
    scores = torch.randint(0, 3, (40, 30)).float()
    values, columns = largest(scores, 7)
    for row, (value, column) in enumerate(zip(values.tolist(), columns.tolist(), strict=True)):
        expected = sorted(range(30), key=lambda at: (-scores[row, at].item(), at))[:7]
        assert column == expected and value == scores[row, expected].tolist()
    assert largest(scores, 99)[0].shape == (40, 30)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_no_ngram_repeats(size: int, width: int) -> None:
    model, (source, is_real) = transformer(), padded()
    config = SearchConfig(beam=width, n_best=width, no_repeat_ngram=size, max_length=15)
    free = beam(model, source, is_real, SearchConfig(beam=width, n_best=width, max_length=15), BOS, EOS)

    def repeats(tokens: list[int]) -> bool:
        grams = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
        return len(set(grams)) < len(grams)

    found = beam(model, source, is_real, config, BOS, EOS)
    assert not any(repeats(one.tokens) for some in found for one in some)
    assert any(repeats(one.tokens) for some in free for one in some)  # the rule had something to do


def test_length_bounds_hold_and_what_no_rule_allows_ends() -> None:
    model, (source, is_real) = transformer(), padded()
    found = beam(model, source, is_real, SearchConfig(beam=3, n_best=3, min_length=4, max_length=6), BOS, EOS)
    assert {len(one.tokens) for some in found for one in some} <= {4, 5, 6}
    # five tokens besides </s>, none twice, at least ten: impossible, so it ends after five
    stuck = SearchConfig(beam=2, n_best=2, min_length=10, no_repeat_ngram=1, max_length=20)
    for some in beam(transformer(6), source % 6, is_real, stuck, BOS, EOS):
        assert [sorted(one.tokens) for one in some] == [[0, 1, 2, 4, 5]] * 2 and some[0].finished


@pytest.mark.parametrize("name", ["decoder.1.cross.weights", "decoder.cross.weights"])
def test_coverage_penalty_is_that_of_the_traced_attention(name: str) -> None:
    model, (source, is_real) = transformer() if "1" in name else recurrent(), padded()
    config = SearchConfig(beam=4, n_best=4, coverage_penalty=0.3, length_penalty=0.5, max_length=9)
    plain = beam(model, source, is_real, SearchConfig(beam=4, n_best=4, length_penalty=0.5, max_length=9), BOS, EOS)
    found = beam(model, source, is_real, config, BOS, EOS)
    assert found != plain
    for row, some in enumerate(found):
        for one in some:
            read = torch.tensor([[BOS, *with_end(one)[:-1]]])
            with torch.inference_mode(), trace(model, only=name) as seen:
                model(source[row : row + 1, is_real[row]], read)
            looked = seen[name][0].mean(dim=0).sum(dim=0)  # [S]
            coverage = looked.clamp_max(1).log().sum().item()
            expected = one.log_probability / penalty(read.shape[1], 0.5) + 0.3 * coverage
            assert one.score == pytest.approx(expected, abs=1e-9)
    with pytest.raises(UserError, match="coverage_penalty: Minimal has no cross attention"):
        beam(Minimal(20), source, is_real, config, BOS, EOS)


@pytest.mark.parametrize("width", [1, 7])
def test_empty_and_extreme_sources(width: int) -> None:
    model = transformer(dtype=torch.float32)
    config = SearchConfig(beam=width, n_best=width, max_length=4)
    assert beam(model, torch.zeros(0, 3, dtype=torch.long), None, config, BOS, EOS) == []
    blind = beam(model, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool), config, BOS, EOS)
    empty = beam(model, torch.zeros(2, 0, dtype=torch.long), None, config, BOS, EOS)
    for one, other in ((blind[0][0], blind[1][0]), (blind[0][0], empty[0][0])):
        assert one.tokens == other.tokens and one.score == pytest.approx(other.score, abs=1e-5)
    long = beam(model, torch.randint(4, 20, (1, 5000)), None, config, BOS, EOS)
    assert len(long[0]) == width and math.isfinite(long[0][-1].score)


@pytest.mark.parametrize("vocab_size", [4, 5])
def test_beam_larger_than_the_vocabulary(vocab_size: int) -> None:
    found = beam(
        transformer(vocab_size), torch.tensor([[1, 2]]), None, SearchConfig(beam=9, n_best=9, max_length=2), 2, 3
    )
    assert len(found[0]) == min(9, 1 + (vocab_size - 1) + (vocab_size - 1) ** 2)
    only = beam(
        transformer(vocab_size), torch.tensor([[1, 2]]), None, SearchConfig(beam=9, n_best=9, max_length=1), 2, 3
    )
    assert sorted(tuple(one.tokens) for one in only[0]) == sorted([(), *((y,) for y in range(vocab_size) if y != EOS)])


def test_broken_weights_are_an_error_not_an_answer() -> None:
    model = transformer()
    with torch.no_grad():
        model.output_head.project.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        beam(model, *padded(), SearchConfig(beam=2), BOS, EOS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("width", [1, 4, 5])
def test_transformers_finds_the_same(width: int, early: bool, seed: int) -> None:
    """Marian with our weights: n-best sequences and log-probabilities of `generate`, without a length penalty."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    ours = transformer(30, tie_embeddings=True, logit_bias=True, logit_scale=1.0, activation="silu")
    with torch.no_grad():
        for weight in (ours.target_embedding.tokens.weight, ours.output_head.bias):
            weight.normal_(std=0.6)
        ours.output_head.bias[EOS] = 4.0  # so that some end early and some never
    notes = {"pad_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**config_to_hf(ours.config, notes))).double().eval()
    missing, unexpected = theirs.load_state_dict(weights_to_hf(ours.config, weights_of(ours)), strict=False)
    assert not unexpected and all("embed_positions" in name or "embed_tokens" in name or "lm_head" in name
                                  for name in missing)  # fmt: skip
    theirs.tie_weights()
    source, is_real = padded(6, vocab_size=30)
    config = SearchConfig(beam=width, n_best=width, early_stopping=early, max_length=12)
    expected = theirs.generate(
        source, attention_mask=is_real.long(), num_beams=width, num_return_sequences=width, do_sample=False,
        max_new_tokens=12, length_penalty=0.0, early_stopping=early if width > 1 else None,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = [one for some in beam(ours, source, is_real, config, BOS, EOS) for one in some]
    for one, row in zip(found, expected.sequences[:, 1:].tolist(), strict=True):
        assert with_end(one) == (row[: row.index(EOS) + 1] if EOS in row else row)
    if width > 1:
        assert [one.score for one in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-5)
    assert {one.finished for one in found} == {True, False} or width == 1
