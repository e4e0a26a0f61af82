"""From a solution to a program, with a linear program, programs and a simulator that are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planned import A100, gpt

from gs_compile.errors import MemoryBudgetError
from gs_compile.planner.lp.solve import Budgets, Fixed
from gs_compile.planner.problem import Problem, _Refinement

WORKLOAD = gpt(2, 64)
TURN = max(size.num_trained for size in WORKLOAD.sizes if isinstance(size.unit, int)) * (12 + 2 + 4)
BUDGET = 10 * TURN
BUDGETS = Budgets(host_nbytes=BUDGET, ssd_nbytes=10**12)
LEAST = TURN  # of host memory, for the linear program to find anything
CPU = replace(A100, device="cpu", device_nbytes=0)


class Faked:
    """The linear program gives all the memory there is to one number; its program takes `over` more than that.

    A device's peak is `lag` above what the linear program gives it.
    """

    profile = CPU
    lag = 0

    def __init__(self, over=lambda alpha: 0, seconds=lambda resident: 1.0, bound=1.0, late=lambda alpha: 1 + alpha):
        self.over, self.seconds, self.bound, self.late = over, seconds, bound, late
        self.asked, self.device_asked = [], []
        self.workload, self.turn_nbytes = WORKLOAD, TURN
        self.formulas = SimpleNamespace(counted=SimpleNamespace(lengths=(2,)))

    def solved(self, number, alpha, *, budgets):
        if alpha is None:
            return None
        self.asked.append(budgets.host_nbytes)
        self.device_asked.append(budgets.device_nbytes)
        if budgets.host_nbytes < LEAST or budgets.device_nbytes < 0:
            return None
        resident = max(0, budgets.host_nbytes)
        names = {"resident": resident, "device": budgets.device_nbytes, "seconds": self.bound}
        return SimpleNamespace(alpha=alpha, num_micro_batches=number, **names)

    def placed(self, solution):
        return solution

    def at(self, number):
        assert number == 3
        return self

    def program(self, placement):
        peaks = {"device": placement.device, "host": placement.resident + self.over(placement.alpha)}
        return SimpleNamespace(peaks=tuple(peaks.items()))

    def predicted(self, program, placement):
        seconds = self.seconds(placement.resident) * self.late(placement.alpha)
        peaks = {"device": placement.device + self.lag}
        return SimpleNamespace(program=program, simulation=SimpleNamespace(seconds=seconds, peaks=peaks))

    def excess(self, prediction):
        return Problem.excess(self, prediction)

    def settle(self, host_nbytes=BUDGET, best=0.0, device_nbytes=0, **fixed):
        self.budgets = replace(BUDGETS, host_nbytes=host_nbytes, device_nbytes=device_nbytes)
        self.fixed = Fixed(**fixed)
        return _Refinement(self, 3).fastest(SimpleNamespace(alpha=best, seconds=self.bound))


def test_what_fits_and_keeps_time_is_taken_at_once():
    faked = Faked()
    assert faked.settle().placement.resident == BUDGET
    assert faked.asked == [BUDGET]


def test_it_shrinks_until_the_program_fits():
    faked = Faked(over=lambda alpha: 1000)
    found = faked.settle()
    assert faked.asked == [BUDGET, BUDGET - 1000]
    assert found.placement is found.solution
    assert found.placement.resident + 1000 == BUDGET


def test_memory_is_left_free_where_the_step_is_faster():
    """A full memory makes the step wait; two turns free are enough, and more would cost again."""
    faked = Faked(seconds=lambda resident: {10: 3.0, 9: 2.0, 8: 1.5, 6: 1.8}[resident // TURN])
    found = faked.settle()
    assert faked.asked == [BUDGET - turns * TURN for turns in (0, 1, 2, 4)]
    assert (found.seconds, found.placement.resident) == (1.5, BUDGET - 2 * TURN)


def test_it_stops_where_nothing_is_to_be_gained():
    faked = Faked(seconds=lambda resident: {10: 3.0, 9: 1.02}[resident // TURN])
    assert faked.settle().seconds == 1.02
    assert len(faked.asked) == 2


def test_nothing_is_late_where_that_is_faster():
    """With as much memory left free as was best with late updates."""
    faked = Faked(seconds=lambda resident: {10: 3.0, 9: 2.0, 8: 1.5, 6: 1.8}[resident // TURN])
    found = faked.settle(best=0.25)
    assert (found.seconds, found.solution.alpha) == (1.5, 0.0)
    assert faked.asked == [BUDGET - turns * TURN for turns in (0, 1, 2, 4, 2)]


def test_late_updates_stay_where_they_are_faster():
    assert Faked().settle(best=0.02).solution.alpha == 0.02  # as good as any: no other is tried
    faked = Faked(seconds=lambda resident: 2.0, late=lambda alpha: 1 - alpha)
    assert faked.settle(best=0.25).solution.alpha == 0.25
    assert len(faked.asked) == 5


def test_nothing_is_late_where_late_gradients_do_not_fit():
    faked = Faked(over=lambda alpha: BUDGET * (alpha > 0))
    assert faked.settle(best=0.25).solution.alpha == 0.0


def test_late_updates_stay_where_nothing_else_fits():
    faked = Faked(seconds=lambda resident: 2.0, over=lambda alpha: BUDGET * (alpha == 0))
    assert faked.settle(best=0.25).solution.alpha == 0.25


@pytest.mark.parametrize("fixed", [{"alpha": 0.25}, {"clip": True}])
def test_no_other_alpha_is_tried_where_it_is_given(fixed):
    faked = Faked(seconds=lambda resident: 2.0)
    assert faked.settle(best=0.25, **fixed).solution.alpha == 0.25
    assert len(faked.asked) == 4


def test_the_device_keeps_its_budget_as_lanes_lag():
    """What is late to leave the device, and what code computes with, count (fault 20)."""
    faked = Faked()
    faked.profile, faked.lag = A100, 300
    inside = WORKLOAD.workspace_nbytes
    found = faked.settle(device_nbytes=inside + 1000)
    assert faked.device_asked == [inside + 1000, 700]
    assert found.placement.device + 300 + inside == inside + 1000
    faked.lag = 2000 + inside
    with pytest.raises(
        MemoryBudgetError, match=r"^host memory of .* or device memory of .* is too little for this step"
    ):
        faked.settle(device_nbytes=inside + 1000)


def test_memory_is_not_left_free_that_is_not_there():
    faked = Faked(seconds=lambda resident: 3.0)
    assert faked.settle(TURN + LEAST // 2).seconds == 3.0
    assert len(faked.asked) == 2


def test_a_program_that_never_fits_is_refused():
    with pytest.raises(MemoryBudgetError, match=r"^host memory of .* is too little for this step: give it more, fewer"):
        Faked(over=lambda alpha: BUDGET).settle()


def test_rounds_end():
    """Each takes off what the program is over; one that grows as it shrinks is given up."""
    faked = Faked()
    faked.program = lambda placement: SimpleNamespace(peaks=(("host", BUDGET + 1),))
    with pytest.raises(MemoryBudgetError):
        faked.settle()
    assert 1 < len(faked.asked) <= 10
