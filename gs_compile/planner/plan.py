"""plan: given a model, a machine and a batch, where everything lives, how the step runs, and why.

    plan("gpt-65b", machine="a100", sequence=2048)      no weights, no such machine needed
    plan(model, storage="/mnt/nvme0/me")                this machine, measured

A linear program chooses where data lives for every number of micro-batches and every alpha (`lp.solve`), a search
takes the smallest batch that reaches the saturated throughput (`lp.search`), and `decide` plans a step of that batch as
it plans that of a run; of a large step that of a few bundles of micro-batches. What is said of its time is the
simulator's.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gs_compile.errors import MemoryBudgetError, NoFitError, PlanError
from gs_compile.options import Masters
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.workload import Workload, beside_slab
from gs_compile.planner import in_pieces
from gs_compile.planner.builder import SCARCE_UPDATES, StepBuilder
from gs_compile.planner.decide import decide
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.lp.search import Search
from gs_compile.planner.measure.cluster import of_one_rank
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import load, named
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import WORTH_SAYING, explained
from gs_compile.planner.request import Request, States
from gs_compile.planner.simulate.prices import with_products
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.workloads import Levelled, Workloads, workloads_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

MORE = 1e-3  # of throughput: less is nothing

Found = tuple[Problem, Search]


def plan(
    model: str | Path | PretrainedConfig | nn.Module | Workload, request: Request | None = None, **settings: Any
) -> StepPlan:
    """Plan one model on one machine, or on the ranks of several. Given settings are kept, and the rest is chosen.

    model: "gpt-65b", a HuggingFace model type, a config or its path, a module, or a `Workload`, which is complete.
    settings: fields of a `Request`, which override those of `request`.

    The schedule "single" plans one forward and backward over the vertical order's batch, or over as much of it as fits.
    Other schedules are planned for the batch that the vertical order would take, if it fits.

    Raises `PlanError` if settings contradict each other or nothing fits, `MemoryBudgetError` if no program fits.
    """
    request = Request(**settings) if request is None else replace(request, **settings)
    return planner_of(model, request).plan()


def planner_of(model: Any, request: Request, known: Iterable[Planner] = (), *, keeps: bool = False) -> Planner:
    """From a model, as of `plan`, and what is asked of it, to its problems and its plan.

    known: planners of the same model; the capture of one that asks for the same code serves this one too. keeps: what a
    capture of a named model comes to is kept in the user's cache, and taken from there.
    """
    machine = named(request.machine)
    profile = _this_machine(request) if machine is None else load(machine)
    profile = of_one_rank(profile, request.gpus, request.nodes, request.network)
    return Planner(workloads_of(model, request, [each.workloads for each in known], keeps=keeps), request, profile)


def _this_machine(request: Request) -> Profile:
    from gs_compile.planner.measure.machines import profile  # late: with torch

    return profile(None, request.storage)


@dataclass(frozen=True)
class Planner:
    """A model, a machine, and what is asked for: from there to a problem whose batch is known, and its decision."""

    workloads: Workloads
    request: Request
    profile: Profile
    layer_updates: int = 1
    layer_tokens: int | None = None

    def plan(self) -> StepPlan:
        """The plan of what is asked for, or of `Request.storing_gradients` where that alone fits."""
        try:
            return self._plan()
        except (NoFitError, MemoryBudgetError):
            if self.request.storing_gradients is not None:
                with suppress(NoFitError, MemoryBudgetError):
                    return self.asked(accumulate=True)._plan()
            raise

    def _plan(self) -> StepPlan:
        """The plan of the request's schedule, for the batch that is given or that another schedule would take."""
        request, spec = self.request, SCHEDULES[self.request.schedule]
        if spec.batch_like is None:
            return self.of_any_batch()
        ratios = replace(request.ratios, gradient=None)
        other = self.asked(schedule=spec.batch_like, ratios=ratios)
        try:
            problem, search = other.searched()[0]
        except NoFitError:
            return self.of_any_batch()
        if spec.whole_batch:
            return self.of_whole_batch(problem, search)
        size, number = problem.workload.micro_batch_size, search.best.num_micro_batches
        return self.asked(batch_size=None, micro_batch_size=size, num_micro_batches=number).of_any_batch()

    def problem(self, size: int, counted: Counted | None = None, masters: Masters | None = None) -> Problem:
        """That of micro-batches of `size` samples, for no number of them yet."""
        workloads, request, profile = self.workloads, self.request, self.profile
        layer_tokens = self.layer_tokens or request.layer_tokens
        workload = workloads.workload(size, masters, layer_tokens)
        workload = replace(workload, sizes=with_products(workload.sizes, profile))
        budgets = request.budgets(profile)
        if counted and not counted.is_of(workload):
            counted = None
        asked = {"clip": request.clip, "accumulates": request.accumulate, "schedule": request.schedule}
        layout = {"separate": profile.separate, **asked}
        may_be_whole = workload.masters == "split" and not request.masters and request.ranks == 1
        found = Problem(
            builder=StepBuilder.of(workload, 0, durability=request.durability, **layout),
            request=request,
            machine=lambda: profile,
            code=lambda: workload,
            host_nbytes=budgets.host_nbytes - beside_slab(workload.sizes),
            device_nbytes=budgets.device_nbytes or None,
            saving=None if layer_tokens else Levelled(cache(lambda: workloads.levelled(workload))),
            whole_masters=partial(self.problem, size, masters="whole") if may_be_whole else None,
            in_pieces={each: partial(self.cut(each).problem, size, masters=masters) for each in self._pieces(size)},
            layer_tokens=self.layer_tokens,
            layer_updates=self.layer_updates,
            counted=counted,
        )
        return found.wider if request.saves else found

    @property
    def _is_whole(self) -> bool:
        """Whether a step has one micro-batch, which is the batch."""
        return SCHEDULES[self.request.schedule].whole_batch

    @property
    def _sizes(self) -> Sequence[int]:
        """Of micro-batches, to be tried."""
        batch_size = self.request.own_batch_size if self._is_whole else None
        return [batch_size] if batch_size else self.request.sizes

    def _number(self, size: int) -> int | None:
        """Of micro-batches of so many samples, where it is known."""
        return 1 if self._is_whole else self.request.number(size)

    def asked(self, **changes: Any) -> Planner:
        """The same model on the same machine, asked for something else."""
        request = replace(self.request, **changes)
        return replace(self, request=request, workloads=self.workloads.asked(request))

    def cut(self, size: int) -> Planner:
        """With layers that run on so many tokens at a time."""
        return replace(self, layer_tokens=size)

    def _pieces(self, size: int) -> Sequence[int]:
        """That may be chosen for micro-batches of so many samples."""
        is_settled = self.layer_tokens or self.request.layer_tokens is not None
        if is_settled or not self.workloads.has_pieces or not self.profile.separate:
            return ()
        return in_pieces.sizes(size * self.request.sequence)

    def smaller(self, size: int, counted: dict[int, Counted] | None = None) -> Iterator[Planner]:
        """For micro-batches of so many samples, itself, and what takes less and less memory: with updates in pieces,
        and with layers, where it is the device's that is short. counted: as in `fit.does_fit`.
        """
        scarce, counted = replace(self, layer_updates=SCARCE_UPDATES), {} if counted is None else counted
        yield self
        yield scarce
        if pieces := self._pieces(size):
            problem = scarce.problem(size, counted.get(SCARCE_UPDATES))
            counted[SCARCE_UPDATES] = problem.formulas.counted
            for each in pieces if in_pieces.may_help(problem) else ():
                yield self.cut(each)
                yield scarce.cut(each)

    def searched(self) -> list[Found]:
        """The micro-batch sizes that fit, until two larger ones have brought nothing; first the one with the highest
        throughput, of equals the smallest batch. Where nothing fits so, what takes less memory is tried.
        """
        refusals: list[NoFitError] = []
        for planner in self.smaller(self._sizes[0]):
            try:
                return planner._searched()
            except NoFitError as error:
                refusals.append(error)
        raise refusals[-1]

    def _searched(self) -> list[Found]:
        found: list[Found] = []
        counted: Counted | None = None
        for size in self._sizes:
            log.info("micro-batches of %d samples", size)
            problem = self.problem(size, counted)
            problem.check()
            try:
                found.append((problem, problem.search(self._number(size))))
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

    def of_any_batch(self) -> StepPlan:
        """The plan of the first search whose program keeps the budgets, else of the smallest batch.

        Where nobody has given the batch, half as many micro-batches are tried before another size.
        """
        found: list[Found] = []
        with suppress(NoFitError):  # but the program of the least may fit
            found = self.searched()
        for problem, search in found:
            most = search.best.num_micro_batches
            is_given = self._number(problem.workload.micro_batch_size) is not None
            for number in (most,) if is_given or most == 1 else (most, most // 2):
                try:
                    tried = search if number == most else problem.search(number)
                    log.info("simulating %d micro-batches", number)
                    made = self.decided(problem, number, tried)
                except (MemoryBudgetError, NoFitError):
                    continue
                others = [each for each in found if each[0] is not problem]
                return explained(made, tried, others, self.narrower(made.problem))
        size = self._sizes[0]
        return self.decided(self.problem(size), self._number(size) or 1)

    def narrower(self, problem: Problem) -> Iterator[tuple[States, Problem]]:
        """The problem with states in fewer bits, by their type; none of what says itself what its states take."""
        own, request = problem.workload, problem.request
        every = get_args(States)
        for states in every[every.index(request.states) + 1 :]:
            with suppress(PlanError):  # Muon has no states of 8 bits
                workloads, pieces = self.asked(states=states).workloads, problem.layer_tokens or request.layer_tokens
                found = workloads.workload(own.micro_batch_size, own.masters, pieces)
                yield states, problem.resized(with_products(found.sizes, self.profile))

    def decided(self, problem: Problem, number: int, found: Search | None = None) -> StepPlan:
        """The decision on a batch of so many micro-batches. found: by the linear program, of whole updates or not."""
        whole = problem.updated_in(1)
        known = found if whole is problem else None
        return decide(whole.of().at(number), self.request, known)

    def of_whole_batch(self, other: Problem, search: Search) -> StepPlan:
        """One forward and backward over the batch of `other`, or over the most samples of it that fit."""
        batch_size = self.request.own_batch_size or search.best.num_micro_batches * other.workload.micro_batch_size
        plans: dict[int, StepPlan] = {}

        def is_too_large(size: int) -> bool:
            problem = self.problem(size)
            try:
                found = problem.search(1)
                plans[size] = explained(self.decided(problem, 1, found), found, [])
            except (NoFitError, MemoryBudgetError):
                if size == 1:  # the least, or what it needs
                    plans[size] = self.decided(problem, 1)
            return size not in plans

        if not is_too_large(batch_size):
            return plans[batch_size]
        fits = bisect_left(range(1, batch_size), True, key=is_too_large)
        taken = f"the {batch_size} samples that the {other.request.schedule} order takes"
        limit = f"of {taken}, {fits} fit in one forward and backward"
        return replace(plans[fits], notes=(limit, *plans[fits].notes))


def _tokens_per_second(found: Found) -> float:
    return found[0].workload.tokens * found[1].best.throughput
