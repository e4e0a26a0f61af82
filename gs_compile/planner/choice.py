"""choice: where the data of a model at hand lives, within its budgets.

ratios and alpha given      as they are
everything fits             in host memory, if the device reads that itself: there is nothing to measure
otherwise                   by the linear program, from the machine's profile and the time of the layers' code

Ratios that are given are kept in every case. The log (`gs_compile.planner.choice`) says what was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from gs_compile.errors import MemoryBudgetError, OptionError, PlanError
from gs_compile.machine import available_memory, format_bytes, usable_memory
from gs_compile.options import Options, parse_bytes
from gs_compile.placement.cut import DEVICE_CLASSES, cut_units, on_device
from gs_compile.placement.placement import Placement
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.cost.timing import timed
from gs_compile.planner.cost.workload import workload_of
from gs_compile.planner.lifetimes import NOTHING, fastest, has_periods, room_of
from gs_compile.planner.lp.fit import CLASSES, fit, host_needed, most_alpha, peak, too_small
from gs_compile.planner.lp.search import GROWTH, search
from gs_compile.planner.lp.solve import Budgets, Fixed
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.prediction import Prediction, predict
from gs_compile.planner.reasons import solver
from gs_compile.planner.refine import alphas_of, settle
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import paragraph
from gs_compile.program.ir import ORDERS, Program, StepShape
from gs_compile.runtime.stream import device_of, has_own_memory

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.8  # of the memory that is free at the start: the rest is for activations and the user's own


class Choice:
    """The choice for one model and its first batch.

    lowered, usual: the program of a placement that takes the most memory, and the one of most steps.
    """

    def __init__(
        self,
        options: Options,
        sizes: tuple[UnitSize, ...],
        layouts: Sequence[SpecializedModel],
        shape: StepShape,
        *,
        clip: bool,
        device: torch.device,
        lowered: Callable[[Placement], Program],
        usual: Callable[[Placement], Program],
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.layouts = layouts
        self.shape = shape
        self.clip = clip
        self.device = device
        self.lowered = lowered
        self.usual = usual
        self.separate = has_own_memory(device) or options.expert.separate_device
        self.host_nbytes = _host_nbytes(options)
        given = {name: ratio for name, ratio in asdict(options.expert.ratios).items() if ratio is not None}
        self.given = {name: ratio for name, ratio in given.items() if name in CLASSES}
        self.device_given = {name: ratio for name, ratio in given.items() if name in DEVICE_CLASSES}
        self._refuse_device_ratios()
        self.speculative = clip and _speculates(options)
        self.given_alpha = _alpha(options, clip and not self.speculative)
        self.alpha = self.given_alpha or 0.0  # without the linear program nothing says that more would be faster
        self.plan: StepPlan | None = None  # where the linear program has decided

    def placement(self) -> Placement:
        """Raises `MemoryBudgetError` where not even the least fits; it says what is needed."""
        least = {name: self.given.get(name, 0.0) for name in CLASSES}
        most = {name: self.given.get(name, 1.0) for name in CLASSES}
        alpha = self.alpha
        smallest = self._make(least, alpha)
        self._refuse_too_large(smallest, least, alpha)
        if least == most and self.given_alpha is not None:
            chosen, reason = smallest, "ratios and alpha are given: nothing was planned"
        elif ORDERS[self.options.expert.schedule] == "horizontal":  # to compare with
            ratios = fit(lambda ratios: self._make(ratios, alpha), self.lowered, self.given, self.host_nbytes)
            chosen, reason = self._make(ratios, alpha), "the horizontal order fills host memory by a simple rule"
        elif not self.separate and self._fits(largest := self._make(most, alpha)):
            chosen, reason = largest, "all that may be in host memory fits there: nothing was planned"
        elif (plan := self._fastest()) is not None:
            self.plan, self.alpha = plan, plan.alpha
            chosen, reason = plan.placement, paragraph(plan)
        else:  # the program fits, whatever the bounds of the linear program say
            chosen, reason = smallest, "no plan fits by the linear program's bounds: host memory keeps the least it can"
        if self.options.expert.schedule == "lifetime":
            chosen, reason = self._prolonged(chosen, reason)
        self._check_device(self.lowered(chosen))
        log.info("%s", reason)
        return chosen

    def _prolonged(self, plain: Placement, reason: str) -> tuple[Placement, str]:
        """With what is inactive kept where it is, as far as there is room and that is faster."""
        if not has_periods(plain, self.lowered):
            return plain, f"{reason}; {NOTHING}"
        room, alpha = room_of(self.budgets, self.workload, self.profile), self.alpha

        def make(ratios: Mapping[str, float]) -> Placement:
            return replace(self._make(ratios, alpha), room=room)

        ratios = fit(make, self.lowered, self.given, self.host_nbytes)
        found = fastest(plain, (replace(plain, room=room), make(ratios)), self.lowered, self._predicted)
        return found.placement, f"{reason}; {found.reason}"

    def _predicted(self, program: Program, placement: Placement) -> Prediction:
        """Of steps none of which is rolled back; the memory they are given is that of the program."""
        if placement.speculative:
            program = replace(self.usual(placement), peaks=program.peaks)
        return predict(program, placement, self.workload, self.profile, host_nbytes=self.host_nbytes)

    # By the linear program --------------------------------------------------------------------------------------------

    @cached_property
    def profile(self) -> Profile:
        return find_profile(self.options.machine, self.options.storage)

    @cached_property
    def workload(self) -> Workload:
        workload = workload_of(self.layouts[0], self.sizes)
        return replace(timed(workload, self.layouts[0]), shape=self.shape)

    @cached_property
    def budgets(self) -> Budgets:
        device = self._device_nbytes()
        return Budgets(
            host_nbytes=self.host_nbytes,
            device_nbytes=self.profile.device_nbytes if device is None else device,
            ssd_nbytes=self.profile.ssd_nbytes,
        )

    def _fastest(self) -> StepPlan | None:
        """The plan of the way to clip that was asked for, or that is faster: of equal ones, with delayed updates."""
        chosen, expert = self._solved(speculative=self.speculative), self.options.expert
        settled = not self.clip or expert.clip is not None or expert.alpha is not None
        if settled or chosen is None:
            return chosen
        other = self._solved(speculative=True)
        if other is None:
            return replace(chosen, notes=(*chosen.notes, "Speculative updates do not fit."))
        seconds = f"{chosen.seconds:.3g} s a step with delayed updates, {other.seconds:.3g} s with speculative ones"
        if other.seconds * GROWTH < chosen.seconds:
            self.speculative = True
            note = f"Clipping is speculative: {seconds}, of which none is expected to be rolled back."
            return replace(other, notes=(*other.notes, note))
        return replace(chosen, notes=(*chosen.notes, f"Clipping is delayed: {seconds}."))

    def _solved(self, *, speculative: bool) -> StepPlan | None:
        """The linear program's answer, settled; None where it finds none."""
        ratios, spare = self.given | self.device_given, self.separate and self.profile.separate
        alpha = self.options.expert.alpha if speculative else self.given_alpha
        fixed = Fixed(alpha=alpha, ratios=ratios, clip=self.clip, speculative=speculative, device=spare)
        number = len(self.layouts)
        workload, profile, budgets = self.workload, self.profile, self.budgets
        again = solver(workload, profile, budgets, fixed)
        try:
            found = search(workload, profile, budgets, fixed, num_micro_batches=number)
            settled = settle(
                again,
                number,
                alphas_of(found.best, fixed),
                lambda solution: self._make(
                    solution.ratios, solution.alpha, solution.device_ratios, speculative=speculative
                ),
                self.lowered,
                self._predicted,
                workload,
                budgets,
            )
        except (PlanError, MemoryBudgetError):
            return None
        return settled.plan(workload, profile, budgets, settled.search(found, again))

    # By the program's own peaks ---------------------------------------------------------------------------------------

    def _make(
        self,
        ratios: Mapping[str, float],
        alpha: float,
        device_ratios: Mapping[str, float] | None = None,
        *,
        speculative: bool | None = None,
    ) -> Placement:
        """Nothing lives on the device by itself but what is said to."""
        speculative = self.speculative if speculative is None else speculative
        x_nbytes = tuple(each.x_nbytes for each in self.layouts)
        side_nbytes = tuple(each.side_nbytes for each in self.layouts)
        return cut_units(
            self.sizes,
            ratios,
            alpha=alpha,
            clip=self.clip and (speculative or alpha == 1.0),  # smaller ones only say what would fit
            speculative=speculative,
            separate=self.separate,
            num_layers=self.layouts[0].split.num_layers,
            x_nbytes=x_nbytes,
            side_nbytes=side_nbytes,
            schedule=self.options.expert.schedule,
            gradient_ratio=self.options.expert.ratios.gradient,
            device_ratios=on_device(self.device_given) if device_ratios is None else device_ratios,
        )

    def _fits(self, placement: Placement) -> bool:
        return host_needed(self.lowered(placement)) <= self.host_nbytes

    def _refuse_too_large(self, placement: Placement, ratios: Mapping[str, float], alpha: float) -> None:
        needed = host_needed(self.lowered(placement))
        if needed <= self.host_nbytes:
            return
        message = too_small(self.host_nbytes, needed, ratios)
        late = alpha and not self.speculative  # otherwise all gradients wait, whatever alpha
        most = most_alpha(lambda smaller: self._fits(self._make(ratios, smaller))) if late else None
        if most is not None:
            why = " (max_grad_norm makes all gradients wait)" if self.clip else ""
            message += (
                ". Late gradients need the memory that obsolete parameters and checkpoints leave: the largest alpha "
                f"possible here is {most:.2f}, not {alpha:g}{why}"
            )
        raise MemoryBudgetError(message)

    def _refuse_device_ratios(self) -> None:
        for name, ratio in self.device_given.items():
            if ratio and not self.separate:
                raise OptionError(
                    f"expert.ratios.{name} is {ratio:g}, but this device has no memory of its own: it reads the "
                    f"host's, so give expert.ratios.{name.removeprefix('device_')}"
                )
        ratio = self.device_given.get("device_parameter")
        if ratio and not any(size.may_reside for size in self.sizes):
            raise OptionError(
                f"expert.ratios.device_parameter is {ratio:g}, but parameters that are updated in the type they are "
                'computed in go to host memory for that: leave it out, or choose precision="bf16"'
            )

    def _check_device(self, program: Program) -> None:
        budget = self._device_nbytes()
        needed = peak(program, "device")
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
