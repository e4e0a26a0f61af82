"""planner: given a model, a machine and a batch, where everything lives, how the step runs, and why.

    plan("gpt-65b", machine="a100", sequence=2048)      no weights, no such machine needed
    plan(model, storage="/mnt/nvme0/me")                this machine, measured

A linear program chooses where data lives for every number of micro-batches and every alpha (`passes/place`), a search
takes the smallest batch that reaches the saturated throughput (`passes/search`), and the step's own program is
simulated (`prediction`). What is printed as time is the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gs_compile.config import parse_bytes
from gs_compile.errors import PlanError
from gs_compile.machine import format_bytes
from gs_compile.passes.cut import cut_units
from gs_compile.passes.lower import lower
from gs_compile.passes.place import Budgets, Fixed, Solution, solve
from gs_compile.passes.search import Search, search
from gs_compile.placement import Placement
from gs_compile.prediction import predict, settle
from gs_compile.profile import Profile
from gs_compile.profiles import profile as find_profile
from gs_compile.program import Program
from gs_compile.step_plan import SECONDS_PER_DAY, Alternative, StepPlan
from gs_compile.workload import Workload
from gs_compile.workloads import captured_workload, named

if TYPE_CHECKING:
    from torch import nn

SECONDS_PER_YEAR = 365 * SECONDS_PER_DAY
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # tried where none is given
WORTH_SAYING = 0.01  # a change of the step's time below this is nothing


def plan(
    model: str | Path | nn.Module | Workload,
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
    precision: str = "bf16",
    wear_years: float | None = None,
    schedule: str = "vertical",
) -> StepPlan:
    """The plan for one model on one machine. What is given is kept; the rest is solved around it.

    model: "gpt-65b", a HuggingFace model type, the path of a config, a module, or a `Workload`.
    machine: a name or file of a machine profile; None: this machine, measured once.
    batch_size: samples of a step; without it and `num_micro_batches`, the smallest batch that saturates the machine.
    host_memory, device_memory: bytes, or text as in the backend's options; None: what the machine has.
    wear_years: how long the drives are to last at their rated endurance, training all day.

    Raises `PlanError` where settings contradict each other or the model fits nowhere.
    """
    if batch_size is not None and num_micro_batches is not None and micro_batch_size is None:
        micro_batch_size = -(-batch_size // num_micro_batches)
    profile = find_profile(machine, storage)
    planner = _Planner(
        workload_at=_workloads(model, sequence, precision),
        profile=profile,
        budgets=_budgets(profile, host_memory, device_memory, wear_years),
        fixed=Fixed(alpha=alpha, ratios=dict(ratios or {}), clip=clip),
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
    )
    return planner.best([micro_batch_size] if micro_batch_size else MICRO_BATCH_SIZES)


@dataclass(frozen=True, kw_only=True)
class _Planner:
    workload_at: Callable[[int], Workload]
    profile: Profile
    budgets: Budgets
    fixed: Fixed
    batch_size: int | None = None
    num_micro_batches: int | None = None
    schedule: str = "vertical"

    def best(self, sizes: Sequence[int]) -> StepPlan:
        """The plan of the micro-batch size with the highest throughput; of equals, the smallest batch."""
        found: list[tuple[Workload, Search]] = []
        refused: PlanError | None = None
        for size in sizes:
            if self.batch_size is not None and size > self.batch_size:
                break
            try:
                found.append(self._search(size))
            except PlanError as error:
                refused = refused or error
                break  # a larger one needs more memory
        if not found:
            assert refused is not None
            raise refused
        rate = {id(s): s.best.num_micro_batches * w.tokens / s.best.seconds for w, s in found}
        most = max(rate.values())
        near = [(w, s) for w, s in found if rate[id(s)] >= most * (1 - WORTH_SAYING)]
        workload, result = min(near, key=lambda f: f[0].tokens * f[1].best.num_micro_batches)
        return self._plan(workload, result, found)

    def _search(self, size: int) -> tuple[Workload, Search]:
        workload = self.workload_at(size)
        number = self.num_micro_batches
        if self.batch_size is not None and number is None:
            number = -(-self.batch_size // size)
        return workload, search(workload, self.profile, self.budgets, self.fixed, num_micro_batches=number)

    def _plan(self, workload: Workload, result: Search, found: Sequence[tuple[Workload, Search]]) -> StepPlan:
        number, alpha = result.best.num_micro_batches, result.best.alpha
        solution, placement = settle(
            lambda budgets: solve(workload, self.profile, number, (alpha,), budgets, self.fixed)[0],
            lambda solution: placed(workload, solution, separate=self.profile.separate, clip=self.fixed.clip),
            lambda placement: self._lowered(workload, placement),
            self.budgets,
        )
        return StepPlan(
            workload=workload,
            profile=self.profile,
            budgets=self.budgets,
            solution=solution,
            placement=placement,
            prediction=predict(placement, workload.shape, workload, self.profile, schedule=self.schedule),
            history=tuple(_row(workload, entry) for entry in result.history if entry is not None),
            binding=tuple(self._binding(workload, solution)),
            alternatives=tuple(self._alternatives(workload, solution, found)),
            schedule=self.schedule,
        )

    def _lowered(self, workload: Workload, placement: Placement) -> Program:
        number = len(placement.x_nbytes)
        late = placement.has_late
        return lower(
            workload.num_layers, number, shape=workload.shape, placement=placement, late=late, schedule=self.schedule
        )[-1]

    # Why ------------------------------------------------------------------------------------------------------------

    def _binding(self, workload: Workload, solution: Solution) -> Iterator[str]:
        """What more of each resource would bring, found by solving again with more of it."""
        for words, profile, budgets in self._more():
            again = solve(workload, profile, solution.num_micro_batches, (solution.alpha,), budgets, self.fixed)[0]
            if again is not None:
                gain = solution.seconds / again.seconds - 1
                yield f"{words}: {f'{gain:.0%} faster' if gain > WORTH_SAYING else 'nothing'}"

    def _more(self) -> Iterator[tuple[str, Profile, Budgets]]:
        profile, budgets = self.profile, self.budgets
        host = max(1 << 30, round(budgets.host_nbytes / 8 / 2**30) << 30)
        more = replace(budgets, host_nbytes=budgets.host_nbytes + host)
        yield f"{format_bytes(host)} more host memory", profile, more
        yield (
            "a second SSD like the first",
            _faster(profile, "ssd"),
            replace(budgets, ssd_nbytes=2 * budgets.ssd_nbytes),
        )
        if profile.separate:
            device = max(1 << 30, round(budgets.device_nbytes / 4 / 2**30) << 30)
            more = replace(budgets, device_nbytes=budgets.device_nbytes + device)
            yield f"{format_bytes(device)} more device memory", profile, more
            yield "a link to the device twice as fast", _faster(profile, "h2d", "d2h"), budgets
        yield "an optimizer twice as fast", _faster(profile, "update"), budgets
        yield "twice the computation a second", _faster(profile, "compute"), budgets

    def _alternatives(
        self, workload: Workload, solution: Solution, found: Sequence[tuple[Workload, Search]]
    ) -> Iterator[Alternative]:
        number = solution.num_micro_batches
        tries = [
            (f"{other.num_micro_batches} micro-batches", workload, other)
            for _, result in found
            if result.best is not None
            for other in result.history
            if other is not None and other.num_micro_batches in (number // 2, 2 * number) and _ is workload
        ]
        tries += [(f"micro-batches of {w.micro_batch_size}", w, s.best) for w, s in found if w is not workload]
        if solution.alpha not in (0.0, 1.0):
            tries.append(("no delayed update (alpha 0)", workload, self._again(workload, number, 0.0)))
        bare = replace(self.fixed, ratios={"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0})
        tries.append(("everything on SSD", workload, self._again(workload, number, solution.alpha, bare)))
        rows = [
            Alternative(
                label=label,
                num_micro_batches=other.num_micro_batches,
                micro_batch_size=w.micro_batch_size,
                alpha=other.alpha,
                seconds=other.seconds,
                tokens_per_second=other.num_micro_batches * w.tokens / other.seconds,
            )
            for label, w, other in tries
            if other is not None
        ]
        own = number * workload.tokens / solution.seconds
        yield from sorted(rows, key=lambda row: abs(row.tokens_per_second / own - 1))[:3]

    def _again(self, workload: Workload, number: int, alpha: float, fixed: Fixed | None = None) -> Solution | None:
        return solve(workload, self.profile, number, (alpha,), self.budgets, fixed or self.fixed)[0]


def placed(
    workload: Workload, solution: Solution, *, separate: bool, clip: bool, x_nbytes: Sequence[int] | None = None
) -> Placement:
    """The placement that a solution describes; `x_nbytes`: of each micro-batch, where they are not all alike."""
    number = solution.num_micro_batches
    return cut_units(
        workload.sizes,
        solution.ratios,
        alpha=solution.alpha,
        clip=clip,
        separate=separate,
        num_layers=workload.num_layers,
        x_nbytes=tuple(x_nbytes or [workload.x_nbytes] * number),
        side_nbytes=(workload.side_nbytes,) * number,
    )


def _workloads(model: str | Path | nn.Module | Workload, sequence: int, precision: str) -> Callable[[int], Workload]:
    """The model's workload at any micro-batch size."""
    if isinstance(model, Workload):
        return lambda size: _resized(model, size)
    if isinstance(model, str | Path):
        model = named(str(model))
    return cache(lambda size: captured_workload(model, micro_batch_size=size, sequence=sequence, precision=precision))


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
    if wear_years is not None and not profile.ssd_rated_nbytes:
        raise PlanError(f"{profile.name} does not say what its drives are rated for: give its profile ssd_rated_nbytes")
    return Budgets(
        host_nbytes=host if host_memory is None else parse_bytes(host_memory, whole=host, name="host_memory"),
        device_nbytes=device
        if device_memory is None
        else parse_bytes(device_memory, whole=device, name="device_memory"),
        ssd_nbytes=profile.ssd_nbytes,
        wear_bytes_per_second=profile.ssd_rated_nbytes / (wear_years * SECONDS_PER_YEAR) if wear_years else None,
    )


def _faster(profile: Profile, *lanes: str) -> Profile:
    """The same machine with some of its rates doubled."""
    names = [name for name in vars(profile) if name.startswith(lanes) and name.endswith("_per_second")]
    changed = {name: 2 * getattr(profile, name) for name in names}
    if "compute" in lanes:
        changed["matmul_flops_per_second"] = {k: 2 * rate for k, rate in profile.matmul_flops_per_second.items()}
    return replace(profile, **changed)


def _row(workload: Workload, solution: Solution) -> tuple[int, float, float]:
    number = solution.num_micro_batches
    return number, solution.seconds, number * workload.tokens / solution.seconds
