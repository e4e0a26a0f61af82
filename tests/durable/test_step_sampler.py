"""StepSampler: what a run has for batches follows from the step, wherever it begins."""

from __future__ import annotations

from itertools import chain

import pytest

import gs_compile
from gs_compile.errors import OptionError

ROWS, BATCH, STOP = 11, 3, 8  # three batches in an epoch, and two rows left out


def drawn(start=0, stop=STOP, **changes):
    """The batches of a script that begins at a step, and what the sampler said of their number."""
    batches, found, said = gs_compile.StepSampler(ROWS, BATCH, start=start, stop=stop, **changes), [], 0
    while batches.step < STOP:
        said += len(batches)
        found += batches
    assert len(batches) == (0 if stop else ROWS // BATCH)  # of the next epoch
    return found, said


def test_a_run_that_goes_on_has_the_batches_that_are_left():
    whole, said = drawn()
    assert (len(whole), said) == (STOP, STOP)
    for start in range(STOP):
        assert drawn(start) == (whole[start:], STOP - start)
    endless, _ = drawn(stop=None)
    assert (endless[:STOP], len(endless)) == (whole, 9)  # to the end of the epoch


def test_an_epoch_has_each_row_once_in_an_order_of_its_own():
    whole, _ = drawn(stop=9)
    epochs = [[*chain(*whole[first : first + 3])] for first in (0, 3, 6)]
    assert all(len({*rows}) == 9 for rows in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert drawn(seed=1)[0] != drawn()[0]


def test_ranks_share_each_batch():
    shares = [drawn(rank=rank, world=2)[0] for rank in range(2)]
    assert [sorted(one + other) for one, other in zip(*shares, strict=True)] == [*map(sorted, drawn()[0])]


def test_batches_that_there_are_not():
    for sizes in ((2, 3), (3, 0)):
        with pytest.raises(OptionError, match="there are no batches of"):
            gs_compile.StepSampler(*sizes)
