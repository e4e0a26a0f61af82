"""problem: one model on one machine within budgets: where everything lives, such that a step takes the least time.

    search      how many micro-batches, by the linear program                                   `lp.search`
    refine      its solution as a placement whose own program keeps the budgets: the fastest of a few, by the simulator
    reasons     what limits that

A plan for a model that is named and the one for a model at hand are made here alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import CodeCost, LevelCost, Workload
from gs_compile.planner.builder import StepBuilder, peak, workload_levels
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.lp.limits import Budgets, Fixed
from gs_compile.planner.lp.search import Saturation, Search, fastest, search
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.simulator import Simulation, predict
from gs_compile.program.ir import Program

Cost = TypeVar("Cost", bound=CodeCost)

LARGE = 2000  # computations of a forward: from there on candidates are compared with micro-batches in bundles
NUM_BUNDLES = 8
NOTHING: Mapping[str, int] = {"host": 0, "device": 0}  # bytes of a tier that are left free


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`builder` lays out the steps: of its own micro-batches, or of as many as are asked for, all like the workload's.

    counted: what is known of the same model at another micro-batch size.
    """

    workload: Workload
    profile: Profile
    budgets: Budgets
    fixed: Fixed
    builder: StepBuilder
    counted: Counted | None = field(default=None, compare=False, repr=False)

    @cached_property
    def formulas(self) -> Formulas:
        saves = self.workload.num_levels > 0
        speculative = self.fixed.speculative
        counted = self.counted or Counted(self.workload, self.builder, speculative=speculative, saves=saves)
        return Formulas(self.workload, self.profile, counted)

    def search(self, number: int | None = None, saturation: Saturation = "relative") -> Search:
        """The best by the linear program, for `number` micro-batches or for as many as saturate; see `lp.search`."""
        return search(self.formulas, self.budgets, self.fixed, num_micro_batches=number, saturation=saturation)

    def other(self, **changes: Any) -> Problem:
        """The same model on another machine, or within other budgets: nothing is counted again."""
        return replace(self, counted=self.formulas.counted, **changes)

    def solved(self, number: int, alpha: float | None = None, *, budgets: Budgets | None = None) -> Solution | None:
        """The linear program's answer for one alpha or the best; None where nothing fits."""
        fixed = self.fixed if alpha is None else replace(self.fixed, alpha=alpha)
        return fastest(self.formulas, number, budgets or self.budgets, fixed)

    def at(self, number: int) -> StepBuilder:
        """What lays out steps of so many micro-batches."""
        if len(self.builder.x_nbytes) == number:
            return self.builder
        workload = self.workload
        x_nbytes, side_nbytes = (workload.x_nbytes,) * number, (workload.side_nbytes,) * number
        return replace(
            self.builder, x_nbytes=x_nbytes, side_nbytes=side_nbytes, levels=workload_levels(workload, number)
        )

    def placed(self, solution: Solution) -> Placement:
        """The placement that a solution describes."""
        builder, speculative = self.at(solution.num_micro_batches), self.fixed.speculative
        return builder.placement(
            solution.ratios, solution.alpha, solution.device_ratios, shares=solution.shares, speculative=speculative
        )

    def predicted(self, program: Program, placement: Placement) -> Simulation:
        """Of steps none of which is rolled back; the memory they are given is that of the program."""
        if placement.speculative:
            program = replace(self.builder.usual(placement), peaks=program.peaks)
        host_nbytes, device_nbytes = self.budgets.host_nbytes, self.values_nbytes
        return predict(
            program, placement, self.workload, self.profile, host_nbytes=host_nbytes, device_nbytes=device_nbytes
        )

    @property
    def values_nbytes(self) -> int | None:
        """Device memory without what code computes with; None: the device has none of its own."""
        return self.budgets.values_nbytes(self.workload.workspace_nbytes) if self.profile.separate else None

    def fits(self, placement: Placement, spare: Mapping[str, int] = NOTHING) -> bool:
        """Whether no program of a placement takes more than the budgets; `spare` bytes of these are left free."""
        builder = self.at(len(placement.x_nbytes))
        return not any(self.excess(program, spare) for program in builder.programs(placement))

    def excess(self, program: Program, spare: Mapping[str, int]) -> dict[str, int]:
        """By tier, the bytes that a step takes beyond its budget; `spare` bytes of it are left free."""
        most = {"host": self.budgets.host_nbytes}
        if (on_device := self.values_nbytes) is not None:
            most["device"] = on_device
        over = {tier: peak(program, tier) + spare[tier] - nbytes for tier, nbytes in most.items()}
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}

    def bundled(self, number: int) -> tuple[Problem, int]:
        """This problem, and a number of micro-batches; of a large step a few, each of which stands for several."""
        if number <= NUM_BUNDLES or number * self.workload.num_layers <= LARGE:
            return self, number
        times = number / NUM_BUNDLES
        return self.other(workload=scaled(self.workload, code=times, activations=times)), NUM_BUNDLES


def scaled(workload: Workload, *, code: float = 1.0, activations: float = 1.0, workspace: float = 1.0) -> Workload:
    """The same model; what its code computes, and the bytes that it hands on and has inside, so many times."""

    def level(cost: LevelCost) -> LevelCost:
        return replace(_slower(cost, code), nbytes=int(cost.nbytes * activations))

    costs = {
        unit: replace(
            _slower(cost, code),
            workspace_nbytes=int(cost.workspace_nbytes * workspace),
            levels=tuple(map(level, cost.levels)),
        )
        for unit, cost in workload.costs.items()
    }
    x_nbytes, side_nbytes = (int(nbytes * activations) for nbytes in (workload.x_nbytes, workload.side_nbytes))
    return replace(workload, costs=costs, x_nbytes=x_nbytes, side_nbytes=side_nbytes)


def _slower(cost: Cost, times: float) -> Cost:
    """What computes so many times as much."""
    return replace(
        cost,
        forward_flops=cost.forward_flops * times,
        backward_flops=cost.backward_flops * times,
        forward_seconds=None if cost.forward_seconds is None else cost.forward_seconds * times,
        backward_seconds=None if cost.backward_seconds is None else cost.backward_seconds * times,
    )
