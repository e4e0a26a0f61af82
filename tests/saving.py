"""Plans that save and keep what a test says, instead of what is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from gs_compile.codegen.compiled import levels_of
from gs_compile.passes.baselines.lifetime import EVERYTHING, Room
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Placement
from gs_compile.planner import decide
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.plan import StepPlan
from gs_compile.planner.run import CallBudgets, Planned, RunPlanner
from gs_compile.program.ir import Unit


@contextmanager
def saving(
    *shares: Share, carried: tuple[Unit, ...] = (), retained: tuple[Unit, ...] = (), held: tuple[int, ...] = ()
) -> Iterator[list[Placement]]:
    """Have plans save these activations, keep these units' parameters from step to step, or these and those layers'
    checkpoints from the forward to the backward; gives such plans.

    Of the units whose parameters are carried, the last states are read earlier then.
    """
    usual, made = RunPlanner._decided, list[Placement]()

    def decided(run: RunPlanner, budgets: CallBudgets) -> Planned:
        found = usual(run, budgets)
        placement = found.placement.decided(carried=carried, retained=retained, held=held, ahead=len(carried))
        if shares:
            ratios = tuple(replace(each, checkpoint=0.0, device_checkpoint=0.0) for each in placement.decision.ratios)
            placement = placement.laid_out(levels=levels_of(run.model.layouts))
            placement = placement.decided(ratios=ratios, shares=Shares(shares))
        made.append(placement)
        return replace(found, placement=placement)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunPlanner, "_decided", decided)
        yield made


@contextmanager
def with_room(share: float) -> Iterator[None]:
    """Have the schedule `lifetime` keep what fits this share of the way from plain horizontal's peaks to those with
    everything kept.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decide, "with_variant", _with_room(share))
        yield


def _with_room(share: float) -> Callable[[StepPlan], StepPlan]:
    def with_variant(plan: StepPlan) -> StepPlan:
        plain, builder = plan.placement, plan.problem.builder
        least, most = (builder.program(plain.decided(own=own)) for own in (None, EVERYTHING))
        sizes = {
            f"{tier}_nbytes": int((1 - share) * planned_peak(least, tier) + share * planned_peak(most, tier))
            for tier in ("device", "host")
        }
        own = Room(**sizes, bytes_per_second=EVERYTHING.bytes_per_second)
        return replace(plan, placement=plain.decided(own=own))

    return with_variant
