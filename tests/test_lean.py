"""The lean step against the model's own, ranks against topk, and batches side by side against one after another."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import EncoderDecoder, build
from regard.nn.trace import trace
from regard.predict import SearchConfig, Translator
from regard.predict.beam import beam
from regard.predict.bundle import Bundle
from regard.predict.engine import lean
from regard.predict.lean import Lean
from regard.predict.lean_attention import Across, AcrossOne
from regard.predict.next_token import largest, largest_of
from regard.predict.workers import side_by_side
from regard.text.tokenizer import Tokenizer

pytestmark = pytest.mark.grid

KINDS: dict[str, dict[str, object]] = {
    "paper": {},
    "pre": {"norm_order": "pre", "norm": "rms", "activation": "swiglu", "bias": False},
    "learned": {"position": "learned", "max_length": 64, "embed_norm": True, "logit_bias": True},
    "bare": {"position": "none", "norm": "none", "residual": False, "embed_scale": False},
    "grouped": {"kv_heads": 2, "head_dim": 6, "activation": "gelu"},
    "head": {"head_layer": True, "logit_scale": 0.5, "attention_scale": 1.0, "tie_embeddings": False},
    "pruned": {"pruned": {"decoder.0.attention": (1,), "decoder.1.cross": (0, 3)}},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(dtype: torch.dtype = torch.float64, **changes: object) -> EncoderDecoder:
    torch.manual_seed(1)
    sizes = {"dim": 16, "layers": 2, "heads": 4, "ff_dim": 32, "vocab_size": 30}
    model = EncoderDecoder(ModelConfig(**{**sizes, **changes})).eval().to(dtype)  # type: ignore[arg-type]
    for parameter in model.parameters():  # zeros and ones would hide a bias or a gain that is left out
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def sources(count: int, length: int) -> tuple[Tensor, Tensor]:
    source, is_real = torch.randint(4, 30, (count, length)), torch.ones(count, length, dtype=torch.bool)
    is_real[1, length // 2 :] = is_real[2, 1:] = False
    return source, is_real


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 16, 33])
def test_every_step_gives_the_models_logits(kind: str, length: int) -> None:
    model = make(**KINDS[kind])
    thin = lean(model)
    assert isinstance(thin, Lean)
    source, is_real = sources(4, length)
    own, other = model.start(source, is_real), thin.start(source, is_real)
    tokens, beams, groups = torch.full((4, 1), 2), 3, 4
    for step in range(36):
        torch.testing.assert_close(thin.step(tokens, other), model.step(tokens, own), rtol=1e-9, atol=1e-9)
        width = 1 if step == 0 else beams
        kept = torch.tensor([0, 2]) if step == 20 else torch.arange(groups)  # two sources are done
        rows = (kept[:, None] * width + torch.randint(0, width, (len(kept), beams))).flatten()
        own.reorder(rows, kept)
        other.reorder(rows, kept)
        groups = len(kept)
        tokens = torch.randint(0, 30, (len(rows), 1))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["paper", "pre", "grouped", "pruned"])
@pytest.mark.parametrize("length", [0, 5, 32, 33])
def test_one_short_source_is_multiplied_by_the_projections_once(kind: str, length: int) -> None:
    model = make(**{"dim": 64, **KINDS[kind]})
    thin, source = lean(model), torch.randint(4, 30, (1, length))
    is_real = torch.arange(length)[None] < 4
    for mask in (None, is_real):
        own, other = model.start(source, mask), thin.start(source, mask)
        assert isinstance(other.across[0], AcrossOne if 0 < length < 33 else Across)
        tokens = torch.full((1, 1), 2)
        for _ in range(18):
            torch.testing.assert_close(thin.step(tokens, other), model.step(tokens, own), rtol=1e-9, atol=1e-9)
            rows = torch.randint(0, len(tokens), (3,))
            own.reorder(rows, torch.tensor([0]))
            other.reorder(rows, torch.tensor([0]))
            tokens = torch.randint(0, 30, (3, 1))


@torch.inference_mode()
def test_single_precision_and_its_packed_head_stay_close() -> None:
    model = make(torch.float32, dim=64, vocab_size=300)
    thin = lean(model)
    source, is_real = sources(5, 9)
    own, other = model.start(source, is_real), thin.start(source, is_real)
    for _ in range(20):
        tokens = torch.randint(0, 300, (5, 1))
        torch.testing.assert_close(thin.step(tokens, other), model.step(tokens, own), rtol=1e-4, atol=1e-4)


def test_an_engine_is_kept_while_its_model_has_the_same_weights() -> None:
    model = make(torch.float32)
    first = lean(model)
    assert lean(model) is first
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    up = model.decoder.blocks[0].feedforward.up.weight  # type: ignore[index, union-attr]

    def change_data() -> None:
        up.data[0, 0] += 1  # type: ignore[index, operator]

    def change_in_inference() -> None:
        with torch.inference_mode():
            up[0, 0] += 1  # type: ignore[index, operator]

    second = first
    for change in (optimizer.step, change_data, change_in_inference):
        change()
        before, second = second, lean(model)
        assert second is not before and lean(model) is second
    model.output_head.project.weight = torch.nn.Parameter(torch.randn_like(model.output_head.project.weight))
    third = lean(model)
    assert third is not second
    source, is_real = sources(5, 9)
    own, other = model.start(source, is_real), third.start(source, is_real)
    tokens = torch.full((5, 1), 2)
    torch.testing.assert_close(third.step(tokens, other), model.step(tokens, own), rtol=1e-4, atol=1e-4)
    block = model.decoder.blocks[0]  # type: ignore[index]
    block.attention_norm = torch.nn.LayerNorm(model.config.dim, dtype=torch.float32)
    fourth = lean(model)
    assert fourth is not third and lean(model) is fourth
    with trace(model.decoder):
        assert lean(model) is model
    hook = block.register_forward_pre_hook(lambda *given: None)
    assert lean(model) is model
    hook.remove()
    block.forward = block.forward
    assert lean(model) is model
    del block.forward
    kept = weakref.ref(third)
    del model, own, other, before, first, second, third, fourth, block, hook
    gc.collect()
    assert kept() is None


@torch.inference_mode()
def test_a_source_without_tokens_and_rows_without_groups() -> None:
    model = make()
    source, is_real = sources(3, 6)
    is_real[0] = False
    thin = lean(model)
    own, other = model.start(source, is_real), thin.start(source, is_real)
    for rows in (torch.tensor([2, 0, 0, 1]), torch.tensor([3, 1])):
        tokens = torch.randint(0, 30, (3 if len(rows) == 4 else 4, 1))
        torch.testing.assert_close(thin.step(tokens, other), model.step(tokens, own))
        own.reorder(rows)
        other.reorder(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rope"}, {"position": "t5"}, {"position": "alibi"}, {"position": "relative"}, {"qk_norm": True},
        {"experts": 2}, {"window": 3}, {"attention_score": "additive", "attention": "reference"},
        {"attention": "reference"},
        {"kv_heads": 2, "pruned": {"decoder.0.cross": (0,)}},
    ],
)  # fmt: skip
def test_other_kinds_are_left_to_the_model(changes: dict[str, object]) -> None:
    model = make(**changes)
    assert lean(model) is model


def test_what_is_looked_at_or_trained_is_left_to_the_model() -> None:
    model = make()
    with trace(model.decoder):
        assert lean(model) is model
    with torch.autocast("cpu", torch.bfloat16):
        assert lean(model) is model
    assert lean(model.train()) is model
    assert lean(make(torch.bfloat16)) is not None and not isinstance(lean(make(torch.bfloat16)), Lean)
    hooked = make()
    hooked.decoder.blocks[0].register_forward_hook(lambda *given: None)
    assert lean(hooked) is hooked


@pytest.mark.parametrize(
    "config",
    [
        SearchConfig(),
        SearchConfig(beam=4, n_best=3, length_penalty=0.6),
        SearchConfig(beam=3, min_length=4, max_length=30, no_repeat_ngram=2),
        SearchConfig(beam=5, early_stopping=True, length_penalty=-1.0),
    ],
)
def test_a_search_finds_the_same(config: SearchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(logit_scale=3.0)
    source, is_real = sources(6, 11)
    found = beam(model, source, is_real, config, 2, 3)
    monkeypatch.setattr(sys.modules["regard.predict.beam"], "lean", lambda model: model)
    plain = beam(model, source, is_real, config, 2, 3)
    assert [[one.tokens for one in some] for some in found] == [[one.tokens for one in some] for some in plain]
    scores = [[one.score for some in outputs for one in some] for outputs in (found, plain)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-8)


def test_learned_positions_end_as_the_models_do() -> None:
    model = make(position="learned", max_length=5)
    thin = lean(model)
    state = thin.start(torch.full((1, 2), 5))
    with torch.inference_mode():
        for _ in range(5):
            thin.step(torch.full((1, 1), 7), state)
        with pytest.raises(Exception, match="max_length = 5"):
            thin.step(torch.full((1, 1), 7), state)


@pytest.mark.parametrize("size", [50, 1000, 5003, 10000])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_two_rounds_find_what_topk_finds(size: int, count: int) -> None:
    torch.manual_seed(size)
    scores = torch.randn(7, size)
    scores[3] = float("-inf")
    scores[3, [0, size - 1]] = 1.0  # the ends, and what fills no layer
    values, columns = largest(scores, count)
    assert torch.equal(values, scores.topk(count, dim=1).values)
    assert torch.equal(scores.gather(1, columns), values)
    assert all(len(set(row)) == count for row in columns.tolist())
    assert [largest_of(row, count) for row in scores] == list(zip(values.tolist(), columns.tolist(), strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_equal_scores_are_ranked_by_column_in_long_rows(count: int) -> None:
    scores = torch.randint(0, 4, (20, 4000), generator=torch.Generator().manual_seed(1)).float()
    values, columns = largest(scores, count)
    order = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :count]) and torch.equal(columns, order.indices[:, :count])
    assert [largest_of(row, count)[1] for row in scores] == columns.tolist()


def test_not_a_number_is_ranked_first_so_that_it_is_seen() -> None:
    scores = torch.randn(2, 5000)
    scores[1, 777] = float("nan")
    assert largest(scores, 3)[0].isnan().any(dim=1).tolist() == [False, True]
    assert [any(value != value for value in largest_of(row, 3)[0]) for row in scores] == [False, True]


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_side_by_side_keeps_the_order_and_the_number_of_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.predict.workers.threading.active_count", lambda: 1 if kind == "processes" else 2)
    torch.set_num_threads(3)

    def work(item: int) -> tuple[int, int, bool]:
        here = (os.getpid(), threading.get_ident()) == home
        return item, torch.get_num_threads(), here

    home = os.getpid(), threading.get_ident()
    assert list(side_by_side(work, range(20))) == [(item, 1, False) for item in range(20)]
    assert torch.get_num_threads() == 3
    assert list(side_by_side(work, [7])) == [(7, 3, True)]  # one alone may use them all
    assert list(side_by_side(work, [])) == []
    with pytest.raises(UserError, match="item 0"):
        list(side_by_side(refuse_zero, [1, 0, 1]))
    assert torch.get_num_threads() == 3
    first = side_by_side(work, range(20))
    next(first)
    first.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == 3


def refuse_zero(item: int) -> int:
    if item == 0:
        raise UserError("item 0 is none")
    return item


def test_a_process_that_is_killed_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.predict.workers.threading.active_count", lambda: 1)
    torch.set_num_threads(2)
    with pytest.raises(UserError, match="ended from outside"):
        list(side_by_side(lambda item: os.kill(os.getpid(), signal.SIGKILL), range(4)))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("kind", ["processes", "threads"])
@pytest.mark.parametrize("architecture", ["encoder-decoder", "recurrent"])
def test_cores_do_not_change_what_a_translator_says(
    architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.predict.workers.threading.active_count", lambda: 1 if kind == "processes" else 2)
    words = ("one", "two", "three", "four", "five")
    lines = [" ".join(words[(at * step) % 5] for step in range(1 + at % 7)) for at in range(60)]
    tokenizer = Tokenizer.train(lines, "word")
    torch.manual_seed(2)
    model = build(
        ModelConfig(architecture=architecture, dim=16, layers=1, heads=2, ff_dim=32, vocab_size=len(tokenizer))
    ).double()  # type: ignore[arg-type]
    translator = Translator(Bundle(model, {"tokenizer": tokenizer}))
    for config in (
        SearchConfig(max_length=12),
        SearchConfig(beam=3, n_best=2, max_length=12),
        SearchConfig(beam=2, max_length=9, coverage_penalty=0.2),
    ):
        torch.set_num_threads(1)
        alone = [one.n_best for one in translator.predict(lines, batch=8, config=config)]
        torch.set_num_threads(4)
        together = [one.n_best for one in translator.predict(lines, batch=8, config=config)]
        assert [[one.text for one in some] for some in together] == [[one.text for one in some] for some in alone]
        scores = [[one.score for some in found for one in some] for found in (alone, together)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-9)
