"""The simulator against its rule written down a second time (`oracle`), closed forms, and the laws of what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
from cpu_work import work
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle
from tiers import PLAIN, Options, options, peaks_of, place, tiered_steps

from gs_compile.options import Ratios
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import Decision, Layout, Placement, StepContext
from gs_compile.placement.slab import packed
from gs_compile.placement.traffic import traffic
from gs_compile.planner.simulate.event_loop import LaneRule
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.planner.simulate.simulator import simulate as simulated
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, StepShape, Value

ALL_ON_SSD = Options()  # and a device of its own
LANES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu")
DURATIONS = st.integers(0, 12).map(lambda quarters: quarters / 4)  # sums of these are exact


def simulate(programs, seconds, placement, **rule) -> Simulation:
    return simulated(programs, seconds, placement, LaneRule(**rule))


def unplanned(programs: Sequence[Program]) -> list[Program]:
    """Programs that wait for no memory: nobody has said where in it their values are."""
    return [replace(program, offsets={}) for program in programs]


def steady(num_layers: int, num_micro_batches: int, placement: Placement, shape: StepShape = PLAIN) -> list[Program]:
    """A first step without late updates, and two with; they find what the step before them has carried."""
    late = placement.has_late and shape.training
    warm = shape.training and bool(placement.carried_values) and not (placement.speculative and late)
    first, then = (
        lower(StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, context=context))[-1]
        for context in (StepContext(), StepContext(late=late, warm=warm))
    )
    return [first, then, then]


def by_lane(programs: Sequence[Program], seconds: Mapping[str, float]) -> list[list[float]]:
    return [[seconds.get(op.lane, 0.0) for op in program.ops] for program in programs]


class Run(NamedTuple):
    """Programs one after the other, with what each operation takes; hypothesis shows it as its last program."""

    programs: list[Program]
    seconds: list[list[float]]
    placement: Placement
    inline: bool
    op_seconds: float

    def __repr__(self) -> str:
        return self.programs[-1].text()


@st.composite
def runs(draw: st.DrawFn) -> Run:
    num_layers, num_micro_batches, shape = draw(tiered_steps())
    placement = place(num_layers, num_micro_batches, shape, draw(options()))
    programs = steady(num_layers, num_micro_batches, placement, shape)
    typical = {lane: draw(DURATIONS) for lane in LANES}
    random = draw(st.randoms(use_true_random=False))
    seconds = [
        [typical.get(op.lane, 0.25 * (op.verb == "zeros")) * random.choice((0, 1, 1, 2)) for op in program.ops]
        for program in programs
    ]
    return Run(programs, seconds, placement, draw(st.booleans()), draw(st.sampled_from((0.0, 1 / 64))))


def times(found: Simulation) -> dict[int, tuple[float, float]]:
    return {span.index: (span.start_seconds, span.stop_seconds) for span in found.spans}


def expected(oracle: Oracle) -> dict[int, tuple[float, float]]:
    since, started, stopped = oracle.steps[-2], oracle.started[-1], oracle.stopped[-1]
    return {index: (started[index] - since, stopped[index] - since) for index in started}


@given(runs(), st.booleans(), st.floats(1.0, 1.5), st.floats(0.5, 2.0))
def test_times_are_those_of_the_rule(run, in_slab, room, on_device):
    """Where values have places in memory, in as much as is needed, or more."""
    programs, seconds, placement, inline, op_seconds = run
    if in_slab:
        most = int(on_device * max(dict(each.peaks)["device"] for each in programs)) if placement.separate else None
        programs = [packed(each, placement, int(room * dict(each.peaks)["host"]), most) for each in programs]
    else:
        programs = unplanned(programs)
    found = simulate(programs, seconds, placement=placement, inline=inline, op_seconds=op_seconds)
    oracle = Oracle(programs, seconds, inline, op_seconds, placement).run()
    assert times(found) == expected(oracle)
    assert found.seconds == oracle.steps[-1] - oracle.steps[-2]
    assert not in_slab or all(nbytes <= found.room.get(tier, nbytes) for tier, nbytes in found.peaks.items())


@given(runs(), st.sampled_from((0.5, 1.0)))
def test_the_report_adds_up(run, speed):
    programs, seconds, placement, inline, op_seconds = run
    speeds = {("ssd_read", "ssd_write"): speed, ("compute", "cpu"): speed, ("h2d", "compute"): speed}
    options = {"placement": placement, "speeds": speeds, "inline": inline, "op_seconds": op_seconds}
    found = simulate(programs, seconds, **options)
    if found.seconds:
        computing = found.busy.get("compute", 0.0) * found.seconds
        assert sum(found.bubbles.values()) + computing == pytest.approx(found.seconds)
        assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())
    for span in found.spans:
        alone = seconds[-1][span.index]
        taken = span.stop_seconds - span.start_seconds
        assert alone - 1e-9 <= taken <= alone / speed**2 + 1e-9
    starts = [span.start_seconds for span in found.spans]
    assert starts == sorted(starts)
    path = found.critical_path
    assert all(a.stop_seconds <= b.start_seconds + 1e-9 or not inline for a, b in pairwise(path))
    assert not path or path[-1].lane == "compute"


@settings(max_examples=30, deadline=None)
@given(tiered_steps(), options(), st.booleans())
def test_if_nothing_takes_time_the_planned_peaks_are_true(step, options, inline):
    num_layers, num_micro_batches, shape = step
    placement = place(num_layers, num_micro_batches, shape, options)
    programs = steady(num_layers, num_micro_batches, placement, shape)
    nothing = [[0.0] * len(program.ops) for program in programs]
    found = simulate(programs, nothing, placement=placement, inline=inline, op_seconds=1.0)
    planned = peaks_of(programs[-1].ops, placement)
    assert {tier: found.peaks[tier] for tier in planned} == planned


# Closed forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["h2d", "d2h", "ssd_read", "ssd_write", "cpu"])
@pytest.mark.parametrize("inline", [True, False])
def test_the_one_lane_that_takes_time_is_the_step(lane, inline):
    """Whoever waits for it, for a value or for memory, a step is what the lane works in it."""
    placement = place(4, 3, PLAIN, ALL_ON_SSD)
    programs = steady(4, 3, placement) * 2
    seconds = by_lane(programs, {lane: 1.0})
    found = simulate(programs, seconds, placement=placement, inline=inline)
    assert found.seconds == sum(seconds[-1])
    assert found.busy[lane] == 1.0


def test_what_is_waited_for_has_a_name():
    placement = place(6, 2, PLAIN, ALL_ON_SSD)
    programs = unplanned(steady(6, 2, placement))
    slow = {lane: simulate(programs, by_lane(programs, {"compute": 1.0, lane: 9.0}), placement) for lane in LANES}
    causes = {lane: found.bubbles for lane, found in slow.items()}
    assert causes["ssd_read"].keys() <= {"fill", "turn", "ssd_read w", "ssd_read x", "ssd_read s"}
    assert causes["ssd_read"]["ssd_read w"] > 0
    assert causes["h2d"].keys() == {"fill", "turn", "h2d w", "h2d x", "h2d dx"}
    assert causes["d2h"].keys() <= {"fill", "turn", "d2h x", "d2h dx", "d2h dw"}
    assert causes["d2h"]["d2h dx"] > 0
    assert causes["compute"] == {}
    path = slow["ssd_read"].critical_path  # from the last computation back, reads after reads
    assert [span.lane for span in path].count("ssd_read") > 10
    assert all(a.stop_seconds == b.start_seconds for a, b in pairwise(path))


# The rule, line by line ----------------------------------------------------------------------------------------------

GRADIENT = Value("dw", 0, tier="host", part="a")


def test_memory_is_given_back_when_its_users_are_done():
    """x0_0.host is freed as soon as it is on its way, and is there until it has arrived."""
    layout, decision = Layout(num_layers=1, x_nbytes=((7,),), separate=True), Decision(ratios=(Ratios(),))
    placement = Placement(layout=layout, decision=decision)
    made, there, away = (Value("x", 0, 0, tier) for tier in ("device", "host", "ssd"))
    ops = [
        Op("embed", (), Stage("forward", "e"), (made,), micro_batch=0),
        Op("offload", (made,), DRAIN, (there,)),
        Op("free", (made,), DRAIN),
        Op("offload", (there,), DRAIN, (away,)),
        Op("free", (there,), DRAIN),
        Op("norm", (GRADIENT,), DRAIN, (Value("norm", 0),)),
    ]
    found = simulate([Program(tuple(ops), 1, 1, "by hand")], [[1.0, 2.0, 0.0, 3.0, 0.0, 9.0]], placement=placement)
    assert found.memory["device"] == ((0.0, 7), (3.0, 0))
    assert found.memory["host"] == ((0.0, 7), (6.0, 0))


def test_a_gradient_leaves_the_device_once_its_norm_is_taken():
    """A norm completes the gradient that it reads, and may scale it."""
    gradient, there = Value("dw", 0), Value("dw", 0, tier="host", part="a")
    ops = [
        Op("zeros", (), DRAIN, (gradient,)),
        Op("norm", (gradient,), DRAIN, (Value("norm", 0),)),
        Op("offload", (gradient,), DRAIN, (there,)),
        Op("update", (there,), DRAIN, into=(Value("w", 0),)),
    ]
    found = simulate([Program(tuple(ops), 1, 1, "by hand")], [[0.0, 3.0, 2.0, 1.0]], place(1, 1))
    assert [span.start_seconds for span in found.spans] == [0.0, 3.0, 5.0]


# Lanes that slow each other down -------------------------------------------------------------------------------------


def side_by_side(*lanes: str, speeds: Mapping[tuple[str, str], float], seconds: Sequence[float]) -> dict[str, float]:
    """One operation a lane, all from the start: when each stops."""
    routes = {"ssd_read": ("ssd", "host"), "ssd_write": ("host", "ssd"), "h2d": ("host", "device")}
    ops = []
    for unit, lane in enumerate(lanes):
        if lane == "cpu":
            gradient = Value("dw", unit, tier="host", part="a")
            ops.append(Op("update", (gradient,), FILL, into=(gradient._replace(kind="w"),)))
        elif lane == "compute":
            ops.append(Op("count", (Value("batch", micro_batch=0, tier=None),), FILL, (Value("total"),)))
        else:
            here, there = routes[lane]
            verb = "offload" if lane == "ssd_write" else "prefetch"
            part = Value("w", unit, tier=here, part="a")
            ops.append(Op(verb, (part,), FILL, (part._replace(tier=there),)))
    placement = place(len(lanes), 1)
    found = simulate([Program(tuple(ops), len(ops), 1, "by hand")], [list(seconds)], placement, speeds=speeds)
    return {span.lane: span.stop_seconds for span in found.spans}


RATES = st.sampled_from((0.25, 0.4, 0.5, 0.8, 1.0))


@given(st.integers(1, 20), st.integers(1, 20), RATES, RATES)
def test_two_lanes(x, y, a, b):
    """The first to end has run at its mixed speed; the other has then done that time at its own, and the rest alone."""
    speeds = {("ssd_read", "ssd_write"): a, ("ssd_write", "ssd_read"): b}
    stops = side_by_side("ssd_read", "ssd_write", speeds=speeds, seconds=(x, y))
    if x / a <= y / b:
        assert stops == pytest.approx({"ssd_read": x / a, "ssd_write": y + x * (1 - b) / a})
    else:
        assert stops == pytest.approx({"ssd_write": y / b, "ssd_read": x + y * (1 - a) / b})


def test_a_computation_runs_as_beside_the_slowest_of_its_neighbours():
    """The computation runs at a quarter beside both, at a half beside the one that is left, then alone."""
    speeds = {("compute", "cpu"): 0.25, ("compute", "ssd_read"): 0.5}
    stops = side_by_side("compute", "cpu", "ssd_read", speeds=speeds, seconds=(4.0, 4.0, 6.0))
    assert stops == {"cpu": 4.0, "ssd_read": 6.0, "compute": 8.0}


def test_each_neighbour_slows_a_transfer_down():
    """It runs at an eighth beside both, at a half beside the one that is left, then alone."""
    speeds = {("ssd_read", "ssd_write"): 0.25, ("ssd_read", "compute"): 0.5}
    stops = side_by_side("ssd_read", "ssd_write", "compute", speeds=speeds, seconds=(3.0, 8.0, 10.0))
    assert stops == {"ssd_write": 8.0, "compute": 10.0, "ssd_read": 11.0}


# What comes out ------------------------------------------------------------------------------------------------------


def test_a_prediction_opens_as_a_run_does():
    placement = place(3, 2, PLAIN, ALL_ON_SSD)
    program = lower(StepSpec(3, 2, placement=placement))[-1]
    found = simulate([program], by_lane([program], dict.fromkeys(LANES, 1.0)), placement=placement)
    slices = [event for event in found.trace().chrome()["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(found.spans)
    one = next(event for event in slices if event["name"] == "forward 1_0")
    assert (one["cat"], one["dur"]) == ("compute", 1e6)
    moved: dict[tuple[str, str], int] = {}
    for event in slices:
        if event["args"]["bytes"]:
            key = event["cat"], event["args"]["kind"]
            moved[key] = moved.get(key, 0) + event["args"]["bytes"]
    assert moved == traffic(program, placement)


def test_a_large_program_takes_little_work():
    placement = place(96, 16, PLAIN, ALL_ON_SSD)
    program = lower(StepSpec(96, 16, placement=placement), verified=False)[-1]
    seconds = by_lane([program], {lane: 1.0 + index / 7 for index, lane in enumerate(LANES)})
    speeds = {("ssd_read", "ssd_write"): 0.6, ("h2d", "d2h"): 0.7, ("compute", "cpu"): 0.9}
    run = partial(simulate, [program] * 2, seconds * 2, placement=placement, speeds=speeds, op_seconds=1e-5)
    assert work(run)[0] < 150
