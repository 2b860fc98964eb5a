"""The search for one sentence against that for a batch, whose rules are written for tables."""

from __future__ import annotations

import itertools

import pytest
import torch

from regard.errors import UserError
from regard.predict import SearchConfig
from regard.predict.beam import beam
from test_beam import BOS, EOS, Minimal, padded, transformer

CONFIGS = [
    SearchConfig(max_length=12),
    SearchConfig(beam=4, n_best=4, max_length=12),
    SearchConfig(beam=5, n_best=2, length_penalty=0.6, max_length=12),
    SearchConfig(beam=3, n_best=3, length_penalty=-1.0, max_length=9),
    SearchConfig(beam=4, n_best=4, early_stopping=True, max_length=12),
    SearchConfig(beam=3, n_best=3, min_length=4, max_length=10, no_repeat_ngram=2),
    SearchConfig(min_length=4, max_length=10, no_repeat_ngram=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("kind", ["transformer", "recurrent", "small vocabulary"])
def test_one_sentence_alone_has_the_outputs_that_it_has_in_a_batch(kind: str, config: SearchConfig) -> None:
    size = 6 if kind == "small vocabulary" else 20
    model = Minimal(size).double() if kind == "recurrent" else transformer(size)
    source, is_real = padded(8, vocab_size=size)
    whole = beam(model, source, is_real, config, BOS, EOS)
    for row, expected in enumerate(whole):
        finished: dict[int, object] = {}
        one = slice(row, row + 1)
        (found,) = beam(model, source[one], is_real[one], config, BOS, EOS, finished=finished.__setitem__)
        assert [(one.tokens, one.finished) for one in found] == [(one.tokens, one.finished) for one in expected]
        for a, b in itertools.zip_longest(found, expected):
            assert (a.score, a.log_probability) == pytest.approx((b.score, b.log_probability), abs=1e-10)
        assert finished == {0: found}


@pytest.mark.parametrize("width", [1, 3])
def test_not_a_number_is_an_error_and_an_interrupt_ends_the_search(width: int) -> None:
    model, source = transformer(), torch.randint(4, 20, (1, 5))
    with pytest.raises(KeyboardInterrupt):
        beam(model, source, None, SearchConfig(beam=width), BOS, EOS, interrupt=interrupted)
    with torch.no_grad():
        model.output_head.project.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        beam(model, source, None, SearchConfig(beam=width), BOS, EOS)


def interrupted() -> None:
    raise KeyboardInterrupt
