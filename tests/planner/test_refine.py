"""From a solution to a program: with a linear program, programs and a simulator that are made up, and with true ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planned import A100, SSD_RATES, gpt, problem, ratios

from gs_compile.errors import MemoryBudgetError
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.choose import MOST_ROUNDS, choose, refined
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Budgets, Request

WORKLOAD = gpt(2, 64)
TURN = max(size.num_trained for size in WORKLOAD.sizes if isinstance(size.unit, int)) * (12 + 2 + 4)
BUDGET = 10 * TURN
BUDGETS = Budgets(host_nbytes=BUDGET, ssd_nbytes=10**12)
LEAST = TURN  # of host memory, for the linear program to find anything
CPU = replace(A100, device="cpu", device_nbytes=0)


class Faked:
    """The linear program gives all the memory there is to one number; its program takes `over` more than that.

    A device's peak is `beyond` above what the linear program gives it.
    """

    profile = CPU
    workload = WORKLOAD
    beyond = 0
    will_run = True
    few = None  # what a large step is looked at with; itself
    number = 3
    unsolved = ()  # alphas with which nothing fits
    seconds_on_device = staticmethod(lambda nbytes: 1.0)
    values_nbytes, _room_nbytes = Problem.values_nbytes, Problem._room_nbytes
    steps, excess, _most = Problem.steps, Problem.excess, Problem._most
    builder = property(lambda self: self)

    def __init__(self, over=lambda alpha: 0, seconds=lambda resident: 1.0, bound=1.0, late=lambda alpha: 1 + alpha):
        self.over, self.seconds, self.bound, self.late = over, seconds, bound, late
        self.asked, self.device_asked = [], []

    def solved(self, number, alpha, *, budgets=None):
        if budgets is None:
            return None if alpha in self.unsolved else SimpleNamespace(seconds=self.bound)
        self.asked.append(budgets.host_nbytes)
        self.device_asked.append(budgets.device_nbytes)
        if budgets.host_nbytes < LEAST:
            return None
        alpha = self.best if alpha is None else alpha
        names = {"resident": budgets.host_nbytes, "device": budgets.device_nbytes, "alpha": alpha}
        shares = ratios(0.0, 0.0, 0.0, 0.0, 0.5 * bool(budgets.device_nbytes))
        decision = SimpleNamespace(ratios=(shares,), **names)
        return SimpleNamespace(seconds=self.bound, num_micro_batches=number, decision=decision, **names)

    @property
    def trial(self):
        return self.few or self

    def placement(self, decision):
        return decision

    def program(self, placement):
        inside = self.workload.workspace_nbytes
        peaks = {
            "device": placement.device + self.beyond - inside,
            "host": placement.resident + self.over(placement.alpha),
        }
        return SimpleNamespace(peaks=tuple(peaks.items()))

    def predicted(self, placement, program=None):
        seconds = self.seconds(placement.resident) * self.late(placement.alpha)
        seconds *= self.seconds_on_device(placement.device)
        return SimpleNamespace(seconds=seconds)

    def refined(self, host_nbytes=BUDGET, best=0.0, device_nbytes=0, **asked):
        self.budgets = replace(BUDGETS, host_nbytes=host_nbytes, device_nbytes=device_nbytes)
        self.request, self.best = Request(**asked), best
        return refined(self, SimpleNamespace(alpha=best, seconds=self.bound))[0]


def test_what_fits_and_keeps_time_is_taken_at_once():
    faked = Faked()
    assert faked.refined().solution.resident == BUDGET
    assert faked.asked == [BUDGET]


def test_it_shrinks_until_the_program_fits():
    faked = Faked(over=lambda alpha: 1000)
    assert faked.refined().solution.resident + 1000 == BUDGET
    assert faked.asked == [BUDGET, BUDGET - 1000]


@pytest.mark.parametrize(
    ("settings", "asked", "alpha"),
    [
        ({}, {}, 0.25),  # as good as any: no other is tried
        ({"seconds": lambda resident: 2.0}, {}, 0.0),
        ({"seconds": lambda resident: 2.0}, {"alpha": 0.25}, 0.25),
        ({"seconds": lambda resident: 2.0}, {"clip": True}, 0.25),
        ({"seconds": lambda resident: 2.0, "late": lambda alpha: 1 - alpha}, {}, 0.5),  # costs the LP nothing
        ({"seconds": lambda resident: 2.0, "late": lambda alpha: 1 + (alpha - 0.25) ** 2}, {}, 0.25),
        ({"over": lambda alpha: BUDGET * (alpha > 0)}, {}, 0.0),
        ({"seconds": lambda resident: 2.0, "over": lambda alpha: BUDGET * (alpha == 0)}, {}, 0.25),
    ],
)
def test_nothing_is_late_where_that_is_faster_or_fits_alone(settings, asked, alpha):
    faked = Faked(**{"late": lambda alpha: 1 + alpha / 10, **settings})
    assert faked.refined(best=0.25, **asked).solution.alpha == alpha


def test_a_large_step_has_an_alpha_with_which_all_of_it_fits():
    """A few bundles of micro-batches may take less memory than all of these."""
    faked, bundles = Faked(), Faked()
    faked.will_run, faked.few, faked.unsolved = False, bundles, (0.0,)
    bundles.budgets, bundles.request, bundles.best = BUDGETS, Request(), 0.0
    assert faked.refined(best=0.25).solution.alpha == 0.25
    faked.unsolved = ()
    assert faked.refined(best=0.25).solution.alpha == 0.0


def test_the_device_keeps_its_budget():
    """What tensors are cut at, and what code computes with, count (fault 20)."""
    faked = Faked()
    faked.profile, faked.beyond = A100, 300
    inside = WORKLOAD.workspace_nbytes
    found = faked.refined(device_nbytes=inside + 1000)
    assert faked.device_asked == [inside + 1000, inside + 700]
    assert found.solution.device + 300 == inside + 1000
    faked.beyond = 2000 + inside
    with pytest.raises(MemoryBudgetError, match=r"no program .* keeps the budgets"):
        faked.refined(device_nbytes=inside + 1000)


def test_device_memory_is_left_free_for_what_leaves_late():
    """Data that lives there takes the room that gradients wait in: a layer's gradient and parameters is enough."""
    layer = max(size.num_trained for size in WORKLOAD.sizes if isinstance(size.unit, int)) * (2 + 4)
    faked = Faked()
    faked.profile = A100
    faked.seconds_on_device = lambda nbytes: 2.0 if nbytes > 7 * layer else 1.0
    found = faked.refined(device_nbytes=8 * layer)
    assert (found.seconds, found.less) == (1.0, {"host": 0, "device": layer, "ssd": 0})
    assert set(faked.asked) == {BUDGET}


@pytest.mark.parametrize("over", [lambda alpha: BUDGET, None])
def test_a_program_that_never_fits_is_refused(over):
    """Each round takes off what the program is over; one that grows as it shrinks is given up."""
    faked = Faked(over=over)
    if over is None:
        faked.program = lambda placement: SimpleNamespace(peaks=(("host", BUDGET + 1),))
    with pytest.raises(MemoryBudgetError, match=r"no program .* keeps the budgets"):
        faked.refined()
    assert len(faked.asked) <= 4 * MOST_ROUNDS


@pytest.mark.parametrize(
    ("machine", "hidden"),
    [pytest.param(A100, 1024, id="gpu"), pytest.param(CPU, 512, id="cpu", marks=pytest.mark.slow)],
)
def test_a_large_step_is_simulated_in_bundles(machine, hidden, monkeypatch):
    """Twelve micro-batches in eight bundles take what they take one by one, within a few per cent, and move as much.

    A layer is large enough for the machine that its products take the time, not the latency of their transfers.
    """
    workload = gpt(6, hidden, sequence=hidden // 2, vocabulary=2000)
    host_nbytes = 300 * 10**6 * (hidden // 512) ** 2
    given = problem(workload, machine, 12, host_nbytes=host_nbytes)
    monkeypatch.setattr("gs_compile.planner.problem.LARGE", 60)
    bundled, whole = (choose(replace(given, will_run=whole)) for whole in (False, True))
    assert (bundled.program.num_micro_batches, whole.program.num_micro_batches) == (8, 12)
    assert bundled.num_micro_batches == whole.num_micro_batches == 12
    assert bundled.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert sum(bundled.homes.values()) == pytest.approx(sum(whole.homes.values()), rel=0.02)
    for found in (bundled, whole):
        assert planned_peak(found.program, "host") <= host_nbytes


def test_a_large_step_that_brings_the_model_in_for_each_micro_batch_is_not_bundled(monkeypatch):
    """Its time grows with the number of micro-batches, as the linear program says. Placements are compared by a few of
    these: a thousand took minutes.
    """
    request = Request(schedule="horizontal", host_memory=300 * 10**6)
    given = problem(gpt(6, 512, sequence=64, vocabulary=2000), CPU, 16, request=request)
    monkeypatch.setattr("gs_compile.planner.choose.GOOD_ENOUGH", 0.5)  # so that several are compared
    placed = choose(given).placement
    monkeypatch.setattr("gs_compile.planner.problem.LARGE", 60)
    numbers, predicted = [], Problem.predicted
    monkeypatch.setattr(Problem, "predicted", lambda each, *args: numbers.append(each.number) or predicted(each, *args))
    chosen = choose(replace(given, will_run=False))
    assert numbers == [8, 16, 8, 16]  # with and without data in memory
    assert chosen.program.num_micro_batches == 16
    assert chosen.seconds == pytest.approx(chosen.bound_seconds, rel=0.1)
    assert chosen.placement == placed


def test_alpha_is_that_of_the_faster_step_with_all_that_stays_in_memory():
    """Late updates fill a drive that binds; so do early ones, once the next step does not wait for what they write."""
    rates = dict.fromkeys(SSD_RATES, 2e8)
    machine = replace(CPU, matmul_flops_per_second={"bf16": 2e11}, **rates)
    workload = gpt(6, 768, sequence=256, vocabulary=50257)
    given = problem(workload, machine, 2, request=Request(ratios=ratios(0.0, 0.0, 0.0)))
    late, early = refined(given, given.best)
    assert late.solution.alpha > early.solution.alpha == 0.0
    assert late.seconds < early.seconds
    chosen = choose(given)
    assert chosen.alpha == 0.0
    assert chosen.seconds < late.seconds
