"""reasons: what limits a step, what is nearly as good, and what is worth knowing, each found by solving again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, combinations

from gs_compile.machine import format_bytes
from gs_compile.options import Ratios
from gs_compile.placement.workload import Workload
from gs_compile.planner.builder import SCARCE_UPDATES
from gs_compile.planner.lp.counting import CLASSES
from gs_compile.planner.lp.search import Search
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import States, several
from gs_compile.planner.step_plan import SECONDS_PER_DAY, Alternative, StepPlan, time_text
from gs_compile.planner.summary import rate_text
from gs_compile.schedules import BASELINE

WORTH_SAYING = 0.01  # a change of the step's time below this is nothing
MOST_ALTERNATIVES = 3
FASTER_DEVICE = 0.1
MOST_DAYS = 3 * 365.0  # of training, that drives last: for longer, nobody asks
MOST_TIMES = 8  # as many micro-batches, for drives to last longer
PARTS = 16  # of the batch: a larger one is told no finer
STORES_GRADIENTS = (
    "host memory has no room for all gradients, which wait for their norm: each step writes and reads the rest on SSD"
)
ADAPTERS = "adapters alone (LoRA) write far less: `greedysnake fit` says for how long the drives last with them"

Narrower = Iterable[tuple[States, Problem]]


def explained(
    plan: StepPlan, found: Search, others: Sequence[tuple[Problem, Search]], narrower: Narrower = ()
) -> StepPlan:
    """The plan with what limits it, what else there was, and notes. `others`: searches with other micro-batch sizes;
    narrower: as of `longer_life`.
    """
    return replace(
        plan,
        binding=tuple(binding(plan.problem, plan.bound)),
        alternatives=tuple(alternatives(plan.problem, replace(found, best=plan.bound), others)),
        notes=(*plan.notes, *notes(plan), *longer_life(plan, narrower)),
    )


def binding(problem: Problem, solution: Solution) -> Iterator[str]:
    """What more of each resource would bring, by the linear program; where none brings anything alone, as lanes are
    equally busy, also the two that bring most together. `solution` is the best without.
    """
    more = richer(problem)

    def gain(*resources: str) -> float:
        better = reduce(lambda each, words: more[words](each), resources, problem)
        solved = better.solved(solution.num_micro_batches, solution.alpha)
        return solution.seconds / solved.seconds - 1 if solved else 0.0

    gains = {words: gain(words) for words in more}
    for words, found in gains.items():
        yield f"{words}: {f'{found:.0%} faster' if found > WORTH_SAYING else 'nothing'}"
    if max(gains.values()) <= WORTH_SAYING:
        found, one, other = max((gain(*pair), *pair) for pair in combinations(more, 2))
        if found > WORTH_SAYING:
            yield f"{one} and {other}: {found:.0%} faster"


def alternatives(problem: Problem, chosen: Search, others: Sequence[tuple[Problem, Search]]) -> Iterator[Alternative]:
    """The settings nearest in throughput to the best of the search, by the linear program; all with its alpha, which
    the simulator may have chosen.
    """
    solution, workload, request = chosen.best, problem.workload, problem.request
    number, alpha = solution.num_micro_batches, solution.alpha
    fewer = [n for n, each in chosen.history if n < number and each is not None][-2:]
    tries: list[tuple[str, Workload, Solution | None]]
    tries = [(several(n), workload, problem.solved(n, alpha)) for n in fewer]
    if others:  # the best of them
        other, result = max(others, key=lambda each: each[0].workload.tokens * each[1].best.throughput)
        size = other.workload.micro_batch_size
        solved = other.solved(result.best.num_micro_batches, alpha)
        tries.append((f"micro-batches of {size}", other.workload, solved))
    if alpha and not (request.clip or request.accumulate):
        tries.append(("no delayed updates (alpha 0)", workload, problem.solved(number, 0.0)))
    given = [each.given() for each in solution.decision.ratios]
    if any(each[name] for each in given for name in each.keys() & CLASSES):
        nothing = replace(request, ratios=Ratios(**dict.fromkeys(given[0], 0.0)), recompute="all")
        tries.append(("everything on SSD", workload, problem.of(request=nothing).solved(number, alpha)))
    rows = [
        Alternative(label=label, seconds=found.seconds, tokens_per_second=found.throughput * model.tokens)
        for label, model, found in tries
        if found is not None
    ]
    own = number * workload.tokens / solution.seconds
    rows.sort(key=lambda row: abs(row.tokens_per_second / own - 1))
    yield from rows[:MOST_ALTERNATIVES]


def notes(plan: StepPlan) -> Iterator[str]:
    """What a reader should know before spending time on this."""
    if plan.num_micro_batches == 1 and plan.schedule == "vertical":
        yield f"one micro-batch: the {BASELINE} order is the same step"
    if plan.placement.accumulates and plan.placement.layout.clip and plan.ratios.get("gradient", 1.0) < 1.0:
        yield STORES_GRADIENTS
    if plan.placement.layer_updates > 1:
        yield "host memory is scarce: layers are updated in pieces, and less is read ahead"
    if not any(tier == "ssd" for _, tier in plan.homes):
        where = "device and host memory" if any(tier == "device" for _, tier in plan.homes) else "host memory"
        yield f"everything fits in {where}: nothing is moved to SSD"
    compute = plan.simulation.busy.get("compute", 0.0)
    if compute > 1 - WORTH_SAYING:
        yield "the computation never waits"
    wear = plan.budgets.wear_bytes_per_second
    if wear and plan.written / wear > plan.seconds * (1 + WORTH_SAYING):  # the program itself does not wait for that
        yield f"the drives last as long as asked if a step begins every {plan.written / wear:.3g} s, and not sooner"


def longer_life(plan: StepPlan, narrower: Narrower = ()) -> Iterator[str]:
    """With what drives that wear within years last at least twice as long, and what that costs, by the linear program;
    narrower: as of `sparing`.
    """
    problem, rated, tokens = plan.problem, plan.profile.ssd_rated_nbytes, plan.workload.tokens
    if not 0 < rated < MOST_DAYS * plan.written_per_day or problem.request.spec.whole_batch:
        return
    masters = [f"{problem.workload.masters} masters"] if problem.whole_masters else []  # others may be chosen
    now = plan.bound
    for states, found, per_day in sparing(plan, narrower):
        narrow = [f"states in {'8 bits' if states == '8bit' else states}"] if states else []
        words = ", ".join([*narrow, *masters, f"{several(found.num_micro_batches)} a step"])
        larger, smaller = (f"{each.num_micro_batches * tokens:,}" for each in (found, now))
        speed, before = (rate_text(each.throughput * tokens) for each in (found, now))
        exact = "; training is not bit for bit that with states in fp32" if states else ""
        life = f"the drives last {time_text(rated / per_day)}" if per_day else "nothing is written to SSD"
        yield (
            f"{life} with {words}, by the linear program: {larger} tokens a step "
            f"instead of {smaller}, {speed} tokens/s instead of {before}{exact}"
        )
    if not any(size.frozen for size in problem.workload.sizes):
        yield ADAPTERS


def sparing(plan: StepPlan, narrower: Narrower) -> Iterator[tuple[States | None, Solution, float]]:
    """The smallest batch, from the plan's on, with which a day writes at most half as many bytes, by the linear
    program, and these bytes: with states as they are (None), and with each of `narrower`, the problem with states in
    fewer bits; with updates in pieces where whole ones do not fit.
    """
    for states, problem in chain([(None, plan.problem)], narrower):
        found = _sparing(problem, plan) or _sparing(problem.updated_in(SCARCE_UPDATES), plan)
        if found is not None:
            yield states, *found


def _sparing(problem: Problem, plan: StepPlan) -> tuple[Solution, float] | None:
    now, known = plan.num_micro_batches, dict[int, tuple[Solution, float]]()
    numbers = range(now, MOST_TIMES * now + 1, max(1, now // PARTS))

    def is_enough(number: int) -> bool:
        solution = problem.solved(number, plan.alpha)
        if solution is None:
            return True  # nor does a larger one fit
        _, written = problem.needs(solution)
        known[number] = solution, written / solution.seconds * SECONDS_PER_DAY
        return known[number][1] <= plan.written_per_day / 2

    place = bisect_left(numbers, True, key=is_enough)
    return known.get(numbers[place]) if place < len(numbers) else None


def richer(problem: Problem) -> dict[str, Callable[[Problem], Problem]]:
    """More of one resource, in amounts that one can buy: what it is called, and what gives a problem that has it."""

    def on(each: Problem, profile: Profile | None = None, *, host: int = 0, device: int = 0) -> Problem:
        now = each.budgets
        return each.of(profile=profile, host_nbytes=now.host_nbytes + host, device_nbytes=now.device_nbytes + device)

    def faster(*lanes: str) -> Callable[[Problem], Problem]:
        return lambda each: on(each, _faster(each.profile, *lanes))

    def second_ssd(each: Problem) -> Problem:
        now = each.profile
        twice = replace(now, ssd_nbytes=2 * now.ssd_nbytes, ssd_rated_nbytes=2 * now.ssd_rated_nbytes)
        return on(each, _faster(twice, "ssd"))

    host, device = _gibibytes(problem.budgets.host_nbytes / 8), _gibibytes(problem.budgets.device_nbytes / 4)
    more: dict[str, Callable[[Problem], Problem]] = {}
    more[f"{format_bytes(host)} more host memory"] = partial(on, host=host)
    more["a second SSD like the first"] = second_ssd
    if problem.profile.separate:
        more[f"{format_bytes(device)} more device memory"] = partial(on, device=device)
        more["a link to the device twice as fast"] = faster("h2d", "d2h")
    if problem.workload.world > 1:
        more["a network twice as fast"] = faster("net")
    more["an optimizer twice as fast"] = faster("update")
    times = 1 / (1 + FASTER_DEVICE)
    more[f"a device that computes {FASTER_DEVICE:.0%} faster"] = lambda each: each.of(each.workload.scaled(code=times))
    return more


def _gibibytes(nbytes: float) -> int:
    return max(1, round(nbytes / 2**30)) * 2**30


def _faster(profile: Profile, *lanes: str) -> Profile:
    """The same machine with all rates of some lanes doubled."""
    names = [name for name in vars(profile) if name.startswith(lanes) and name.endswith("_per_second")]
    return replace(profile, **{name: 2 * getattr(profile, name) for name in names})
