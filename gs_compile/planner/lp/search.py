"""search: the number of micro-batches, alpha, and where data lives (arXiv 2512.17570, Algorithm 1).

For each number n of micro-batches the best alpha of 0.00, 0.01 ... 0.50 is taken; only 1.00 if clipping makes all
updates wait. (With speculative updates the former: steps are expected not to be rolled back.) The search ends at the
first n from which throughput hardly grows, or beyond which nothing fits: more micro-batches never take less memory.
Throughput hardly grows by one of these rules:

    relative    the relative growth of throughput is less than a tenth of the relative growth of n. With seconds
                T(n) = a + b n, throughput is then within a tenth of 1 / b, its limit by the busiest lane
    paper       another micro-batch brings less than 1 %: with small micro-batches this ends early

Not every alpha is solved for every n: the multipliers of a solved linear program bound the seconds of all programs with
the same rows, for any alpha and n (`System.lagrangian`), and an alpha whose bound is above what another one reaches
cannot be the best. Nor is every n solved: with the relative rule n doubles, and the last doubling is bisected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf

import numpy as np

from gs_compile.errors import NoFitError, PlanError
from gs_compile.machine import format_bytes
from gs_compile.options import Ratios
from gs_compile.placement.workload import beside_slab
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import Array, anchors
from gs_compile.planner.lp.solve import FEASIBLE, ProblemData, Solution, System, short
from gs_compile.planner.request import Request, several

GROWTH = 1.01  # of throughput, for which another micro-batch is worth it by the paper's rule
PART = 0.1  # of the relative growth of n, by which throughput has to grow
# Seconds do not fall with n, so with n > 100 throughput cannot grow by 1 % a micro-batch; a program of a thousand has
# half a million operations.
MOST = {"relative": 1024, "paper": 101}
ROUNDING = 1e-5  # relative: how far the solver's rounding may move a bound of seconds

MOST_SYSTEMS = 64  # that are kept: those of one number of micro-batches and all alphas


@dataclass(frozen=True)
class Search:
    """The results of a search: the best solution, and the best one for each n that was tried (None: nothing fits)."""

    best: Solution
    history: tuple[tuple[int, Solution | None], ...]


def search(data: ProblemData, num_micro_batches: int | None = None) -> Search:
    """The smallest number of micro-batches with saturated throughput, or the one given, and the best plan for it.

    Raises `PlanError` if settings contradict each other or nothing fits: it says what is short, and which similar
    settings fit.
    """
    tries, saturation = _Tries(data), data.request.saturation
    if num_micro_batches is not None:
        best = tries.at(num_micro_batches)
    else:
        best = (_relative if saturation == "relative" else _paper)(tries, MOST[saturation])
    if best is None:
        raise NoFitError(shortfall(data, num_micro_batches or 1))
    return Search(best, tuple(sorted(tries.known.items())))


def best_for(data: ProblemData, num_micro_batches: int, alphas: Sequence[float] = ()) -> Solution | None:
    """The best solution for a number of micro-batches, with one of these alphas, or the request's; None: none fits."""
    return _Tries(data, alphas).at(num_micro_batches)


def has_solution(data: ProblemData, num_micro_batches: int, alphas: Sequence[float] = ()) -> bool:
    """Whether a step fits with one of these alphas, or one of the request's."""
    return _Tries(data, alphas).fits(num_micro_batches)


# The number of micro-batches ------------------------------------------------------------------------------------------


def _paper(tries: _Tries, most: int) -> Solution | None:
    """Algorithm 1 as it stands: one micro-batch more at a time."""
    best = tries.at(1)
    for number in range(2, most + 1):
        solution = tries.at(number)
        if best is None or solution is None or solution.throughput < GROWTH * best.throughput:
            break
        best = solution
    return best


def _relative(tries: _Tries, most: int) -> Solution | None:
    """The smallest number that is enough: it doubles each time, and then the last doubling is bisected."""
    low, high = 0, 1
    while not _is_enough(tries, high, most):
        low, high = high, 2 * high
    between = range(low + 1, high)
    enough = low + 1 + bisect_left(between, True, key=lambda number: _is_enough(tries, number, most))
    return tries.at(enough) or (tries.at(enough - 1) if enough > 1 else None)


def _is_enough(tries: _Tries, number: int, most: int) -> bool:
    """Whether more micro-batches do not fit, are not allowed, or hardly bring anything."""
    here = tries.at(number)
    if here is None or number >= most:
        return True
    for more in (-(-number // 8), 1):
        there = tries.at(number + more)
        if there is not None:
            return there.throughput / here.throughput - 1 < PART * more / number
    return True


class _Tries:
    """The best solution of each number of micro-batches that was asked for."""

    def __init__(self, data: ProblemData, alphas: Sequence[float] = ()) -> None:
        _check(data.formulas)
        self.system = lru_cache(MOST_SYSTEMS)(partial(System, data))
        self.known: dict[int, Solution | None] = {}
        self.most = dict.fromkeys(alphas or data.request.alphas, inf)  # by alpha, the n from which on nothing fits
        self.multipliers: dict[tuple[tuple[float, ...], bool], list[Array]] = {}  # by a key of programs with equal rows

    def at(self, number: int) -> Solution | None:
        if number not in self.known:
            self.known[number] = self._best(number)
        return self.known[number]

    def fits(self, number: int) -> bool:
        """Whether there is a solution for any alpha."""
        while left := self._left(number):
            if self._solved(left[0], number) is not None:
                return True
        return False

    def _best(self, number: int) -> Solution | None:
        """The alpha with the lowest bound is solved, which moves the bounds of others, until none can be better."""
        left, best = self._left(number), None
        bounds = dict.fromkeys(left, self.system(number, left[0]).computing if left else 0.0)
        for between in set(map(anchors, bounds)):
            self._raise(bounds, between, self.multipliers.get((between, number > 1), ()), number)
        while bounds:
            bound, alpha = min((bound, alpha) for alpha, bound in bounds.items())
            if best and bound >= best.seconds * (1 - ROUNDING):
                break
            solution = self._solved(alpha, number)
            if solution is None:
                bounds = {each: bound for each, bound in bounds.items() if number < self.most[each]}
                continue
            del bounds[alpha]
            self.multipliers.setdefault((anchors(alpha), number > 1), []).append(solution.multipliers)
            self._raise(bounds, anchors(alpha), [solution.multipliers], number)
            if best is None or (solution.seconds, alpha) < (best.seconds, best.alpha):
                best = solution
        return best

    def _left(self, number: int) -> list[float]:
        """The alphas with which something may fit."""
        return [alpha for alpha, most in self.most.items() if number < most]

    def _solved(self, alpha: float, number: int) -> Solution | None:
        """The best solution with this alpha. If nothing fits, this is noted for it, and for other alphas for which one
        budget alone, or the same multipliers, show the same.
        """
        alike = [each for each in self._left(number) if anchors(each) == anchors(alpha)]
        low, high = (self.system(number, each).beyond for each in (min(alike), max(alike)))
        beyond = np.minimum(low, high)  # rows are affine in alpha
        if (beyond > FEASIBLE).any():
            self.most |= dict.fromkeys(alike, number)
            return None
        system = self.system(number, alpha)
        if (solution := system.solution()) is not None:
            return solution
        exceeded = self._least(alike, [system.exceeded()[1]], number)
        parts = zip(alike, exceeded.tolist(), strict=True)
        self.most |= {each: number for each, part in parts if part > FEASIBLE or each == alpha}
        return None

    def _raise(
        self, bounds: dict[float, float], between: tuple[float, ...], multipliers: Sequence[Array], number: int
    ) -> None:
        """Raise the bounds of the alphas that are lowered `between` these."""
        alphas = [alpha for alpha in bounds if anchors(alpha) == between]
        if alphas and len(multipliers):
            least = self._least(alphas, multipliers, number).tolist()
            bounds.update((alpha, max(bounds[alpha], new)) for alpha, new in zip(alphas, least, strict=True))

    def _least(self, alphas: Sequence[float], multipliers: Sequence[Array], number: int) -> Array:
        """Lower bounds by these multipliers, whatever the ratios, for alphas between the same anchors, where the rows
        are affine in alpha.
        """
        low, high = anchors(alphas[0])[0], anchors(alphas[0])[-1]
        first, last = (self.system(number, alpha).lagrangian(np.array(multipliers)) for alpha in (low, high))
        shares = (np.array(alphas) - low) / (high - low or 1.0)
        least: Array = self.system(number, low).least(first + shares[:, None, None] * (last - first)).max(axis=1)
        return least


# What is refused ------------------------------------------------------------------------------------------------------


def _check(formulas: Formulas) -> None:
    """Raise `PlanError` if the machine has no rate for what is computed, before anything is solved."""
    workload, profile = formulas.workload, formulas.profile
    timed = all(cost.seconds is not None for cost in workload.costs.values())
    if not timed and workload.dtype not in profile.matmul_flops_per_second:
        known = ", ".join(profile.matmul_flops_per_second)
        raise PlanError(
            f"{workload.name} computes in {workload.dtype}, of which the machine {profile.name} has no matrix rate, "
            f"only of {known}: add matmul_flops_per_second of {workload.dtype} to its profile"
        )


def shortfall(data: ProblemData, num_micro_batches: int = 1, lacking: Mapping[str, int] | None = None) -> str:
    """In one or two sentences, why nothing fits: what is short, by how much, and the nearest settings that fit.

    lacking: by tier, the bytes that the step program with the first alpha lacks; None: those of the linear program.
    """
    formulas, budgets, request = data
    alphas = request.alphas if lacking is None else request.alphas[:1]
    needed = {each: lacking or short(data, num_micro_batches, each) for each in alphas}
    alpha = min(needed, key=lambda each: sum(n / budgets.of(tier) for tier, n in needed[each].items()))
    workload = formulas.workload
    beside = {"host": beside_slab(workload.sizes)}  # which the budget is without

    def whole(tier: str, nbytes: int) -> str:
        return format_bytes(budgets.of(tier) + beside.get(tier, 0) + nbytes, up=True)

    what = "; ".join(
        f"it needs {whole(tier, nbytes)} of {'SSD' if tier == 'ssd' else tier + ' memory'}, "
        f"{format_bytes(nbytes)} more than it may use"
        for tier, nbytes in needed[alpha].items()
    )
    near = list(_nearest(data, num_micro_batches))
    smaller = ", or make micro_batch_size smaller" if workload.micro_batch_size > 1 else ""
    remedy = f"What would fit: {', or '.join(near)}" if near else f"Give it more{smaller}"
    return (
        f"{workload.name} does not fit with {several(num_micro_batches)} of {workload.micro_batch_size} and alpha "
        f"{alpha:g}: {what}. {remedy}"
    )


def _nearest(data: ProblemData, num_micro_batches: int) -> Iterator[str]:
    """Settings that fit, each with one thing changed."""

    def does(number: int, alphas: Sequence[float], request: Request) -> bool:
        return has_solution(data._replace(request=request), number, alphas)

    request, alphas, ratios = data.request, data.request.alphas, data.request.ratios.given()
    most = 0.0 if request.late else request.alpha or 0.0  # if all updates are late, there is only one alpha
    below = (each for each in range(99, -1, -1) if each / 100 < most)
    if (smaller := next((n for n in below if does(num_micro_batches, [n / 100], request)), None)) is not None:
        yield f"alpha {smaller / 100:g}"
    if request.clip and not request.accumulate:
        free = replace(request, clip=False, clipping=None)
        if does(num_micro_batches, free.alphas, free):
            yield "no clipping, so that updates need not wait"
    if ratios and does(num_micro_batches, alphas, replace(request, ratios=Ratios())):
        yield f"other ratios than {', '.join(f'{name} {ratio:g}' for name, ratio in ratios.items())}"
    if request.saves and does(num_micro_batches, alphas, request.recomputing()):
        yield "activations that are computed again"
    if num_micro_batches > 1 and does(1, alphas, request):
        yield several(bisect_left(range(1, num_micro_batches), True, key=lambda n: not does(n, alphas, request)))
