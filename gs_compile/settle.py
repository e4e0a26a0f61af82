"""settle: a solution of the linear program as a placement whose own program keeps the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.passes.fit import MARGIN, peak
from gs_compile.passes.place import Budgets, Solution
from gs_compile.placement import Placement
from gs_compile.program import Program

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over


def settle(
    solve: Callable[[Budgets], Solution | None],
    make: Callable[[Solution], Placement],
    lowered: Callable[[Placement], Program],
    budgets: Budgets,
) -> tuple[Solution, Placement, Program]:
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
        program = lowered(placement)
        needed = peak(program, "host") + MARGIN
        if needed <= budgets.host_nbytes:
            return solution, placement, program
        allowed -= needed - budgets.host_nbytes
    raise MemoryBudgetError(
        f"host memory of {format_bytes(budgets.host_nbytes)} is too little for this step"
        + (f", whose program needs {format_bytes(needed)}" if needed else "")
        + ": give it more, fewer micro-batches, or a smaller micro_batch_size"
    )
