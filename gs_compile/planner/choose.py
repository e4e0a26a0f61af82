"""choose: from the linear program's solution to the placement whose own program keeps the budgets and takes least time.

Why the program is asked. The linear program does not know cuts at whole tensors, nor how values fit beside each other.
Where a program takes more than a budget, the linear program is given less. A full host memory can cost more than it
brings, too: where the drive is busy, writes end late, and the step waits for their buffers, so some is left free where
that is faster. And a late update that costs nothing in the linear program, as long as the forward hides its traffic,
stands between two steps in the program. Nor does it know what else memory is good for: of a small step, the fastest of
those that store nothing there is finished, too.

Of placements that may be faster, those that keep the budgets are simulated too. A ladder is what one idea proposes:
placements, each of which takes no less memory than the one before. The last one that keeps the budgets is a candidate.

    boundary    parameters stay in memory from one step to the next, or these and checkpoints from the forward to the
                backward; the last states of a step are read earlier, or all that is read from SSD, as the head computes
                for as long as several layers
    saved       the topmost layers save activations in memory that gradients and states need later
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize
from gs_compile.planner.boundary import (
    Ladder,
    carried_nbytes,
    carrying,
    deeper,
    earlier,
    further,
    holding,
    retained_text,
    retaining,
)
from gs_compile.planner.lp.search import Search
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.problem import NOTHING, Problem
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.planner.step_plan import StepPlan, commits_text

T = TypeVar("T")

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over
SPARE_TURNS = (1, 2, 4)  # of a layer's data, left free for what leaves late; tried as long as that is faster
LEAST_PART = 32  # of host memory, that alphas are tried with less and less of
SMALL = 400  # computations of a forward
MIDDLING = 0.3  # alpha
FASTER = 0.999  # of the time with more memory left free: less is nothing
GOOD_ENOUGH = 1.03  # of the linear program's time with the same memory: nothing else is tried then


@dataclass(frozen=True)
class Candidate:
    """A solution, and how the program of the placement that it became runs.

    less: by tier, the bytes that the linear program was not given; spare: of these the bytes left free on purpose.
    """

    solution: Solution
    simulation: Simulation
    less: Mapping[str, int]
    spare: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return self.simulation.seconds

    @property
    def is_good_enough(self) -> bool:
        return self.seconds <= GOOD_ENOUGH * self.solution.seconds

    def fills(self, tier: str) -> bool:
        """Whether data may have the memory of a tier that waits could be shorter with."""
        ratios = self.solution.decision.ratios
        return tier == "host" or any(part for each in ratios for part in each.on_device().values())


def choose(problem: Problem, search: Search) -> StepPlan:
    """What the search's best becomes. Raises `MemoryBudgetError` where no program keeps the budgets."""
    steps, best, is_small = problem.steps, search.best, is_small_step(problem)
    finished = [(each, _with_boundary(steps, each, is_small=is_small)) for each in _to_finish(problem, best)]
    chosen, simulation = min(finished, key=lambda pair: pair[1].seconds)
    if chosen.solution.alpha != best.alpha:  # what is said of the plan is said of its own alpha
        solved = problem.solved(problem.number, chosen.solution.alpha)
        assert solved is not None, "what fits in less memory fits"
        best = solved
    rows = [(number, solution.seconds) for number, solution in search.history if solution is not None]
    return StepPlan(
        problem=problem,
        relaxed=chosen.solution.decision,
        placement=simulation.placement,
        solved=best,
        simulated=simulation,
        history=tuple((number, seconds, number * problem.workload.tokens / seconds) for number, seconds in rows),
        notes=(*_of_commits(problem, best, simulation.placement), *_of_boundary(chosen.simulation, simulation)),
    )


def _to_finish(problem: Problem, best: Solution) -> list[Candidate]:
    """What `refined` finds; and of what stores nothing in host memory, which has most room for what follows, the
    fastest, and that with a middling alpha: how fast they will be depends more on what follows.

    Raises `MemoryBudgetError` where none keeps the budgets.
    """
    candidates, emptied = refined(problem, best), problem.emptied
    is_open = emptied is not problem and not problem.profile.separate
    if is_open and is_small_step(problem) and not any(each.is_good_enough for each in candidates):
        with suppress(MemoryBudgetError):
            candidates.append(min(refined(emptied, best), key=lambda each: each.seconds))
            is_another = MIDDLING in emptied.request.alphas and candidates[-1].solution.alpha != MIDDLING
            if is_another and (middling := _fitting(emptied, MIDDLING, NOTHING)):
                candidates.append(middling)
    return candidates


def _with_boundary(steps: Problem, chosen: Candidate, *, is_small: bool) -> Simulation:
    """The step of a candidate, with what `boundary` proposes where that is faster; as it is where its schedule is as
    others publish it: what it is compared with moves what is said of it.

    The last states are read earlier beside all else that was chosen: before, they may not be what the step waits for.
    """
    if steps.request.spec.as_published:
        return chosen.simulation
    simulation = fastest(steps, chosen.simulation, each_of(carrying(chosen.simulation.placement)), chosen.spare)
    if is_small and _waits_for_drives(simulation):
        simulation = fastest(steps, simulation, [retaining(simulation.placement)], chosen.spare)
        placed = simulation.placement
        deep = deeper(placed)
        ladders = *each_of(deep), *map(holding, (placed, *deep))
        simulation = fastest(steps, simulation, ladders, chosen.spare, FASTER)  # the deeper, the more memory
        more = chain.from_iterable(map(further, (simulation.placement, *deep[-1:])))
        simulation = fastest(steps, simulation, each_of(list(more)), chosen.spare, FASTER)
        return fastest(steps, simulation, each_of(earlier(simulation.placement)), chosen.spare)
    return fastest(steps, simulation, [earlier(simulation.placement)], chosen.spare)


def is_small_step(problem: Problem) -> bool:
    """Whether a step is quickly simulated."""
    return problem.number * problem.workload.num_layers <= SMALL


def _waits_for_drives(simulation: Simulation) -> bool:
    waits = sum(seconds for cause, seconds in simulation.bubbles.items() if cause.startswith("ssd"))
    return waits > (1 - FASTER) * simulation.seconds


def each_of(ladder: Ladder) -> Iterator[Ladder]:
    """Each placement by itself, where none is sure to be faster than the one before."""
    return ([each] for each in ladder)


def highest(ladder: Ladder, fitting: Callable[[Placement], T | None]) -> tuple[Placement, T] | None:
    """The last placement of a ladder that fits, if any does, with what `fitting` makes of it."""
    last: tuple[Placement, T] | None = None

    def is_over(each: Placement) -> bool:
        nonlocal last
        if result := fitting(each):
            last = each, result
        return not result

    bisect_left(ladder, True, key=is_over)
    return last


def fastest(
    problem: Problem,
    plain: Simulation,
    ladders: Iterable[Ladder],
    spare: Mapping[str, int] = NOTHING,
    part: float = 1.0,
) -> Simulation:
    """The first step that is as fast as the fastest one, of `plain` and then of what ladders propose, in their order.

    spare: by tier, bytes that are left free. part: of a step's time, that the fastest may take where both are as fast.
    """
    ends = (highest(ladder, lambda each: problem.fitting(each, spare)) for ladder in ladders)
    programs = dict(each for each in ends if each)  # where memory is short, ladders end at the same placement
    simulations = [plain, *(problem.predicted(*each) for each in programs.items())]
    least = min(each.seconds for each in simulations)
    return next(each for each in simulations if part * each.seconds <= least)


def _of_commits(problem: Problem, best: Solution, placement: Placement) -> tuple[str, ...]:
    """What durable steps take; none where there are none."""
    if not placement.durability:
        return ()
    plain = replace(problem, builder=problem.builder.laid_out(durability=0))
    without = plain.solved(best.num_micro_batches)
    assert without is not None, "less fits, too"
    slower = f"{best.seconds / without.seconds - 1:.1%} slower by the linear program"
    return (f"Commits: {commits_text(placement)}; {slower}.",)


def _of_boundary(plain: Simulation, chosen: Simulation) -> tuple[str, ...]:
    """What is carried from a step to the next, what is read earlier, and what that brings; none where nothing is."""
    placed, ahead, all_ahead = chosen.placement, chosen.placement.decision.ahead, chosen.placement.decision.lookahead
    carried = f"{format_bytes(carried_nbytes(placed))} of parameters that the next step reads first stay in host memory"
    carried += " until then"
    retained = f"{retained_text(placed)} stay in host memory from the forward to the backward"
    read = f"states of the updates after the last backward are read {ahead} layer{'s' * (ahead > 1)} earlier"
    deep = f"all that is read from SSD is read {all_ahead} stage{'s' * (all_ahead > 1)} earlier"
    said = {carried: placed.carried_values, retained: retained_text(placed), read: ahead, deep: all_ahead}
    words = "; ".join(text for text, is_so in said.items() if is_so)
    return (f"{words[0].upper()}{words[1:]}: {plain.seconds / chosen.seconds - 1:.1%} faster.",) if words else ()


def refined(problem: Problem, best: Solution) -> list[Candidate]:
    """The fastest of a few placements, by the simulator, all within the budgets; of a small step that of each alpha.

    Raises `MemoryBudgetError` where none does.
    """
    by_alpha: dict[float, Candidate] = {}
    for tried in sorted(_tries(problem.trial, best), key=lambda each: each.seconds):
        if candidate := _whole(problem, tried):
            by_alpha.setdefault(candidate.solution.alpha, candidate)
        if by_alpha and not is_small_step(problem):
            break
    if not by_alpha and (scarce := _of_any_alpha(problem)):
        return [scarce]
    if not by_alpha:
        raise MemoryBudgetError(
            "no program of a plan by the linear program keeps the budgets: give more host_memory or device_memory, or "
            "a smaller micro_batch_size"
        )
    return list(by_alpha.values())


def _whole(problem: Problem, tried: Candidate) -> Candidate | None:
    """A candidate of a problem's trial as one of its steps; None where these do not fit so."""
    alpha, steps = tried.solution.alpha, problem.steps
    if steps is not problem.trial:
        return _fitting(steps, alpha, tried.spare, tried.less)
    return tried if steps is problem or problem.solved(problem.number, alpha) else None


def _tries(problem: Problem, best: Solution) -> list[Candidate]:
    """With the best alpha; then with others, where those may be faster."""
    candidates = _with_spare(problem, None)
    if candidates and candidates[-1].is_good_enough:
        return candidates
    first = candidates[-1] if candidates else None
    for alpha in _other_alphas(problem, first.solution if first else best):
        bound = problem.solved(problem.number, alpha)
        if bound and (first is None or bound.seconds < first.seconds):
            candidates += _with_spare(problem, alpha)
    return candidates


def _with_spare(problem: Problem, alpha: float | None) -> list[Candidate]:
    """With memory left free as long as that is faster; none where nothing fits."""
    candidates = [candidate] if (candidate := _fitting(problem, alpha, NOTHING)) else []
    for tier, turn_nbytes in _turns(problem).items():
        for turns in SPARE_TURNS:
            if not candidates or candidates[-1].is_good_enough or not candidates[-1].fills(tier):
                break
            last = candidates[-1]
            more = turns * turn_nbytes - last.spare[tier]
            spare, less = ({**left, tier: left[tier] + more} for left in (last.spare, last.less))
            candidate = _fitting(problem, last.solution.alpha, spare, less)
            if candidate is None or candidate.seconds > FASTER * last.seconds:
                break
            candidates.append(candidate)
    return candidates


def _other_alphas(problem: Problem, best: Solution) -> Iterator[float]:
    """None late; and of a small step, which is quickly simulated, the most that costs the linear program nothing."""
    alphas = problem.request.alphas
    if best.alpha and 0.0 in alphas:
        yield 0.0
    above = [alpha for alpha in alphas if alpha > best.alpha]
    if above and is_small_step(problem):

        def costs(alpha: float) -> bool:
            solution = problem.solved(problem.number, alpha)
            return solution is None or solution.seconds > GOOD_ENOUGH * best.seconds

        free = bisect_left(above, True, key=costs)
        if free:
            yield above[free - 1]


def _of_any_alpha(problem: Problem) -> Candidate | None:
    """Where memory is scarce, the first that fits of the alphas that are best with less and less of it."""
    budgets, tried = problem.budgets, set()
    for part in range(MOST_ROUNDS):
        less = replace(budgets, host_nbytes=budgets.host_nbytes - part * budgets.host_nbytes // LEAST_PART)
        best = problem.solved(problem.number, None, budgets=less)
        if best is None:
            return None
        if best.alpha not in tried and (candidate := _fitting(problem.steps, best.alpha, NOTHING)):
            return candidate
        tried.add(best.alpha)
    return None


def _fitting(
    problem: Problem, alpha: float | None, spare: Mapping[str, int], less: Mapping[str, int] | None = None
) -> Candidate | None:
    """A candidate whose program keeps the budgets and leaves `spare` bytes free; None if there is none.

    alpha: None: in each round the best with the memory that is left, as some need less than others.
    """
    less = dict(less or spare)
    times: Counter[str] = Counter()  # twice as much each time: tensors that are cut whole may stay where they were
    for _ in range(MOST_ROUNDS):
        left = {f"{tier}_nbytes": getattr(problem.budgets, f"{tier}_nbytes") - nbytes for tier, nbytes in less.items()}
        if left["host_nbytes"] <= 0 or left["device_nbytes"] < 0:
            return None
        solution = problem.solved(problem.number, alpha, budgets=replace(problem.budgets, **left))
        if solution is None:
            return None
        placement = problem.builder.placement(solution.decision)
        program = problem.builder.program(placement)
        over = problem.excess(program, spare)
        if not over:
            return Candidate(solution, problem.predicted(placement, program), less, spare)
        for tier, nbytes in over.items():
            less[tier] += nbytes << times[tier]
            times[tier] += 1
    return None


def _turns(problem: Problem) -> dict[str, int]:
    """By tier, the bytes that the largest layer's update has there: its gradient, its parameters, in host memory its
    state.
    """
    layers = [size for size in problem.workload.sizes if isinstance(size.unit, int)]

    def nbytes(size: UnitSize, tier: str) -> int:
        state = size.state_itemsize if tier == "host" else 0
        return int(size.num_trained * (size.itemsize + size.gradient_itemsize + state))

    tiers = ("host",) if problem.values_nbytes is None else ("device", "host")
    return {tier: max((nbytes(size, tier) for size in layers), default=0) for tier in tiers}
