"""problem: one model on one machine within budgets, and a request: what fits, and how long a step takes.

A named model and one in this process differ in where the machine's figures and the costs of code come from. These are
functions that are called when they are needed: what is settled without them need not be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, Protocol

from gs_compile.errors import OptionError, PlanError
from gs_compile.options import Masters
from gs_compile.placement.boundaries import BoundaryNbytes
from gs_compile.placement.levels import Levels
from gs_compile.placement.placement import Decision, Placement
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.builder import StepBuilder, planned_peak
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import CLASSES, DEVICE_RATIOS, Counted
from gs_compile.planner.lp.search import Search, best_for, has_solution, search
from gs_compile.planner.lp.solve import ProblemData, Solution, System
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.request import Budgets, Request
from gs_compile.planner.simulate.simulator import Simulation, predict
from gs_compile.program.ir import TIERS, Program, Unit
from gs_compile.schedules import BY_MICRO_BATCH

LARGE = 2000  # computations of a forward: of larger steps, candidates are compared with micro-batches in bundles
NUM_BUNDLES = 8


class Saving(Protocol):
    """What the layers of a model may save in addition to their inputs."""

    def levels(self, x_nbytes: Sequence[BoundaryNbytes]) -> Levels:
        """The levels of each layer, for micro-batches whose inputs have these bytes; () if none may save more."""

    def costs(self, *, last: bool) -> Mapping[Unit, UnitCost]:
        """The costs of all units, with those of the levels; with `last` only the last level."""

    def reasons(self) -> str:
        """Why layers can save nothing, if that is known."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The steps of one model: what is given, and what is asked for.

    builder: lays out steps of its own micro-batches, or of any number of micro-batches like the workload's.
    machine, code: the profile, and the workload with the costs of code on it, as functions that measure once.
    saving: what layers may save; None: only their inputs.
    host_nbytes, device_nbytes: the memory budgets that are known before the machine; None: by machine and request.
    will_run: the steps are going to run: a large one must not keep its micro-batches in bundles.
    whole_masters: returns the same problem with whole masters, if masters are split only because nothing is asked for.
    in_pieces: by number of tokens, the largest first, returns the same problem with layers that run on that many tokens
        at a time; empty if there is no choice. layer_tokens: the number that was chosen so.
    masters: of narrow parameters, if there is a choice. layer_updates: as in `Decision`.
    apart: each stack has ratios of its own; otherwise all have the same.
    counts: what was counted of the same model so far, by `Counted.key`; problems derived from this one share it.
    """

    builder: StepBuilder
    request: Request
    machine: Callable[[], Profile]
    code: Callable[[], Workload]
    saving: Saving | None = None
    host_nbytes: int
    device_nbytes: int | None = None
    will_run: bool = False
    whole_masters: Callable[[], Problem] | None = None
    in_pieces: Mapping[int, Callable[[], Problem]] = field(default_factory=dict, compare=False, repr=False)
    layer_tokens: int | None = None
    masters: Masters | None = None
    layer_updates: int = 1
    apart: bool = True
    counts: dict[Hashable, Counted] = field(default_factory=dict, compare=False, repr=False)

    @property
    def number(self) -> int:
        """The number of micro-batches of its steps; 0: to be found."""
        return self.builder.layout.num_micro_batches

    # What is asked for when it is needed ------------------------------------------------------------------------------

    @cached_property
    def profile(self) -> Profile:
        return self.machine()

    @cached_property
    def workload(self) -> Workload:
        return self.code()

    @cached_property
    def budgets(self) -> Budgets:
        return self.request.budgets(self.profile, host_nbytes=self.host_nbytes, device_nbytes=self.device_nbytes)

    @cached_property
    def formulas(self) -> Formulas:
        speculative, layer_updates = self.request.speculative, self.layer_updates
        counted = Counted(self.workload, self.builder, speculative=speculative, layer_updates=layer_updates)
        known = self.counts.setdefault(counted.key, counted)
        return Formulas(self.workload, self.profile, known, apart=self.apart)

    @cached_property
    def wider(self) -> Problem:
        """The problem with layers that may save more than their inputs; itself if none may, or they may already.

        Raises `PlanError` if saving is asked for and layers can save nothing.
        """
        layout, saving, request = self.builder.layout, self.saving, self.request
        levels = saving.levels(layout.x_nbytes) if saving and not layout.levels else layout.levels
        if request.saves and not levels:
            reasons = saving.reasons() if saving else ""
            raise PlanError(
                'the options recompute or ratios["activation"] ask for saved activations, but the layers have nothing '
                f"to save that they could compute again{reasons and f' ({reasons})'}: leave that out"
            )
        if saving is None or layout.levels or not levels:
            return self
        code = cache(lambda: replace(self.workload, costs=saving.costs(last=request.saves_all)))
        return replace(self, builder=self.builder.laid_out(levels=levels), code=code)

    @cached_property
    def priced(self) -> Problem:
        """The problem with the costs of updates in its units, which need the machine's figures."""
        sizes = self.workload.sizes
        return self if sizes == self.builder.sizes else self.resized(sizes)

    # Others -----------------------------------------------------------------------------------------------------------

    def of(self, workload: Workload | None = None, profile: Profile | None = None, **changes: Any) -> Problem:
        """The problem of another workload of this model, on another machine, or with other fields."""
        workload, profile = workload or self.workload, profile or self.profile
        return replace(self, machine=lambda: profile, code=lambda: workload, **changes)

    def resized(self, sizes: tuple[UnitSize, ...]) -> Problem:
        """The problem with the same code, and units of other sizes."""
        builder = replace(self.builder, sizes=sizes)
        return self.of(replace(self.workload, sizes=sizes), builder=builder)

    def asked(self, request: Request) -> Problem:
        """The problem of the same model and machine, for another request."""
        if request == self.request:
            return self
        return replace(self, request=request, builder=self.builder.laid_out(accumulates=request.accumulate))

    @property
    def emptied(self) -> Problem:
        """The problem with nothing in host memory of the classes without a given ratio."""
        ratios = replace(self.request.ratios, **dict.fromkeys(CLASSES, 0.0) | self.request.ratios.given())
        return self.asked(replace(self.request, ratios=ratios))

    def updated_in(self, number: int) -> Problem:
        """The problem with each layer's update in `number` pieces."""
        return self if number == self.layer_updates else replace(self, layer_updates=number)

    def like(self, other: Problem) -> Problem:
        """This problem with the number of micro-batches, the pieces of updates and the request of another one."""
        return self.at(other.number).updated_in(other.layer_updates).asked(other.request)

    def cut(self, size: int) -> Problem:
        """The problem with layers that run on `size` tokens at a time, one of `in_pieces`."""
        return self.in_pieces[size]().like(self)

    def at(self, number: int) -> Problem:
        """The problem for steps of `number` micro-batches."""
        return self if number == self.number else replace(self, builder=self.builder.at(self.workload, number))

    @property
    def steps(self) -> Problem:
        """The problem that is planned in the end: this one if it will run or is micro-batch-major, else `trial`."""
        return self if self.will_run or self.request.schedule in BY_MICRO_BATCH else self.trial

    @cached_property
    def trial(self) -> Problem:
        """The problem with a few micro-batches in place of a large step's, to compare placements: bundles, each of
        which stands for several. If each micro-batch loads the whole model, they are single ones: the others repeat
        them.
        """
        if self.number <= NUM_BUNDLES or self.number * self.workload.num_layers <= LARGE:
            return self
        if self.request.schedule in BY_MICRO_BATCH:
            return self.at(NUM_BUNDLES)
        times = self.number / NUM_BUNDLES
        return self.of(self.workload.scaled(code=times, activations=times)).at(NUM_BUNDLES)

    # Its solutions ----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> ProblemData:
        """The data from which its linear programs are made."""
        return ProblemData(self.formulas, self.budgets, self.request)

    @cached_property
    def found(self) -> Search:
        """The linear program's results, for its number of micro-batches, or for one that saturates (`lp.search`).

        Raises `NoFitError` if nothing fits.
        """
        return search(self.data, self.number or None)

    @property
    def best(self) -> Solution:
        return self.found.best

    @property
    def tokens_per_second(self) -> float:
        """The throughput of the best solution, by the linear program."""
        return self.workload.tokens * self.best.throughput

    def does_fit(self) -> bool:
        """Whether a step fits, by the linear program; one with one micro-batch if their number is to be found."""
        if self.profile.separate and self._room_nbytes < 0:
            return False  # whatever else is on the device
        return has_solution(self.data, self.number or 1)

    def solved(self, number: int, alpha: float | None = None, *, budgets: Budgets | None = None) -> Solution | None:
        """The linear program's solution for one alpha, or for the best; None if nothing fits."""
        data = self.data if budgets is None else self.data._replace(budgets=budgets)
        return best_for(data, number, () if alpha is None else (alpha,))

    def predicted(self, placement: Placement, program: Program | None = None) -> Simulation:
        """A simulation of steps without rollbacks, of `program` if it is known."""
        program = program or self.builder.program(placement)
        if placement.speculative:
            program = replace(self.builder.usual(placement), peaks=program.peaks)
        host_nbytes, device_nbytes = self.budgets.host_nbytes, self.values_nbytes
        return predict(
            program, placement, self.workload, self.profile, host_nbytes=host_nbytes, device_nbytes=device_nbytes
        )

    def valued(self, decision: Decision) -> Solution:
        """A decision with its seconds by the linear program, whether or not it fits."""
        return System(self.data, self.number, decision.alpha).valued(decision)

    def needs(self, solution: Solution) -> tuple[dict[str, int], int]:
        """The most bytes of a step on each tier, and the bytes that it writes to SSD, by the linear program."""
        return System(self.data, solution.num_micro_batches, solution.alpha).needs(solution.decision)

    # Whether they fit -------------------------------------------------------------------------------------------------

    @property
    def values_nbytes(self) -> int | None:
        """Device memory without the workspace of code; None: the device has no memory of its own."""
        return max(self._room_nbytes, 0) if self.profile.separate else None

    @property
    def _room_nbytes(self) -> int:
        """The device's bytes without the workspace of code; negative if that alone does not fit."""
        return self.budgets.device_nbytes - self.workload.workspace_nbytes

    def fitting(self, placement: Placement) -> Program | None:
        """The step program of a placement, if all of its programs keep the budgets; otherwise None."""
        programs = self.builder.programs(placement)
        first = next(programs)
        return first if fits(chain((first,), programs), self._most) else None

    def lacking(self, placement: Placement) -> dict[str, int]:
        """By tier, the bytes by which the steps of a placement, with their workspaces, exceed the budgets."""
        over = [self.excess(program) for program in self.builder.programs(placement)]
        return {tier: max(each.get(tier, 0) for each in over) for tier in TIERS if any(tier in each for each in over)}

    def excess(self, program: Program) -> dict[str, int]:
        """By tier, the bytes by which a step exceeds its budget."""
        return excess(program, self._most)

    @property
    def _most(self) -> dict[str, int]:
        """The most that a step may take, by tier. (For a run, the store checks the room on SSD.)"""
        most = {"host": self.budgets.host_nbytes}
        if self.profile.separate:
            most["device"] = self._room_nbytes
        if not self.will_run:
            most["ssd"] = self.budgets.ssd_nbytes
        return most

    def check(self) -> None:
        """Raise `OptionError` if the given ratios are impossible here."""
        ratios, separate = self.request.ratios.given(), self.builder.layout.separate
        for name in DEVICE_RATIOS:
            if ratios.get(name) and not separate:
                raise OptionError(
                    f"the ratio {name} is {ratios[name]:g}, but this device has no memory of its own: it reads the "
                    f"host's, so give {name.removeprefix('device_')}"
                )
        if (ratio := ratios.get("device_parameter")) and not any(size.may_reside for size in self.builder.sizes):
            raise OptionError(
                f"the ratio device_parameter is {ratio:g}, but parameters that are updated in the type they are "
                'computed in go to host memory for that: leave it out, or choose precision="bf16"'
            )


def fits(programs: Iterable[Program], most: Mapping[str, int | None]) -> bool:
    """Whether no program takes more of a tier than `most`."""
    return not any(excess(program, most) for program in programs)


def excess(program: Program, most: Mapping[str, int | None]) -> dict[str, int]:
    """By tier, the bytes by which a step exceeds `most`; None: the tier has no bound."""
    over = {tier: planned_peak(program, tier) - nbytes for tier, nbytes in most.items() if nbytes is not None}
    return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}
