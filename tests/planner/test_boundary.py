"""What is carried from one step to the next takes no memory that a plan does not have, and makes no plan slower."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planned import A100, SSD_RATES, gpt, problem, ratios

from gs_compile.passes.baselines.lifetime import Rooms
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Decision
from gs_compile.planner.boundary import FIRST, carrying, deeper, earlier, further, holding, retaining, with_boundary
from gs_compile.planner.builder import StepBuilder, planned_peak
from gs_compile.planner.decide import decide
from gs_compile.planner.ladders import FASTER, each_of, fastest
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.resumed import as_before, facts_of
from gs_compile.planner.settled import _boundary_for_free
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import Value

WORKLOAD = gpt(4, 256, vocabulary=20000)
CPU = replace(A100, device="cpu", device_nbytes=0)
NOTHING = Decision(ratios=(ratios(0.0, 0.0, 0.0),))


@pytest.mark.parametrize("schedule", ["vertical", "single", "horizontal"])
@pytest.mark.parametrize("is_scarce", [False, True])
def test_what_stays_takes_next_to_no_memory(schedule, is_scarce):
    """And none at all where the budget is what the step needs."""
    given = problem(WORKLOAD, CPU, 1, request=Request(schedule=schedule))
    builder, plain = given.builder, given.builder.placement(NOTHING)
    needed = planned_peak(builder.program(plain), "host")
    if is_scarce:
        given = problem(WORKLOAD, CPU, 1, host_nbytes=needed, request=Request(schedule=schedule))
    found = _boundary_for_free(given, plain)
    assert max(planned_peak(program, "host") for program in builder.programs(found)) <= needed * (
        1 if is_scarce else 1.02
    )
    assert bool(found.carried_values) == bool(found.retained_values) == (schedule != "horizontal")


def test_the_faster_one_that_fits_is_chosen():
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = builder.placement(NOTHING)
    most = plain.decided(carried=FIRST)
    for host_nbytes in (planned_peak(builder.program(plain), "host"), 2 * planned_peak(builder.program(most), "host")):
        given = problem(WORKLOAD, CPU, 2, host_nbytes=host_nbytes)
        before = given.predicted(plain)
        found = fastest(given, before, [carrying(plain)])
        assert found.placement.carried_values
        assert found.seconds < before.seconds
        assert planned_peak(found.program, "host") <= host_nbytes
        moved, less = before.moved_nbytes, found.moved_nbytes
        assert moved - less >= sum(size.numel * size.itemsize for size in WORKLOAD.sizes if size.unit == "t") * 2


def test_more_of_the_topmost_layers_is_retained_where_there_is_room():
    """From the forward to the backward: their parameters are read once, and what the head shares with them last."""
    workload = gpt(8, 256, vocabulary=20000)
    builder = StepBuilder.of(workload, 1, separate=False)
    plain = builder.placement(NOTHING).decided(carried=FIRST)
    every = retaining(plain)
    assert [each.decision.retained for each in every] == [
        (7, 6, 5, 4, 3, 2, 1, 0, "t")[:number] for number in range(1, 10)
    ]
    peaks = [max(planned_peak(program, "host") for program in builder.programs(each)) for each in (plain, *every)]
    assert peaks[0] == peaks[1] < peaks[-1]
    sizes = {size.unit: size.numel * size.itemsize for size in workload.sizes}
    before = problem(workload, CPU, 1).predicted(plain)
    for host_nbytes in (peaks[0], peaks[-1]):
        given = problem(workload, CPU, 1, host_nbytes=host_nbytes)
        found = fastest(given, before, [every])
        assert found.seconds < before.seconds
        retained = found.placement.decision.retained
        assert before.moved_nbytes - found.moved_nbytes == sum(sizes[unit] for unit in retained)
    assert found.placement.decision.retained == every[-1].decision.retained


def test_checkpoints_of_the_upper_half_are_held_where_a_drive_binds():
    """They would be written behind all that the step before has left to write, and read again at once."""
    slow = replace(CPU, matmul_flops_per_second={"bf16": 1e11}, **dict.fromkeys(SSD_RATES, 1e8))
    workload = gpt(6, 256, vocabulary=20000)
    plain = StepBuilder.of(workload, 2, separate=False).placement(NOTHING).decided(carried=FIRST)
    plain = retaining(plain)[-1]
    given = problem(workload, slow, 2)
    before = given.predicted(plain)
    ladders = [*map(holding, (plain, *deeper(plain)))]
    found = fastest(given, before, ladders)
    assert found.placement.decision.held == (5, 4, 3)
    assert found.seconds < 0.97 * before.seconds
    inputs = [nbytes_of(found.placement, value) for value in found.placement.held_values]
    assert len(inputs) == 6
    assert before.moved_nbytes - found.moved_nbytes == 3 * sum(inputs)  # collected, written and read
    assert found.placement.held_values == {Value("x", layer, j) for layer in (3, 4, 5) for j in (0, 1)}
    scarce = problem(workload, slow, 2, host_nbytes=planned_peak(before.program, "host"))
    assert len(fastest(scarce, before, ladders).placement.decision.held) < 3


def test_more_layers_are_carried_where_the_drive_writes_on_for_much_of_the_next_forward():
    """Their parameters would be read behind that, and the forward would wait for all of it."""
    slow = replace(CPU, matmul_flops_per_second={"bf16": 1e11}, **dict.fromkeys(SSD_RATES, 2e8))
    workload = gpt(6, 256, vocabulary=2000, sequence=256)
    plain = StepBuilder.of(workload, 2, separate=False).placement(NOTHING).decided(carried=FIRST, lookahead=8)
    plain = retaining(plain)[-1].decided(held=(5, 4, 3))
    given = problem(workload, slow, 2)
    before = given.predicted(plain)
    assert [each.decision.carried for each in further(plain)] == [(*FIRST, 2, 3), (*FIRST, 2, 3, 4, 5)]
    found = fastest(given, before, each_of(further(plain)))
    assert found.placement.decision.carried == (*FIRST, 2, 3)
    assert found.seconds < 0.95 * before.seconds
    assert not further(plain.decided(carried=()))
    assert not further(further(plain)[-1])


def test_the_last_states_are_read_while_the_backward_computes():
    """As early as there is room: one layer's worth is in memory for each stage."""
    builder = StepBuilder.of(WORKLOAD, 2, separate=False)
    plain = builder.placement(NOTHING).decided(carried=FIRST)
    every = earlier(plain)
    peaks = [planned_peak(builder.program(each), "host") for each in (plain, *every)]
    assert peaks == sorted(peaks)
    for host_nbytes, ahead in ((peaks[4], 1), (2 * peaks[-1], len(every))):
        slow = replace(CPU, matmul_flops_per_second={"bf16": 5e11})  # the backward has time to read beside it
        given = problem(WORKLOAD, slow, 2, host_nbytes=host_nbytes)
        before = given.predicted(plain)
        found = fastest(given, before, [every])
        assert found.seconds < before.seconds
        assert found.placement.decision.ahead >= ahead
        assert found.moved_nbytes == before.moved_nbytes
    assert not earlier(plain.decided(layer_updates=2))


def test_reads_go_on_beside_a_head_that_computes_for_long():
    """Where there is room for what is read ahead; the bytes stay the same."""
    workload = gpt(8, 256, vocabulary=20000)
    builder = StepBuilder.of(workload, 2, separate=False)
    plain = builder.placement(NOTHING).decided(carried=("t",))
    every = deeper(plain)
    peaks = [planned_peak(builder.program(each), "host") for each in every]
    slow = replace(CPU, matmul_flops_per_second={"bf16": 8e12})  # drives are at work for 70 % of a step
    given = problem(workload, slow, 2, host_nbytes=2 * peaks[-1])
    before = given.predicted(plain)
    found = fastest(given, before, each_of(every))
    assert found.seconds < 0.97 * before.seconds
    assert found.moved_nbytes == before.moved_nbytes
    assert not deeper(plain.decided(layer_updates=2))


def test_states_are_read_for_as_long_as_the_drive_needs():
    """Beside parameters in memory for a third of a step, until computing is all that a step waits for; and not earlier
    than is of use.
    """
    workload = gpt(8, 256, vocabulary=20000)
    inside = Decision(ratios=(ratios(0.0, 1.0, 0.0),))
    every = deeper(StepBuilder.of(workload, 2, separate=False).placement(inside))
    assert [each.decision.lookahead for each in every] == [1, 2, 4, 8, 16]
    for flops, busiest, lookahead in ((4e12, "compute", 8), (1e14, "ssd_write", 0)):
        given = problem(workload, replace(CPU, matmul_flops_per_second={"bf16": flops}), 2, host_nbytes=10**12)
        before = given.predicted(every[0].decided(lookahead=0))
        found = fastest(given, before, each_of(every), part=FASTER)
        assert found.placement.decision.lookahead == lookahead
        assert found.busy[busiest] > 0.96
        assert not lookahead or found.seconds < 0.92 * before.seconds


def test_a_schedule_as_others_publish_it_moves_what_is_said_of_it():
    for schedule, is_published in (("horizontal", True), ("single", False)):
        given = problem(WORKLOAD, CPU, 1, host_nbytes=10**12, request=Request(schedule=schedule))
        plain = given.predicted(given.builder.placement(NOTHING))
        assert (with_boundary(given, plain, is_small=True) is plain) == is_published


def test_memory_of_what_drives_are_behind_with_is_given_on_later():
    """As much later as there is room, in the next step too: its first reads do not wait for the last writes of this one."""
    workload = gpt(8, 256, vocabulary=20000)
    builder = StepBuilder.of(workload, 2, separate=False)
    placement = builder.placement(NOTHING).decided(carried=("t",))
    needed = planned_peak(builder.program(placement), "host")
    slow = replace(CPU, matmul_flops_per_second={"bf16": 8e12})
    given = [problem(workload, slow, 2, host_nbytes=int(needed * part)) for part in (1, 1.2, 1.5, 2)]
    seconds = [each.predicted(placement).seconds for each in given]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.85 * seconds[0]


def test_a_run_that_goes_on_has_what_its_plan_had():
    """If there is room for it, as there was; of what is between two steps what still fits."""
    given = problem(WORKLOAD, CPU, 2)
    builder, plain = given.builder, given.builder.placement(NOTHING)
    carried, before = plain.decided(carried=FIRST), plain.decided(carried=FIRST, ahead=2)
    host_nbytes = planned_peak(builder.program(before), "host")
    known = {"made_for": "this model", "host_nbytes": host_nbytes, "values_nbytes": None}
    former = json.loads(json.dumps({**known, "decision": before.decision.as_dict()}))
    assert as_before(given, former, "this model", host_nbytes) == before
    less = planned_peak(builder.program(plain), "host")
    assert as_before(given, former | {"host_nbytes": less}, "this model", less) == carried
    of_two_calls = former | {"host_nbytes": 2 * host_nbytes}
    assert as_before(given, of_two_calls, "this model", 2 * host_nbytes, host_nbytes) == before
    assert as_before(given, of_two_calls, "this model", 2 * host_nbytes, less) == carried
    assert as_before(given, former, "another model", host_nbytes) is None
    assert as_before(given, former, "this model", host_nbytes // 2) is None
    assert as_before(given, former | {"host_nbytes": host_nbytes // 4}, "this model", host_nbytes // 4) is None
    for broken in ({"carried": 1}, {"shares": "far"}, {"ratios": {"parameter": 2.0}}, {"ratios": {"unknown": 0.5}}):
        decision = former["decision"] | broken
        assert as_before(given, former | {"decision": decision}, "this model", host_nbytes) is None
    older = {{"carried": "kept"}.get(name, name): each for name, each in former["decision"].items()}
    assert as_before(given, former | {"decision": older}, "this model", host_nbytes) is None, "it has other names"


@pytest.mark.parametrize(("num_layers", "vocabulary"), [(2, 2000), (1, 2000), (1, 10**5)])
def test_all_that_is_chosen_is_taken_again(num_layers, vocabulary):
    """Where nothing is tied, of one layer, and of an embedding that has more updates than a step has stages."""
    given = problem(gpt(num_layers, 64, vocabulary=vocabulary, tied=False), CPU, 2)
    plain = given.builder.placement(NOTHING)
    former = {"made_for": "it", "host_nbytes": 10**12, "values_nbytes": None}
    for ladder in (carrying, retaining, holding, earlier, deeper):
        for each in ladder(plain)[-1:]:
            decision = json.loads(json.dumps(each.decision.as_dict()))
            assert as_before(given, former | {"decision": decision}, "it", 10**12) == each


def test_what_ladders_have_in_common_is_lowered_once(monkeypatch):
    given = problem(WORKLOAD, CPU, 2)
    plain = given.builder.placement(NOTHING)
    lowered, fitting = [], Problem.fitting
    monkeypatch.setattr(Problem, "fitting", lambda *asked: lowered.append(asked) or fitting(*asked))
    every = carrying(plain)
    fastest(given, given.predicted(plain), [every, every, every[1:]])
    assert len(lowered) == len({placement for _, placement in lowered})


def test_what_has_no_room_is_not_carried():
    given = problem(WORKLOAD, CPU, 2, host_nbytes=10**12)
    plain = given.builder.placement(NOTHING)
    before = given.predicted(plain)
    assert fastest(replace(given, host_nbytes=1), before, [carrying(plain)]) is before


def test_a_commit_keeps_nothing_of_what_only_a_schedule_can_read():
    """Such a plan is made again: its own data is no JSON."""
    given = problem(WORKLOAD, CPU, 2)
    plain = given.builder.placement(NOTHING)
    found, own = (StepPlan(problem=given, placement=each) for each in (plain, plain.decided(own=Rooms.unbounded)))
    assert facts_of(found, "this model", 1, None)["decision"] == plain.decision.as_dict()
    assert facts_of(own, "this model", 1, None) == {}


def test_alpha_is_settled_where_nothing_moves_alone():
    """With ratios below 1 that are given, and all of it within the budget, it is still for the planner to choose."""
    for part, alpha, is_solved in ((0.5, None, True), (0.5, 0.3, False), (1.0, None, False)):
        asked = Request(recompute="all", alpha=alpha, ratios=ratios(part, part, part))
        plan = decide(problem(WORKLOAD, CPU, 2, host_nbytes=10**12, will_run=True, request=asked))
        assert plan.is_solved == is_solved
        assert is_solved or plan.alpha == (alpha or 0.0)
        assert plan.ratios["parameter"] == part
