"""Saved activations in plans: never slower, what the formulas say of them is what programs do, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planned import A100, GB, SSD_RATES, formulas, gpt, lowered, placed, problem, ratios
from tiers import peaks_of

from gs_compile.cli.report.explain import report
from gs_compile.errors import NoFitError, OptionError, PlanError
from gs_compile.options import Options
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision
from gs_compile.placement.traffic import traffic
from gs_compile.placement.workload import LevelCost
from gs_compile.planner import saved
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.choose import choose
from gs_compile.planner.lp.counting import WIDTH
from gs_compile.planner.plan import plan
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.resumed import as_before
from gs_compile.planner.saved import computed, with_saved

CPU = replace(A100, device="cpu", device_nbytes=0)


def levelled(workload, hidden):
    """Products alone, or all that a backward reads, which then does not read its input."""
    per_token = 2 * hidden * workload.micro_batch_size * workload.sequence

    def level(cost, times, part, reads_input):
        backward = cost.backward_flops - part * cost.forward_flops
        flops = {"forward_flops": cost.forward_flops, "backward_flops": backward}
        return LevelCost(nbytes=times * per_token, reads_input=reads_input, **flops)

    costs = {
        unit: replace(cost, levels=(level(cost, 9, 0.8, True), level(cost, 17, 1.0, False)))
        if isinstance(unit, int)
        else cost
        for unit, cost in workload.costs.items()
    }
    return replace(workload, costs=costs)


@pytest.mark.parametrize("share", [Share(1, "host", 1.0), Share(2, "device", 1.0), Share(2, "ssd", 1.0)])
@pytest.mark.parametrize("separate", [True, False])
def test_whole_programs_are_what_the_columns_say(separate, share):
    """A model of 8 layers and many micro-batches from shorter ones that save a byte of each."""
    if not separate and share.tier == "device":
        return
    workload, machine = levelled(gpt(8, 512, sequence=512, vocabulary=2000), 512), A100 if separate else CPU
    known = formulas(workload, machine)
    point = np.array([1.0, *np.zeros(known.width - 1)])
    point[WIDTH + known.saved.index((share.level, share.tier))] = 1.0
    placement = placed(workload, 12, ratios(0.0, 0.0, 0.0), 0.0, separate=separate, shares=[share])
    program = lowered(workload, placement)[-1]
    peaks, found = peaks_of(program.ops, placement), known.of(0.0, 12)
    for tier, alive in found.alive.items():
        said = float((alive @ point).max()) - (workload.workspace_nbytes if tier == "device" else 0)
        # what goes to SSD is staged in host memory, where another class has its most at another moment
        assert 0.99 * peaks[tier] <= said <= (1.06 if share.tier == "ssd" else 1.01) * peaks[tier] + 1
    moved = sum(nbytes for (lane, _), nbytes in traffic(program, placement).items() if lane.startswith("ssd"))
    assert float(found.ssd @ point) == pytest.approx(moved, rel=0.01, abs=1e5)
    again = workload.costs[0].backward_flops - workload.costs[0].levels[share.level - 1].backward_flops
    saved = float(found.seconds["backward", "compute"] @ (point - np.eye(known.width)[0]))
    assert saved == pytest.approx(-12 * 8 * again / machine.matmul_flops_per_second["bf16"])


@pytest.mark.parametrize(
    ("alpha", "number_of_machines"),
    [(0.0, 3), pytest.param(0.0, 20, marks=pytest.mark.slow), pytest.param(None, 20, marks=pytest.mark.slow)],
)
def test_a_step_is_never_slower_for_what_it_saves(alpha, number_of_machines):
    """Of random machines and budgets; on some of them it is faster."""
    numbers, gains = np.random.default_rng(0), []
    workload = levelled(gpt(4, 512, sequence=256, vocabulary=2000), 512)
    counts = {}
    for _ in range(number_of_machines):
        machine, known = drawn(numbers)
        number = int(numbers.integers(1, 9))
        given = problem(workload, machine, number, request=Request(alpha=alpha), bare=True, counts=counts, **known)
        if not given.solved(number):
            continue
        without = choose(given)
        found = with_saved(without)
        assert found.seconds <= without.seconds
        assert bool(found.placement.decision.shares) == (found.seconds < without.seconds)
        assert bool(found.placement.decision.shares) == any("keep their activations" in note for note in found.notes)
        gains.append(without.seconds / found.seconds)
    assert len(gains) > 0.75 * number_of_machines
    assert max(gains) > 1.1


def drawn(numbers):
    """A random machine, and budgets that keep some of the toy off host memory."""
    fast = float(np.exp(numbers.uniform(np.log(0.02), np.log(2))))
    read, write = (numbers.uniform(1, 6, 2) * 1e9 * fast).tolist()
    machine = replace(
        A100 if numbers.integers(2) else CPU,
        matmul_flops_per_second={"bf16": 2e12},
        **{f"ssd_read{mixed}_bytes_per_second": read for mixed in ("", "_mixed")},
        **{f"ssd_write{mixed}_bytes_per_second": write for mixed in ("", "_mixed")},
    )
    host, device = numbers.uniform(0.12, 0.6) * GB, numbers.uniform(0.1, 0.4) * GB * machine.separate
    return machine, {"host_nbytes": int(host), "device_nbytes": int(device)}


def test_what_is_given_of_activations_is_kept():
    workload = levelled(gpt(4, 512, sequence=256, vocabulary=2000), 512)
    given = {"machine": CPU, "micro_batch_size": 1, "num_micro_batches": 4, "alpha": 0.0}
    half = plan(workload, **given, ratios={"activation": 0.5})
    assert sum(share.part for share in half.placement.decision.shares) == 0.5
    assert {share.tier for share in half.placement.decision.shares} == {"host"}
    everything = plan(workload, **given, recompute="none")
    assert {share.level for share in everything.placement.decision.shares} == {2}
    assert sum(share.part for share in everything.placement.decision.shares) == 1.0
    assert everything.homes.get(("x", "host"), 0) == 0
    least = plan(workload, **given, host_memory="150MB", recompute="all").peaks["ssd"]
    small = given | {"machine": replace(CPU, ssd_nbytes=least), "host_memory": "150MB"}
    with pytest.raises(NoFitError, match=r"it needs .* What would fit: .*activations that are computed again"):
        plan(workload, **small, recompute="none")
    with pytest.raises(PlanError, match="have nothing to save"):
        plan(gpt(4, 512), **given, recompute="none")
    with pytest.raises(OptionError, match=r'recompute is "all", but expert\.ratios\.activation is 0\.5: leave one'):
        Options.of({"expert": {"recompute": "all", "ratios": {"activation": 0.5}}})


@pytest.mark.parametrize("separate", [False, True])
def test_layers_that_can_save_nothing_are_in_no_share(separate):
    """Every other layer: what is saved is of the others, on however many tiers, and so is what that brings."""
    workload = levelled(gpt(4, 512, sequence=256, vocabulary=2000), 512)
    halves = {unit: replace(cost, levels=()) for unit, cost in workload.costs.items() if unit in (0, 2)}
    workload = replace(workload, costs=workload.costs | halves)
    machine = A100 if separate else CPU
    given = {"machine": machine, "micro_batch_size": 1, "num_micro_batches": 4, "alpha": 0.0}
    for found in (plan(workload, **given, recompute="none"), plan(workload, **given, ratios={"activation": 1.0})):
        assert found.saved == pytest.approx(0.5)
        saving = {value[1:3] for op in found.program.ops for value in op.results if value.kind == "a"}
        assert saving == {(unit, j) for unit in (1, 3) for j in range(4)}
        assert sum(share.part for share in found.placement.decision.shares) == 0.5
    for shares in ((Share(2, "host", 1.0),), (Share(2, "host", 0.5), Share(2, "ssd", 0.5))):
        decision = Decision(ratios=(ratios(0.25, 0.0, 0.0),), shares=Shares(shares))
        kept = StepBuilder.of(workload, 4, separate=separate).placement(decision)
        assert (kept.decision.shares, kept.activations.checkpoints("host")) == ((Share(2, "host", 0.5),), 0.25)


def test_the_schedules_to_compare_with_save_too():
    workload = levelled(gpt(4, 512, sequence=256, vocabulary=2000), 512)
    given = {"machine": CPU, "micro_batch_size": 1, "num_micro_batches": 4, "schedule": "horizontal"}
    again, auto, none = (plan(workload, **given, recompute=recompute) for recompute in ("all", "auto", "none"))
    assert (again.saved, none.saved) == (0, 1.0)
    assert auto.seconds <= again.seconds
    assert none.program.by_micro_batch
    assert "horizontal: 4 micro-batches of 1 sample of 256 tokens, alpha 0" in report(none)
    assert "100% of activations saved" in report(none)


def test_the_topmost_layers_save_what_has_room_at_the_turn():
    """Where all of host memory is needed later in the backward: no linear program of even shares knows of that room."""
    workload = levelled(gpt(8, 512, sequence=256, vocabulary=20000), 512)
    most = placed(workload, 4, ratios(0.0, 0.0, 0.0), 0.0, separate=False)
    host_nbytes = int(1.08 * peaks_of(lowered(workload, most)[-1].ops, most)["host"])
    slow = {name: getattr(CPU, name) / 1.25 for name in SSD_RATES}
    machine = replace(CPU, matmul_flops_per_second={"bf16": 5e11}, **slow)
    given = problem(workload, machine, 4, request=Request(alpha=0.0), bare=True, host_nbytes=host_nbytes)
    without = choose(given)
    found = with_saved(without)
    assert {(share.tier, share.is_topmost) for share in found.placement.decision.shares} == {
        ("host", True),
        ("ssd", False),
    }
    assert without.seconds / found.seconds > 1.05  # copies to where it is saved take turns with the computation
    assert dict(found.program.peaks)["host"] <= host_nbytes


def test_what_is_saved_may_take_the_place_of_all_that_lives_in_memory(monkeypatch):
    """Where computation binds, memory is worth more to activations than to parameters, which drives bring in time."""
    workload = levelled(gpt(8, 256, sequence=256, vocabulary=4000, bf16=False), 256)
    slow = replace(
        CPU, matmul_flops_per_second={"fp32": 1.6e11}, compute_mixed_speed=0.5, **dict.fromkeys(SSD_RATES, 4e8)
    )
    given = problem(workload, slow, 4, request=Request(alpha=0.0), bare=True, host_nbytes=53 * 10**6)
    with monkeypatch.context() as only_full:
        only_full.setattr(Problem, "emptied", property(lambda problem: problem))
        without = choose(given)
    found = saved._at_the_turn(given.wider, without)
    assert without.ratios["parameter"] > 0.0 == found.ratios["parameter"]
    assert found.bound_seconds < without.bound_seconds, "it is held against a linear program that may save as well"
    monkeypatch.setattr(saved, "_emptied", lambda problem, decision: decision)
    assert saved._at_the_turn(given.wider, without).seconds / found.seconds > 1.02


def test_a_step_that_computes_nearly_all_the_time_saves_however_slow_the_linear_program_holds_drives(monkeypatch):
    """By the linear program drives take as long with less to compute: what stays in memory between two uses it does not
    know.
    """
    workload = levelled(gpt(8, 512, sequence=256, vocabulary=20000), 512)
    slow = replace(CPU, matmul_flops_per_second={"bf16": 2e11}, **dict.fromkeys(SSD_RATES, 4e8))
    request = Request(alpha=0.0, ratios=ratios(0.0, 0.0, 0.0))
    given = problem(workload, slow, 4, request=request, bare=True, host_nbytes=GB)
    without = choose(given)
    assert without.simulation.busy["compute"] > 0.9
    found = with_saved(without)
    assert without.seconds / found.seconds > 1.05
    assert found.placement.decision.shares
    monkeypatch.setattr(saved, "MOST_COMPUTED", 1.0)
    assert with_saved(without) is without


def test_where_all_but_activations_fits_in_memory_drives_may_take_some():
    """With less memory they do: so a step was slower with more of it."""
    workload = levelled(gpt(8, 128, sequence=256, vocabulary=5000), 128)
    slow = replace(CPU, matmul_flops_per_second={"bf16": 2e10})
    given = {"machine": slow, "micro_batch_size": 1, "num_micro_batches": 3}
    less, more = (plan(workload, host_memory=nbytes, **given) for nbytes in ("30MiB", "36MiB"))
    assert more.seconds < 1.01 * less.seconds


@pytest.mark.parametrize(
    ("seconds", "worthwhile"), [((4.0, 3.2, 3.15), (1,)), ((4.0, 3.2, 3.0), (1, 2)), ((4.0, 3.95, 3.0), (2,))]
)
def test_of_levels_that_are_as_fast_the_smallest_is_taken(seconds, worthwhile):
    workload = levelled(gpt(2, 512), 512)
    none, *levels = seconds
    cost = workload.costs[0]
    each = zip(cost.levels, levels, strict=True)
    timed = [replace(level, seconds=(1.0, seconds - 1)) for level, seconds in each]
    cost = replace(cost, seconds=(1.0, none - 1), levels=tuple(timed))
    workload = replace(workload, costs=workload.costs | dict.fromkeys(range(2), cost))
    assert workload.computed == pytest.approx([2 * each for each in (none, *levels)])
    assert workload.worthwhile == worthwhile
    found = plan(workload, machine=CPU, micro_batch_size=1, num_micro_batches=4, alpha=0.0)
    assert {share.level for share in found.shares} <= set(worthwhile)
    assert computed(workload, found.shares) < workload.computed[0]


def test_a_former_plan_that_the_layers_cannot_have_is_made_anew():
    decision = Decision(ratios=(ratios(0.0, 0.0, 0.0),), shares=Shares([Share(1, "host", 0.5)])).as_dict()
    former = {"made_for": "it", "host_nbytes": 400 * GB, "values_nbytes": None, "decision": decision}
    workload = levelled(gpt(2, 512), 512)
    assert as_before(problem(workload, CPU, 2, bare=True), former, "it", 400 * GB).decision.shares.part() == 0.5
    assert as_before(problem(gpt(2, 512), CPU, 2, bare=True), former, "it", 400 * GB) is None
