"""in_pieces: layers that are updated in pieces, or that run on some tokens at a time, take less memory.

    a step does not fit         updates in pieces; if device memory is short, also layers in pieces (`codegen.pieces`),
                                in the largest pieces that fit
    it fits                     updates or layers in pieces, if the memory that they free makes the step faster

Layers in pieces compute a little more and save only their inputs, which each plan takes into account. They free memory
only on a device with memory of its own.
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

SIZES = (8192, 2048, 512)  # tokens of a piece: memory that depends on them falls to a quarter each time
WORTH = 0.95  # of the time with whole layers: the plan does not count the launches of more, smaller operations


def sizes(num_tokens: int, request: Request, *, separate: bool) -> tuple[int, ...]:
    """The tokens of a piece to try for micro-batches of `num_tokens`, the largest first; () if that is settled."""
    is_settled = request.layer_tokens is not None or not separate
    return () if is_settled else tuple(size for size in SIZES if size < num_tokens)


def smaller(problem: Problem) -> Iterator[Problem]:
    """The problem, and then problems that take less and less memory: updates in pieces, and layers in pieces, too."""
    scarce = problem.updated_in(SCARCE_UPDATES)
    yield problem
    yield scarce
    for size in problem.in_pieces if _may_help(scarce) else ():
        cut = problem.cut(size)
        yield cut
        yield cut.updated_in(SCARCE_UPDATES)


def smallest(problem: Problem) -> Problem:
    """The last of `smaller`, without the others."""
    scarce = problem.updated_in(SCARCE_UPDATES)
    return scarce.cut(min(scarce.in_pieces)) if _may_help(scarce) else scarce


def _may_help(problem: Problem) -> bool:
    """Whether a step may fit with layers in pieces: it would if its code needed no device memory at all."""
    if not problem.in_pieces or problem.request.saves:
        return False
    try:
        workload = problem.workload
    except NoFitError:  # which is said of that memory alone, before code is timed
        return True
    return problem.of(workload.scaled(workspace=0.0)).does_fit()


def faster(problem: Problem) -> Iterator[tuple[Problem, float]]:
    """The problem with updates or with layers in pieces, if the memory that this frees could make a step faster; with
    the part of the time with whole ones that a step then has to reach.
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
    """The plan with the tokens that its layers run on in its decision, and with a note on them."""
    size = plan.problem.layer_tokens
    if size is None:
        return plan
    on_all = dict.fromkeys(name for cost in plan.workload.costs.values() for name in cost.on_all)
    memory = format_bytes(plan.workload.workspace_nbytes)
    why = f"layers run {on_tokens(size, on_all)}, and compute in {memory} so"
    return replace(plan, placement=plan.placement.decided(layer_tokens=size), notes=(*plan.notes, why))
