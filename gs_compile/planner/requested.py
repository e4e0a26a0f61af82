"""requested: what is asked of a plan, as what the planner works with: sizes of micro-batches, workloads, budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gs_compile.errors import PlanError
from gs_compile.machine import parse_bytes
from gs_compile.options import Masters
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.shards import shared
from gs_compile.placement.workload import Workload
from gs_compile.planner.cost.workload import STATES, ModelSpec
from gs_compile.planner.lp.limits import Budgets
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import scaled
from gs_compile.planner.saved import bare
from gs_compile.planner.step_plan import SECONDS_PER_DAY
from gs_compile.program.ir import Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SECONDS_PER_YEAR = 365 * SECONDS_PER_DAY
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # tried where none is given


def micro_batch_sizes(
    batch_size: int | None, micro_batch_size: int | None, num_micro_batches: int | None
) -> Sequence[int]:
    """The sizes to be tried: the one that is given or follows, or those that a batch can be cut into."""
    given = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "num_micro_batches": num_micro_batches}
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


def workloads(
    model: str | Path | PretrainedConfig | nn.Module | Workload,
    sequence: int,
    precision: str | None,
    world: int,
    masters: Masters | None = None,
    states: str = "fp32",
) -> Callable[..., Workload]:
    """One rank's share of the model at any micro-batch size, with or without the levels of its layers; a workload given
    as such is scaled from its own.
    """

    if isinstance(model, Workload) and (masters or states != "fp32"):
        raise PlanError(f"the workload {model.name} says itself what its states have: leave masters and states out")
    if states not in STATES:
        raise PlanError(f"states are {states!r}; there are {', '.join(STATES)}")

    @cache
    def spec(schedule: Schedule) -> ModelSpec:
        assert not isinstance(model, Workload)
        wanted = precision or ("model" if isinstance(model, nn.Module) else "bf16")
        more: dict[str, Any] = {"precision": wanted, "masters": masters, "states": states}
        return ModelSpec.of(model, sequence=sequence, schedule=schedule, **more)

    @cache
    def workload(size: int, *, schedule: Schedule = "vertical", levels: bool = False) -> Workload:
        cut = SCHEDULES[schedule].block_cut
        if not isinstance(model, Workload):
            alike = next(name for name, each in SCHEDULES.items() if each.block_cut is cut)  # captured once for all
            found = spec(alike)
            return found.levelled(workload(size, schedule=schedule)) if levels else shared(found.workload(size), world)
        if cut:
            raise PlanError(
                f"the {schedule} schedule cuts each block in {cut.parts}, and the numbers of the workload {model.name} "
                "do not tell where: give the model by name, as a config or as a module"
            )
        times = size / model.micro_batch_size
        whole = replace(scaled(model, code=times, activations=times, workspace=times), micro_batch_size=size)
        return shared(whole if levels else bare(whole), world)

    return workload


def budgets(
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
