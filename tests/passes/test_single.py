from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import Options, options, place, tiered_steps

from gs_compile.passes.baselines.single import single
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.passes.vertical import vertical
from gs_compile.placement.traffic import traffic
from gs_compile.program.ir import StepShape
from gs_compile.program.text import parse


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_two_blocks(self):
        self.assertExpectedInline(
            str(single(4, 1)),
            """\
# gs_compile 0.1   after single   4 layers x 1 micro-batches
# forward e   micro-batches 0
x0_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0
x1_0.device = forward(x0_0.device, w0.device)
# forward 1 .. 3   repeat forward 0
# backward h   micro-batches 0
dwh.device = zeros()
loss_0.device, dx4_0.device = head(x4_0.device, batch_0, wh.device, into=dwh.device)
# backward 3   micro-batches 0
dw3.device = zeros()
dx3_0.device = backward(x3_0.device, dx4_0.device, w3.device, into=dw3.device)
# backward 2 .. 0   repeat backward 3
# backward e   micro-batches 0
dwe.device = zeros()
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)
""",
        )


@settings(deadline=None, max_examples=25)
@given(tiered_steps(), options(), st.booleans())
def test_it_is_the_vertical_step_of_one_micro_batch(step, chosen, late):
    """All passes after it are the same; `lower` verifies each program."""
    half, _, shape = step
    num_layers = half * 2
    shape = replace(shape, emits=frozenset(), outside=frozenset())
    placement = replace(place(num_layers, 1, shape, chosen), schedule="single")
    late = late and placement.has_late
    found = lower(StepSpec(num_layers, 1, shape=shape, placement=placement, late=late))
    expected = lower(
        StepSpec(num_layers, 1, shape=shape, placement=replace(placement, schedule="vertical"), late=late, snake=False)
    )
    assert found[0].made_by == ("single" if shape.training else "vertical")
    assert (found[-1].ops, found[-1].peaks) == (expected[-1].ops, expected[-1].peaks)
    assert parse(str(found[-1])) == found[-1]


def test_twice_as_many_checkpoints():
    """Of the same size: with one micro-batch each goes once each way."""
    moved = {}
    for schedule, num_layers in (("vertical", 3), ("single", 6)):
        placement = replace(place(num_layers, 1, options=Options(separate=True)), schedule=schedule)
        moved[schedule] = traffic(lower(StepSpec(num_layers, 1, placement=placement))[-1], placement)
    for lane in ("ssd_read", "ssd_write", "h2d", "d2h"):
        assert moved["single"][lane, "x"] == 2 * moved["vertical"][lane, "x"] > 0


def test_a_forward_alone_is_vertical():
    shape = StepShape(training=False)
    assert lower(StepSpec(4, 1, shape=shape, schedule="single"))[0].ops == vertical(4, 1, shape=shape).ops


@pytest.mark.parametrize(("layers", "micro_batches", "fault"), [(4, 2, "2 micro-batches"), (3, 1, "3 layers")])
def test_a_step_that_is_none(layers, micro_batches, fault):
    with pytest.raises(AssertionError, match=fault):
        single(layers, micro_batches)
