"""Changes as values: JSON gives them back, and invalid ones are refused with a message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given as generated
from hypothesis import settings
from hypothesis import strategies as st

from inside_models import opened
from regard.errors import UserError
from regard.explore.changes import Changes

SENTENCE = "the animal did not cross"
positions = st.tuples(st.sampled_from(["encoder", "decoder", "cross"]), st.integers(0, 9), st.integers(0, 9))
rows = st.builds(
    lambda place, query, weights: (*place, query, tuple(weights)),
    positions,
    st.integers(0, 9),
    st.lists(st.floats(0, 1), max_size=4),
)
changes = st.builds(
    Changes,
    st.lists(positions, max_size=3).map(tuple),
    st.lists(positions.map(lambda place: place[:2]), max_size=3).map(tuple),
    st.booleans(),
    st.floats(0.01, 100),
    st.none() | st.integers(0, 2**40),
    st.lists(rows, max_size=2).map(tuple),
)


@generated(changes)
def test_changes_survive_json(wanted: Changes) -> None:
    assert Changes.from_dict(json.loads(json.dumps(wanted.to_dict()))) == wanted
    assert bool(wanted) == (wanted != Changes()) == bool(wanted.to_dict())
    assert str(wanted)


SHARED = opened("decoder")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@generated(
    st.dictionaries(st.sampled_from(["heads", "layers", "future", "temperature", "shuffle", "rows", "x"]), anything)
)
def test_invalid_json_is_reported(values: dict) -> None:
    try:
        SHARED.look("a b", changes=Changes.from_dict(values))
    except UserError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (Changes(heads=(("decoder", 0, 4),)), "heads 0 to 3"),
        (Changes(heads=(("decoder", 2, 0),)), "layers 0 to 1"),
        (Changes(heads=(("cross", 0, 0),)), "does not have it"),
        (Changes(layers=(("encoder", 0),)), "does not have it"),
        (Changes(temperature=0.0), "greater than 0"),
        (Changes(rows=(("decoder", 0, 0, 9, (1.0,)),)), "queries 0 to"),
        (Changes(rows=(("decoder", 0, 0, 0, (1.0,)),)), "1 weights for 5 keys"),
        (Changes(rows=(("decoder", 0, 0, 0, (1.0, -1.0, 0.0, 0.0, 0.0)),)), "none below 0"),
    ],
)
def test_impossible_changes_are_reported(changes: Changes, message: str) -> None:
    inside = opened("decoder")
    with pytest.raises(UserError, match=message):
        inside.look(SENTENCE, changes=changes)
    inside.look(SENTENCE)  # and nothing is left behind
