"""Texts of packed rows as rows of their own: every real token comes back to its place."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.nn.tokens import Positions

rows = st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=7, max_size=7), min_size=1, max_size=3)


@given(rows)
def test_each_text_is_a_row_and_comes_back(tokens: list[list[tuple[int, bool]]]) -> None:
    document, is_real = (torch.tensor([[one[i] for one in row] for row in tokens]) for i in (0, 1))
    x = torch.arange(1.0, document.numel() + 1).view(*document.shape, 1)
    texts = Positions.of(7, torch.device("cpu"), is_real.bool(), document).texts
    expected = []  # runs of one document, without padding
    for row, real, values in zip(document.tolist(), is_real.tolist(), x[..., 0].tolist(), strict=True):
        for at, value in enumerate(values):
            if at == 0 or row[at] != row[at - 1]:
                expected.append([])
            expected[-1] += [value] * bool(real[at])
    parts = texts.split(x)
    found = [row[row > 0].tolist() for part in parts for row in part[..., 0]]
    assert sorted(filter(None, found)) == sorted(filter(None, expected))
    for part in parts:
        lengths = (part[..., 0] > 0).sum(dim=1)
        assert (
            (part[..., 0] > 0) == (torch.arange(part.shape[1]) < lengths[:, None])
        ).all()  # from the first column on
        assert part.shape[1] < 2 * max(1, int(lengths.min()))
    assert torch.equal(texts.join(parts), torch.where(is_real.bool()[..., None], x, 0.0))
