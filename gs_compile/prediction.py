"""prediction: what a step of a placed model will take, by running its own program through the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.passes.fit import MARGIN, peak
from gs_compile.passes.lower import lower
from gs_compile.passes.measure import Price, measure
from gs_compile.passes.place import Budgets, Solution
from gs_compile.placement import Placement
from gs_compile.profile import Profile
from gs_compile.program import Program, StepShape
from gs_compile.runtime.simulator import Simulation, simulate
from gs_compile.workload import Workload

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over


@dataclass(frozen=True)
class Prediction:
    """A step in its steady state: the program that runs, what each operation costs, and when it runs."""

    program: Program
    prices: tuple[Price, ...]
    simulation: Simulation


def predict(
    placement: Placement,
    shape: StepShape,
    workload: Workload,
    profile: Profile,
    *,
    snake: bool = True,
    schedule: str = "vertical",
) -> Prediction:
    """The step that follows on others: a first one without late updates, then two with those of the step before."""
    programs = [
        lower(
            placement.num_layers,
            len(placement.x_nbytes),
            shape=shape,
            snake=snake,
            schedule=schedule,
            placement=placement,
            late=late,
        )[-1]
        for late in ((False, True) if placement.has_late else (False,))
    ]
    steps = [programs[0], programs[-1], programs[-1]]
    prices = {id(program): measure(program, placement, workload, profile) for program in programs}
    seconds = [[price.seconds for price in prices[id(program)]] for program in steps]
    simulation = simulate(
        steps,
        seconds,
        placement=placement,
        speeds=profile.speeds(),
        inline=not profile.separate,
        op_seconds=profile.op_seconds,
    )
    return Prediction(programs[-1], prices[id(programs[-1])], simulation)


def settle(
    solve: Callable[[Budgets], Solution | None],
    make: Callable[[Solution], Placement],
    lowered: Callable[[Placement], Program],
    budgets: Budgets,
) -> tuple[Solution, Placement]:
    """A solution whose program keeps the budget of host memory, by the peak that is planned of it.

    The linear program bounds working buffers from above but not cuts that are rounded to whole tensors and pages.
    Where the program itself needs more, the linear program is given that much less. Raises `MemoryBudgetError`.
    """
    allowed, needed = budgets.host_nbytes, 0
    for _ in range(MOST_ROUNDS):
        solution = solve(replace(budgets, host_nbytes=allowed))
        if solution is None:
            break
        placement = make(solution)
        needed = peak(lowered(placement), "host") + MARGIN
        if needed <= budgets.host_nbytes:
            return solution, placement
        allowed -= needed - budgets.host_nbytes
    raise MemoryBudgetError(
        f"host memory of {format_bytes(budgets.host_nbytes)} is too little for this step"
        + (f", whose program needs {format_bytes(needed)}" if needed else "")
        + ": give it more, fewer micro-batches, or a smaller micro_batch_size"
    )
