"""What is kept from one step to the next takes no memory that a plan does not have, and makes no plan slower."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planned import A100, gpt

from gs_compile.options import Options
from gs_compile.planner import again
from gs_compile.planner.boundary import FIRST, earlier, kept, kept_for_free
from gs_compile.planner.builder import StepBuilder, peak
from gs_compile.planner.candidates import fastest
from gs_compile.planner.lp.limits import Budgets, Fixed
from gs_compile.planner.problem import Problem

WORKLOAD = gpt(4, 256, vocabulary=20000)
CPU = replace(A100, device="cpu", device_nbytes=0)
NOTHING = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0)


@pytest.mark.parametrize("schedule", ["vertical", "single", "horizontal"])
def test_nothing_that_is_kept_raises_the_peak(schedule):
    builder = StepBuilder.of(WORKLOAD, 1, separate=False, schedule=schedule)
    plain = builder.placement(NOTHING, 0.0)
    found = kept_for_free(builder, plain)
    assert peak(builder.program(found), "host") <= peak(builder.program(plain), "host")
    assert bool(found.kept_values) == (schedule != "horizontal")


def test_the_faster_one_that_fits_is_chosen():
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = builder.placement(NOTHING, 0.0)
    most = replace(plain, kept=FIRST)
    for host_nbytes in (peak(builder.program(plain), "host"), 2 * peak(builder.program(most), "host")):
        problem = Problem(
            workload=WORKLOAD,
            profile=CPU,
            budgets=Budgets(host_nbytes=host_nbytes, ssd_nbytes=10**12),
            fixed=Fixed(),
            builder=builder,
        )
        before = problem.predicted(builder.program(plain), plain)
        found = fastest(problem, before, [kept(builder, plain)])
        assert found.placement.kept_values
        assert found.seconds < before.seconds
        assert peak(found.program, "host") <= host_nbytes
        spare = {"host": host_nbytes, "device": 0}
        assert fastest(problem, before, [kept(builder, plain)], spare) is before
        moved, less = before.moved_nbytes, found.moved_nbytes
        assert moved - less >= sum(size.numel * size.itemsize for size in WORKLOAD.sizes if size.unit == "t") * 2


def test_the_last_states_are_read_while_the_backward_computes():
    """As early as there is room: one layer's worth is in memory for each stage."""
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = replace(builder.placement(NOTHING, 0.0), kept=FIRST)
    every = earlier(builder, plain)
    peaks = [peak(builder.program(each), "host") for each in (plain, *every)]
    assert peaks == sorted(peaks)
    for host_nbytes, ahead in ((peaks[4], 1), (2 * peaks[-1], len(every))):
        budgets = Budgets(host_nbytes=host_nbytes, ssd_nbytes=10**12)
        slow = replace(CPU, matmul_flops_per_second={"bf16": 5e11})  # the backward has time to read beside it
        problem = Problem(workload=WORKLOAD, profile=slow, budgets=budgets, fixed=Fixed(), builder=builder)
        before = problem.predicted(builder.program(plain), plain)
        found = fastest(problem, before, [every])
        assert found.seconds < before.seconds
        assert found.placed.ahead >= ahead
        assert found.moved_nbytes == before.moved_nbytes
    assert earlier(builder, replace(plain, layer_updates=2)) == earlier(builder, replace(plain, schedule="horizontal"))


def test_a_run_that_goes_on_has_what_its_plan_had():
    """If there is room for it, as there was."""
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = builder.placement(NOTHING, 0.0)
    before = replace(plain, kept=FIRST, ahead=2)
    found = SimpleNamespace(placement=before, ratios=NOTHING, device_ratios={}, alpha=0.0, shares=())
    room = {"host_nbytes": peak(builder.program(before), "host"), "values_nbytes": None}
    planner: Any = SimpleNamespace(plan=found, fixed=Fixed(), builder=builder, **room)
    options = Options.of({"host_memory": planner.host_nbytes})

    def goes_on(former: dict[str, Any]) -> Any:
        return again.planned(lambda *_: (planner, plain), options, former, "this model")

    former = json.loads(json.dumps(goes_on({})[2]))
    assert goes_on(former)[1] == before
    planner.host_nbytes = peak(builder.program(plain), "host")
    assert goes_on(former)[1] == plain
    for broken in ({"kept": 1}, {"ahead": "far"}):
        assert goes_on(former | broken)[2] != former | broken


def test_what_has_no_room_is_not_kept():
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = builder.placement(NOTHING, 0.0)
    tight = Budgets(host_nbytes=1, ssd_nbytes=10**12)
    problem = Problem(workload=WORKLOAD, profile=CPU, budgets=tight, fixed=Fixed(), builder=builder)
    before = Problem.predicted(
        replace(problem, budgets=replace(tight, host_nbytes=10**12)), builder.program(plain), plain
    )
    assert fastest(problem, before, [kept(builder, plain)]) is before
