"""programs: the programs of a run's steps, by size and shape, within the memory that its first step has settled."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from gs_compile.codegen.codes import let_oldest_go
from gs_compile.codegen.compiled import levels_of
from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.passes.lower import flush, lower
from gs_compile.placement.kinds import is_of_units
from gs_compile.placement.levels import TOLERANCE
from gs_compile.placement.liveness import live_ranges
from gs_compile.placement.placement import ALL_LATE, Layout, Placement, StepContext
from gs_compile.placement.slab import fixed_offsets, packed, placed_as
from gs_compile.planner.boundary import said, without
from gs_compile.planner.builder import planned_peak
from gs_compile.planner.cost.workload import activations
from gs_compile.planner.problem import fits
from gs_compile.planner.run import Planned, RunPlanner
from gs_compile.planner.simulate.simulator import Simulation, predict
from gs_compile.planner.step_plan import commits_text, nbytes_by_home
from gs_compile.planner.summary import RATIO_OF
from gs_compile.planner.variants import table
from gs_compile.program.ir import WORDS, Program, StepShape, Unit

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel


log = logging.getLogger(__name__)

MOST_PROGRAMS = 256  # of one model, the latest: each length of the inputs has up to four, with commits sixteen


class StepPrograms:
    """The programs of one model's steps, by size and shape, of the placement that was planned at its first call."""

    def __init__(self, planner: RunPlanner, planned: Planned) -> None:
        self.planner, self.planned = planner, planned
        self.placement, self.host_nbytes = planned.placement, planned.budgets.host_nbytes
        self.builder = replace(planner.builder(planned.masters), layout=planned.placement.layout)
        self._programs: dict[Any, tuple[Program, ...]] = {}
        self._placements: dict[tuple[Layout, bool], Placement] = {}

    def shape(self, layout: SpecializedModel, tied: Set[Unit], *, training: bool) -> StepShape:
        """The layout's shape, with the shared parameters of the units `tied` as a unit of their own."""
        return layout.shape_of(self.builder.sizes, tied, training=training)

    def snapshots(self, placement: Placement, shape: StepShape, context: StepContext) -> tuple[Program, ...]:
        """Every snapshot of a step.

        The step with all late updates takes the most memory and is planned first: the others run in its memory.
        """
        key = placement, shape, context
        if key not in self._programs:
            largest = None
            if shape.training and placement.has_late and not (context.late and context.redo):
                largest = self.snapshots(placement, shape, ALL_LATE)[-1]
            step = replace(self.builder, shape=shape).step(placement, context)
            self._programs[key] = self._packed(lower(step), placement, largest)
            let_oldest_go(self._programs, MOST_PROGRAMS)  # the latest one has the most host memory of all so far
        return self._programs[key]

    def flush(self, context: StepContext) -> Program:
        """The program of the late updates alone, with a commit if the context has one."""
        key = "flush", context
        if key not in self._programs:
            self._programs[key] = self._packed(flush(self.placement, context), self.placement)
        return self._programs[key][-1]

    def _packed(
        self, programs: Sequence[Program], placement: Placement, largest: Program | None = None
    ) -> tuple[Program, ...]:
        """The last snapshot, packed into the host memory of earlier programs or, if it needs more, into the budget."""
        before = max((known[-1].slab_nbytes for known in self._programs.values()), default=0)
        on_device = self.device_nbytes
        found = packed(programs[-1], placement, before, on_device)
        if found.slab_nbytes > before and largest is not None:
            found = placed_as(found, largest, placement)
        if found.slab_nbytes > before:
            found = packed(programs[-1], placement, self.host_nbytes, on_device)
        return (*programs[:-1], replace(found, slab_nbytes=max(before, found.slab_nbytes)))

    def sized(self, layouts: Sequence[SpecializedModel], shape: StepShape) -> Placement:
        """The placement of a step of another size: the first of `_retreats` that fits into the settled memory.

        Raises `MemoryBudgetError` if none fits.
        """
        known = self.placement
        levels = levels_of(layouts) if known.decision.shares and shape.training else known.layout.levels
        layout = self.builder.laid_out(**activations(layouts), levels=levels).layout
        if layout == known.layout:
            return known
        key = layout, shape.training
        if key not in self._placements:
            self._placements[key] = self._first_that_fits(replace(known, layout=layout), shape)
            let_oldest_go(self._placements, MOST_PROGRAMS)
        return self._placements[key]

    def _first_that_fits(self, planned: Placement, shape: StepShape) -> Placement:
        needed = 0
        for each in self._retreats(planned, training=shape.training):
            most = {"host": self.host_nbytes, "device": self._on_device if each.activations.are_on_device else None}
            programs = list(replace(self.builder, shape=shape).steps(each))
            needed = max(planned_peak(program, "host") for program in programs)
            if fits(programs, most):
                if planned.decision.shares and not each.decision.shares:
                    log.info("a batch of this size leaves no room for saved activations: layers' forwards run again")
                if planned.decision.carried and not each.decision.carried:
                    log.info(
                        "a batch of this size leaves no room to keep parameters for the next step: they are read again"
                    )
                return each
        raise MemoryBudgetError(
            f"host_memory is {format_bytes(self.host_nbytes)}; a batch of this size needs {format_bytes(needed)} of it "
            "with all data where the plan for the first one has put it: start with the largest batch"
        )

    def _retreats(self, planned: Placement, *, training: bool) -> Iterable[Placement]:
        """The placements of `_less_in_memory`, each followed by variants with less and less kept between two uses
        (`without`), which costs less time than the next placement. An evaluation keeps what is carried.
        """
        home_nbytes = fixed_offsets(self.placement).nbytes
        every = (without(each, home_nbytes) if training else (each,) for each in self._less_in_memory(planned))
        return dict.fromkeys(chain.from_iterable(every))

    def _less_in_memory(self, planned: Placement) -> Iterator[Placement]:
        """The placement as planned; with layers that save only their inputs, unless the options ask for more; with all
        activations away from the device; with all of them on SSD, if there is storage.
        """
        yield planned
        if planned.decision.shares and not self.planner.request.saves:
            planned = planned.recomputing()
            yield planned
        planned = planned.moved("device", "ssd" if self.uses_ssd else "host")
        yield planned
        if self.uses_ssd:
            yield planned.moved("host", "ssd")

    @cached_property
    def _on_device(self) -> int:
        """The device memory for values; if none is given, what the first step was planned to take."""
        if (known := self.planned.values_nbytes) is not None:
            return known
        return max(planned_peak(program, "device") for program in self.builder.steps(self.placement))

    def predict(self, placement: Placement, shape: StepShape) -> Simulation:
        """A simulation of consecutive steps of this kind on this machine."""
        planner, builder = self.planner, replace(self.builder, shape=shape) if shape.training else self.builder
        problem = planner.problem(self.planned.budgets, self.planned.masters, placement.decision.layer_tokens)
        workload = problem.wider.workload if placement.decision.shares else problem.workload
        budgets = {"host_nbytes": self.host_nbytes, "device_nbytes": self.device_nbytes}
        return predict(builder.usual(placement), placement, workload, planner.figures.profile, **budgets)

    @property
    def device_nbytes(self) -> int | None:
        """The device memory for values; if none is given, what the planned program takes."""
        nbytes = self.planned.values_nbytes
        return 0 if nbytes is None and self.placement.separate else nbytes

    @property
    def uses_ssd(self) -> bool:
        return self.placement.activations.in_memory < 1 - TOLERANCE or self.ssd_nbytes > 0

    @cached_property
    def planned_step(self) -> Program:
        """The planned step, without its memory plan."""
        return self.builder.program(self.placement, planned=False)

    @cached_property
    def files(self) -> Sequence[int]:
        """The bytes of each extent of this run: what a step has on SSD (activations once for each open call), and what
        commits store in addition.
        """
        rest = self.planner.model.rest_nbytes
        extents = [rest, rest] if rest else []
        for live in live_ranges(self.planned_step.ops, self.placement):
            if live.slot.tier == "ssd":
                number = self.placement.num_extents(live.value)
                of_calls = 1 if is_of_units(live.value) else self.planner.num_calls
                extents += [live.slot.nbytes // number] * (number * of_calls)
        return extents

    @property
    def ssd_nbytes(self) -> int:
        """The bytes of this run's files."""
        return sum(self.files)

    def describe(self, program: Program) -> str:
        """For people: each class of data by tier, and the planned peaks of a program."""
        homes, placement = Counter(nbytes_by_home(self.placement)), self.placement

        def stored(kind: str) -> str:
            on_device = f"{format_bytes(homes[kind, 'device'])} on the device, " if homes[kind, "device"] else ""
            return f"{on_device}{format_bytes(homes[kind, 'host'])} on host, {format_bytes(homes[kind, 'ssd'])} on SSD"

        kinds = dict.fromkeys([*RATIO_OF, *(kind for kind, _ in homes if kind != "seal")])
        rows = [(WORDS[kind], stored(kind)) for kind in kinds]
        if placement.durability:
            rows.append((WORDS["seal"], commits_text(placement)))
        if kept := said(placement):
            rows.append(("kept", kept))
        late, trained = (sum(g.numel for u in placement.units for g in u.trained(*when)) for when in (("late",), ()))
        share = late / max(trained, 1)
        rows.append(("updates", f"{share:.0%} late, in the next forward (alpha {placement.decision.alpha:g})"))
        peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in program.peaks)
        rows.append(("peaks", f"{peaks}; host budget {format_bytes(self.host_nbytes)}"))
        rows += [("not saved", refusal) for refusal in self.planner.figures.levels.refusals()]
        if (plan := self.planned.plan) and plan.is_solved:
            rows.append(("planned", f"{plan.seconds:.3g} s a step"))
        width = max(len(label) for label, _ in rows) + len(": ")
        lines = [f"{label + ':':<{width}}{text}" for label, text in rows]
        return "\n".join([*lines, *([self._own] if placement.decision.own else [])])

    @cached_property
    def _own(self) -> str:
        """What the schedule has decided in addition; cached, as this lowers a step, and every call is described."""
        return table(self.placement, self.builder)
