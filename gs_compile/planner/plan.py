"""planner: given a model, a machine and a batch, where everything lives, how the step runs, and why.

    plan("gpt-65b", machine="a100", sequence=2048)      no weights, no such machine needed
    plan(model, storage="/mnt/nvme0/me")                this machine, measured

A linear program chooses where data lives for every number of micro-batches and every alpha (`lp.solve`), a search
takes the smallest batch that reaches the saturated throughput (`lp.search`), and the step's own program is simulated
(`refine`): of a large step that of a few bundles of micro-batches. What is said of its time is the simulator's.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import nn

from gs_compile.errors import MemoryBudgetError, NoFitError, PlanError
from gs_compile.options import Masters, Options, Recompute
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.workload import Workload
from gs_compile.planner.builder import SCARCE_UPDATES, StepBuilder
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.lp.limits import Budgets, Fixed
from gs_compile.planner.lp.search import Saturation, Search
from gs_compile.planner.measure.cluster import of_one_rank, samples_of_one_rank
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import WORTH_SAYING, explained
from gs_compile.planner.refine import planned
from gs_compile.planner.requested import budgets, micro_batch_sizes, workloads
from gs_compile.planner.saved import faster, with_levels
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.variants import with_variant
from gs_compile.program.ir import Schedule

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

MORE = 1e-3  # of throughput: less is nothing

Found = tuple[Problem, Search]


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
    saturation: Saturation = "relative",
    gpus: int = 1,
    nodes: int = 1,
    network: str | float | None = None,
    durability: Literal["off", "step"] | int = "off",
    recompute: Recompute = "auto",
    masters: Masters | None = None,
    states: str = "fp32",
) -> StepPlan:
    """The plan for one model on one machine, or for ranks of several. What is given is kept, the rest solved around it.

    model: "gpt-65b", a HuggingFace model type, a config or its path, a module, or a `Workload`, which says all itself.
    machine: a name or file of a machine profile; None: this machine, measured once.
    batch_size: samples of a step, in whole micro-batches; without it and `num_micro_batches`, as few as saturate it.
    precision: "bf16" with fp32 masters, or "model", the model's own; None: bf16 for what has no weights yet.
    host_memory, device_memory, durability, recompute, masters: as in the backend's options; None: what the machine has.
    wear_years: how long the drives are to last at their rated endurance, training all day.
    schedule: "single" plans one forward and backward over the vertical order's batch, or over as much of it as fits;
        "horizontal" plans the baseline, for the batch that the vertical order would take where that fits;
        "lifetime" the same step, with what is inactive kept where it is as far as the budgets have room for it.
    saturation: a batch is large enough where more micro-batches bring less than a tenth of what they are more, or, with
        "paper", where one more brings less than 1 %. states: of AdamW, "fp32", "bf16" or "8bit" for its moments.
    gpus, nodes, network: ranks of a node, nodes, bytes a second that a node receives; `batch_size` is of all ranks.

    Raises `PlanError` where settings contradict each other or nothing fits, `MemoryBudgetError` where no program does.
    """
    profile = of_one_rank(find_profile(machine, storage), gpus, nodes, network)
    batch_size = samples_of_one_rank(batch_size, gpus * nodes)
    return _Request(
        schedule=schedule,
        workload_of=workloads(model, sequence, precision, gpus * nodes, masters, states),
        profile=profile,
        budgets=budgets(profile, host_memory, device_memory, wear_years),
        fixed=Fixed(alpha=alpha, ratios=dict(ratios or {}), clip=clip, device=profile.separate, recompute=recompute),
        batch_size=batch_size,
        num_micro_batches=num_micro_batches,
        saturation=saturation,
        durability=Options.of({"durability": durability}).durability,
    ).made(micro_batch_sizes(batch_size, micro_batch_size, num_micro_batches))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is asked for, whatever the micro-batch size."""

    schedule: Schedule
    workload_of: Callable[..., Workload]
    profile: Profile
    budgets: Budgets
    fixed: Fixed
    batch_size: int | None
    num_micro_batches: int | None
    saturation: Saturation
    layer_updates: int = 1
    durability: int = 0

    def made(self, sizes: Sequence[int]) -> StepPlan:
        """The plan of the schedule; with updates in pieces, which takes less memory, where no other fits.

        sizes: of micro-batches, to be tried.
        """
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule is {self.schedule!r}; there are {' and '.join(SCHEDULES)}")
        with suppress(NoFitError, MemoryBudgetError):
            return self._made(sizes)
        return replace(self, layer_updates=SCARCE_UPDATES)._made(sizes)

    def _made(self, sizes: Sequence[int]) -> StepPlan:
        spec = SCHEDULES[self.schedule]
        if spec.batch_like is None:
            return self.planned(sizes)
        other = replace(self, schedule=spec.batch_like)
        return self.whole(other, sizes) if spec.whole_batch else self.baseline(other, sizes)

    def problem(self, size: int, counted: Counted | None = None) -> Problem:
        fixed, schedule = self.fixed, self.schedule
        workload = self.workload_of(size, schedule=schedule, levels=fixed.saves)
        if SCHEDULES[schedule].as_published and not fixed.clip:
            fixed = replace(fixed, alpha=fixed.alpha or 0.0)
        if counted and (counted.workload.sizes, counted.workload.shape) != (workload.sizes, workload.shape):
            counted = None
        if fixed.saves and not workload.num_levels:
            raise PlanError(f"the layers of {workload.name} have nothing to save that they could compute again")
        builder = StepBuilder.of(workload, 0, separate=self.profile.separate, clip=fixed.clip, schedule=schedule)
        return Problem(
            workload=workload,
            profile=self.profile,
            budgets=self.budgets,
            fixed=fixed,
            builder=replace(builder, layer_updates=self.layer_updates, durability=self.durability),
            counted=counted,
        )

    def faster(self, problem: Problem, made: StepPlan) -> tuple[Problem, StepPlan]:
        """With saved activations, where that is faster."""

        def saving(problem: Problem) -> Problem:
            size = problem.workload.micro_batch_size
            return with_levels(problem, self.workload_of(size, schedule=self.schedule, levels=True))

        return faster(problem, made, saving)

    def number(self, size: int) -> int | None:
        """Micro-batches, where they are given or follow."""
        if self.batch_size is None or self.num_micro_batches is not None:
            return self.num_micro_batches
        return -(-self.batch_size // size)

    def searched(self, sizes: Sequence[int]) -> list[Found]:
        """The micro-batch sizes that fit, until two larger ones have brought nothing; first the one with the highest
        throughput, of equals the smallest batch.
        """
        found: list[Found] = []
        counted: Counted | None = None
        for size in sizes:
            log.info("micro-batches of %d samples", size)
            problem = self.problem(size, counted)
            try:
                found.append((problem, problem.search(self.number(size), self.saturation)))
            except PlanError:
                if not found:
                    raise
                break  # a larger one needs more memory
            counted = problem.formulas.counted
            if len(found) > 2 and _tokens_per_second(found[-1]) <= _tokens_per_second(found[-3]) * (1 + MORE):
                break
        found.sort(key=_tokens_per_second, reverse=True)
        near = (each for each in found if _tokens_per_second(each) >= _tokens_per_second(found[0]) * (1 - WORTH_SAYING))
        chosen = min(near, key=lambda each: each[0].workload.tokens * each[1].best.num_micro_batches)
        return [chosen, *(each for each in found if each is not chosen)]

    def planned(self, sizes: Sequence[int]) -> StepPlan:
        """The plan of the first search whose program keeps the budgets.

        Where nobody has given the batch, half as many micro-batches are tried before another size.
        """
        found, refusal = self.searched(sizes), None
        for problem, search in found:
            most = search.best.num_micro_batches
            is_given = self.number(problem.workload.micro_batch_size) is not None
            for number in (most,) if is_given or most == 1 else (most, most // 2):
                try:
                    tried = search if number == most else problem.search(number)
                    log.info("simulating %d micro-batches", number)
                    chosen, made = self.faster(problem, planned(problem, tried))
                except MemoryBudgetError as error:
                    refusal = error
                    continue
                whole = explained(chosen, made, tried, [each for each in found if each[0] is not problem])
                if not SCHEDULES[self.schedule].fills_memory:
                    return whole
                kept = with_variant(chosen, whole)
                return replace(kept, notes=(*kept.notes, *made.notes))
        assert refusal is not None, "there is a search"
        raise refusal

    def whole(self, other: _Request, sizes: Sequence[int]) -> StepPlan:
        """One forward and backward over the batch of `other`, or over the most samples of it that fit."""
        problem, search = other.searched(sizes)[0]
        batch_size = self.batch_size or search.best.num_micro_batches * problem.workload.micro_batch_size
        plans: dict[int, StepPlan] = {}

        def is_too_large(size: int) -> bool:
            problem = self.problem(size)
            try:
                found = problem.search(1)
                problem, made = self.faster(problem, planned(problem, found))
                plans[size] = explained(problem, made, found, [])
            except (NoFitError, MemoryBudgetError):
                if size == 1:
                    raise
            return size not in plans

        if not is_too_large(batch_size):
            return plans[batch_size]
        fits = bisect_left(range(1, batch_size), True, key=is_too_large)
        limit = (
            f"of the {batch_size} samples that the {other.schedule} order takes, {fits} fit in one forward and backward"
        )
        return replace(plans[fits], notes=(limit, *plans[fits].notes))

    def baseline(self, other: _Request, sizes: Sequence[int]) -> StepPlan:
        """The plan for the batch that `other` takes, where that fits."""
        try:
            problem, search = other.searched(sizes)[0]
        except NoFitError:
            return self.planned(sizes)
        same = replace(self, batch_size=None, num_micro_batches=search.best.num_micro_batches)
        return same.planned([problem.workload.micro_batch_size])


def _tokens_per_second(found: Found) -> float:
    return found[0].workload.tokens * found[1].best.throughput
