"""search: Algorithm 1 (arXiv 2512.17570): how many micro-batches, how much of the updates late, and what lives where.

n goes up from 1. For each n the best alpha of 0.00, 0.01 ... 0.50 counts, or 1.00 alone where clipping makes all
updates wait. (Where they are speculative it is the other alphas: no step is expected to be rolled back.) The search
ends at the first n that makes throughput less than 1 % higher than the best before it, or that does not fit: more
micro-batches never take less memory.

Not every alpha is solved for every n. With one alpha, the seconds of a step are a convex function of n, as a linear
program is of its right side: n stands beside the ratios only in n c, which could be a variable of its own. So from two
numbers of micro-batches on, a line is a lower bound for all that follow, and an alpha whose bound is above what another
one reaches cannot be the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gs_compile.errors import NoFitError, PlanError
from gs_compile.machine import format_bytes
from gs_compile.placement.cut import DEVICE_CLASSES
from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.fit import CLASSES
from gs_compile.planner.lp.solve import Budgets, Fixed, Formulas, Solution, best, short
from gs_compile.planner.measure.profile import Profile

GROWTH = 1.01  # of throughput, for another micro-batch to be worth it
# Seconds do not fall with n, so with n > 100 throughput cannot grow by 1 %.
MOST = 101
ALPHAS = tuple(number / 100 for number in range(51))
ROUNDING = 1e-4  # of seconds: how far the solver's rounding may move a bound
FEW = 4  # alphas are solved at first where bounds are known


@dataclass(frozen=True)
class Search:
    """What was found: the best, and the best of each n that was tried, None where nothing fits."""

    best: Solution
    history: tuple[tuple[int, Solution | None], ...]


def search(
    workload: Workload,
    profile: Profile,
    budgets: Budgets,
    fixed: Fixed,
    *,
    num_micro_batches: int | None = None,
    most: int = MOST,
) -> Search:
    """The smallest number of micro-batches with saturated throughput, or the one given, and the best plan for it.

    Raises `PlanError` where settings contradict each other or nothing fits: it says what is short, and what is near.
    """
    check(workload, profile, budgets, fixed, num_micro_batches or 1)
    formulas = Formulas(workload, profile, allowed_alphas(fixed), speculative=fixed.speculative)
    bounds = _Bounds(len(formulas.alphas))
    found: Solution | None = None
    history: list[tuple[int, Solution | None]] = []
    numbers = range(1, most + 1) if num_micro_batches is None else (num_micro_batches,)
    for number in numbers:
        solution = _best_alpha(formulas, number, bounds, budgets, fixed)
        history.append((number, solution))
        if solution is None or (found and solution.throughput < GROWTH * found.throughput):
            break
        found = solution
    if found is None:
        raise NoFitError(shortfall(workload, profile, budgets, fixed, num_micro_batches=numbers[0]))
    return Search(found, tuple(history))


def check(workload: Workload, profile: Profile, budgets: Budgets, fixed: Fixed, num_micro_batches: int) -> None:
    """Raise `PlanError` where what is fixed contradicts itself or the budgets, before anything is solved."""
    if fixed.clip and not fixed.speculative and fixed.alpha not in (None, 1.0):
        raise PlanError(
            f"alpha is {fixed.alpha:g}, but with clipping all updates wait for the norm of all gradients, so alpha is "
            "1: leave one of the two out"
        )
    if fixed.alpha is not None and not 0 <= fixed.alpha <= 1:
        raise PlanError(f"alpha is {fixed.alpha:g}; it is a part of each update, from 0 to 1")
    classes = (*CLASSES, *DEVICE_CLASSES)
    for name, ratio in fixed.ratios.items():
        if name not in classes or not 0 <= ratio <= 1:
            raise PlanError(f"the ratio {name} is {ratio:g}; there are {', '.join(classes)}, each from 0 to 1")
    spare = next((name for name in DEVICE_CLASSES if fixed.ratios.get(name)), None)
    if spare and not profile.separate:
        raise PlanError(
            f"the ratio {spare} is {fixed.ratios[spare]:g}, but the device of {profile.name} has no memory of its own: "
            f"give {spare.removeprefix('device_')}"
        )
    if fixed.ratios.get("device_parameter") and not any(size.may_reside for size in workload.sizes):
        raise PlanError(
            f"the ratio device_parameter is {fixed.ratios['device_parameter']:g}, but {workload.name} is computed in "
            'the type it is updated in: only what an update makes from fp32 masters (precision="bf16") lives there'
        )
    for name in ("parameter", "checkpoint"):
        host, device = (fixed.ratios.get(each, 0.0) for each in (name, f"device_{name}"))
        if host + device > 1:
            raise PlanError(
                f"the ratios {name} {host:g} and device_{name} {device:g} are more than there is: lower one"
            )
    timed = all(None not in (cost.forward_seconds, cost.backward_seconds) for cost in workload.costs.values())
    if not timed and workload.dtype not in profile.matmul_flops_per_second:
        known = ", ".join(profile.matmul_flops_per_second)
        raise PlanError(
            f"{workload.name} computes in {workload.dtype}, of which the machine {profile.name} has no matrix rate, "
            f"only of {known}: add matmul_flops_per_second of {workload.dtype} to its profile"
        )
    nbytes = {
        "parameter": workload.parameters_nbytes,
        "checkpoint": num_micro_batches * workload.num_layers * workload.x_nbytes,
        "optimizer": workload.states_nbytes,
    }
    on_host = {name: ratio for name, ratio in fixed.ratios.items() if name in nbytes}
    resident = sum(ratio * nbytes[name] for name, ratio in on_host.items())
    if resident > budgets.host_nbytes:
        kept = ", ".join(f"{name} {ratio:g}" for name, ratio in on_host.items())
        raise NoFitError(
            f"the ratios {kept} keep {format_bytes(int(resident))} in host memory, of which there are "
            f"{format_bytes(budgets.host_nbytes)}: lower them, or leave them out and they are chosen"
        )


def shortfall(
    workload: Workload, profile: Profile, budgets: Budgets, fixed: Fixed, *, num_micro_batches: int = 1
) -> str:
    """Why nothing fits: what is short, by how much, and the nearest settings that do fit. One sentence or two."""
    alphas = allowed_alphas(fixed)
    formulas = Formulas(workload, profile, alphas, speculative=fixed.speculative)
    needed = short(formulas, num_micro_batches, budgets, fixed)
    alpha, least = min(zip(alphas, needed, strict=True), key=lambda each: _parts(each[1], budgets))
    what = "; ".join(
        f"it needs {format_bytes(getattr(budgets, f'{tier}_nbytes') + nbytes)} of "
        f"{'SSD' if tier == 'ssd' else tier + ' memory'}, {format_bytes(nbytes)} more than it may use"
        for tier, nbytes in least.items()
    )
    micro_batches = f"{num_micro_batches} micro-batch" + ("es" if num_micro_batches > 1 else "")
    near = _nearest(workload, profile, budgets, fixed, num_micro_batches)
    remedy = f"What would fit: {', or '.join(near)}" if near else "Give it more, or make micro_batch_size smaller"
    rows = workload.micro_batch_size
    return f"{workload.name} does not fit with {micro_batches} of {rows} and alpha {alpha:g}: {what}. {remedy}"


def _parts(needed: dict[str, int], budgets: Budgets) -> float:
    return sum(nbytes / budgets.of(tier) for tier, nbytes in needed.items())


def _nearest(workload: Workload, profile: Profile, budgets: Budgets, fixed: Fixed, num_micro_batches: int) -> list[str]:
    """Settings that fit, each with one thing changed."""

    def fits(number: int, alphas: Sequence[float], fixed: Fixed) -> list[float]:
        formulas = Formulas(workload, profile, alphas, speculative=fixed.speculative)
        solved = best(formulas, number, range(len(alphas)), budgets, fixed)
        return [solution.alpha for solution in solved if solution]

    alphas, near = allowed_alphas(fixed), []
    below = [number / 100 for number in range(100) if fixed.alpha and number / 100 < fixed.alpha]
    if below and (smaller := fits(num_micro_batches, below, fixed)):
        near.append(f"alpha {max(smaller):g}")
    if fixed.clip and fits(num_micro_batches, ALPHAS, Fixed(ratios=fixed.ratios, device=fixed.device)):
        near.append("no clipping, so that updates need not wait")
    if fixed.ratios and fits(num_micro_batches, alphas, replace(fixed, ratios={})):
        near.append(f"other ratios than {', '.join(f'{name} {ratio:g}' for name, ratio in fixed.ratios.items())}")
    if num_micro_batches > 1 and fits(1, alphas, fixed):
        low, high = 1, num_micro_batches
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, alphas, fixed) else (low, middle)
        near.append(f"{low} micro-batch{'es' if low > 1 else ''}")
    return near


def allowed_alphas(fixed: Fixed) -> tuple[float, ...]:
    """Those that may be chosen; one where it is given, or where clipping makes all updates wait."""
    if fixed.clip and not fixed.speculative:
        return (1.0,)
    return ALPHAS if fixed.alpha is None else (fixed.alpha,)


class _Bounds:
    """By alpha, the numbers of micro-batches that were solved and their seconds; None once it does not fit."""

    def __init__(self, num_alphas: int) -> None:
        self.solved: list[list[tuple[int, float]] | None] = [[] for _ in range(num_alphas)]

    def note(self, index: int, number: int, solution: Solution | None) -> None:
        solved = self.solved[index]
        if solution is None:
            self.solved[index] = None
        elif solved is not None:
            solved.append((number, solution.seconds))

    def below(self, number: int) -> list[tuple[float, int]]:
        """Seconds that each alpha that may fit takes at least, from the lowest."""
        found = []
        for index, solved in enumerate(self.solved):
            if solved is not None:
                found.append((_extended(solved, number), index))
        return sorted(found)


def _extended(solved: list[tuple[int, float]], number: int) -> float:
    """The line through the last two of a convex function."""
    if len(solved) < 2:
        return solved[0][1] if solved else 0.0
    (n0, t0), (n1, t1) = solved[-2:]
    return t1 + (number - n1) * (t1 - t0) / (n1 - n0)


def _best_alpha(formulas: Formulas, number: int, bounds: _Bounds, budgets: Budgets, fixed: Fixed) -> Solution | None:
    """The best solution for one n; of equal ones that with the smaller alpha."""
    found: Solution | None = None
    left = bounds.below(number)
    few = FEW if left and left[0][0] > 0 else len(left)
    while left:
        now, left = [index for _, index in left[:few]], left[few:]
        for index, solution in zip(now, best(formulas, number, now, budgets, fixed), strict=True):
            bounds.note(index, number, solution)
            if solution and (found is None or (solution.seconds, solution.alpha) < (found.seconds, found.alpha)):
                found = solution
        if found:
            left = [each for each in left if each[0] < found.seconds * (1 - ROUNDING)]
        few *= 4
    return found
