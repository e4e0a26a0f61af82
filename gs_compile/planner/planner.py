"""planner: where the data of a model at hand lives, within its budgets.

ratios and alpha given      as they are
everything fits             in host memory, if the device reads that itself: there is nothing to measure
otherwise                   by the linear program, from the machine's profile and the time of the layers' code

Ratios that are given are kept in every case. The log (`gs_compile.planner.planner`) says what was decided.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from gs_compile.errors import MemoryBudgetError, NoFitError, OptionError
from gs_compile.machine import available_memory, format_bytes, usable_memory
from gs_compile.options import Options, parse_bytes
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.cut import DEVICE_CLASSES, on_device
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.cost.timing import timed
from gs_compile.planner.cost.workload import workload_of
from gs_compile.planner.lp.fit import CLASSES, host_needed, most_alpha, peak, too_small
from gs_compile.planner.lp.rows import contradiction
from gs_compile.planner.lp.search import GROWTH
from gs_compile.planner.lp.solve import Budgets, Fixed
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import paragraph
from gs_compile.program.ir import StepShape
from gs_compile.runtime.stream import device_of, has_own_memory

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.8  # of the memory that is free at the start: the rest is for activations and the user's own


class Planner:
    """Decides for one model and its first batch. `builder` lays out its steps."""

    def __init__(
        self,
        options: Options,
        sizes: tuple[UnitSize, ...],
        layouts: Sequence[SpecializedModel],
        shape: StepShape,
        *,
        clip: bool,
        device: torch.device,
    ) -> None:
        expert = options.expert
        self.options = options
        self.layouts = layouts
        self.clip = clip
        self.device = device
        self.host_nbytes = _host_nbytes(options)
        self.builder = StepBuilder(
            sizes=sizes,
            num_layers=layouts[0].split.num_layers,
            shape=shape,
            x_nbytes=tuple(each.x_nbytes for each in layouts),
            side_nbytes=tuple(each.side_nbytes for each in layouts),
            separate=has_own_memory(device) or expert.separate_device,
            clip=clip,
            schedule=expert.schedule,
            snake=expert.snake,
        )
        self.is_horizontal = SCHEDULES[expert.schedule].order == "horizontal"
        classes = (*CLASSES, "gradient") if self.is_horizontal else CLASSES
        given = {name: ratio for name, ratio in asdict(expert.ratios).items() if ratio is not None}
        self.given = {name: ratio for name, ratio in given.items() if name in classes}
        self.device_given = {name: ratio for name, ratio in given.items() if name in DEVICE_CLASSES}
        self.least, self.most = ({name: self.given.get(name, ratio) for name in classes} for ratio in (0.0, 1.0))
        self.speculative = clip and _speculates(options)
        self.given_alpha = _alpha(options, clip and not self.speculative)
        self.alpha = self.given_alpha or 0.0  # without the linear program nothing says that more would be faster
        self.plan: StepPlan | None = None  # where the linear program has decided
        fixed = self._fixed(speculative=self.speculative)
        may_reside = any(size.may_reside for size in sizes)
        wrong = contradiction(fixed, separate=self.builder.separate, may_reside=may_reside, prefix="expert.ratios.")
        if wrong:
            raise OptionError(wrong)

    def placement(self) -> Placement:
        """Raises `MemoryBudgetError` where not even the least fits; it says what is needed."""
        smallest = self._make(self.least, self.alpha)
        self._refuse_too_large(smallest)
        if self.least == self.most and (self.given_alpha is not None or self.is_horizontal):
            chosen, reason = smallest, "ratios and alpha are given: nothing was planned"
        elif not self.builder.separate and self._fits(largest := self._make(self.most, self.alpha)):
            chosen, reason = largest, "all that may be in host memory fits there: nothing was planned"
        elif (plan := self._fastest()) is not None:
            self.plan, self.alpha = plan, plan.alpha
            chosen, reason = plan.placement, paragraph(plan)
        else:  # the program fits, whatever the bounds of the linear program say
            chosen, reason = smallest, "no plan fits by the linear program's bounds: host memory keeps the least it can"
        if SCHEDULES[self.options.expert.schedule].fills_memory:
            chosen, reason = self._prolonged(chosen, reason)
        self._check_device(chosen)
        log.info("%s", reason)
        return chosen

    def _prolonged(self, plain: Placement, reason: str) -> tuple[Placement, str]:
        """With what is inactive kept where it is, as far as there is room and that is faster."""
        found = self.problem(speculative=False).kept_inactive(plain)
        return found.placement, f"{reason}; {found.reason}"

    # By the linear program --------------------------------------------------------------------------------------------

    @cached_property
    def profile(self) -> Profile:
        return find_profile(self.options.machine, self.options.storage)

    @cached_property
    def workload(self) -> Workload:
        workload = workload_of(self.layouts[0], self.builder.sizes)
        return replace(timed(workload, self.layouts[0]), shape=self.builder.shape)

    def problem(self, *, speculative: bool) -> Problem:
        """The problem of the model at hand; its clipping may be speculative or not."""
        device = self._device_nbytes()
        return Problem(
            workload=self.workload,
            profile=self.profile,
            budgets=Budgets(
                host_nbytes=self.host_nbytes,
                device_nbytes=self.profile.device_nbytes if device is None else device,
                ssd_nbytes=self.profile.ssd_nbytes,
            ),
            fixed=replace(self._fixed(speculative=speculative), device=self.builder.separate and self.profile.separate),
            builder=self.builder,
        )

    def _fixed(self, *, speculative: bool) -> Fixed:
        alpha = self.options.expert.alpha if speculative else self.given_alpha
        if self.is_horizontal:
            alpha = alpha or 0.0
        return Fixed(alpha=alpha, ratios=self.given | self.device_given, clip=self.clip, speculative=speculative)

    def _fastest(self) -> StepPlan | None:
        """The plan of the way to clip that was asked for, or that is faster: of equal ones, with delayed updates."""
        chosen, expert = self._planned(speculative=self.speculative), self.options.expert
        settled = not self.clip or expert.clip is not None or expert.alpha is not None
        if settled or chosen is None:
            return chosen
        other = self._planned(speculative=True)
        if other is None:
            return replace(chosen, notes=(*chosen.notes, "Speculative updates do not fit."))
        seconds = f"{chosen.seconds:.3g} s a step with delayed updates, {other.seconds:.3g} s with speculative ones"
        if other.seconds * GROWTH < chosen.seconds:
            self.speculative = True
            note = f"Clipping is speculative: {seconds}, of which none is expected to be rolled back."
            return replace(other, notes=(*other.notes, note))
        return replace(chosen, notes=(*chosen.notes, f"Clipping is delayed: {seconds}."))

    def _planned(self, *, speculative: bool) -> StepPlan | None:
        """The linear program's answer; None where it finds none, or none whose program keeps the budgets."""
        problem = self.problem(speculative=speculative)
        try:
            return problem.planned(problem.search(len(self.layouts)))
        except (NoFitError, MemoryBudgetError):
            return None

    # By the program's own peaks ---------------------------------------------------------------------------------------

    def _make(self, ratios: Mapping[str, float], alpha: float) -> Placement:
        """Nothing lives on the device by itself but what is said to."""
        return self.builder.placement(ratios, alpha, on_device(self.device_given), speculative=self.speculative)

    def _fits(self, placement: Placement) -> bool:
        return host_needed(self.builder.program(placement)) <= self.host_nbytes

    def _refuse_too_large(self, placement: Placement) -> None:
        needed = host_needed(self.builder.program(placement))
        if needed <= self.host_nbytes:
            return
        message = too_small(self.host_nbytes, needed, self.least)
        late = self.alpha and not self.speculative  # otherwise all gradients wait, whatever alpha
        most = most_alpha(lambda smaller: self._fits(self._make(self.least, smaller))) if late else None
        if most is not None:
            why = " (max_grad_norm makes all gradients wait)" if self.clip else ""
            message += (
                ". Late gradients need the memory that obsolete parameters and checkpoints leave: the largest alpha "
                f"possible here is {most:.2f}, not {self.alpha:g}{why}"
            )
        raise MemoryBudgetError(message)

    def _check_device(self, placement: Placement) -> None:
        budget = self._device_nbytes()
        needed = peak(self.builder.program(placement), "device")
        if budget is not None and needed > budget:
            raise MemoryBudgetError(
                f"device_memory is {format_bytes(budget)}; this step keeps {format_bytes(needed)} there, and what a "
                "layer computes with comes on top: give it more, or a smaller micro_batch_size"
            )

    def _device_nbytes(self) -> int | None:
        if self.options.device_memory is None:
            return None
        whole = device_of(self.device).memory_nbytes()[1]
        return parse_bytes(self.options.device_memory, whole=whole, name="device_memory")


def _speculates(options: Options) -> bool:
    """Whether updates have to be: it was asked for, or they are not all to be late."""
    expert = options.expert
    return expert.clip == "speculative" or (expert.clip is None and expert.alpha not in (None, 1.0))


def _alpha(options: Options, delayed: bool) -> float | None:
    given = options.expert.alpha
    if delayed and given not in (None, 1.0):
        raise OptionError(
            f'expert.alpha is {given}, but with max_grad_norm and expert.clip="delayed" all updates wait for the norm '
            'of all gradients, so alpha is 1: leave one of the two out, or choose expert.clip="speculative"'
        )
    return 1.0 if delayed else given


def _host_nbytes(options: Options) -> int:
    if options.host_memory is None:
        return int(available_memory() * DEFAULT_SHARE)
    return parse_bytes(options.host_memory, whole=usable_memory(), name="host_memory")
