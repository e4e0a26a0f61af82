"""A prediction is the simulator's, of the program and at the prices it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import A100, gpt, lowered, placed, ratios

from gs_compile.planner.prediction import predict
from gs_compile.planner.simulate.prices import measure

WORKLOAD = gpt(4, 512, sequence=256, vocabulary=5000)
SLOW = replace(A100, ssd_write_bytes_per_second=3e8, ssd_write_mixed_bytes_per_second=2e8)


def predicted(machine=A100, host_nbytes=None, shares=(0.0, 0.0, 0.0), alpha=0.25):
    placement = placed(WORKLOAD, 3, ratios(*shares), alpha, separate=machine.separate)
    return predict(lowered(WORKLOAD, placement)[-1], placement, WORKLOAD, machine, host_nbytes=host_nbytes), placement


def test_it_is_of_the_program_at_its_prices():
    found, placement = predicted()
    assert found.prices == measure(found.program, placement, WORKLOAD, A100)
    computing = sum(p.seconds for p, op in zip(found.prices, found.program.ops, strict=True) if op.lane == "compute")
    assert found.simulation.seconds >= computing
    assert found.simulation.busy["compute"] * found.simulation.seconds >= 0.999 * computing  # it may be slowed down


@pytest.mark.parametrize(("machine", "shares"), [(SLOW, (0.0, 0.0, 0.0)), (A100, (1.0, 1.0, 0.0))])
def test_no_lane_works_longer_than_the_step(machine, shares):
    """As one step follows on another, what is put off from one is done in the next, however many steps that takes."""
    found, _ = predicted(machine, shares=shares)
    written = sum(p.seconds for p, op in zip(found.prices, found.program.ops, strict=True) if op.lane == "ssd_write")
    assert found.simulation.seconds >= 0.99 * written
    assert all(share <= 1 + 1e-9 for share in found.simulation.busy.values())


def test_a_device_that_is_the_host_computes_in_line():
    """Issuing costs such a machine the time of its computation."""
    one_memory = replace(A100, device="cpu", op_seconds=1e-3)
    slow, fast = (predicted(replace(one_memory, op_seconds=s))[0].simulation.seconds for s in (1e-3, 0.0))
    assert slow > fast + 1e-3


def test_a_budget_makes_the_step_wait_for_its_memory():
    free, _ = predicted(SLOW)
    needed = dict(free.program.peaks)["host"]
    held, _ = predicted(SLOW, host_nbytes=needed)
    assert held.simulation.peaks["host"] <= held.program.slab_nbytes == needed
    assert free.program.slab_nbytes > needed  # writes may lag behind
    assert held.simulation.seconds > free.simulation.seconds
