"""place: what each tier keeps of every class of data, such that a step takes the least time: a linear program.

For n micro-batches and one alpha (arXiv 2512.17570, section 4.4). The variables are

    c, p, o     in [0, 1]: what part of checkpoints, parameters and optimizer states lives in host memory
    dc, dp      in [0, 1]: what part of checkpoints and parameters lives in spare memory of a device that has its own
    t_f, t_b    seconds of the forward and of the backward

and what is left, 1 - c - dc and so on, is on SSD. All else is affine in c, p, o, dc, dp. With f a phase, i a lane:

    minimise    t_f + t_b + eps (bytes to and from SSD)                                       `_objective`
    subject to
      t_f  >=   x_i                             x_i: seconds of lane i in f, alone            `coefficients.Formulas`
      t_f  >=   y + x (1 - b) / a               lanes x and y that disturb each other,        `rows._pair`
      t_f  >=   x + y (1 - a) / b               with speeds a and b while both run
      c + dc <= 1,  p + dp <= 1                                                               `rows._homes`
      bytes alive on host at moment m   <= host_nbytes      for every m that can bind         `counting.Counted`
      bytes alive on device at m        <= device_nbytes    likewise, if it has its own
      bytes on SSD at m                 <= ssd_nbytes       likewise
      bytes written to SSD              <= wear_bytes_per_second (t_f + t_b)                  `rows._wear`

The bytes at a moment hold the working buffers, late gradients, and the room that stale parameters leave for these.

Why two rows for lanes that disturb each other. Alone they need x and y seconds; while both run they do a and b seconds
of that work in a second. Say x ends first, after x / a. By then b x / a of y is done, and the rest takes
y - b x / a: together y + x (1 - b) / a. If y ends first it is the other row. The difference of the two is
(a + b - 1) (y / b - x / a), so where a + b >= 1 the row that applies is the larger, and both together are exact. Where
a + b < 1, taking turns is faster, and the row is t_f >= x + y.

All alphas of one n are one problem without common variables. Each has its own unit of time and memory, so that all
numbers are near 1. eps is so small that all SSD traffic there can be costs a millionth of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import PHASES, RATIOS, TIERS, TIMED, Array
from gs_compile.planner.lp.rows import Budgets, Fixed, System, build

__all__ = ["Budgets", "Fixed", "Formulas", "Solution", "short", "solve"]

TRAFFIC_PRICE = 1e-6  # of a step's seconds, for all the bytes it could move to and from SSD
TOLERANCE = 1e-9  # of the solver
FEASIBLE = 1e-6  # of a budget: what is checked after it
NUM_RATIOS = len(RATIOS)
# Columns of one alpha: the ratios, t_f and t_b, and by how much of its budget each tier may be exceeded.
TIMES, SLACKS = slice(NUM_RATIOS, NUM_RATIOS + 2), slice(NUM_RATIOS + 2, NUM_RATIOS + 5)
WIDTH = NUM_RATIOS + 5


@dataclass(frozen=True)
class Solution:
    """The best there is for one n and alpha.

    ratios, device_ratios: by class ("parameter", "checkpoint", "optimizer"; of the horizontal order also "gradient").
    lanes: seconds that each lane needs in each phase alone.
    duals: how `seconds` change with a budget, for each byte ("host_nbytes" ...), and with a rate, for each part it
    grows by ("ssd_read", "ssd_write", both as "ssd", "h2d", "d2h", "update", "compute"). They are 0 or below.
    """

    num_micro_batches: int
    alpha: float
    ratios: Mapping[str, float]
    device_ratios: Mapping[str, float]
    forward_seconds: float
    backward_seconds: float
    lanes: Mapping[tuple[str, str], float]
    duals: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def throughput(self) -> float:
        """Micro-batches a second."""
        return self.num_micro_batches / self.seconds


def solve(
    formulas: Formulas, num_micro_batches: int, alphas: Sequence[float], budgets: Budgets, fixed: Fixed
) -> tuple[Solution | None, ...]:
    """The best for each alpha; None where it does not fit."""
    systems = build(formulas, num_micro_batches, alphas, budgets, fixed)
    fits = _feasible(systems)
    solved = iter(_optimum([s for s, fit in zip(systems, fits, strict=True) if fit], elastic=False))
    found: list[Solution | None] = []
    for system, fit in zip(systems, fits, strict=True):
        point, duals = next(solved) if fit else (system.least(), np.zeros(0))
        kept = fit and max(system.excess(point).values()) <= FEASIBLE
        found.append(_solution(system, point, duals, num_micro_batches, budgets) if kept else None)
    return tuple(found)


def short(
    formulas: Formulas, num_micro_batches: int, alphas: Sequence[float], budgets: Budgets, fixed: Fixed
) -> list[dict[str, int]]:
    """For each alpha the bytes that are short, by tier, where budgets are exceeded by as small parts as can be."""
    systems = build(formulas, num_micro_batches, alphas, budgets, fixed)
    found = []
    for system, (point, _) in zip(systems, _optimum(systems, elastic=True), strict=True):
        excess = {tier: part for tier, part in system.excess(point).items() if part > FEASIBLE}
        found.append({tier: int(np.ceil(part * budgets.of(tier))) for tier, part in excess.items()})
    return found


# The solver ----------------------------------------------------------------------------------------------------------


def _feasible(systems: Sequence[System]) -> list[bool]:
    """Whether each alpha fits. Host and device memory need the least where all is on SSD; if that has not the room for
    it, only the solver can say.
    """
    least = [system.excess(system.least()) for system in systems]
    fits = [max(excess.values()) <= 0 for excess in least]
    open_ = [i for i, e in enumerate(least) if not fits[i] and max(e["host"], e.get("device", 0.0)) <= 0]
    for index, (point, _) in zip(open_, _optimum([systems[i] for i in open_], elastic=True), strict=True):
        fits[index] = max(systems[index].excess(point).values()) <= FEASIBLE / 10
    return fits


def _optimum(systems: Sequence[System], *, elastic: bool) -> list[tuple[Array, Array]]:
    """The best ratios of each, after a 1, and the duals of its rows.

    elastic: budgets may be exceeded, and the sum of the parts they are exceeded by is what is minimised.
    """
    if not systems:
        return []
    import cvxpy
    from scipy import sparse

    blocks = [_matrix(system) for system in systems]
    lower = np.concatenate([[*system.lower, 0, 0, 0, 0, 0] for system in systems])
    most = np.inf if elastic else 0.0
    upper = np.concatenate([[*system.upper, np.inf, np.inf, most, most, most] for system in systems])
    variables = cvxpy.Variable(WIDTH * len(systems), bounds=[lower, upper])
    constraint = sparse.block_diag([a for a, _ in blocks], format="csr") @ variables <= np.concatenate(
        [b for _, b in blocks]
    )
    prices = np.concatenate([_objective(system, elastic=elastic) for system in systems])
    problem = cvxpy.Problem(cvxpy.Minimize(prices @ variables), [constraint])
    tolerances = {"primal_feasibility_tolerance": TOLERANCE, "dual_feasibility_tolerance": TOLERANCE}
    problem.solve(solver=cvxpy.HIGHS, **tolerances)
    assert problem.status == cvxpy.OPTIMAL, f"a placement that is feasible and bounded came out {problem.status}"
    points: Any = np.asarray(variables.value).reshape(len(systems), WIDTH)[:, :NUM_RATIOS]
    duals = np.split(np.asarray(constraint.dual_value), np.cumsum([len(b) for _, b in blocks])[:-1])
    return [
        (np.array([1.0, *np.clip(point, system.lower, system.upper)]), dual)
        for system, point, dual in zip(systems, points, duals, strict=True)
    ]


def _matrix(system: System) -> tuple[Array, Array]:
    """The rows of one alpha as ``matrix @ columns <= bound``, with times in the system's unit."""
    matrix, bound = np.zeros((len(system.rows), WIDTH)), np.ones(len(system.rows))
    for number, row in enumerate(system.rows):
        unit = 1.0
        if row.phase:
            unit, bound[number] = system.unit_seconds, 0.0
            matrix[number, TIMES.start + PHASES.index(row.phase)] = -1.0
        elif row.per_second:
            unit, bound[number] = row.per_second * system.unit_seconds, 0.0
            matrix[number, TIMES] = -1.0
        elif row.tier:
            matrix[number, SLACKS.start + TIERS.index(row.tier)] = -1.0
        matrix[number, :NUM_RATIOS] = row.coefficients[1:] / unit
        bound[number] -= row.coefficients[0] / unit
    return matrix, bound


def _objective(system: System, *, elastic: bool) -> Array:
    """The price of each column: of seconds and SSD traffic, or of exceeded budgets."""
    if elastic:
        return np.array([*np.zeros(NUM_RATIOS + 2), 1.0, 1.0, 1.0])
    return np.array([*(TRAFFIC_PRICE * system.traffic[1:]), 1.0, 1.0, 0.0, 0.0, 0.0])


# What came out -------------------------------------------------------------------------------------------------------


def _solution(system: System, point: Array, duals: Array, num_micro_batches: int, budgets: Budgets) -> Solution:
    by_name = dict(zip(RATIOS, point[1:].tolist(), strict=True))
    forward, backward = system.times(point)
    return Solution(
        num_micro_batches,
        system.alpha,
        {name: by_name[name] for name in system.classes},
        {name: by_name[f"device_{name}"] for name in ("parameter", "checkpoint")},
        forward,
        backward,
        {key: float(array @ point) for key, array in system.lanes.items()},
        _duals(system, point, duals, budgets),
    )


def _duals(system: System, point: Array, duals: Array, budgets: Budgets) -> dict[str, float]:
    """d(seconds) / d(resource). A row's dual is what one more on its right side is worth; a rate that grows by a part
    takes that part off its lane's time in every row.
    """
    found = {f"{tier}_nbytes": 0.0 for tier in TIERS} | dict.fromkeys(TIMED, 0.0)
    for row, dual in zip(system.rows, duals.tolist(), strict=True):
        if row.tier:
            found[f"{row.tier}_nbytes"] -= dual * system.unit_seconds / budgets.of(row.tier)
        for lane, part in row.lanes.items():
            found[lane] -= dual * float(part @ point)
    found["update"] = found.pop("cpu")
    return found | {"ssd": found["ssd_read"] + found["ssd_write"]}
