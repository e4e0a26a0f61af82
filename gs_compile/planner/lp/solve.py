"""solve: a linear program: how much of every class of data each tier stores, such that a step takes the least time.

For n micro-batches and one alpha (arXiv 2512.17570, section 4.4). The variables are

    c, p, o     in [0, 1]: what part of checkpoints, parameters and optimizer states lives in host memory
    dc, dp      in [0, 1]: what part of checkpoints and parameters lives in spare memory of a device that has its own
    a_kt        in [0, 1]: what part of layers' micro-batches saves activations, at level k on tier t
    t_f, t_b    seconds of the forward and of the backward

and the rest, 1 - c - dc and so on, is on SSD. Each stack has ratios of its own, or all have the same. Everything else
is affine in c, p, o, dc, dp, a_kt. With f a phase, i a lane:

    minimise    t_f + t_b + eps (bytes to and from SSD + those on the link / 10) + eps a      `System.optimum`
    subject to
      t_f  >=   x_i                             x_i: seconds of lane i in f, alone            `coefficients.Formulas`
      t_f  >=   y + x (1 - b) / a               lanes x and y that disturb each other,        `_times`
      t_f  >=   x + y (1 - a) / b               with speeds a and b while both run
      c + dc + sum of a <= 1,  p + dp <= 1                                                    `Formulas.homes`
      sum of a <= what layers can save,  what is given of a                                   `demands`
      bytes alive on host at moment m   <= host_nbytes      for every m that can bind         `counting.Counted`
      bytes alive on device at m        <= device_nbytes    likewise, if it has its own
      bytes on SSD at m                 <= ssd_nbytes       likewise
      bytes written to SSD              <= wear_bytes_per_second (t_f + t_b)                  `System`

The bytes at a moment hold the working buffers, late gradients, and the room that stale parameters leave for these.

Two rows for lanes that disturb each other: alone they need x and y seconds; while both run they do a and b seconds of
that work in a second. If x ends first, it does so after x / a. By then b x / a of y is done, and the rest takes
y - b x / a: together y + x (1 - b) / a. If y ends first it is the other row. The difference of the two is
(a + b - 1) (y / b - x / a), so if a + b >= 1 the row that applies is the larger, and both together are exact. If
a + b < 1, taking turns is faster, and the row is t_f >= x + y.

Times are scaled and memory is in parts of its budget, so that all numbers are near 1. eps is so small that the largest
possible SSD traffic costs a millionth of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from gs_compile.options import Ratios
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision
from gs_compile.placement.stacks import part_of
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import DEVICE_RATIOS, PHASES, RATIOS, TIMED, Array, host_classes
from gs_compile.planner.request import Budgets, Request
from gs_compile.program.ir import TIERS

TRAFFIC_PRICE = 1e-6  # of a step's seconds, for all the bytes that it could move to and from SSD
LINK_PART = 0.1  # of that, for those between host and device: so nothing moves without need
TOLERANCE = 1e-9  # of the solver
# HiGHS may end without a status for a nearly infeasible program after presolve, and its simplex method for another; if
# budgets may be exceeded, and are by far, it may call a program unbounded that has an optimum.
SOLVERS: tuple[dict[str, Any], ...] = ({}, {"presolve": "off"}, {"highs_options": {"solver": "ipm"}})
FEASIBLE = 1e-6  # of a budget: a smaller excess is the solver's rounding
PAIRS = (
    ("ssd_read", "ssd_write"),
    ("h2d", "d2h"),
    ("cpu", "compute"),
    ("compute", "ssd_read"),
    ("compute", "ssd_write"),
    ("compute", "d2h"),
)
# Columns: the ratios, t_f and t_b, and the part of its budget by which each tier is exceeded.
TIMES, EXCESS = (0, 1), 2
NUM_OTHERS = EXCESS + len(TIERS)
LEAST_PART = 1e-6  # of all items: a smaller part is the solver's rounding


@dataclass(frozen=True)
class Solution:
    """The optimum for one n and alpha.

    multipliers: of the rows, for bounds of other linear programs (`System.lagrangian`).
    """

    num_micro_batches: int
    decision: Decision
    seconds: float
    multipliers: Array = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)

    @property
    def alpha(self) -> float:
        return self.decision.alpha

    @property
    def throughput(self) -> float:
        """Micro-batches a second."""
        return self.num_micro_batches / self.seconds


class ProblemData(NamedTuple):
    """What the linear programs of all alphas and all numbers of micro-batches have in common."""

    formulas: Formulas
    budgets: Budgets
    request: Request


def short(data: ProblemData, num_micro_batches: int, alpha: float) -> dict[str, int]:
    """The bytes that are short, by tier, if the budgets are exceeded by the smallest possible parts."""
    exceeded, _ = System(data, num_micro_batches, alpha).exceeded()
    parts = zip(TIERS, exceeded.tolist(), strict=True)
    return {tier: int(np.ceil(part * data.budgets.of(tier))) for tier, part in parts if part > FEASIBLE}


class System:
    """The rows of one alpha: affine functions of the ratios, in seconds or in parts of a budget, and their limits."""

    def __init__(self, data: ProblemData, num_micro_batches: int, alpha: float) -> None:
        formulas, self.budgets, request = data
        self.formulas, self.num_micro_batches, self.alpha = formulas, num_micro_batches, alpha
        self.numbers = formulas.of(alpha, num_micro_batches)
        self.lower, self.upper = _bounds(formulas, request)
        speeds = formulas.profile.speeds()
        seconds = self.numbers.seconds
        self.times = [(i, each) for i, phase in enumerate(PHASES) for each in _times(phase, seconds, speeds)]
        blocks = zip(*self._blocks(request), strict=True)
        self.rows, self.limits, self.others = (np.concatenate(arrays) for arrays in blocks)
        self.is_time = self.others[:, list(TIMES)].any(axis=1)
        self.unit_seconds = max(sum(float(array[0]) for array in seconds.values()), 1e-30)

    def solution(self) -> Solution | None:
        """The best ratios; None where nothing fits."""
        if (optimum := self.optimum()) is None:
            return None
        point, _, multipliers = optimum
        return self._at(point, multipliers)

    def valued(self, decision: Decision) -> Solution:
        """A decision with its seconds, whether or not it keeps the budgets."""
        return Solution(self.num_micro_batches, decision, self._seconds_at(self._point(decision)))

    def needs(self, decision: Decision) -> tuple[dict[str, int], int]:
        """The most bytes that a decision has on each tier, and the bytes that it writes to SSD in a step."""
        point = self._point(decision)
        peaks = {tier: int((alive @ point).max()) for tier, alive in self.numbers.alive.items()}
        return peaks, int(self.numbers.written @ point)

    def _point(self, decision: Decision) -> Array:
        """A decision as the columns of the rows."""
        formulas, point = self.formulas, np.ones(self.formulas.width)
        several = len(decision.ratios) > 1
        for stack in range(len(formulas.stacks)):
            known, shares = decision.ratios[stack * several].given(), decision.shares.of(stack)
            parts = [sum(each.part for each in shares if each[:2] == saved) for saved in formulas.saved]
            saved_parts = np.array(parts) / (part_of(stack, formulas.stacks) if several else 1.0)
            point[formulas.columns(stack)] = [*(known.get(name, 0.0) for name in RATIOS), *saved_parts]
        return point

    def _at(self, point: Array, multipliers: Array) -> Solution:
        several = len(self.formulas.stacks) > 1
        ratios, shares = [], list[Share]()
        for stack in range(len(self.formulas.stacks)):
            of_stack = point[self.formulas.columns(stack)].tolist()
            by_name = dict(zip(RATIOS, of_stack, strict=False))
            names = (*host_classes(self.formulas.counted.builder.layout), *DEVICE_RATIOS)
            ratios.append(Ratios(**{name: by_name[name] for name in names}))
            for (level, tier), part in zip(self.formulas.saved, of_stack[len(RATIOS) :], strict=True):
                if (part := part * part_of(stack, self.formulas.stacks)) > LEAST_PART:
                    shares.append(Share(level, tier, part, stack=stack if several else None))
        decision = self.formulas.counted.decision(tuple(ratios), self.alpha, Shares(shares))
        return Solution(self.num_micro_batches, decision, self._seconds_at(point), multipliers)

    def optimum(self, *, elastic: bool = False) -> tuple[Array, Array, Array] | None:
        """The best ratios after a 1; the part by which each budget is exceeded; and the rows' multipliers: the seconds
        that one less on a row's right side costs.

        elastic: budgets may be exceeded, and the sum of the parts by which they are is minimised.
        """
        scale = np.where(self.is_time, 1 / self.unit_seconds, 1.0)
        others = self.others if elastic else self.others * np.isin(np.arange(NUM_OTHERS), TIMES)
        matrix = np.hstack([self.rows[:, 1:] * scale[:, None], others])
        traffic, link = (each[1:] / max(float(each[0]), 1.0) for each in (self.numbers.ssd, self.numbers.link))
        traffic = traffic + LINK_PART * link
        saved = self.formulas.saved_columns - 1
        traffic[saved] = np.maximum(traffic[saved], 0.0) + 1.0  # nothing is saved without need
        prices = [*np.zeros(len(traffic) + 2), 1, 1, 1] if elastic else [*(TRAFFIC_PRICE * traffic), 1, 1, 0, 0, 0]
        bound = (self.limits - self.rows[:, 0]) * scale
        solved = _linear_program(len(bound), len(traffic))
        answer = solved(np.array(prices), matrix, bound, self.lower, self.upper, is_feasible=elastic)
        if answer is None:
            return None
        columns, duals = answer
        point = np.array([1.0, *np.clip(columns[: len(traffic)], self.lower, self.upper)])
        return point, columns[-len(TIERS) :], np.maximum(-duals, 0.0) * scale * self.unit_seconds

    @property
    def computing(self) -> float:
        """The least seconds of the computation, which are the same for all alphas: updates run on the CPU."""
        return float(sum(self.least(self.numbers.seconds[phase, "compute"]) for phase in PHASES))

    def exceeded(self) -> tuple[Array, Array]:
        """The part by which each budget is exceeded, and multipliers of the rows: for any ratios, the sum of the parts
        is at least their `lagrangian`.
        """
        optimum = self.optimum(elastic=True)
        assert optimum is not None, "there is a point that exceeds the budgets by enough"
        _, parts, multipliers = optimum
        return parts, multipliers / self.unit_seconds

    @cached_property
    def beyond(self) -> Array:
        """The least by which each row, except those of seconds, exceeds its limit, for any ratios."""
        return np.where(self.is_time, -np.inf, self.least(self.rows) - self.limits)

    def lagrangian(self, multipliers: Array) -> Array:
        """Lower bounds of the seconds, as an affine function of the ratios for each row of `multipliers`.

        By weak duality they hold for any multipliers, also for those of another alpha or another n.
        """
        functions: Array = multipliers @ self.rows
        functions[:, 0] -= multipliers @ self.limits
        return functions

    def least(self, functions: Array) -> Array:
        """The least value of affine functions `[..., 1 + ratios]` over all ratios within their bounds."""
        slopes = functions[..., 1:]
        least: Array = functions[..., 0] + np.minimum(slopes * self.lower, slopes * self.upper).sum(axis=-1)
        return least

    def _seconds_at(self, point: Array) -> float:
        """t_f + t_b of a point; waits that the wear budget requires are in the backward."""
        forward, backward = (max(float(seconds @ point) for i, seconds in self.times if i == phase) for phase in TIMES)
        if (wear := self.budgets.wear_bytes_per_second) is not None:
            backward = max(backward, float(self.numbers.written @ point) / wear - forward)
        return forward + backward

    def _blocks(self, request: Request) -> Iterator[tuple[Array, Array, Array]]:
        """Rows, limits, and the entries of the columns after the ratios; first the times, then each tier's memory."""
        for i, seconds in self.times:
            yield _block(seconds, 0.0, i)
        for tier, alive in self.numbers.alive.items():
            yield _block(alive / self.budgets.of(tier), 1.0, EXCESS + TIERS.index(tier))
        yield _block(self.formulas.homes, 1.0)
        yield from (_block(row, limit) for row, limit in demands(self.formulas, request))
        if (wear := self.budgets.wear_bytes_per_second) is not None:
            yield _block(self.numbers.written / wear, 0.0, *TIMES)


@cache
def _linear_program(num_rows: int, num_ratios: int) -> Callable[..., tuple[Array, Array] | None]:
    """A linear program of so many rows and ratios, as a function of its numbers: prices, matrix and bounds of the rows,
    lower and upper bounds of the ratios; is_feasible: something is known to fit. It returns the columns and the rows'
    multipliers; None if nothing fits. cvxpy compiles it once. There are no warm starts, so that the choice among equal
    optima depends on the numbers alone.
    """
    import cvxpy

    columns = cvxpy.Variable(num_ratios + NUM_OTHERS, nonneg=True)
    shapes = columns.size, (num_rows, columns.size), num_rows, num_ratios, num_ratios
    numbers = prices, matrix, bound, lower, upper = [cvxpy.Parameter(shape) for shape in shapes]
    rows, ratios = matrix @ columns <= bound, columns[:num_ratios]
    problem = cvxpy.Problem(cvxpy.Minimize(prices @ columns), [rows, ratios >= lower, ratios <= upper])
    tolerances = {"primal_feasibility_tolerance": TOLERANCE, "dual_feasibility_tolerance": TOLERANCE}

    def solved(*values: Array, is_feasible: bool = False) -> tuple[Array, Array] | None:
        for number, value in zip(numbers, values, strict=True):
            number.value = value
        for way in SOLVERS:
            with suppress(ValueError) if way is not SOLVERS[-1] else nullcontext():
                problem.solve(solver=cvxpy.HIGHS, warm_start=False, **tolerances, **way)
                if problem.status == cvxpy.OPTIMAL or not is_feasible:
                    break
        return (columns.value, -rows.dual_value) if problem.status == cvxpy.OPTIMAL else None

    return solved


def _block(coefficients: Array, limit: float, *columns: int) -> tuple[Array, Array, Array]:
    """``coefficients @ (1, ratios) <= limit +`` the sum of these columns after the ratios."""
    rows = np.atleast_2d(coefficients)
    others = np.zeros((len(rows), NUM_OTHERS))
    others[:, list(columns)] = -1.0
    return rows, np.full(len(rows), limit), others


def _times(
    phase: str, lanes: Mapping[tuple[str, str], Array], speeds: Mapping[tuple[str, str], float]
) -> Iterator[Array]:
    """Lower bounds of a phase's seconds."""
    yield from (lanes[phase, lane] for lane in TIMED)
    for one, two in PAIRS:
        a, b = speeds.get((one, two), 1.0), speeds.get((two, one), 1.0)
        if min(a, b) < 1.0:
            yield from _pair(lanes[phase, one], lanes[phase, two], a, b)


def _pair(x: Array, y: Array, a: float, b: float) -> list[Array]:
    """The seconds that two lanes which disturb each other take together."""
    return [x + y] if a + b < 1 else [y + x * (1 - b) / a, x + y * (1 - a) / b]


def _bounds(formulas: Formulas, request: Request) -> tuple[Array, Array]:
    """The bounds of the ratios, in the order of the columns of formulas."""
    lower, upper = np.zeros(formulas.width), np.ones(formulas.width)
    upper[formulas.saved_columns] = _most_saved(formulas, request)
    if not formulas.separate:
        upper[np.array([formulas.column(name) for name in DEVICE_RATIOS])] = 0.0
    if not formulas.may_reside:
        upper[formulas.column("device_parameter")] = 0.0
    ratios = replace(request.ratios, activation=None).given()
    for name, ratio in ratios.items():
        if f"device_{name}" in RATIOS and f"device_{name}" not in ratios:
            upper[formulas.column(f"device_{name}")] = 0.0
        upper[formulas.column(name)] = ratio
        lower[formulas.column(name)] = 0.0 if _is_of_the_rest(formulas, request, name) else ratio
    return lower[1:], upper[1:]


def _most_saved(formulas: Formulas, request: Request) -> Array:
    """Upper bounds of the saved items, by stack, and by level and tier."""
    last = (formulas.workload.num_levels,)
    levels = last if request.saves_all else formulas.workload.worthwhile or last
    allowed = [
        request.recompute != "all" and level in levels and (request.ratios.activation is None or tier == "host")
        for level, tier in formulas.saved
    ]
    savable = list(map(formulas.workload.savable, formulas.stacks))
    return np.outer(savable, np.array(allowed, dtype=bool))


def _is_of_the_rest(formulas: Formulas, request: Request, name: str) -> bool:
    """Whether a given ratio is of the checkpoints that are left once the planner has chosen which items save
    activations.
    """
    return bool(formulas.saved) and name in ("checkpoint", "device_checkpoint") and request.ratios.activation is None


def demands(formulas: Formulas, request: Request) -> Iterator[tuple[Array, float]]:
    """Rows and limits for what is given: how many items save activations, of those that can, and inputs of others."""
    saved, most = np.zeros(formulas.width), formulas.workload.savable(range(formulas.workload.num_layers))
    for stack, columns in enumerate(formulas.saved_columns):
        saved[columns] = part_of(stack, formulas.stacks)
    asked = request.ratios.activation
    least = most if request.saves_all else min(asked or 0.0, most)
    if formulas.saved:
        yield -saved, -least
        yield saved, most if asked is None else least
    for name, ratio in request.ratios.given().items():
        if _is_of_the_rest(formulas, request, name):
            rest = np.zeros((len(formulas.stacks), formulas.width))
            for row, columns, column in zip(rest, formulas.saved_columns, formulas.column(name), strict=True):
                row[columns], row[column] = ratio, 1.0
            yield rest, ratio
            yield -rest, -ratio
