"""Masks combined at random, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from regard.nn.mask import Mask


def combined(leaves: st.SearchStrategy[Mask], max_leaves: int) -> st.SearchStrategy[Mask]:
    """`leaves`, and what `&`, `|` and `~` make of them."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=max_leaves,
    )
