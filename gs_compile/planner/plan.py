"""plan: given a model, a machine and a batch, where everything lives, how the step runs, and why.

    plan("gpt-65b", machine="a100", sequence=2048)      no weights, no such machine needed
    plan(model, storage="/mnt/nvme0/me")                this machine, measured

A linear program chooses where data lives for every number of micro-batches and every alpha (`lp.solve`), a search
takes the smallest batch that reaches the saturated throughput (`lp.search`), and `decide` plans a step of that batch in
the same way as that of a run; a large step with its micro-batches in a few bundles. Times are the simulator's.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from gs_compile.errors import MemoryBudgetError, NoFitError, PlanError
from gs_compile.options import Masters
from gs_compile.placement.workload import Workload, beside_slab
from gs_compile.planner import in_pieces
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.decide import decide
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.measure.cluster import of_one_rank
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import load, named
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import WORTH_SAYING, explained
from gs_compile.planner.request import Request, States
from gs_compile.planner.simulate.prices import with_products
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.workloads import CapturedWorkloads, GivenWorkloads, Levelled, Workloads

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

MORE = 1e-3  # of throughput: a smaller gain counts as none
MOST_SAMPLES = 1_000_000  # of a micro-batch, so that the bytes of its values fit 64 bits

T = TypeVar("T")


def plan(
    model: str | Path | PretrainedConfig | nn.Module | Workload, request: Request | None = None, **settings: Any
) -> StepPlan:
    """Plan one model on one machine, or on the ranks of several. Given settings are kept, and the rest is chosen.

    model: "gpt-65b", a HuggingFace model type, a config or its path, a module, or a `Workload`, which is complete.
    settings: fields of a `Request`, which override those of `request`; `greedysnake plan --help` describes them.

    The schedule "single" plans one forward and backward over the vertical order's batch, or over as much of it as fits.
    Other schedules are planned for the batch that the vertical order would take, if it fits.

    Raises `PlanError` if settings contradict each other or nothing fits, `MemoryBudgetError` if no program fits.
    """
    request = Request(**settings) if request is None else replace(request, **settings)
    return planner_of(model, request).plan()


def planner_of(model: Any, request: Request, known: Iterable[Planner] = (), *, keeps: bool = False) -> Planner:
    """The planner of a model, which is given as for `plan`, and of a request.

    known: planners of the same model; the capture of one that needs the same code is reused. keeps: workloads of named
    models are cached in the user's cache.
    """
    machine = named(request.machine)
    profile = _this_machine(request) if machine is None else load(machine)
    profile = of_one_rank(profile, request.gpus, request.nodes, request.network)
    if isinstance(model, Workload):
        return Planner(GivenWorkloads(model, request), request, profile)
    captured = CapturedWorkloads(model, request, [each.workloads for each in known], keeps=keeps)
    return Planner(captured, request, profile)


def _this_machine(request: Request) -> Profile:
    from gs_compile.planner.measure.machines import profile  # late: with torch

    return profile(None, request.storage)


@dataclass(frozen=True)
class Planner:
    """From a model, a machine and a request to a problem whose batch is known, and to its plan.

    counts: see `Problem`; all problems made here share it.
    """

    workloads: Workloads
    request: Request
    profile: Profile
    counts: dict[Hashable, Counted] = field(default_factory=dict, compare=False, repr=False)

    def plan(self) -> StepPlan:
        """The plan of the request; if that does not fit, as of `or_storing_gradients`."""
        return self.or_storing_gradients(Planner._plan)

    def _plan(self) -> StepPlan:
        """The plan of the request's schedule, for the batch that is given or that another schedule would take."""
        request, spec = self.request, self.request.spec
        if spec.batch_like is None:
            return self.of_any_batch()
        ratios = replace(request.ratios, gradient=None)
        other = self.asked(schedule=spec.batch_like, ratios=ratios)
        try:
            like = other.searched()[0]
        except NoFitError:
            return self.of_any_batch()
        if spec.whole_batch:
            return self.of_whole_batch(like)
        size, number = like.workload.micro_batch_size, like.best.num_micro_batches
        return self.asked(batch_size=None, micro_batch_size=size, num_micro_batches=number).of_any_batch()

    def problem(self, size: int, masters: Masters | None = None, layer_tokens: int | None = None) -> Problem:
        """The problem of micro-batches of `size` samples. masters, layer_tokens: those chosen."""
        if size > MOST_SAMPLES:
            raise PlanError(f"micro_batch_size is {size}; it is in samples, {MOST_SAMPLES:,} at most")
        workloads, request, profile = self.workloads, self.request, self.profile
        tokens = layer_tokens or request.layer_tokens
        workload = workloads.workload(size, masters, tokens)
        workload = replace(workload, sizes=with_products(workload.sizes, profile))
        budgets = request.budgets(profile)
        asked = {"clip": request.clip, "accumulates": request.accumulate, "schedule": request.schedule}
        layout = {"separate": profile.separate, **asked}
        may_be_whole = workload.masters == "split" and not request.masters and request.ranks == 1
        may_be_cut = workloads.has_pieces and layer_tokens is None
        pieces = in_pieces.sizes(size * request.sequence, request, separate=profile.separate) if may_be_cut else ()
        problem = Problem(
            builder=StepBuilder.of(workload, request.number(size) or 0, durability=request.durability, **layout),
            request=request,
            machine=lambda: profile,
            code=lambda: workload,
            host_nbytes=budgets.host_nbytes - beside_slab(workload.sizes),
            device_nbytes=budgets.device_nbytes or None,
            saving=None if tokens else Levelled(cache(lambda: workloads.levelled(workload))),
            whole_masters=partial(self.problem, size, "whole", layer_tokens) if may_be_whole else None,
            in_pieces={each: partial(self.problem, size, masters, each) for each in pieces},
            layer_tokens=layer_tokens,
            counts=self.counts,
        )
        return problem.wider if request.saves else problem

    def or_storing_gradients(self, made: Callable[[Planner], T]) -> T:
        """The result of `made` for this planner, or for one of `Request.or_storing_gradients`."""
        return self.request.or_storing_gradients(lambda request: made(self.asked(accumulate=request.accumulate)))

    def asked(self, **changes: Any) -> Planner:
        """The planner of the same model and machine for another request."""
        request = replace(self.request, **changes)
        if request == self.request:
            return self
        return replace(self, request=request, workloads=self.workloads.asked(request))

    def searched(self) -> list[Problem]:
        """The problems of the micro-batch sizes that fit, until two larger ones bring nothing. The first is the one
        with the highest throughput, of equals the one with the smallest batch. If nothing fits, less memory is tried.
        """
        refusals: list[NoFitError] = []
        for first in in_pieces.smaller(self.problem(self.request.sizes[0])):
            try:
                return self._searched(first)
            except NoFitError as error:
                refusals.append(error)
        raise refusals[-1]

    def _searched(self, first: Problem) -> list[Problem]:
        """The problems of all sizes, with updates and layers in pieces as in the first one."""
        fitting: list[Problem] = []
        for size in self.request.sizes:
            log.info("micro-batches of %d samples", size)
            problem = self.problem(size, layer_tokens=first.layer_tokens).updated_in(first.layer_updates)
            problem.check()
            try:
                _ = problem.found
            except PlanError:
                if not fitting:
                    raise
                break  # a larger one needs more memory
            fitting.append(problem)
            if len(fitting) > 2 and fitting[-1].tokens_per_second <= fitting[-3].tokens_per_second * (1 + MORE):
                break
        fitting.sort(key=attrgetter("tokens_per_second"), reverse=True)
        least = fitting[0].tokens_per_second * (1 - WORTH_SAYING)
        near = (each for each in fitting if each.tokens_per_second >= least)
        chosen = min(near, key=lambda each: each.workload.tokens * each.best.num_micro_batches)
        return [chosen, *(each for each in fitting if each is not chosen)]

    def of_any_batch(self) -> StepPlan:
        """The plan of the first search whose step program keeps the budgets, otherwise of the smallest batch.

        If the batch is not given, half as many micro-batches are tried before another size.
        """
        fitting: list[Problem] = []
        with suppress(NoFitError):  # but the program of the least may fit
            fitting = self.searched()
        for problem in fitting:
            most = problem.best.num_micro_batches
            for number in (most,) if problem.number or most == 1 else (most, most // 2):
                log.info("simulating %d micro-batches", number)
                try:
                    plan = decide(problem.at(number))
                except MemoryBudgetError:
                    continue
                others = [each for each in fitting if each is not problem]
                return explained(plan, problem.found, others, self.narrower(plan.problem))
        problem = self.problem(self.request.sizes[0])
        return decide(problem.at(problem.number or 1))

    def narrower(self, problem: Problem) -> Iterator[tuple[States, Problem]]:
        """The problem with states in fewer bits, by their type; none if the model is a given workload."""
        workload, request = problem.workload, problem.request
        every = get_args(States)
        for states in every[every.index(request.states) + 1 :]:
            with suppress(PlanError):  # Muon has no states of 8 bits
                workloads, pieces = self.asked(states=states).workloads, problem.layer_tokens or request.layer_tokens
                sizes = workloads.workload(workload.micro_batch_size, workload.masters, pieces).sizes
                yield states, problem.resized(with_products(sizes, self.profile))

    def of_whole_batch(self, other: Problem) -> StepPlan:
        """One forward and backward over the batch of `other`, or over the most samples of it that fit."""
        batch_size = self.request.own_batch_size or other.best.num_micro_batches * other.workload.micro_batch_size
        plans: dict[int, StepPlan] = {}

        def is_too_large(size: int) -> bool:
            problem = self.problem(size)
            try:
                found = problem.found
                plans[size] = explained(decide(problem), found, [])
            except MemoryBudgetError:
                if size == 1:  # the smallest step, or the error with its need
                    plans[size] = decide(problem)
            return size not in plans

        if not is_too_large(batch_size):
            return plans[batch_size]
        fits = bisect_left(range(1, batch_size), True, key=is_too_large)
        taken = f"the {batch_size} samples that the {other.request.schedule} order takes"
        limit = f"of {taken}, {fits} fit in one forward and backward"
        return replace(plans[fits], notes=(limit, *plans[fits].notes))
