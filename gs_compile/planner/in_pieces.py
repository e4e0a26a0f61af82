"""in_pieces: what takes less memory: layers that are updated in pieces, and that run on some tokens at a time.

    a step does not fit         updates in pieces; if it is the device's memory that is short, the largest pieces of
                                layers (`codegen.pieces`) with which it does, too
    it fits                     updates or layers in pieces, if the memory that whole ones take is worth that much to
                                values

Layers in pieces compute a little more and save nothing but their inputs, which the plan of each size counts. Only a
device with memory of its own has some for them to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from gs_compile.errors import NoFitError
from gs_compile.machine import format_bytes
from gs_compile.planner.builder import SCARCE_UPDATES
from gs_compile.planner.ladders import CLEARLY_FASTER
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import on_tokens

SIZES = (8192, 2048, 512)  # tokens: what depends on them falls to a quarter each time
WORTH = 0.95  # of the time with whole layers: what it takes to launch more, smaller operations is not counted


def sizes(num_tokens: int, request: Request, *, separate: bool) -> tuple[int, ...]:
    """Tokens of a piece to be tried for micro-batches of so many, the largest first; none where that is settled."""
    is_settled = request.layer_tokens is not None or not separate
    return () if is_settled else tuple(size for size in SIZES if size < num_tokens)


def smaller(problem: Problem) -> Iterator[Problem]:
    """The problem, and what takes less and less memory: with updates in pieces, and with layers in pieces, too."""
    scarce = problem.updated_in(SCARCE_UPDATES)
    yield problem
    yield scarce
    for size in problem.in_pieces if _may_help(scarce) else ():
        cut = problem.cut(size)
        yield cut
        yield cut.updated_in(SCARCE_UPDATES)


def smallest(problem: Problem) -> Problem:
    """The last of `smaller`, made alone."""
    scarce = problem.updated_in(SCARCE_UPDATES)
    return scarce.cut(min(scarce.in_pieces)) if _may_help(scarce) else scarce


def _may_help(problem: Problem) -> bool:
    """Whether a step may fit with layers in pieces: it would if its code computed in no device memory."""
    if not problem.in_pieces or problem.request.saves:
        return False
    try:
        workload = problem.workload
    except NoFitError:  # which is said of that memory alone, before code is timed
        return True
    return problem.of(workload.scaled(workspace=0.0)).does_fit()


def faster(problem: Problem) -> Iterator[tuple[Problem, float]]:
    """The problem with updates or with layers in pieces, where the memory that they save could make a step faster, and
    the part of the time with whole ones that a step is to take then.
    """

    def part(other: Problem) -> float:
        found, whole = (each.solved(problem.number) for each in (other, problem))
        return found.seconds / whole.seconds if found and whole else inf

    scarce, as_published = problem.updated_in(SCARCE_UPDATES), problem.request.spec.as_published
    if not as_published and part(scarce) < CLEARLY_FASTER:
        yield scarce, CLEARLY_FASTER
    if problem.in_pieces and not problem.request.saves:
        no_workspace = problem.of(problem.workload.scaled(workspace=0.0))
        if part(no_workspace) < WORTH:
            yield from ((problem.cut(size), WORTH) for size in problem.in_pieces)


def with_layer_tokens(plan: StepPlan) -> StepPlan:
    """The plan whose decision says how many tokens its layers run on, if it is to, and what that is for."""
    size = plan.problem.layer_tokens
    if size is None:
        return plan
    on_all = dict.fromkeys(name for cost in plan.workload.costs.values() for name in cost.on_all)
    memory = format_bytes(plan.workload.workspace_nbytes)
    why = f"layers run {on_tokens(size, on_all)}, and compute in {memory} so"
    return replace(plan, placement=plan.placement.decided(layer_tokens=size), notes=(*plan.notes, why))
