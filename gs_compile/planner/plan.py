"""planner: given a model, a machine and a batch, where everything lives, how the step runs, and why.

    plan("gpt-65b", machine="a100", sequence=2048)      no weights, no such machine needed
    plan(model, storage="/mnt/nvme0/me")                this machine, measured

A linear program chooses where data lives for every number of micro-batches and every alpha (`passes/place`), a search
takes the smallest batch that reaches the saturated throughput (`passes/search`), and the step's own program is
simulated (`prediction`). What is said of its time is the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from torch import nn

from gs_compile.errors import NoFitError, PlanError
from gs_compile.options import parse_bytes
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.cut import cut_units, on_device
from gs_compile.placement.placement import Placement, Room
from gs_compile.placement.workload import Workload
from gs_compile.planner.cost.workload import ModelSpec
from gs_compile.planner.lifetimes import NOTHING, has_periods, room_of, why
from gs_compile.planner.lp.fit import fit, host_needed, lessened
from gs_compile.planner.lp.search import Search, search
from gs_compile.planner.lp.solve import Budgets, Fixed
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.prediction import Prediction, predict
from gs_compile.planner.reasons import WORTH_SAYING, alternatives, binding, notes, solver
from gs_compile.planner.refine import alphas_of, settle
from gs_compile.planner.step_plan import SECONDS_PER_DAY, StepPlan
from gs_compile.program.ir import Program, Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SECONDS_PER_YEAR = 365 * SECONDS_PER_DAY
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # tried where none is given
FITTED = 3  # micro-batches of the horizontal program that ratios are fitted to: more take hardly more memory


def plan(
    model: str | Path | PretrainedConfig | nn.Module | Workload,
    *,
    machine: str | Path | Profile | None = None,
    storage: Sequence[Path | str] | Path | str | None = None,
    sequence: int = 2048,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    num_micro_batches: int | None = None,
    alpha: float | None = None,
    ratios: Mapping[str, float] | None = None,
    clip: bool = False,
    host_memory: int | str | None = None,
    device_memory: int | str | None = None,
    precision: str | None = None,
    wear_years: float | None = None,
    schedule: Schedule = "vertical",
) -> StepPlan:
    """The plan for one model on one machine. What is given is kept; the rest is solved around it.

    model: "gpt-65b", a HuggingFace model type, a config or its path, a module, or a `Workload`, which has a sequence
        and precision of its own.
    machine: a name or file of a machine profile; None: this machine, measured once.
    batch_size: samples of a step; without it and `num_micro_batches`, the smallest batch that saturates the machine. A
        last micro-batch that is smaller is planned as a whole one.
    precision: "bf16" with fp32 masters, or "model", the model's own; None: bf16 for what has no weights yet.
    host_memory, device_memory: bytes, or text as in the backend's options; None: what the machine has.
    wear_years: how long the drives are to last at their rated endurance, training all day.
    schedule: "single" plans one forward and backward over the batch that the vertical order would take, or over as much
        of it as fits;
        "horizontal" plans the baseline, by a simple rule, for the batch that the vertical order would take;
        "lifetime" the same step, with what is inactive kept where it is as far as the budgets have room for it.

    Raises `PlanError` where settings contradict each other or the model fits nowhere, and `MemoryBudgetError` where
    only the linear program's bounds fit.
    """
    if schedule not in get_args(Schedule):
        raise PlanError(f"schedule is {schedule!r}; there are {' and '.join(get_args(Schedule))}")
    sizes = _micro_batch_sizes(batch_size, micro_batch_size, num_micro_batches)
    profile = find_profile(machine, storage)
    planner = _Planner(
        workload_at=_workloads(model, sequence, precision),
        profile=profile,
        budgets=_budgets(profile, host_memory, device_memory, wear_years),
        fixed=Fixed(alpha=alpha, ratios=dict(ratios or {}), clip=clip, device=profile.separate),
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
    )
    found = planner.search(sizes)
    if schedule == "single":
        workload, number = found[0][0], found[0][1].best.num_micro_batches
        halves = _workloads(model, sequence, precision, "single")
        whole = replace(planner, workload_at=halves, batch_size=None, num_micro_batches=1)
        return whole.single(batch_size or number * workload.micro_batch_size)
    if schedule == "lifetime":
        return planner.lifetime(found)
    return planner.vertical(found) if schedule == "vertical" else planner.horizontal(found)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    workload_at: Callable[[int], Workload]
    profile: Profile
    budgets: Budgets
    fixed: Fixed
    batch_size: int | None
    num_micro_batches: int | None

    def search(self, sizes: Sequence[int]) -> list[tuple[Workload, Search]]:
        """Every micro-batch size that fits; first the one with the highest throughput, of equals the smallest batch."""
        found: list[tuple[Workload, Search]] = []
        for size in sizes:
            try:
                found.append(self._searched(size))
            except PlanError:
                if not found:
                    raise
                break  # a larger one needs more memory
        most = max(_tokens_per_second(each) for each in found)
        near = [each for each in found if _tokens_per_second(each) >= most * (1 - WORTH_SAYING)]
        chosen = min(near, key=lambda each: each[0].tokens * each[1].best.num_micro_batches)
        return [chosen, *(each for each in found if each is not chosen)]

    def single(self, batch_size: int) -> StepPlan:
        """One forward and backward over a batch, or over the most samples of it that fit."""
        found, fits, fails = None, 0, batch_size + 1
        size = batch_size
        while fails - fits > 1:
            try:
                found, fits = self._searched(size), size
            except NoFitError:
                fails = size
                if fails == 1:
                    raise
            size = (fits + fails) // 2
        assert found is not None
        chosen = self.vertical([found], schedule="single")
        if fits == batch_size:
            return chosen
        limit = f"of the {batch_size} samples that the vertical order takes, {fits} fit in one forward and backward"
        return replace(chosen, notes=(limit, *chosen.notes))

    def vertical(self, found: Sequence[tuple[Workload, Search]], schedule: Schedule = "vertical") -> StepPlan:
        workload, best = found[0][0], found[0][1].best
        number, clip = best.num_micro_batches, self.fixed.clip
        again = solver(workload, self.profile, self.budgets, self.fixed)
        settled = settle(
            again,
            number,
            alphas_of(best, self.fixed),
            lambda s: _placed(
                workload,
                number,
                s.ratios,
                s.device_ratios,
                alpha=s.alpha,
                separate=self.profile.separate,
                clip=clip,
                schedule=schedule,
            ),
            lambda placement: _lowered(workload, placement),
            lambda program, placement: self._predicted(program, placement, workload),
            workload,
            self.budgets,
        )
        own = settled.search(found[0][1], again)
        chosen = settled.plan(workload, self.profile, self.budgets, own)
        return replace(
            chosen,
            binding=tuple(binding(own.best, self.profile, self.budgets, again)),
            alternatives=tuple(alternatives([(workload, own), *found[1:]], again, clip=clip)),
            notes=tuple(notes(chosen)),
        )

    def lifetime(self, found: Sequence[tuple[Workload, Search]]) -> StepPlan:
        """The fastest of three: the horizontal plan, the same with what there is room for kept, and ratios for that."""
        workload, plain = found[0][0], self.horizontal(found)
        homes = replace(plain.placement, schedule="lifetime")
        if not has_periods(homes, lambda placement: _lowered(workload, placement)):
            return replace(plain, placement=homes, notes=(NOTHING,))
        room = room_of(self.budgets, workload, self.profile)
        kept = replace(homes, room=room)
        plans = [
            replace(plain, placement=homes),
            replace(plain, placement=kept, prediction=self._predicted(_lowered(workload, kept), kept, workload)),
            self.horizontal(found, room),
        ]
        chosen = min(reversed(plans), key=lambda plan: plan.seconds)
        return replace(chosen, notes=(why(plain.prediction, chosen.prediction),))

    def horizontal(self, found: Sequence[tuple[Workload, Search]], room: Room | None = None) -> StepPlan:
        workload, number = found[0][0], found[0][1].best.num_micro_batches
        separate, clip = self.profile.separate, self.fixed.clip
        alpha = 1.0 if clip else self.fixed.alpha or 0.0

        resident = on_device(self.fixed.ratios)

        def make(ratios: Mapping[str, float], number: int = min(FITTED, number)) -> Placement:
            placement = _placed(
                workload,
                number,
                ratios,
                resident,
                alpha=alpha,
                separate=separate,
                clip=clip,
                schedule="lifetime" if room else "horizontal",
            )
            return replace(placement, room=room)

        ratios = fit(
            make,
            lambda placement: _lowered(workload, placement),
            self.fixed.ratios,
            self.budgets.host_nbytes,
            classes=("gradient", "parameter", "checkpoint", "optimizer"),
        )
        placement = make(ratios, number)
        program = _lowered(workload, placement)
        while host_needed(program) > self.budgets.host_nbytes:
            ratios = lessened(ratios, self.fixed.ratios, self.budgets.host_nbytes, host_needed(program))
            placement = make(ratios, number)
            program = _lowered(workload, placement)
        return StepPlan(
            workload=workload,
            profile=self.profile,
            budgets=self.budgets,
            alpha=alpha,
            ratios=ratios,
            device_ratios=resident,
            placement=placement,
            prediction=self._predicted(program, placement, workload),
        )

    def _predicted(self, program: Program, placement: Placement, workload: Workload) -> Prediction:
        return predict(program, placement, workload, self.profile, host_nbytes=self.budgets.host_nbytes)

    def _searched(self, size: int) -> tuple[Workload, Search]:
        workload, number = self.workload_at(size), self.num_micro_batches
        if self.batch_size is not None and number is None:
            number = -(-self.batch_size // size)
        return workload, search(workload, self.profile, self.budgets, self.fixed, num_micro_batches=number)


def _placed(
    workload: Workload,
    num_micro_batches: int,
    ratios: Mapping[str, float],
    device_ratios: Mapping[str, float],
    *,
    alpha: float,
    separate: bool,
    clip: bool,
    schedule: Schedule = "vertical",
) -> Placement:
    """The placement that ratios and alpha describe, of micro-batches that are all alike."""
    return cut_units(
        workload.sizes,
        ratios,
        alpha=alpha,
        clip=clip,
        separate=separate,
        num_layers=workload.num_layers,
        x_nbytes=(workload.x_nbytes,) * num_micro_batches,
        side_nbytes=(workload.side_nbytes,) * num_micro_batches,
        schedule=schedule,
        gradient_ratio=ratios.get("gradient"),
        device_ratios=device_ratios,
    )


def _lowered(workload: Workload, placement: Placement) -> Program:
    """The program of a step among others. It will not run here, and all passes were tested: it is not verified."""
    return lower(
        StepSpec(
            workload.num_layers,
            len(placement.x_nbytes),
            shape=workload.shape,
            placement=placement,
            late=placement.has_late,
        ),
        verified=False,
    )[-1]


def _micro_batch_sizes(
    batch_size: int | None, micro_batch_size: int | None, num_micro_batches: int | None
) -> Sequence[int]:
    """The sizes to be tried: the one that is given or follows, or those that a batch can be cut into."""
    given = {
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "num_micro_batches": num_micro_batches,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}; it is 1 or more")
    if batch_size is None:
        return [micro_batch_size] if micro_batch_size else MICRO_BATCH_SIZES
    if micro_batch_size is None and num_micro_batches is None:
        return [size for size in MICRO_BATCH_SIZES if batch_size % size == 0]
    size = micro_batch_size or -(-batch_size // (num_micro_batches or 1))
    number = num_micro_batches or -(-batch_size // size)
    if not (number - 1) * size < batch_size <= number * size or size > batch_size:
        raise PlanError(
            f"a batch of {batch_size} cannot be cut into {number} micro-batch{'es' if number > 1 else ''} of {size}: "
            "leave one of batch_size, micro_batch_size and num_micro_batches out"
        )
    return [size]


def _workloads(
    model: str | Path | PretrainedConfig | nn.Module | Workload,
    sequence: int,
    precision: str | None,
    schedule: Schedule = "vertical",
) -> Callable[[int], Workload]:
    """The model's workload at any micro-batch size; a workload given as such is scaled from its own."""
    if isinstance(model, Workload):
        if schedule == "single":
            raise PlanError(
                f"the single schedule cuts each block in two, and the numbers of the workload {model.name} do not tell "
                "where: give the model by name, as a config or as a module"
            )
    else:
        wanted = precision or ("model" if isinstance(model, nn.Module) else "bf16")
        return cache(ModelSpec.of(model, sequence=sequence, precision=wanted, schedule=schedule).workload)
    return partial(_resized, model)


def _resized(workload: Workload, size: int) -> Workload:
    """The same model with other micro-batches: what a sample costs, times their number."""
    factor = size / workload.micro_batch_size
    costs = {
        unit: replace(
            cost,
            forward_flops=cost.forward_flops * factor,
            backward_flops=cost.backward_flops * factor,
            forward_seconds=None if cost.forward_seconds is None else cost.forward_seconds * factor,
            backward_seconds=None if cost.backward_seconds is None else cost.backward_seconds * factor,
            workspace_nbytes=int(cost.workspace_nbytes * factor),
        )
        for unit, cost in workload.costs.items()
    }
    return replace(
        workload,
        costs=costs,
        micro_batch_size=size,
        x_nbytes=int(workload.x_nbytes * factor),
        side_nbytes=int(workload.side_nbytes * factor),
    )


def _budgets(
    profile: Profile, host_memory: int | str | None, device_memory: int | str | None, wear_years: float | None
) -> Budgets:
    host, device = profile.host_nbytes, profile.device_nbytes
    if wear_years is not None and not wear_years > 0:
        raise PlanError(f"wear_years is {wear_years:g}; it is more than 0")
    if wear_years is not None and not profile.ssd_rated_nbytes:
        raise PlanError(f"{profile.name} does not say what its drives are rated for: give its profile ssd_rated_nbytes")
    return Budgets(
        host_nbytes=host if host_memory is None else parse_bytes(host_memory, whole=host, name="host_memory"),
        device_nbytes=(
            device if device_memory is None else parse_bytes(device_memory, whole=device or None, name="device_memory")
        ),
        ssd_nbytes=profile.ssd_nbytes,
        wear_bytes_per_second=profile.ssd_rated_nbytes / (wear_years * SECONDS_PER_YEAR) if wear_years else None,
    )


def _tokens_per_second(found: tuple[Workload, Search]) -> float:
    workload, best = found[0], found[1].best
    return best.num_micro_batches * workload.tokens / best.seconds
