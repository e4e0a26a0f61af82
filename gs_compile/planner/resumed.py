"""resumed: the plan of a resumed run is taken from its commit, if nothing has changed that it was made for.

Measured figures differ a little each time, and another plan would have all values copied to other files. A plan that
follows from options and budgets alone is simply made again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gs_compile.machine import format_bytes
from gs_compile.options import Options
from gs_compile.placement.placement import Decision, Placement
from gs_compile.placement.workload import UnitSize
from gs_compile.planner.boundary import without
from gs_compile.planner.builder import SCARCE_UPDATES, StepBuilder
from gs_compile.planner.cost.workload import activations
from gs_compile.planner.in_pieces import SIZES
from gs_compile.planner.problem import Problem, fits
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import StepShape
from gs_compile.version import __version__

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)

ACCUMULATES, NUM_CALLS = "accumulates", "num_calls"  # of the loop; stored even if the plan itself is not
MOST_CALLS = 1 << 16  # a larger number was not written by this package
SAME = 0.1  # of host memory, by which a budget that follows from the free memory may differ


def fingerprint(
    options: Options, sizes: Sequence[UnitSize], layouts: Sequence[SpecializedModel], shape: StepShape, *settled: Any
) -> str:
    """A hash of all that a plan depends on, except what is measured. settled: further facts, as text and numbers."""
    batches = activations(layouts)
    settled_options = replace(options, group=None, mesh=None, resume=None, progress=None, report=None, status=None)
    facts = settled_options, sizes, batches, shape, settled, __version__
    return sha256(json.dumps(facts, default=_plain, sort_keys=True).encode()).hexdigest()


def _plain(fact: Any) -> Any:
    if is_dataclass(fact):
        return {each.name: getattr(fact, each.name) for each in fields(fact)}
    return sorted(map(str, fact)) if isinstance(fact, frozenset) else str(fact)


def num_calls_of(former: Mapping[str, Any]) -> int:
    """The number of calls of the model that waited for their backward at a time; 1 if a commit does not say."""
    number = former.get(NUM_CALLS)
    return number if type(number) is int and 1 <= number <= MOST_CALLS else 1


def facts_of(plan: StepPlan, made_for: str, whole_nbytes: int, values_nbytes: int | None) -> dict[str, Any]:
    """What commits store of a plan that was searched for: the decision, and what it was made for; `whole_nbytes` of
    host memory. Nothing if only the schedule can read the decision: the plan is then made again.
    """
    decision = plan.placement.decision
    if decision.own is not None:
        return {}
    known = {"made_for": made_for, "host_nbytes": whole_nbytes, "values_nbytes": values_nbytes}
    return {**known, "decision": decision.as_dict()}


def as_before(
    problem: Problem, former: Mapping[str, Any], made_for: str, whole_nbytes: int, host_nbytes: int | None = None
) -> Placement | None:
    """The placement of the commit's plan; None: it was made for something else, or does not fit any more.

    whole_nbytes: of host memory; `host_nbytes` of these are for one call, if several are open; None: all.
    """
    before, values_nbytes = former.get("host_nbytes"), former.get("values_nbytes")
    if former.get("made_for") != made_for or type(before) is not int or not isinstance(values_nbytes, int | None):
        return None
    if abs(whole_nbytes - before) > SAME * before:
        log.info(
            "the amount of host memory is different from before, %s: a new plan is made", format_bytes(whole_nbytes)
        )
        return None
    try:
        decision = Decision.of(former["decision"])
        builder = problem.wider.builder if decision.shares else problem.builder
        _check(decision, builder)
        if decision.shares and not builder.layout.levels:
            return None
        return _fitting(builder, decision, {"host": host_nbytes or whole_nbytes, "device": values_nbytes})
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
        return None  # not written by this package: a placement's assertions failed


def _check(decision: Decision, builder: StepBuilder) -> None:
    """Raise ValueError for a decision that this package would not make, before it takes time or memory."""
    units, most = {size.unit for size in builder.sizes}, 2 * len(builder.sizes)  # stages of a step
    stages = decision.ahead, decision.lookahead
    numbers = decision.alpha, decision.layer_updates, *stages, *(share.part for share in decision.shares)
    if not all(type(each) in (int, float) for each in numbers) or type(decision.speculative) is not bool:
        raise ValueError("a number is none")
    is_near = all(0 <= each <= most for each in stages)
    if not (0 <= decision.alpha <= 1 and is_near and decision.layer_updates in (1, SCARCE_UPDATES)):
        raise ValueError("a number is out of range")
    if decision.layer_tokens not in (None, *SIZES):
        raise ValueError("pieces that no plan has")
    if decision.own is not None or not units.issuperset((*decision.carried, *decision.retained, *decision.held)):
        raise ValueError("units that there are not")


def _fitting(builder: StepBuilder, decision: Decision, most: Mapping[str, int | None]) -> Placement | None:
    """The placement of a decision, if it fits, maybe with less in memory between two uses (`without`)."""
    for each in without(builder.placement(decision)):
        if fits(builder.programs(each), most):
            return each
    log.info("the plan of the resumed run does not fit any more")
    return None
