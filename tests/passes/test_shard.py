"""Units that ranks share: gathered in pieces, reduced once, in an order that no number of micro-batches changes."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import Options, after, lowered, options, place, stages, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.placement.traffic import traffic
from gs_compile.placement.verify import verify
from gs_compile.planner.boundary import without
from gs_compile.program.ir import Value

SMALL = Options(parameter_ratio=0.5, optimizer_ratio=0.5, alpha=0.25, world=2)


class TestText(expecttest.TestCase):
    def test_separate_memories(self):
        placement = place(1, 2, options=SMALL)
        program = after(lowered((1, 2), placement, late=True), "pipeline")
        self.assertExpectedInline(
            stages(program, "backward 0"),
            """\
# backward 0   micro-batches 0 1
shb.host = prefetch(shb.ssd)
dwha.host = offload(dshardh.device)
w0.device = gather(w0.device[0], w0.device[1], w0.device[2], w0.device[3])
dw0.device = zeros()
x0_1.device = prefetch(x0_1.host)
dx1_1.device = prefetch(dx1_1.host)
sharde.device[0] = prefetch(wea.host, web.host)
sharde.device[1] = prefetch(wea.host, web.host)
we.device[0] = all_gather(sharde.device[0])
we.device[1] = all_gather(sharde.device[1])
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
dx0_0.host = offload(dx0_0.device)
sharde.device[2] = prefetch(wea.host, web.host)
sharde.device[3] = prefetch(wea.host, web.host)
we.device[2] = all_gather(sharde.device[2])
we.device[3] = all_gather(sharde.device[3])
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
dshard0.device, norm0.device = reduce_scatter(dw0.device)
""",
        )

    def test_one_memory(self):
        placement = place(1, 2, options=replace(SMALL, separate=False))
        program = after(lowered((1, 2), placement, late=True), "shard")
        self.assertExpectedInline(
            stages(program, "backward 0"),
            """\
# backward 0   micro-batches 0 1
x0_0.host, x0_1.host = prefetch(x0_0.ssd, x0_1.ssd)
w0b.host = prefetch(w0b.ssd)
w0.device[0] = all_gather(w0a.host)
w0.device[1] = all_gather(w0a.host)
w0.device[2] = all_gather(w0b.host)
w0.device[3] = all_gather(w0b.host)
w0.device = gather(w0.device[0], w0.device[1], w0.device[2], w0.device[3])
dw0.device = zeros()
x0_0.device = alias(x0_0.host)
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
x0_1.device = alias(x0_1.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
dshard0.device, norm0.device = reduce_scatter(dw0.device)
w0b.host = empty()
s0b.host = prefetch(s0b.ssd)
update(dshard0.device, into=(w0a.host, w0b.host, s0a.host, s0b.host))
offload(w0b.host, into=w0b.ssd)
offload(s0b.host, into=s0b.ssd)
""",
        )


def collectives(program):
    return [str(op) for op in program.ops if op.lane == "net"]


def retreats(placement):
    """What a rank makes of its plan for a batch that is larger than those of others."""
    less = [placement, *([placement.recomputing()] if placement.decision.shares else [])]
    less.append(less[-1].moved("device", "ssd"))
    less.append(less[-1].moved("host", "ssd"))
    return [each for one in less for each in without(one)]


@given(tiered_steps(), options(), st.booleans(), st.sampled_from((2, 3)), st.booleans(), st.integers(0, 15))
def test_the_same_collectives_in_the_same_order_for_any_number_of_micro_batches(
    step, options, late, world, speculative, retreat
):
    num_layers, _, shape = step
    if speculative and options.clip:
        options = replace(options, speculative=True, alpha=0.5)

    def of(number, retreat=0):
        every = retreats(place(num_layers, number, shape, replace(options, world=world)))
        placement = every[retreat % len(every)]
        now = late and placement.has_late and retreat % 3 < 2  # else the updates of the step before were asked for
        warm = retreat % 2 > 0 and bool(placement.carried_values) and not (now and placement.speculative)
        return collectives(lowered((num_layers, number, shape), placement, late=now, warm=warm)[-1])

    expected = of(1)
    assert expected
    for number in (2, 3, 5):
        assert of(number, retreat) == expected


@given(tiered_steps(), options(), st.booleans(), st.sampled_from((2, 3)))
def test_each_unit_is_gathered_for_a_stage_and_reduced_once(step, options, late, world):
    num_layers, number, shape = step
    placement = place(num_layers, number, shape, replace(options, world=world))
    program = lowered(step, placement, late=late)[-1]
    ops = [op for op in program.ops if op.lane == "net"]
    stages_of = {(op.stage, op.results[0].unit) for op in program.ops if op.verb == "gather"}
    units, others = placement.by_unit, world - 1
    expected = sum(units[unit].numel * units[unit].itemsize for _, unit in stages_of) * others
    summed = [op.reads[0].unit for op in ops if op.verb == "reduce_scatter"]
    assert len(set(summed)) == len(summed)
    found = traffic(program, placement)
    assert sum(found.get(("net", kind), 0) for kind in ("w", "shard")) == expected
    trained = sum(units[unit].num_trained * units[unit].gradient_itemsize for unit in summed)
    assert found.get(("net", "dw"), 0) == trained * others


def _swapped(ops):
    at = [index for index, op in enumerate(ops) if op.verb == "all_gather"]
    ops[at[0]], ops[at[1]] = ops[at[1]], ops[at[0]]
    return ops


def _left_out(ops):
    return [op for op in ops if op.results != (Value("w", 0, piece=1),)]


def _after_the_sum(ops):
    last = next(index for index, op in enumerate(ops) if op.verb == "reduce_scatter" and op.reads[0].unit == "h")
    at = max(index for index, op in enumerate(ops[:last]) if op.verb == "all_gather")
    return [*ops[:at], *ops[at + 1 : last + 1], ops[at], *ops[last + 1 :]]


def _not_shared(ops):
    whole = {Value("dshard", "h"): Value("dw", "h")}
    return [replace(op, reads=tuple(whole.get(value, value) for value in op.reads)) for op in ops]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_swapped, "we.device.0. here, and ranks have exchanged we.device.1."),
        (_left_out, "w0.device.1. here, and ranks have exchanged w0.device.2."),
        (_after_the_sum, "comes after a reduce_scatter in backward h"),
        (_not_shared, "dwh.device is this rank's alone, and there is the sum of all"),
    ],
)
def test_what_verify_says_of_changed_programs(change, complaint):
    placement = place(2, 2, options=SMALL)
    program = after(lowered((2, 2), placement), "pipeline")
    verify(program, placement)
    with pytest.raises(ProgramError, match=complaint):
        verify(program.with_ops(change(list(program.ops)), made_by="pipeline"), placement)
