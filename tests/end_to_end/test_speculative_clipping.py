"""Speculative clipping: what it is said to be, and what it costs. That it learns what delayed clipping does, bit for bit
and whatever gradients do, test_same_bits.py has.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
from tiered import adamw, moved, options, step, tokens

from gs_compile.errors import OptionError

KEEPS_CAPTURES = True
RATIOS = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.5)


def test_a_bound_that_changes_from_step_to_step(harness, storage):
    bounds = (0.2, 5.0, None, 0.3, math.inf)

    def give_next(number, optimizer):
        optimizer.max_grad_norm = bounds[number]

    make = partial(adamw, max_grad_norm=math.inf)
    ways = options(storage, clip="delayed"), options(storage, clip="speculative", alpha=0.3, ratios=RATIOS)
    expected, found = (harness.train(make, given, len(bounds), look=give_next) for given in ways)
    assert found.differences(expected) == []


def test_what_holds_moves_what_early_updates_move(harness, storage):
    """As the program says: shadow copies cost no traffic."""

    def third_step(make, **chosen):
        with harness.fresh(make, options(storage, alpha=0.0, **chosen)) as optimizer:
            for number in range(2):
                step(harness.model, optimizer, tokens(number))
            return moved(harness.model, optimizer, tokens(2))

    assert third_step(partial(adamw, max_grad_norm=1e6), clip="speculative") == third_step(adamw)


def test_a_smaller_alpha_says_that_updates_are_speculative(harness, storage):
    make = partial(adamw, max_grad_norm=1.0)
    with harness.fresh(make, options(storage, alpha=0.3)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert optimizer.engine.placement.speculative
    with (
        harness.fresh(make, options(storage, alpha=0.3, clip="delayed")) as optimizer,
        pytest.raises(OptionError, match=r'expert\.alpha is 0\.3, but with expert\.clip="delayed" all updates wait'),
    ):
        step(harness.model, optimizer, tokens(0))


def test_without_a_bound_nothing_is_speculative(harness, storage):
    with harness.fresh(adamw, options(storage, alpha=0.0, clip="speculative")) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert not optimizer.engine.placement.speculative
        assert not optimizer.last_step.rolled_back
