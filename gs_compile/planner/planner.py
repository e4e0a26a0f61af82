"""planner: where the data of a model at hand lives, within its budgets.

all is given                as it is: ratios, alpha, and what layers save
everything fits             in host memory, if the device reads that itself: only the layers' code may be timed
otherwise                   by the linear program, from the machine's profile and the time of the layers' code

Ratios that are given are kept in every case. The log (`gs_compile.planner.planner`) says what was decided.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from gs_compile.errors import MemoryBudgetError, NoFitError
from gs_compile.machine import format_bytes
from gs_compile.options import Options
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.cut import on_device
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.boundary import kept_for_free
from gs_compile.planner.builder import SCARCE_UPDATES, StepBuilder, peak
from gs_compile.planner.candidates import highest
from gs_compile.planner.cost.levels import Levels
from gs_compile.planner.cost.timing import priced, timed
from gs_compile.planner.cost.workload import workload_of
from gs_compile.planner.given import check, classes, device_budget, fixed, host_budget, num_update_threads, remedies
from gs_compile.planner.lp.limits import ACTIVATION, Budgets, Fixed
from gs_compile.planner.lp.search import GROWTH
from gs_compile.planner.measure.machines import named
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.refine import planned
from gs_compile.planner.saved import computed, faster, is_open, saved_text, topmost, with_levels
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import paragraph
from gs_compile.planner.variants import fastest_variant
from gs_compile.program.ir import StepShape, Tier
from gs_compile.progress import stage
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import has_own_memory

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)


class Planner:
    """Decides for one model and its first batch. `builder` lays out its steps. shares: those of an earlier plan."""

    def __init__(
        self,
        options: Options,
        sizes: tuple[UnitSize, ...],
        layouts: Sequence[SpecializedModel],
        shape: StepShape,
        *,
        clip: bool,
        device: torch.device,
        ranks: Ranks | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.options, self.ranks, self.layouts, self.device = options, ranks, layouts, device
        self.num_threads = num_update_threads(options, device, here := ranks.num_here if ranks else 1)
        sizes_of_batch = tuple(each.x_nbytes for each in layouts), tuple(each.side_nbytes for each in layouts)
        own = host_budget(options, here), device_budget(options, device), sizes_of_batch
        hosts, devices, batches = zip(*(ranks.agree("the budgets and batches", own) if ranks else [own]), strict=True)
        x_nbytes, side_nbytes = max(batches, key=lambda batch: sum(map(sum, batch)))
        self.host_nbytes: int = min(hosts)
        self.device_nbytes: int | None = None if None in devices else min(devices)
        self.builder = StepBuilder(
            sizes=sizes,
            num_layers=layouts[0].split.num_layers,
            shape=shape,
            x_nbytes=x_nbytes,
            side_nbytes=side_nbytes,
            separate=has_own_memory(device) or options.expert.separate_device,
            clip=clip,
            schedule=options.expert.schedule,
            snake=options.expert.snake,
            world=ranks.number if ranks else 1,
            durability=options.durability,
        )
        self.fixed = replace(fixed(options, clip), shares=shares)
        self.alpha = self.fixed.alpha or 0.0  # without the linear program nothing says that more would be faster
        self.plan: StepPlan | None = None  # where the linear program has decided
        self.levels = Levels(layouts, x_nbytes, compiled=options.expert.compiler != "eager")
        if self.fixed.saves or shares:
            self.builder = replace(self.builder, levels=self.levels.checked())
        check(self.fixed, self.builder)

    def placement(self) -> Placement:
        """The first rank's, for the largest batch of all. Raises `MemoryBudgetError` where not even the least fits; it
        says what is needed.
        """
        if self.ranks is None:
            return self._chosen()
        fills = SCHEDULES[self.options.expert.schedule].fills_memory
        if self.ranks.from_first("whether to plan", lambda: fills or self._settled is None):
            self.profile = self._measured()  # by all ranks together
        chosen, self.alpha, self.values_nbytes = self.ranks.from_first(
            "the plan", lambda: (self._chosen(), self.alpha, self.values_nbytes)
        )
        return chosen

    @cached_property
    def _settled(self) -> tuple[Placement, str] | None:
        """What needs no plan, and why; None: the linear program decides."""
        smallest, largest = self._smallest(), self._make(1.0, self.alpha)
        may_save = is_open(self.fixed, self.builder) and bool(self.levels.by_micro_batch)
        if smallest == largest and self.fixed.alpha is not None and not may_save:
            return smallest, "ratios and alpha are given: nothing was planned"
        moves_nothing = all(self._ratios(1.0)[name] == 1.0 for name in classes(self.options))
        if self.builder.separate or not self._fits(largest) or (may_save and not moves_nothing):
            return None
        chosen, number = self._filled(largest) if may_save else largest, self.builder.num_items
        reason = "all that may be in host memory fits there: nothing was planned"
        return chosen, "; ".join([reason, *saved_text(chosen.shares, number)])

    def _filled(self, plain: Placement) -> Placement:
        """With the least to compute, of what host memory has room for: where nothing moves, that is all there is."""
        self.builder = replace(self.builder, levels=self.levels.by_micro_batch)
        workload, make = self.levels.of(self.workload), partial(self._placed, self._ratios(1.0), self.alpha)
        ladders = (list(map(make, ladder)) for ladder in topmost(workload.worthwhile, "host"))
        return min([plain, *highest(ladders, self._fits)], key=lambda each: computed(workload, each.shares))

    def _chosen(self) -> Placement:
        if self._settled is not None:
            chosen, reason = kept_for_free(self.builder, self._settled[0]), self._settled[1]
        elif (plan := self._fastest()) is not None:
            self.plan, self.alpha = plan, plan.alpha
            chosen, reason = plan.placement, paragraph(plan)
        else:  # the program fits, whatever the bounds of the linear program say
            reason = "no plan fits by the linear program's bounds: host memory keeps the least it can"
            chosen = self._smallest()
        if SCHEDULES[self.options.expert.schedule].fills_memory:
            chosen, reason = self._prolonged(chosen, reason)
        self._check_device(chosen)
        log.info("%s", "; ".join([reason, *self.levels.refusals()]))
        return chosen

    @cached_property
    def values_nbytes(self) -> int | None:
        """Device memory, without what code computes with where that is known; None: nothing is said of it."""
        plan = self.plan
        if plan is not None and plan.profile.separate:
            return plan.budgets.values_nbytes(plan.workload.workspace_nbytes)
        return self.device_nbytes if self.builder.separate else None

    def _prolonged(self, plain: Placement, reason: str) -> tuple[Placement, str]:
        """The fastest of the schedule's variants."""
        found, why = fastest_variant(self._problem(replace(self.fixed, speculative=False)), plain)
        return found.placement or plain, f"{reason}; {why}"

    # By the linear program --------------------------------------------------------------------------------------------

    @cached_property
    def profile(self) -> Profile:
        return self._measured()

    def _measured(self) -> Profile:
        with stage("measuring this machine, once"):
            return find_profile(self.options.machine, self.options.storage, ranks=self.ranks)

    @cached_property
    def workload(self) -> Workload:
        workload = workload_of(self.layouts[0], self.builder.sizes)
        with stage("compiling and timing the layers' code"):
            return replace(timed(workload, self.layouts[0]), shape=self.builder.shape, world=self.builder.world)

    @cached_property
    def _sizes(self) -> tuple[UnitSize, ...]:
        sizes, is_named = self.builder.sizes, named(self.options.machine)
        return sizes if is_named else priced(sizes, self.profile, self.num_threads)

    def _problem(self, fixed: Fixed) -> Problem:
        found = Problem(
            workload=replace(self.workload, sizes=self._sizes),
            profile=self.profile,
            budgets=Budgets(
                host_nbytes=self.host_nbytes,
                device_nbytes=self.profile.device_nbytes if self.device_nbytes is None else self.device_nbytes,
                ssd_nbytes=self.profile.ssd_nbytes,
            ),
            fixed=replace(fixed, device=self.builder.separate and self.profile.separate),
            builder=replace(self.builder, sizes=self._sizes),
        )
        return self._saving(found) if fixed.saves else found

    def _saving(self, problem: Problem) -> Problem:
        """With layers that may save more than their inputs."""
        workload = self.levels.of(problem.workload, last=problem.fixed.saves_all)
        return with_levels(problem, workload, self.levels.by_micro_batch)

    def _fastest(self) -> StepPlan | None:
        """The plan of the way to clip that was asked for, or that is faster: of equal ones, with delayed updates."""
        chosen, expert = self._planned(self.fixed), self.options.expert
        settled = not self.fixed.clip or expert.clip is not None or expert.alpha is not None
        if settled or chosen is None:
            return chosen
        alpha = 0.0 if SCHEDULES[expert.schedule].as_published else None
        speculative = replace(self.fixed, alpha=alpha, speculative=True)
        other = self._planned(speculative)
        if other is None:
            return replace(chosen, notes=(*chosen.notes, "Speculative updates do not fit."))
        seconds = f"{chosen.seconds:.3g} s a step with delayed updates, {other.seconds:.3g} s with speculative ones"
        if other.seconds * GROWTH < chosen.seconds:
            self.fixed = speculative
            note = f"Clipping is speculative: {seconds}, of which none is expected to be rolled back."
            return replace(other, notes=(*other.notes, note))
        return replace(chosen, notes=(*chosen.notes, f"Clipping is delayed: {seconds}."))

    def _planned(self, fixed: Fixed) -> StepPlan | None:
        """The linear program's answer; None where it finds none, or none whose program keeps the budgets."""
        problem = self._problem(fixed)
        try:
            made = planned(problem, problem.search(len(self.builder.x_nbytes)), whole=True)
        except (NoFitError, MemoryBudgetError) as error:
            if fixed.saves:
                raise MemoryBudgetError(str(error)) from error
            return None
        return faster(problem, made, self._saving, whole=True)[1]

    # By the program's own peaks ---------------------------------------------------------------------------------------

    def _make(self, part: float, alpha: float) -> Placement:
        """This part of all classes in host memory whose ratio is not given, and on the device what is said to be."""
        return self._placed(self._ratios(part), alpha, self._shares(part))

    def _placed(self, ratios: Mapping[str, float], alpha: float, shares: Shares) -> Placement:
        speculative = self.fixed.speculative
        return self.builder.placement(ratios, alpha, on_device(ratios), speculative=speculative, shares=shares)

    def _shares(self, part: float) -> Shares:
        """Of items that save activations, what is given: all there is to save, where nothing says at which level."""
        if self.fixed.shares is not None or not self.fixed.saves:
            return self.fixed.shares or ()
        tier: Tier = "host" if part or not self.fixed.saves_all else "ssd"
        return (Share(self.levels.most, tier, self.fixed.ratios.get(ACTIVATION, 1.0)),)

    def _ratios(self, part: float) -> dict[str, float]:
        return {**dict.fromkeys(classes(self.options), part), **self.fixed.ratios}

    def _host_needed(self, placement: Placement) -> int:
        return peak(self.builder.program(placement), "host")

    def _fits(self, placement: Placement) -> bool:
        return self._host_needed(placement) <= self.host_nbytes

    def _smallest(self) -> Placement:
        """The least that host memory may keep; updates are in pieces where whole ones do not fit."""
        for layer_updates in (1, SCARCE_UPDATES):
            self.builder = replace(self.builder, layer_updates=layer_updates)
            placement = self._make(0.0, self.alpha)
            if self._fits(placement):
                return placement
        raise MemoryBudgetError(self._too_large(self._host_needed(placement)))

    def _too_large(self, needed: int) -> str:
        ratios = self._ratios(0.0)
        words = ", ".join(f"{name} {ratios[name]:g}" for name in classes(self.options))
        message = (
            f"host_memory is {format_bytes(self.host_nbytes)}; this step needs {format_bytes(needed)} ({needed} bytes) "
            f"of it at least, with ratios {words}: {remedies(self.options, self.fixed)}"
        )
        if self.alpha and not self.fixed.speculative and (most := self._most_alpha()) is not None:
            why = " (max_grad_norm makes all gradients wait)" if self.fixed.clip else ""
            message += (
                ". Late gradients need the memory that obsolete parameters and checkpoints leave: the largest alpha "
                f"possible here is {most:.2f}, not {self.alpha:g}{why}"
            )
        return message

    def _most_alpha(self) -> float | None:
        """The largest alpha of 0.00, 0.01 ... below the one asked for with which the least fits; None without one."""

        def is_too_large(hundredths: int) -> bool:
            return not self._fits(self._make(0.0, hundredths / 100))

        number = bisect_left(range(round(100 * self.alpha)), True, key=is_too_large)
        return (number - 1) / 100 if number else None

    def _check_device(self, placement: Placement) -> None:
        budget = self.device_nbytes
        needed = peak(self.builder.program(placement), "device")
        if budget is not None and needed > budget:
            raise MemoryBudgetError(
                f"device_memory is {format_bytes(budget)}; this step keeps {format_bytes(needed)} there, and what a "
                f"layer computes with comes on top: {remedies(self.options, self.fixed)}"
            )
