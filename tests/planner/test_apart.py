"""Stacks that differ keep other parts of their data in memory: what that brings, and that formulas are what programs do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import A100, GB, formulas, gpt, lowered, problem, ratios
from test_saved_plans import levelled
from tiers import peaks_of

from gs_compile.placement.boundaries import shortest
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision
from gs_compile.placement.traffic import traffic
from gs_compile.placement.workload import UnitCost
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.decide import plan_stacks
from gs_compile.planner.lp.solve import ProblemData, System
from gs_compile.planner.request import Request
from gs_compile.program.ir import StepShape

CPU = replace(A100, device="cpu", device_nbytes=0)
JOINT = 2  # the layer between a tower of two and a language model of two


def two_stacks(tower, text, *, trained=True):
    """Four layers of two models, and a joint that takes one's output to the other's width."""
    sizes = {size.unit: size for size in tower.sizes if size.unit != "h"}
    sizes |= {JOINT: replace(sizes["e"], unit=JOINT)}
    costs = {**tower.costs, JOINT: UnitCost(forward_flops=1e6, backward_flops=3e6)}
    for layer in range(text.num_layers):
        sizes[JOINT + 1 + layer] = replace(text.sizes[1 + layer], unit=JOINT + 1 + layer)
        costs[JOINT + 1 + layer] = text.costs[layer]
    sizes["h"], costs["h"] = text.sizes[-1], text.costs["h"]
    below = () if trained else ("e", *range(JOINT))
    for unit in below:
        sizes[unit] = replace(sizes[unit], trained_numels=(), frozen_numels=sizes[unit].trained_numels)
    shape = StepShape(joints=frozenset({JOINT}), frozen=frozenset(below), first_grad="e" if trained else JOINT)
    return replace(
        text,
        name="two stacks",
        num_layers=JOINT + 1 + text.num_layers,
        sizes=tuple(sizes.values()),
        costs={unit: costs[unit] for unit in ("e", *range(JOINT + 1 + text.num_layers), "h")},
        x_nbytes=shortest([*tower.x_nbytes] * (JOINT + 1) + [*text.x_nbytes] * (text.num_layers + 1)),
        shape=shape,
    )


def stack(hidden, sequence):
    return gpt(JOINT, hidden, sequence=sequence, vocabulary=1000, tied=False)


NARROW, WIDE = stack(256, 1024), stack(1024, 256)


@pytest.mark.parametrize("separate", [False, True])
def test_whole_programs_are_what_the_columns_of_each_stack_say(separate):
    """Of one stack all is in host memory, what its layers save too; of the other all is on SSD, or on the device."""
    workload, machine = two_stacks(levelled(NARROW, 256), levelled(WIDE, 1024)), A100 if separate else CPU
    decision = Decision(
        ratios=(ratios(0.0, 0.0, 0.0, 0.0, 1.0 * separate), ratios(1 / 3, 1.0, 1.0)),
        shares=Shares([Share(2, "host", 2 / 5, stack=1), Share(1, "ssd", 2 / 5, stack=0)]),
    )
    placement = StepBuilder.of(workload, 5, separate=separate).placement(decision)
    program = lowered(workload, placement)[-1]
    system = System(ProblemData(formulas(workload, machine), Request().budgets(machine), Request()), 5, 0.0)
    found, written = system.needs(decision)
    peaks = peaks_of(program.ops, placement)
    for tier, needed in found.items():
        nbytes, said = peaks[tier], needed - (workload.workspace_nbytes if tier == "device" else 0)
        assert 0.99 * nbytes <= said <= 1.15 * nbytes + 1
    moved = sum(nbytes for (lane, _), nbytes in traffic(program, placement).items() if lane == "ssd_write")
    assert written == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize(
    ("trained", "flops_per_second", "host_nbytes", "gains"),
    [
        pytest.param(True, 6e12, 0.52 * GB, (1.08, 1.04), id="both trained", marks=pytest.mark.slow),
        pytest.param(False, 1e13, 0.46 * GB, (1.04, 1.02), id="a frozen tower"),
    ],
)
def test_a_step_is_faster_for_what_each_stack_keeps(trained, flops_per_second, host_nbytes, gains):
    """By the linear program and by the simulator: memory is of most use to the stack of wide layers, which is trained."""
    workload = two_stacks(levelled(NARROW, 256), levelled(WIDE, 1024), trained=trained)
    machine = replace(CPU, matmul_flops_per_second={"bf16": flops_per_second})
    given = problem(workload, machine, 4, request=Request(alpha=0.0), bare=True, host_nbytes=int(host_nbytes))
    own, same = (plan_stacks(each) for each in (given, replace(given, apart=False)))
    found = same.bound_seconds / own.bound_seconds, same.seconds / own.seconds
    assert all(gain >= least for gain, least in zip(found, gains, strict=True)), found
    tower, text = own.placement.decision.ratios
    assert (len(same.placement.decision.ratios), tower.parameter, text.parameter) == (1, 0.0, 1.0)
    assert tower.parameter < own.ratios["parameter"] < text.parameter
    assert any("Stacks have parts of their own in host memory (parameter 0%, 100%; " in note for note in own.notes)


def test_stacks_that_gain_nothing_keep_the_same():
    """Computation hides what is moved: the plan spreads it over all layers."""
    slow = replace(CPU, matmul_flops_per_second={"bf16": 1e11})
    given = problem(two_stacks(NARROW, WIDE), slow, 4, request=Request(alpha=0.0), host_nbytes=GB // 2)
    found = plan_stacks(given)
    assert len(found.placement.decision.ratios) == 1
    assert not any("Stacks" in note for note in found.notes)
