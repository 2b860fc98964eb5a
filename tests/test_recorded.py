"""Beam search in fixed shapes gives the outputs of the search that changes its shapes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from regard.errors import UserError
from regard.models.transformer import EncoderDecoder
from regard.nn.cache import Cache
from regard.predict import Hypothesis, SearchConfig
from regard.predict.beam import beam
from regard.predict.next_token import largest
from regard.predict.recorded import LANES, SHAPES, TURN, FixedCache, RecordedSearch, RecordedSearches
from test_beam import BOS, EOS, padded, transformer

pytestmark = pytest.mark.grid

CONFIGS = [
    {},
    {"beam": 5},
    {"beam": 3, "n_best": 3, "length_penalty": 0.6},
    {"beam": 4, "length_penalty": -0.5, "min_length": 3},
    {"beam": 4, "early_stopping": True, "length_penalty": 1.0},
    {"beam": 2, "max_length": 5, "n_best": 2},
    {"beam": 12, "n_best": 12, "max_ratio": 0.5},  # 24 best of a vocabulary of 20
]


def search(searches: RecordedSearches, source, is_real, config: SearchConfig) -> list[list[Hypothesis]]:
    """One batch."""
    return next(searches.search_all([(None, source, is_real)], config))[1]


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]], tolerance: float = 1e-9) -> None:
    assert [[(one.tokens, one.finished) for one in some] for some in found] == [
        [(one.tokens, one.finished) for one in some] for some in expected
    ]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        assert one.score == pytest.approx(other.score, abs=tolerance)
        assert one.log_probability == pytest.approx(other.log_probability, abs=tolerance)


POSITIONS = [("learned", 2), ("relative", 1), ("rope", 3), ("alibi", 4), ("t5", 2)]


@pytest.mark.parametrize(
    ("changes", "position"),
    [(changes, "sinusoidal") for changes in CONFIGS] + [(CONFIGS[at], position) for position, at in POSITIONS],
    ids=str,
)
def test_the_answers_are_those_of_beam_search(changes, position):
    torch.manual_seed(len(str(changes)))
    model, config = transformer(position=position), SearchConfig(**changes)
    searches = RecordedSearches(model, BOS, EOS)
    for rows in (6, 5, 8):  # the same shape again: nothing of the search before may be left
        source, is_real = padded(rows)
        same(search(searches, source, is_real, config), beam(model, source, is_real, config, BOS, EOS))
    assert len(searches.ready) == 1


def test_no_padding_is_no_difference():
    model, source = transformer(), torch.randint(4, 20, (3, 7))
    config = SearchConfig(beam=3)
    same(search(RecordedSearches(model, BOS, EOS), source, None, config), beam(model, source, None, config, BOS, EOS))


@pytest.mark.parametrize("changes", [{"kv_heads": 1}, {"window": 3}, {"decoder_layers": 1}, {"norm_order": "pre"}])
def test_other_models(changes):
    model, config = transformer(**changes), SearchConfig(beam=3)
    source, is_real = padded()
    found = search(RecordedSearches(model, BOS, EOS), source, is_real, config)
    same(found, beam(model, source, is_real, config, BOS, EOS))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rope"])
def test_a_step_depends_on_no_value(position, beams):
    """Tensors that have shapes but no numbers: reading one back, as no recorded graph can, would fail."""
    config = SearchConfig(beam=beams, min_length=2, length_penalty=0.6)
    sizes = transformer(position=position).config
    with FakeTensorMode(), torch.inference_mode():
        model = EncoderDecoder(sizes).eval()
        search = RecordedSearch(model, config, 4, 16, 32, BOS, EOS)
        source, is_real = torch.ones(4, 16, dtype=torch.long), torch.ones(4, 16, dtype=torch.bool)
        search.start(source, is_real, [32] * 4)
        with pytest.raises(DataDependentOutputException):
            bool(search.live.closed.all())


@pytest.mark.parametrize(("size", "count"), [(20, 4), (512, 10), (1000, 10), (1003, 24), (5000, 1)])
def test_the_highest_in_two_rounds(size, count):
    scores = torch.randn(7, size)
    values, columns = largest(scores, count, recorded=True)
    wanted = scores.sort(dim=1, descending=True)
    assert torch.equal(values, wanted.values[:, :count]) and torch.equal(columns, wanted.indices[:, :count])


def test_few_searches_are_kept():
    model, config = transformer(), SearchConfig(beam=2, max_length=2)
    searches = RecordedSearches(model, BOS, EOS)
    for length in range(1, 300, 17):
        source = torch.randint(4, 20, (2, length))
        search(searches, source, None, config)
    assert len(searches.ready) == SHAPES


def test_two_searches_at_once_share_no_buffer():
    """One after the other by turns, then in threads: the outputs are those of each alone."""
    model, config = transformer(), SearchConfig(beam=3, max_length=12)
    searches, batches = RecordedSearches(model, BOS, EOS), [padded(6) for _ in range(8)]
    expected = [beam(model, *batch, config, BOS, EOS) for batch in batches]
    named = [(at, *batch) for at, batch in enumerate(batches)]
    by_turns = zip(searches.search_all(named[:4], config), searches.search_all(named[4:], config), strict=True)
    for at, found in chain(*by_turns):
        same(found, expected[at])
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda batch: search(searches, *batch, config), batches))
    for found, wanted in zip(outputs, expected, strict=True):
        same(found, wanted)


def test_searches_left_half_way_are_kept():
    """A GPU would still be writing into their memory; the next batch begins with empty tables all the same."""
    model, config = transformer(), SearchConfig(beam=3, max_length=12)
    searches, batches = RecordedSearches(model, BOS, EOS), [padded(6) for _ in range(6)]
    searches.lanes = [None] * 3
    under_way = searches.search_all([(at, *batch) for at, batch in enumerate(batches)], config)
    next(under_way)
    under_way.close()
    assert len(searches.ready) == 3
    for batch in batches:
        same(search(searches, *batch, config), beam(model, *batch, config, BOS, EOS))


def test_a_search_waits_for_its_turn():
    """What another thread may be recording is not disturbed."""
    searches, found = RecordedSearches(transformer(), BOS, EOS), []
    thread = threading.Thread(target=lambda: found.append(search(searches, *padded(2), SearchConfig(max_length=3))))
    with TURN:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not found
    thread.join(20)
    assert len(found) == 1


def test_weights_that_are_no_numbers_are_named():
    model = transformer()
    with torch.no_grad():
        model.decoder.norm = torch.nn.Identity()
        model.output_head.project.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not numbers"):
        search(RecordedSearches(model, BOS, EOS), torch.randint(4, 20, (2, 4)), None, SearchConfig(beam=2))


def test_what_cannot_be_done_in_fixed_shapes_is_not_tried():
    searches = RecordedSearches(transformer(), BOS, EOS)
    for changes in ({"coverage_penalty": 0.2, "beam": 2}, {"no_repeat_ngram": 2}, {"sample": True}):
        assert not searches.fits(SearchConfig(**changes))
    assert searches.fits(SearchConfig(beam=5))
    assert not RecordedSearches(transformer(position="alibi"), BOS, EOS).fits(SearchConfig())


@pytest.mark.parametrize("position", ["sinusoidal", "rope", "alibi", "relative"])
def test_a_fixed_cache_gives_the_numbers_of_one_that_grows(position):
    model, source = transformer(position=position), torch.randint(4, 20, (3, 6))
    with torch.inference_mode():
        growing, fixed = model.start(source), model.start(source)
        fixed.cache = FixedCache(12, source.device)
        assert isinstance(growing.cache, Cache)
        for count in (3, 1, 1, 4):  # several tokens at a time, too
            tokens = torch.randint(4, 20, (3, count))
            torch.testing.assert_close(model.step(tokens, fixed), model.step(tokens, growing))


@pytest.mark.cuda
@pytest.mark.parametrize("changes", CONFIGS[:5], ids=str)
def test_recorded_as_a_graph(changes):
    torch.manual_seed(1)
    model, config = transformer().cuda(), SearchConfig(**changes)
    assert isinstance(model, EncoderDecoder)
    searches = RecordedSearches(model, BOS, EOS)
    batches = [tuple(x.cuda() for x in padded(6)) for _ in range(3 * LANES)]  # the third of a lane is all replayed
    found = dict(searches.search_all([(number, *batch) for number, batch in enumerate(batches)], config))
    for number, (source, is_real) in enumerate(batches):
        same(found[number], beam(model, source, is_real, config, BOS, EOS), 1e-6)
    assert all(None not in search.graphs.values() for search in searches.ready.values())
