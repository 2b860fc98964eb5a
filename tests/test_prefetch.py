"""Batches made ahead by a thread: the same ones, in order, and nothing left running."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import fields
from itertools import islice

import pytest
import torch

from regard.data.batch import PairBatch
from regard.data.streams import PREFETCHED, Batches, Stream, prefetch
from reversal import make_trainer, reversal_pairs


def stream() -> Batches:
    return Batches(reversal_pairs(), budget=48, seed=1)


def same(a: PairBatch, b: PairBatch) -> bool:
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_batches_and_positions_are_those_of_the_stream_itself():
    plain, ahead = stream(), stream()
    with closing(prefetch(ahead)) as batches:
        for expected, found in islice(zip(plain, batches, strict=True), 3 * len(plain.plan(0))):
            assert same(expected, found) and plain.position == ahead.position
        assert threads()
    assert not threads()


def test_what_was_made_but_not_taken_is_made_again():
    ahead = stream()
    with closing(prefetch(ahead)) as batches:
        for _ in range(5):
            next(batches)
    again = stream()
    again.seek(ahead.position)
    assert same(next(iter(again)), list(islice(iter(stream()), 6))[5])


class Failing(Stream):
    """Ten batches, then the disk is gone."""

    made = 0

    def open(self, epoch):
        return 1_000, self.make

    def make(self, number: int) -> int:
        if number == 10:
            raise OSError(5, "Input/output error", "source.ids")
        type(self).made += 1
        return number


def test_an_error_in_the_thread_reaches_the_one_who_asks():
    batches = prefetch(Failing())
    assert [next(batches) for _ in range(10)] == [*range(10)]
    with pytest.raises(OSError, match=r"source\.ids"):
        next(batches)
    assert not threads()


def test_no_more_is_made_than_asked_for():
    Failing.made = 0
    with closing(prefetch(Failing())) as batches:
        next(batches)
    assert Failing.made <= 1 + PREFETCHED


def test_training_leaves_no_thread_behind(tmp_path):
    make_trainer(tmp_path / "done").run()
    assert not threads()

    def fail(model, batch):
        raise ValueError("stop here")

    with pytest.raises(ValueError, match="stop here"):
        make_trainer(tmp_path / "failed", objective=fail).run()
    assert not threads()


LEFT = """
from test_prefetch import prefetch, stream
batches = prefetch(stream())
next(batches)
"""


def test_a_process_that_forgets_to_close_it_still_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEFT], cwd=__file__.rpartition("/")[0], timeout=60, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
def test_pinned_for_a_gpu():
    with closing(prefetch(stream(), pin=True)) as batches:
        batch = next(batches)
    assert batch.source.is_pinned() and batch.labels.is_pinned()
