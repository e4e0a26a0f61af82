"""A step that has run is told of as a simulated one is: a simulation that is played back as a run's trace is found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import options, place, tiered_steps

from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import StepContext
from gs_compile.placement.slab import packed
from gs_compile.planner.simulate.event_loop import LaneRule
from gs_compile.planner.simulate.measured import mean_bubbles, measured
from gs_compile.planner.simulate.simulator import simulate
from gs_compile.program.ir import LANES
from gs_compile.runtime.trace import Label, Trace

NUM_STEPS = 3
OP_SECONDS = 0.25


def played_back(simulation, monkeypatch):
    """The trace of a run in which everything happens when it does in a simulation.

    A run tells of an operation before a memory verb waits, a simulation says when that was over.
    """
    trace, order, times = Trace(events=True), simulation.order, simulation.times
    for number, program in enumerate(simulation.programs):
        for index, op in enumerate(program.ops):
            at = order.starts[number] + index
            told = times.issued[at]
            if at and op.lane == "memory":
                told = min(told, times.issued[at - 1] + OP_SECONDS)
            monkeypatch.setattr("gs_compile.runtime.trace.time.perf_counter", lambda told=told: 100 + told)
            trace.issue(program, index)
            if op.lane in LANES:
                label = Label(op.lane, op.name, kind=op.kind, number=trace.number)
                trace.add(label, 100 + times.started[at], 100 + times.stopped[at])
    return trace


@given(tiered_steps(), options(), st.booleans(), st.data())
def test_what_is_simulated_is_found_in_its_trace(step, chosen, inline, data):
    num_layers, num_micro_batches, shape = step
    placement = place(*step, chosen)
    late = placement.has_late and shape.training
    spec = StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, context=StepContext(late=late))
    program = packed(lower(spec)[-1], placement)
    seconds = data.draw(st.lists(st.integers(0, 8), min_size=len(program.ops), max_size=len(program.ops)))
    seconds = [float(each) if op.lane in LANES else 0.0 for op, each in zip(program.ops, seconds, strict=True)]
    rule = LaneRule(inline=inline, op_seconds=OP_SECONDS)
    simulation = simulate([program] * NUM_STEPS, [seconds] * NUM_STEPS, placement=placement, rule=rule)
    with pytest.MonkeyPatch.context() as monkeypatch:
        trace = played_back(simulation, monkeypatch)
    found = list(measured(trace, placement, program, inline=inline))
    assert len(found) == NUM_STEPS - 1
    assert found[-1].seconds == pytest.approx(simulation.seconds)
    assert found[-1].bubbles == pytest.approx(simulation.bubbles)
    assert found[-1].busy == pytest.approx(simulation.busy)
    assert mean_bubbles(found[-1:]) == pytest.approx(simulation.bubbles)


def test_a_step_that_was_given_up_is_none():
    placement = place(2, 2)
    program = lower(StepSpec(2, 2, placement=placement))[-1]
    trace = Trace(events=True)
    for numbers in (range(len(program.ops)), range(3), range(len(program.ops)), range(len(program.ops))):
        for index in numbers:
            trace.issue(program, index)
    assert len(list(measured(trace, placement, program, inline=True))) == 1
    assert mean_bubbles([]) == {}
    assert not Trace().issues()
