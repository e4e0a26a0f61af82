"""reasons: what limits a step, which other settings are nearly as good, and notes, all found by solving again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, combinations
from operator import attrgetter
from typing import Any

from gs_compile.errors import NoFitError
from gs_compile.machine import format_bytes
from gs_compile.options import Ratios
from gs_compile.placement.workload import Workload
from gs_compile.planner.builder import SCARCE_UPDATES
from gs_compile.planner.lp.counting import CLASSES
from gs_compile.planner.lp.search import Search
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import SECONDS_PER_YEAR, States, several
from gs_compile.planner.step_plan import SECONDS_PER_DAY, Alternative, StepPlan, time_text
from gs_compile.planner.summary import rate_text
from gs_compile.schedules import BASELINE

WORTH_SAYING = 0.01  # a smaller relative change of the step's time counts as none
MOST_ALTERNATIVES = 3
FASTER_DEVICE = 0.1
MOST_DAYS = 3 * 365.0  # drives that last longer, in training, are not a concern
STORES_GRADIENTS = (
    "host memory has no room for all gradients, which wait for their norm: each step writes and reads the rest on SSD"
)
ADAPTERS = "adapters alone (LoRA) write far less: `greedysnake fit` says for how long the drives last with them"

Narrower = Iterable[tuple[States, Problem]]


def explained(plan: StepPlan, found: Search, others: Sequence[Problem], narrower: Narrower = ()) -> StepPlan:
    """The plan with what limits it, with alternatives, and with notes. `others`: problems of other micro-batch sizes;
    narrower: see `sparing`.
    """
    rows = [(number, each.seconds) for number, each in found.history if each is not None]
    return replace(
        plan,
        simulated=plan.simulation,
        history=tuple((number, seconds, number * plan.workload.tokens / seconds) for number, seconds in rows),
        binding=tuple(binding(plan.problem, plan.bound)),
        alternatives=tuple(alternatives(plan.problem, replace(found, best=plan.bound), others)),
        notes=(*plan.notes, *notes(plan), *longer_life(plan, narrower)),
    )


def binding(problem: Problem, solution: Solution) -> Iterator[str]:
    """What more of each resource would bring, by the linear program. If none brings anything alone, because lanes are
    equally busy, also the two that bring most together. `solution` is the best one now.
    """
    more = richer(problem)

    def gain(*resources: str) -> float:
        better = reduce(lambda each, words: more[words](each), resources, problem)
        solved = better.solved(solution.num_micro_batches, solution.alpha)
        return solution.seconds / solved.seconds - 1 if solved else 0.0

    gains = {words: gain(words) for words in more}
    for words, gained in gains.items():
        yield f"{words}: {f'{gained:.0%} faster' if gained > WORTH_SAYING else 'nothing'}"
    if max(gains.values()) <= WORTH_SAYING:
        gained, one, other = max((gain(*pair), *pair) for pair in combinations(more, 2))
        if gained > WORTH_SAYING:
            yield f"{one} and {other}: {gained:.0%} faster"


def alternatives(problem: Problem, chosen: Search, others: Sequence[Problem]) -> Iterator[Alternative]:
    """The settings nearest in throughput to the best one of the search, by the linear program, all with its alpha."""
    solution, workload, request = chosen.best, problem.workload, problem.request
    number, alpha = solution.num_micro_batches, solution.alpha
    fewer = [n for n, each in chosen.history if n < number and each is not None][-2:]
    tries: list[tuple[str, Workload, Solution | None]]
    tries = [(several(n), workload, problem.solved(n, alpha)) for n in fewer]
    if others:  # the best of them
        other = max(others, key=attrgetter("tokens_per_second"))
        solved = other.solved(other.best.num_micro_batches, alpha)
        tries.append((f"micro-batches of {other.workload.micro_batch_size}", other.workload, solved))
    if alpha and not (request.clip or request.accumulate):
        tries.append(("no delayed updates (alpha 0)", workload, problem.solved(number, 0.0)))
    ratios = [each.given() for each in solution.decision.ratios]
    if any(each[name] for each in ratios for name in each.keys() & CLASSES):
        nothing = replace(request, ratios=Ratios(**dict.fromkeys(ratios[0], 0.0)), recompute="all")
        tries.append(("everything on SSD", workload, problem.of(request=nothing).solved(number, alpha)))
    rows = [
        Alternative(label=label, seconds=answer.seconds, tokens_per_second=answer.throughput * model.tokens)
        for label, model, answer in tries
        if answer is not None
    ]
    now = number * workload.tokens / solution.seconds
    rows.sort(key=lambda row: abs(row.tokens_per_second / now - 1))
    yield from rows[:MOST_ALTERNATIVES]


def notes(plan: StepPlan) -> Iterator[str]:
    """Notes that a reader should know before running this plan."""
    if plan.num_micro_batches == 1 and plan.schedule == "vertical":
        yield f"one micro-batch: the {BASELINE} order is the same step"
    if (bundles := plan.placement.layout.num_micro_batches) < plan.num_micro_batches:
        yield f"micro-batches are simulated in {bundles} bundles: times, peaks and the timeline are of these"
    if plan.placement.accumulates and plan.placement.layout.clip and plan.ratios.get("gradient", 1.0) < 1.0:
        yield STORES_GRADIENTS
    if plan.placement.decision.layer_updates > 1:
        yield "host memory is scarce: layers are updated in pieces, and less is read ahead"
    if not any(tier == "ssd" for _, tier in plan.homes):
        where = "device and host memory" if any(tier == "device" for _, tier in plan.homes) else "host memory"
        yield f"everything fits in {where}: nothing is moved to SSD"
    compute = plan.simulation.busy.get("compute", 0.0)
    if compute > 1 - WORTH_SAYING:
        yield "the computation never waits"
    wear = plan.budgets.wear_bytes_per_second
    if wear and plan.written / wear > plan.seconds * (1 + WORTH_SAYING):  # the program itself does not slow down
        yield f"the drives last as long as asked if a step begins every {plan.written / wear:.3g} s, and not sooner"


def longer_life(plan: StepPlan, narrower: Narrower) -> Iterator[str]:
    """Notes on settings with which drives that wear out within years last twice as long, and on what that costs, by the
    linear program; narrower: see `sparing`.
    """
    request, rated, tokens = plan.problem.request, plan.profile.ssd_rated_nbytes, plan.workload.tokens
    if request.spec.batch_like or not 0 < rated < MOST_DAYS * plan.written_per_day:  # the batch is another's
        return
    is_batch_given = (request.batch_size, request.num_micro_batches) != (None, None)
    for settings, best, per_day in sparing(plan, narrower):
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        life = f"the drives last {time_text(rated / per_day)}" if per_day else "nothing is written to SSD"
        larger, smaller = (f"{each.num_micro_batches * tokens:,}" for each in (best, plan.bound))
        speed, before = (rate_text(each.throughput * tokens) for each in (best, plan.bound))
        exact = "; training is not bit for bit that with states in fp32" if "states" in settings else ""
        yield (
            f"with `{flags}`{' and no given batch' if is_batch_given else ''} {life}, by the linear program: {larger} "
            f"tokens a step instead of {smaller}, {speed} tokens/s instead of {before}{exact}"
        )
    if not any(size.frozen_numels for size in plan.workload.sizes):
        yield ADAPTERS


def sparing(plan: StepPlan, narrower: Narrower) -> Iterator[tuple[dict[str, Any], Solution, float]]:
    """Settings with which drives last twice as long as by the plan, the linear program's solution with the plan's
    alpha, and the bytes that it writes in a day: with states as they are, and with each of `narrower`, the problems
    with states in fewer bits; with updates in pieces if whole ones do not fit.
    """
    days = 2 * plan.profile.ssd_rated_nbytes / plan.written_per_day
    lasting: dict[str, Any] = {"wear_years": float(f"{days * SECONDS_PER_DAY / SECONDS_PER_YEAR:.2g}")}
    for states, problem in chain([(None, plan.problem)], narrower):
        request = replace(problem.request, alpha=plan.alpha, batch_size=None, num_micro_batches=None, **lasting)
        whole = problem.asked(request).at(0)
        for asked in (whole, whole.updated_in(SCARCE_UPDATES)):
            with suppress(NoFitError):
                best = asked.best
                per_day = asked.needs(best)[1] / best.seconds * SECONDS_PER_DAY
                yield ({"states": states} if states else {}) | lasting, best, per_day
                break


def richer(problem: Problem) -> dict[str, Callable[[Problem], Problem]]:
    """More of one resource, in amounts that one can buy: its name, and a function from a problem to one that has it."""

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
