"""step_plan: a plan in numbers: where everything of a step lives, how the step runs, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product

from gs_compile.machine import format_bytes
from gs_compile.placement.boundaries import at
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.levels import Shares
from gs_compile.placement.placement import Placement
from gs_compile.placement.stacks import stack_of
from gs_compile.placement.traffic import traffic
from gs_compile.placement.units import UnitPlacement
from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.counting import host_classes
from gs_compile.planner.lp.solve import Solution
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Budgets
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.program.ir import Program, Schedule, Value

SECONDS_PER_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another setting near the plan's, by the linear program."""

    label: str
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Where all data is stored and how a step runs. Seconds and throughput are simulated; see `explain.report`.

    problem: what was given and asked for.
    placement: of the simulated step, `problem.steps`; its decision has what was chosen.
    simulated: None: the step is simulated when that is first needed.
    is_solved: the plan was made with figures of the machine, and not settled without them.
    history: for each number of micro-batches that was tried, this number, seconds and tokens/s, by the linear program.
    binding: what limits the step, and what more of it would bring.
    """

    problem: Problem = field(repr=False)
    placement: Placement = field(repr=False)
    simulated: Simulation | None = field(default=None, repr=False, compare=False)
    is_solved: bool = False
    history: tuple[tuple[int, float, float], ...] = ()
    binding: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        return self.problem.number

    @cached_property
    def simulation(self) -> Simulation:
        return self.simulated or self.problem.priced.steps.predicted(self.priced)

    @cached_property
    def priced(self) -> Placement:
        """The placement with the cost of updates, also if the plan was made before the machine was known."""
        priced = self.problem.priced
        return self.placement if priced is self.problem else priced.steps.builder.placement(self.placement.decision)

    @cached_property
    def bound(self) -> Solution:
        """The linear program's solution with the chosen alpha; if it has none, its seconds for the plan's decision."""
        best = self.problem.solved(self.num_micro_batches, self.alpha)
        return best or self.problem.valued(self.placement.decision)

    @property
    def workload(self) -> Workload:
        return self.problem.workload

    @property
    def profile(self) -> Profile:
        return self.problem.profile

    @property
    def budgets(self) -> Budgets:
        return self.problem.budgets

    @property
    def alpha(self) -> float:
        return self.placement.decision.alpha

    @property
    def shares(self) -> Shares:
        """The shares of items that save activations."""
        return self.placement.decision.shares

    @property
    def ratios(self) -> Mapping[str, float]:
        """The ratios in host memory: "parameter", "checkpoint" and "optimizer", perhaps "gradient"."""
        means = self._means
        return {name: means[name] for name in host_classes(self.placement.layout) if name in means}

    @property
    def device_ratios(self) -> Mapping[str, float]:
        """The ratios in device memory: "parameter" and "checkpoint"."""
        return {name: self._means.get(f"device_{name}", 0.0) for name in ("parameter", "checkpoint")}

    @cached_property
    def _means(self) -> Mapping[str, float]:
        """The mean ratios of all stacks, weighted by their numbers of elements, items or units."""
        ratios, stacks = self.placement.decision.ratios, self.placement.stacks
        if len(ratios) == 1:
            return ratios[0].given()
        weights = {"checkpoint": [float(len(layers)) for layers in stacks]}
        units = [[u for u in self.placement.units if stack_of(u.unit, stacks) == at] for at in range(len(stacks))]
        weights["parameter"] = [float(sum(unit.numel for unit in members)) for members in units]
        weights["optimizer"] = [float(sum(unit.num_trained for unit in members)) for members in units]
        weights["gradient"] = [float(len(members)) for members in units]

        def mean(name: str) -> float:
            weight = weights[name.removeprefix("device_")]
            return sum(w * each.given()[name] for w, each in zip(weight, ratios, strict=True)) / (sum(weight) or 1.0)

        return {name: mean(name) for name in ratios[0].given()}

    @property
    def bound_seconds(self) -> float:
        """The seconds of a step by the linear program, with the chosen alpha."""
        return self.bound.seconds

    @property
    def layer_tokens(self) -> int | None:
        """The tokens that layers, except their attention, run on at a time, if that was chosen or asked for."""
        return self.placement.decision.layer_tokens or self.problem.request.layer_tokens

    @property
    def schedule(self) -> Schedule:
        return self.placement.layout.schedule

    @property
    def program(self) -> Program:
        return self.simulation.program

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step."""
        return self.simulation.seconds

    @property
    def ranks(self) -> int:
        """The ranks that share the model. Bytes and seconds are those of one rank, throughput is that of all."""
        return self.workload.world

    @property
    def masters(self) -> str | None:
        """The kind of masters of narrow parameters: "split" or "whole"."""
        return self.workload.masters

    @property
    def saved(self) -> float:
        """The part of items that save activations, so that their backward recomputes less."""
        return self.shares.part()

    @property
    def tokens_per_second(self) -> float:
        return self.num_micro_batches * self.workload.tokens / self.seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs a second: 3 x those of the forward, without recomputation."""
        return self.num_micro_batches * self.workload.model_flops / self.seconds

    @cached_property
    def traffic(self) -> Mapping[tuple[str, str], int]:
        """The bytes of a mean step, by lane and kind; an Nth of a commit's if every Nth step is committed."""
        moved = traffic(self.program, self.placement)
        often = max(self.placement.durability, 1)
        return {(lane, kind): nbytes // (often if kind == "seal" else 1) for (lane, kind), nbytes in moved.items()}

    @cached_property
    def homes(self) -> Mapping[tuple[str, str], int]:
        """Bytes by kind and tier, as of `nbytes_by_home`."""
        return nbytes_by_home(self.placement)

    @property
    def peaks(self) -> Mapping[str, int]:
        """The planned peak of each tier."""
        return dict(self.program.peaks)

    @property
    def lanes(self) -> Mapping[str, tuple[float, float]]:
        """Seconds of work and share of the step, by lane."""
        return {lane: (share * self.seconds, share) for lane, share in self.simulation.busy.items()}

    @property
    def written(self) -> int:
        """Bytes that a step writes to SSD."""
        return sum(nbytes for (lane, _), nbytes in self.traffic.items() if lane == "ssd_write")

    @property
    def written_per_day(self) -> float:
        """The bytes written to SSD in a day of training."""
        return self.written / self.seconds * SECONDS_PER_DAY

    @property
    def wear(self) -> str:
        """For people: what a day of training writes, and for how long the drives are rated for that."""
        return wear_text(self.written_per_day, self.profile.ssd_rated_nbytes, self.ranks)


def wear_text(nbytes_per_day: float, rated_nbytes: int, ranks: int = 1) -> str:
    """What a day writes to SSD, and for how long the drives are rated for that; rated_nbytes 0: not known."""
    if not nbytes_per_day:
        return "nothing is written to SSD"
    words = f"{format_bytes(int(nbytes_per_day))} written to SSD in a day"
    words += " by each rank" if ranks > 1 else ""
    if rated_nbytes:
        days = time_text(rated_nbytes / nbytes_per_day)
        words += f"; the drives are rated for {format_bytes(rated_nbytes)}, {days} of it"
    return words


def time_text(days: float) -> str:
    """A number of days, in years or hours if it is large or small."""
    unit, length = ("years", 365.0) if days >= 365 else ("days", 1.0) if days >= 1 else ("hours", 1 / 24)
    return f"{days / length:.1f} {unit}"


def nested(nbytes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Bytes by the first key, then by the second."""
    found: dict[str, dict[str, int]] = {}
    for (first, second), size in nbytes.items():
        found.setdefault(first, {})[second] = size
    return found


def nbytes_by_home(placement: Placement) -> Mapping[tuple[str, str], int]:
    """Bytes by kind and tier of what stays stored between two stages: the result of each ratio."""
    layout, by_home = placement.layout, Counter[tuple[str, str]]()
    for unit in placement.units:
        shadows = (other for group in placement.speculated(unit) for _, other in unit.shadows(group))
        for value in chain(unit.parts(), shadows):
            by_home[value.kind, value.tier or "host"] += nbytes_of(placement, value)
        if layout.has_sums:
            by_home["dw", placement.gradient_home(unit)] += unit.num_trained * unit.gradient_itemsize
        if not placement.accumulates:
            waiting = unit.trained(*placement.waiting(redo=True))
            by_home["dw", "host"] += sum(group.numel for group in waiting) * unit.gradient_itemsize
        by_home["seal", "ssd"] += sum(_commit_nbytes(unit, placement))
    for layer, micro_batch in product(range(layout.num_layers), range(layout.num_micro_batches)):
        nbytes = at(layout.x_nbytes[micro_batch], layer)
        checkpoint, saved = Value("x", layer, micro_batch), Value("a", layer, micro_batch)
        home, level = placement.activations.home(checkpoint), placement.activations.level_of(saved)
        by_home["x", home] += nbytes if level is None or level.reads_input else 0
        by_home["a", home] += level.nbytes[micro_batch] if level else 0
    return {key: nbytes for key, nbytes in by_home.items() if nbytes}


def _commit_nbytes(unit: UnitPlacement, placement: Placement) -> Iterator[int]:
    """The bytes that commits store of a unit's parts in addition to their homes: all extents except the home's."""
    if placement.durability:
        at_home = [value for value in unit.parts() if value.tier == "ssd"]
        copies = [copy for group in unit.groups for _, copy in unit.copies(group)]
        for value, home in chain(((each, 1) for each in at_home), ((each, 0) for each in copies)):
            yield (placement.num_extents(value) - home) * nbytes_of(placement, value)


def commits_text(placement: Placement) -> str:
    """For people: what the commits of a durable placement write of data in memory, and what they store on SSD."""
    groups = ((unit, group) for unit in placement.units for group in unit.trained())
    nbytes = sum(nbytes_of(placement, copy) for unit, group in groups for _, copy in unit.copies(group))
    written = f"{format_bytes(nbytes)} of what lives in memory" if nbytes else "nothing more"
    often = "every step" if placement.durability == 1 else f"every {placement.durability} steps"
    kept = format_bytes(nbytes_by_home(placement).get(("seal", "ssd"), 0))
    return f"{written} is written {often}, SSD holds {kept} more"
