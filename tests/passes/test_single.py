from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import Options, lowered, options, place, tiered_steps

from gs_compile.passes.baselines.single import single
from gs_compile.passes.vertical import vertical
from gs_compile.placement.traffic import traffic
from gs_compile.program.ir import StepShape
from gs_compile.program.text import parse


@given(tiered_steps(), options(), st.booleans())
def test_it_is_the_vertical_step_of_one_micro_batch(step, chosen, late):
    """All passes after it are the same; `lower` verifies each program."""
    half, _, shape = step
    step = half * 2, 1, replace(shape, emits=frozenset(), outside=frozenset())
    placement = place(*step, chosen)
    late = late and placement.has_late
    found = lowered(step, placement.laid_out(schedule="single"), late=late)
    expected = lowered(step, placement, late=late, snake=False)
    assert found[0].made_by == ("single" if shape.training else "vertical")
    assert (found[-1].ops, found[-1].peaks) == (expected[-1].ops, expected[-1].peaks)
    assert parse(str(found[-1])) == found[-1]


def test_twice_as_many_checkpoints():
    """Of the same size: with one micro-batch each goes once each way."""
    moved = {}
    for schedule, num_layers in (("vertical", 3), ("single", 6)):
        placement = place(num_layers, 1, options=Options(separate=True)).laid_out(schedule=schedule)
        moved[schedule] = traffic(lowered((num_layers, 1), placement)[-1], placement)
    for lane in ("ssd_read", "ssd_write", "h2d", "d2h"):
        assert moved["single"][lane, "x"] == 2 * moved["vertical"][lane, "x"] > 0


def test_a_forward_alone_is_vertical():
    shape = StepShape(training=False)
    assert lowered((4, 1, shape), schedule="single")[0].ops == vertical(4, 1, shape=shape).ops


@pytest.mark.parametrize(("layers", "micro_batches", "fault"), [(4, 2, "2 micro-batches"), (3, 1, "3 layers")])
def test_a_step_that_is_none(layers, micro_batches, fault):
    with pytest.raises(AssertionError, match=fault):
        single(layers, micro_batches)
