"""problem: one model on one machine within budgets: where everything lives, such that a step takes the least time.

    search      how many micro-batches, by the linear program                                   `lp.search`
    refined     its solution as a placement whose own program keeps the budgets: the fastest of a few, by the simulator
    planned     that, and what limits it

A plan for a model that is named and the one for a model at hand are made here alike.

Why the program is asked. The linear program knows neither cuts at whole tensors nor how far lanes lag behind the order
of issue: what leaves the device late, say, is there beside what comes next. Where a program takes more than a budget,
the linear program is given less. A full host memory can cost more than it brings, too: where the drive is busy, writes
end late, and the step waits for their buffers, so some is left free where that is faster. A large model's candidates
are compared on some of its layers, and the best is lowered as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import Workload
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.lifetimes import NOTHING, Outcome, fastest, has_periods, room_of
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import Counted, shortened
from gs_compile.planner.lp.fit import host_needed, peak
from gs_compile.planner.lp.search import Saturation, Search, allowed_alphas, search
from gs_compile.planner.lp.solve import Budgets, Fixed, Solution, solve
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.prediction import Prediction, predict
from gs_compile.planner.simulate.prices import code_seconds
from gs_compile.planner.step_plan import StepPlan
from gs_compile.program.ir import Program

MOST_ROUNDS = 8  # of solving again with less: each takes off what the program before was over
SPARE_TURNS = (0, 1, 2, 4)  # of a layer's data, left free for writes that lag behind; tried in this order
GOOD_ENOUGH = 1.03  # of the linear program's time: nothing else is tried then
LARGE = 2000  # computations of a forward: from there on candidates are compared on some of the layers
LEAST_PART = 32  # of host memory, that alphas are tried with less and less of
SPARE_PARTS = (0.25, 0.5)  # of host memory, left to the schedule `lifetime`


@dataclass(frozen=True)
class Candidate:
    """A solution, the placement that it became, and how its program runs."""

    solution: Solution
    placement: Placement
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.simulation.seconds


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
        counted = self.counted or Counted(self.workload, self.profile, self.builder, speculative=self.fixed.speculative)
        return Formulas(self.workload, self.profile, counted)

    def search(self, number: int | None = None, saturation: Saturation = "relative") -> Search:
        """The best by the linear program, for `number` micro-batches or for as many as saturate; see `lp.search`."""
        return search(self.formulas, self.budgets, self.fixed, num_micro_batches=number, saturation=saturation)

    def solved(
        self,
        number: int,
        alpha: float | None,
        *,
        profile: Profile | None = None,
        budgets: Budgets | None = None,
        fixed: Fixed | None = None,
    ) -> Solution | None:
        """The linear program's answer for one alpha or the best, or with others; None where nothing fits."""
        formulas, fixed = self.formulas.on(profile) if profile else self.formulas, fixed or self.fixed
        alphas = allowed_alphas(fixed) if alpha is None else (alpha,)
        found = solve(formulas, number, alphas, budgets or self.budgets, fixed)
        return min(filter(None, found), key=lambda each: each.seconds, default=None)

    def planned(self, found: Search) -> StepPlan:
        """What the search's best becomes. Raises `MemoryBudgetError` where no program keeps the budgets."""
        chosen = self.refined(found.best)
        best: Solution | None = found.best
        if chosen.solution.alpha != found.best.alpha:  # what is said of the plan is said of its own alpha
            best = self.solved(found.best.num_micro_batches, chosen.solution.alpha)
        assert best is not None, "what fits in less memory fits"
        rows = [(number, solution.seconds) for number, solution in found.history if solution is not None]
        return StepPlan(
            workload=self.workload,
            profile=self.profile,
            budgets=self.budgets,
            alpha=best.alpha,
            ratios=chosen.solution.ratios,
            device_ratios=chosen.solution.device_ratios,
            placement=chosen.placement,
            prediction=chosen.prediction,
            bound_seconds=best.seconds,
            history=tuple((number, seconds, number * self.workload.tokens / seconds) for number, seconds in rows),
        )

    def refined(self, best: Solution) -> Candidate:
        """The fastest of a few placements, by the simulator; all keep the budgets.

        Raises `MemoryBudgetError` where none does.
        """
        return _Refinement(self, best.num_micro_batches).fastest(best)

    def kept_inactive(self, plain: Placement, others: Sequence[Placement] = ()) -> Outcome:
        """The schedule `lifetime`: of a horizontal step, alone and with what there is room for kept, the fastest.

        others: placements that leave more room.
        """
        if not has_periods(plain, self.builder.program):
            return Outcome(plain, self.predicted(self.builder.program(plain), plain), NOTHING)
        room = room_of(self.budgets, self.workload, self.profile)
        tries = [replace(placement, room=room) for placement in (plain, *others)]
        return fastest(plain, tries, self.builder.program, self.predicted)

    def with_room(self, plan: StepPlan) -> StepPlan:
        """`plan` of the schedule `lifetime`, with what is inactive kept as far as that is faster."""
        others = []
        for part in SPARE_PARTS:
            less = replace(self.budgets, host_nbytes=int(self.budgets.host_nbytes * (1 - part)))
            solution = self.solved(plan.num_micro_batches, plan.alpha, budgets=less)
            others += [self.placed(solution)] if solution else []
        found = self.kept_inactive(plan.placement, others)
        return replace(plan, placement=found.placement, prediction=found.prediction, notes=(found.reason,))

    # Placements and programs ------------------------------------------------------------------------------------------

    def at(self, number: int) -> StepBuilder:
        """What lays out steps of so many micro-batches."""
        if len(self.builder.x_nbytes) == number:
            return self.builder
        x_nbytes, side_nbytes = (self.workload.x_nbytes,) * number, (self.workload.side_nbytes,) * number
        return replace(self.builder, x_nbytes=x_nbytes, side_nbytes=side_nbytes)

    def placed(self, solution: Solution) -> Placement:
        """The placement that a solution describes."""
        builder, speculative = self.at(solution.num_micro_batches), self.fixed.speculative
        return builder.placement(solution.ratios, solution.alpha, solution.device_ratios, speculative=speculative)

    def predicted(self, program: Program, placement: Placement) -> Prediction:
        """Of steps none of which is rolled back; the memory they are given is that of the program."""
        if placement.speculative:
            program = replace(self.builder.usual(placement), peaks=program.peaks)
        return predict(program, placement, self.workload, self.profile, host_nbytes=self.budgets.host_nbytes)

    def excess(self, prediction: Prediction) -> dict[str, int]:
        """By tier, the bytes that a step takes beyond its budget; what code computes with counts on the device."""
        program, peaks = prediction.program, prediction.simulation.peaks
        over = {"host": host_needed(program) - self.budgets.host_nbytes}
        if self.profile.separate and self.budgets.device_nbytes:
            needed = max(peak(program, "device"), peaks["device"]) + self.workload.workspace_nbytes
            over["device"] = needed - self.budgets.device_nbytes
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}

    def shortened(self, num_layers: int) -> Problem:
        """The same with the first layers alone."""
        workload = shortened(self.workload, num_layers)
        builder = replace(self.builder, sizes=workload.sizes, num_layers=num_layers, shape=workload.shape)
        return replace(self, workload=workload, builder=builder, counted=None)

    @property
    def turn_nbytes(self) -> int:
        """What the largest layer's update has in host memory: its state, its parameters, its gradient."""
        layers = [size for size in self.workload.sizes if isinstance(size.unit, int)]
        return max(
            (size.num_trained * (size.state_itemsize + size.itemsize + size.gradient_itemsize) for size in layers),
            default=0,
        )


class _Refinement:
    """From the linear program's solutions to one whose program keeps the budgets, and keeps time."""

    def __init__(self, problem: Problem, number: int) -> None:
        self.problem = problem
        self.number = number
        self.lag_nbytes = 0  # by which a device's memory is above its planned peak, as lanes lag
        self.sample: Problem | None = None
        lengths = problem.formulas.counted.lengths
        if len(lengths) > 1 and number * problem.workload.num_layers > LARGE:
            self.sample = problem.shortened(lengths[-1])
        self.known: dict[tuple[float, int], Candidate | None] = {}

    def fastest(self, best: Solution) -> Candidate:
        seconds: dict[tuple[float, int], float] = {}
        enough = GOOD_ENOUGH * best.seconds
        for turns in SPARE_TURNS:
            took = self._seconds(best.alpha, turns)
            if took is None:
                break
            seconds[best.alpha, turns] = took
            if took <= enough:
                break
        else:
            seconds |= self._without_late(best.alpha, seconds)
        if not seconds:
            seconds = self._without_late(best.alpha, {(best.alpha, 0): 0.0})
        for setting in sorted(seconds, key=lambda each: seconds[each]):
            found = self._kept(*setting)
            if found is not None:
                return found
        if found := self._of_any_alpha():
            return found
        raise MemoryBudgetError(self._too_little())

    def _of_any_alpha(self) -> Candidate | None:
        """Where memory is scarce: the alphas that are best with less and less of it, as some need less than others."""
        budgets = self.problem.budgets
        for part in range(MOST_ROUNDS):
            less = replace(budgets, host_nbytes=budgets.host_nbytes - part * budgets.host_nbytes // LEAST_PART)
            best = self.problem.solved(self.number, None, budgets=less)
            found = self._kept(best.alpha, 0) if best else None
            if found is not None or best is None:
                return found
        return None

    def _without_late(self, alpha: float, seconds: Mapping[tuple[float, int], float]) -> dict[tuple[float, int], float]:
        """With no late update, where alpha is free: in the linear program one costs nothing as long as the forward
        hides its traffic. In the step that of the first units stands between two steps, and every part is an operation.
        """
        _, turns = min(seconds, key=lambda each: seconds[each])
        took = self._seconds(0.0, turns) if alpha and 0.0 in allowed_alphas(self.problem.fixed) else None
        return {} if took is None else {(0.0, turns): took}

    def _seconds(self, alpha: float, turns: int) -> float | None:
        """Seconds of a step that leaves so many turns free, or as its sample has it; None if it does not fit."""
        if self.sample is None:
            return found.seconds if (found := self._kept(alpha, turns)) else None
        spare = turns * self.problem.turn_nbytes
        solution = self._solved(alpha, {"host": spare})
        if solution is None:
            return None
        placement = self.sample.placed(solution)
        program = self.sample.at(self.number).program(placement)
        budgets = replace(self.problem.budgets, host_nbytes=host_needed(program) + spare)
        prediction = replace(self.sample, budgets=budgets).predicted(program, placement)
        self.lag_nbytes = max(self.lag_nbytes, prediction.simulation.peaks["device"] - peak(program, "device"))
        code = [code_seconds(each.workload, each.profile) for each in (self.problem, self.sample)]
        return prediction.simulation.seconds * code[0] / code[1]

    def _kept(self, alpha: float, turns: int) -> Candidate | None:
        """A candidate whose program keeps the budgets; None if there is none."""
        if (alpha, turns) not in self.known:
            self.known[alpha, turns] = self._shrunk(alpha, turns * self.problem.turn_nbytes)
        return self.known[alpha, turns]

    def _shrunk(self, alpha: float, spare: int) -> Candidate | None:
        problem = self.problem
        less = {"host": spare, "device": self.lag_nbytes if problem.profile.separate else 0}
        for times in range(1, MOST_ROUNDS + 1):  # more each time: units that are cut whole may stay where they were
            solution = self._solved(alpha, less)
            if solution is None:
                return None
            placement = problem.placed(solution)
            program = problem.at(self.number).program(placement)
            over = host_needed(program) - (problem.budgets.host_nbytes - spare)
            if over > 0:
                less["host"] += times * over
                continue
            prediction = problem.predicted(program, placement)
            excess = problem.excess(prediction)
            if not excess:
                return Candidate(solution, placement, prediction)
            less = {tier: nbytes + excess.get(tier, 0) for tier, nbytes in less.items()}
        return None

    def _solved(self, alpha: float, less: Mapping[str, int]) -> Solution | None:
        budgets = self.problem.budgets
        left = {f"{tier}_nbytes": getattr(budgets, f"{tier}_nbytes") - nbytes for tier, nbytes in less.items()}
        if left["host_nbytes"] <= 0 or left.get("device_nbytes", 0) < 0:
            return None
        return self.problem.solved(self.number, alpha, budgets=replace(budgets, **left))

    def _too_little(self) -> str:
        budgets = self.problem.budgets
        memory = f"host memory of {format_bytes(budgets.host_nbytes)}"
        if self.problem.profile.separate and budgets.device_nbytes:
            memory += f" or device memory of {format_bytes(budgets.device_nbytes)}"
        return f"{memory} is too little for this step: give it more, fewer micro-batches, or a smaller micro_batch_size"
