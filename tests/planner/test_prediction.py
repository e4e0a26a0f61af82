"""A prediction is the simulator's, of the program and at the prices it is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from planned import A100, gpt, lowered, placed, ratios

from gs_compile.planner.simulate.prices import op_prices
from gs_compile.planner.simulate.simulator import predict

WORKLOAD = gpt(4, 512, sequence=256, vocabulary=5000)
SLOW = replace(A100, ssd_write_bytes_per_second=3e8, ssd_write_mixed_bytes_per_second=2e8)


def predicted(machine=A100, host_nbytes=None, shares=(0.0, 0.0, 0.0), alpha=0.25):
    placement = placed(WORKLOAD, 3, ratios(*shares), alpha, separate=machine.separate)
    return predict(lowered(WORKLOAD, placement)[-1], placement, WORKLOAD, machine, host_nbytes=host_nbytes), placement


@pytest.mark.parametrize(("machine", "shares"), [(SLOW, (0.0, 0.0, 0.0)), (A100, (1.0, 1.0, 0.0))])
def test_no_lane_works_longer_than_the_step(machine, shares):
    """As one step follows on another, what is put off from one is done in the next, however many steps that takes."""
    found, placement = predicted(machine, shares=shares)
    work: Counter[str] = Counter()
    for op, seconds in zip(found.program.ops, op_prices(found.program, placement, WORKLOAD, machine), strict=True):
        work[op.lane] += seconds
    assert found.seconds >= max(work["compute"], 0.99 * work["ssd_write"])
    assert found.busy["compute"] * found.seconds >= 0.999 * work["compute"]  # it may be slowed down
    assert all(share <= 1 + 1e-9 for share in found.busy.values())


def test_a_device_that_is_the_host_computes_in_line():
    """Issuing costs such a machine the time of its computation."""
    one_memory = replace(A100, device="cpu", op_seconds=1e-3)
    slow, fast = (predicted(replace(one_memory, op_seconds=s))[0].seconds for s in (1e-3, 0.0))
    assert slow > fast + 1e-3


def test_a_budget_makes_the_step_wait_for_its_memory():
    free, _ = predicted(SLOW)
    needed = dict(free.program.peaks)["host"]
    held, _ = predicted(SLOW, host_nbytes=needed)
    assert held.peaks["host"] <= held.program.slab_nbytes == needed
    assert free.program.slab_nbytes > needed  # writes may lag behind
    assert held.seconds > free.seconds
