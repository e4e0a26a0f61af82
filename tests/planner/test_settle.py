"""Settling, with a linear program, programs and a simulator that are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planned import gpt

from gs_compile.errors import MemoryBudgetError
from gs_compile.planner.lp.search import Search
from gs_compile.planner.lp.solve import Budgets, Fixed
from gs_compile.planner.refine import alphas_of, settle

WORKLOAD = gpt(2, 64)
TURN = max(size.num_trained for size in WORKLOAD.sizes if isinstance(size.unit, int)) * (12 + 2 + 4)
BUDGET = 10 * TURN
BUDGETS = Budgets(host_nbytes=BUDGET, ssd_nbytes=10**12)
LEAST = TURN  # of host memory, for the linear program to find anything


class Faked:
    """The linear program gives all the memory there is to one number; its program takes `over` more than that."""

    def __init__(self, over=lambda alpha: 0, seconds=lambda resident: 1.0, bound=1.0, late=lambda alpha: 1 + alpha):
        self.over, self.seconds, self.bound, self.late = over, seconds, bound, late
        self.asked = []

    def again(self, number, alpha, *, room=BUDGETS):
        self.asked.append(room.host_nbytes)
        if room.host_nbytes < LEAST:
            return None
        resident = max(0, room.host_nbytes)
        return SimpleNamespace(resident=resident, seconds=self.bound, alpha=alpha, num_micro_batches=number)

    def lowered(self, placement):
        return SimpleNamespace(peaks=(("device", 7), ("host", placement.resident + self.over(placement.alpha))))

    def predicted(self, program, placement):
        seconds = self.seconds(placement.resident) * self.late(placement.alpha)
        return SimpleNamespace(simulation=SimpleNamespace(seconds=seconds))

    def settle(self, host_nbytes=BUDGET, alphas=(0.0,)):
        budgets = replace(BUDGETS, host_nbytes=host_nbytes)
        return settle(self.again, 3, alphas, lambda solution: solution, self.lowered, self.predicted, WORKLOAD, budgets)


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
    found = faked.settle(alphas=(0.25, 0.0))
    assert (found.seconds, found.solution.alpha) == (1.5, 0.0)
    assert faked.asked == [BUDGET - turns * TURN for turns in (0, 1, 2, 4, 2)]


def test_late_updates_stay_where_they_are_faster():
    assert Faked().settle(alphas=(0.02, 0.0)).solution.alpha == 0.02  # as good as any: no other is tried
    faked = Faked(seconds=lambda resident: 2.0, late=lambda alpha: 1 - alpha)
    assert faked.settle(alphas=(0.25, 0.0)).solution.alpha == 0.25
    assert len(faked.asked) == 5


def test_nothing_is_late_where_late_gradients_do_not_fit():
    faked = Faked(over=lambda alpha: BUDGET * (alpha > 0))
    assert faked.settle(alphas=(0.25, 0.0)).solution.alpha == 0.0


def test_late_updates_stay_where_nothing_else_fits():
    faked = Faked(seconds=lambda resident: 2.0, over=lambda alpha: BUDGET * (alpha == 0))
    assert faked.settle(alphas=(0.25, 0.0)).solution.alpha == 0.25


def test_what_is_said_of_a_plan_is_said_of_its_alpha():
    faked = Faked(seconds=lambda resident: 2.0)
    found = Search(best=faked.again(3, 0.25), history=())
    late, prompt = (faked.settle(alphas=(alpha,)) for alpha in (0.25, 0.0))
    assert late.search(found, faked.again) is found
    assert prompt.search(found, faked.again).best.alpha == 0.0


@pytest.mark.parametrize(
    ("fixed", "alphas"),
    [
        ({}, (0.25, 0.0)),
        ({"alpha": 0.25}, (0.25,)),
        ({"clip": True}, (0.25,)),
        ({"clip": True, "speculative": True}, (0.25, 0.0)),
    ],
)
def test_no_other_alpha_is_tried_where_it_is_given(fixed, alphas):
    assert alphas_of(SimpleNamespace(alpha=0.25), Fixed(**fixed)) == alphas
    assert alphas_of(SimpleNamespace(alpha=0.0), Fixed(**fixed)) == (0.0,)


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
    faked.lowered = lambda placement: SimpleNamespace(peaks=(("host", BUDGET),))
    with pytest.raises(MemoryBudgetError):
        faked.settle()
    assert 1 < len(faked.asked) <= 10
