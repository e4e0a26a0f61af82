"""highs: the optimum of a linear program, by HiGHS.

No solution before is begun from: of equal optima, which one comes out depends on the numbers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gs_compile.planner.lp.counting import Array

if TYPE_CHECKING:
    import highspy

OPTIONS: dict[str, Any] = {
    "log_to_console": False,
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
}
# HiGHS may find no status for a nearly infeasible program that it has simplified, and its simplex method for one more;
# where budgets may be exceeded, and are by far, it may call a program unbounded that has an optimum.
WAYS: tuple[dict[str, Any], ...] = ({}, {"presolve": "off"}, {"solver": "ipm"})
NO_OPTIMUM = ("kInfeasible", "kUnboundedOrInfeasible", "kUnbounded")


def optimum(prices: Array, rows: Array, limits: Array, *, is_feasible: bool) -> tuple[Array, Array] | None:
    """The columns, none below 0, that minimise ``prices @ columns`` where ``rows @ columns <= limits``, and what a
    larger limit of each row adds to the minimum; None where nothing fits. is_feasible: something does.
    """
    from highspy import Highs  # late: a run that needs no plan needs no solver

    program = _program(prices, rows, limits)
    for way in WAYS:
        solver = Highs()  # type: ignore[no-untyped-call]
        for name, value in (OPTIONS | way).items():
            solver.setOptionValue(name, value)
        solver.passModel(program)
        solver.run()
        status = solver.getModelStatus().name
        if status == "kOptimal":
            found = solver.getSolution()
            return np.array(found.col_value), np.array(found.row_dual)
        if status in NO_OPTIMUM and not is_feasible:
            return None
    raise AssertionError(f"HiGHS finds no optimum: {status}")


def _program(prices: Array, rows: Array, limits: Array) -> highspy.HighsLp:
    """As HiGHS takes it: column by column, without zeros."""
    from highspy import HighsLp, MatrixFormat

    program = HighsLp()
    program.num_row_, program.num_col_ = rows.shape
    program.col_cost_ = prices
    program.col_lower_, program.col_upper_ = np.zeros(len(prices)), np.full(len(prices), np.inf)
    program.row_lower_, program.row_upper_ = np.full(len(limits), -np.inf), limits
    columns, places = np.nonzero(rows.T)
    matrix = program.a_matrix_
    matrix.format_ = MatrixFormat.kColwise
    matrix.start_ = np.searchsorted(columns, np.arange(len(prices) + 1)).astype(np.int32)
    matrix.index_, matrix.value_ = places.astype(np.int32), rows.T[columns, places]
    return program
