"""A step of a larger batch than the first has homes with which all of its programs fit what the first has settled."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planned import gpt, ratios

from gs_compile.errors import MemoryBudgetError
from gs_compile.placement.placement import Decision, Placement
from gs_compile.placement.slab import fixed_offsets
from gs_compile.placement.workload import ACTIVATIONS
from gs_compile.planner.boundary import FIRST, without
from gs_compile.planner.builder import StepBuilder, planned_peak
from gs_compile.planner.programs import StepPrograms
from gs_compile.planner.request import Request

NOTHING = ratios(0.0, 0.0, 0.0)
LARGER = 32  # micro-batches; the first batch has 2


def sized(builder: StepBuilder, first: Placement, host_nbytes: int, values_nbytes: int | None = None) -> Placement:
    """The homes of a training step with the larger batch, in these budgets."""
    planning: Any = object.__new__(StepPrograms)
    planning.planner = SimpleNamespace(request=Request(), model=SimpleNamespace(rest_nbytes=0))
    planning.builder, planning.placement, planning.host_nbytes = builder, first, host_nbytes
    planning._placements = {}
    planning.planned = SimpleNamespace(values_nbytes=values_nbytes)
    one = {name: getattr(first.layout, name)[0] for name in ACTIVATIONS}
    layouts: Any = [SimpleNamespace(**one)] * LARGER
    found = StepPrograms.sized(planning, layouts, builder.shape)
    assert host_peak(builder, found) <= host_nbytes
    return found


def host_peak(builder: StepBuilder, placement: Placement) -> int:
    return max(planned_peak(program, "host") for program in builder.steps(placement))


def larger(placement: Placement) -> Placement:
    return placement.laid_out(**{name: getattr(placement.layout, name)[:1] * LARGER for name in ACTIVATIONS})


def test_a_step_after_updates_that_hold_may_take_the_most_memory():
    """What the step before has carried is then in it from the start; where that one is rolled back it is not."""
    workload = gpt(3, 128, vocabulary=2000, sequence=256, tied=False, bf16=False)
    builder = StepBuilder.of(workload, 2, separate=True, clip=True)
    first = builder.placement(Decision(ratios=(NOTHING,), speculative=True, carried=FIRST))
    redone, held = (planned_peak(builder.program(larger(first), redo=redo), "host") for redo in (True, False))
    assert host_peak(builder, first) <= redone < held
    assert sized(builder, first, held) == larger(first)
    assert not sized(builder, first, redone).decision.carried


def test_what_is_between_two_steps_goes_before_checkpoints_move():
    """What lives on has the same memory in all programs of a run, whatever a step keeps for the next one."""
    workload = gpt(3, 128, vocabulary=2000, sequence=256)
    builder = StepBuilder.of(workload, 2, separate=True)
    first = builder.placement(Decision(ratios=(ratios(1.0, 0.0, 1.0),), alpha=0.3, carried=FIRST, ahead=2))
    planned = larger(first)
    variants = without(planned, fixed_offsets(first).nbytes)
    assert [(bool(each.decision.carried), each.decision.ahead) for each in variants] == [
        (True, 2),
        (True, 0),
        (False, 2),
        (False, 0),
    ]
    peaks = [host_peak(builder, each) for each in variants]
    assert min(peaks) < peaks[0]
    for host_nbytes in sorted(set(peaks)):
        found = sized(builder, first, host_nbytes)
        assert found == next(each for each, needed in zip(variants, peaks, strict=True) if needed <= host_nbytes)
        before, after = fixed_offsets(first), fixed_offsets(found)
        assert (after.always, after.nbytes) == (before.always, before.nbytes)
        assert after.shared.items() <= before.shared.items()
    less = sized(builder, first, min(peaks) - 1)
    assert less.activations.checkpoints("host") == 0.0
    assert less.decision.carried, "moved checkpoints leave room for what is carried"
    with pytest.raises(MemoryBudgetError, match=r"needs .* of it with all data where .* start with the largest"):
        sized(builder, first, host_peak(builder, first) // 2)


def test_checkpoints_stay_on_the_device_where_the_plan_has_room_for_them():
    """Whatever the first batch has taken of it; where nobody has said how much there is, they take no more than that."""
    workload = gpt(3, 128, vocabulary=2000, sequence=256)
    builder = StepBuilder.of(workload, 2, separate=True)
    first = builder.placement(Decision(ratios=(ratios(0.0, 0.0, 0.0, 1.0, 0.0),)))
    needed = max(planned_peak(program, "device") for program in builder.steps(larger(first)))
    assert sized(builder, first, 10**12, needed) == larger(first)
    for values_nbytes in (needed - 1, None):
        assert sized(builder, first, 10**12, values_nbytes) == larger(first).moved("device", "ssd")


@pytest.mark.parametrize("separate", [False, True])
def test_ranks_may_keep_less_than_others(separate):
    """What they do together is in the same order, whatever the size of each one's batch."""
    workload = replace(gpt(3, 128, vocabulary=2000, sequence=256), world=2)
    builder = StepBuilder.of(workload, 2, separate=separate)
    first = builder.placement(Decision(ratios=(NOTHING,), alpha=0.3, carried=FIRST, ahead=2))
    every = (*without(first, 0), *without(larger(first), fixed_offsets(first).nbytes))
    sizes = (replace(builder, layout=each.layout) for each in every)
    programs = [of.program(each) for of, each in zip(sizes, every, strict=True)]
    together = [[(op.verb, op.values[0]) for op in program.ops if op.lane == "net"] for program in programs]
    assert together[0]
    assert all(each == together[0] for each in together)
