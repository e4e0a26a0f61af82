"""run: the plan of a model at hand, made at its first call, with the other ranks if there are any.

What `decide` decides, for the model's own micro-batches. The machine is measured and the layers' code is timed when the
decision needs it. Ranks share one plan: that of the first rank, for the largest batch of all and the smallest budgets.
The log (`gs_compile.planner.run`) says what was decided.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.errors import MemoryBudgetError, NoFitError, OptionError
from gs_compile.machine import DEFAULT_SHARE, available_memory, format_bytes, parse_bytes, usable_memory
from gs_compile.options import Masters, Options
from gs_compile.placement.boundaries import total
from gs_compile.placement.placement import Layout, Placement
from gs_compile.placement.slab import fixed_offsets
from gs_compile.placement.workload import UnitSize, Workload, beside_slab
from gs_compile.planner import in_pieces
from gs_compile.planner.builder import StepBuilder, peak, waiting_nbytes
from gs_compile.planner.cost.known_times import KnownTimes
from gs_compile.planner.cost.timing import LayerLevels, priced, timed
from gs_compile.planner.cost.workload import activations, workload_of
from gs_compile.planner.decide import decide, remedies, undecided
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.measure.machines import Where, remembered_code
from gs_compile.planner.measure.machines import profile as find_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import ENVIRONMENT, named
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import STORES_GRADIENTS
from gs_compile.planner.request import Request
from gs_compile.planner.resumed import ACCUMULATES, NUM_CALLS, as_before, facts_of, fingerprint
from gs_compile.planner.simulate.prices import with_products
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import paragraph
from gs_compile.progress import stage
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import device_of, has_own_memory
from gs_compile.runtime.threads import update_threads

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel

log = logging.getLogger(__name__)

MOST_ROUNDS = 4  # of planning with less: what several calls share is known once it is planned


@dataclass(frozen=True, kw_only=True)
class ModelAtHand:
    """What a plan of a model at hand is made of.

    sizes: of its units, with each kind of masters that may be chosen: "split" first. layouts: of each micro-batch.
    tied: the units that share parameters. clip: the optimizer clips gradients. accumulate: a step is known to have
        several backwards. num_calls: that are between forward and backward at a time, as far as that is known.
        host_nbytes: the budget of host memory, where it is known; None: as the options say.
    where: the device, and what leaves it.
    """

    options: Options
    sizes: Mapping[Masters, tuple[UnitSize, ...]]
    layouts: Sequence[SpecializedModel]
    tied: Set[Any]
    where: Where
    clip: bool
    accumulate: bool = False
    num_calls: int = 1
    host_nbytes: int | None = None
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        return self.where.device


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was decided for a run.

    plan: by this rank, which is the first; None: by another one, or by the run that goes on here.
    masters: of parameters in bf16. values_nbytes: of device memory, without what code computes with where that is
        known; None: nothing is said of it. facts: what commits keep of the plan.
    """

    placement: Placement
    masters: Masters
    values_nbytes: int | None
    plan: StepPlan | None = None
    facts: Mapping[str, Any]


class RunPlanner:
    """The problem of a model at hand: what is asked for, and what is measured when it is needed."""

    def __init__(self, model: ModelAtHand) -> None:
        options, ranks, layouts = model.options, model.ranks, model.layouts
        self.model, self.ranks, self.options = model, ranks, options
        self.request = Request.of(options, clip=model.clip, accumulate=model.accumulate)
        here = ranks.num_here if ranks else 1
        self.num_threads = options.expert.threads or update_threads(not has_own_memory(model.device), here)
        batch = activations(layouts)
        self.beside_nbytes = beside_slab(chain.from_iterable(model.sizes.values()))
        host_nbytes = model.host_nbytes or host_budget(options, here) - self.beside_nbytes
        own = host_nbytes, device_budget(options, model.device), batch
        hosts, devices, batches = zip(*(ranks.agree("the budgets and batches", own) if ranks else [own]), strict=True)
        number = layouts[0].split.num_layers
        sizes = (sum(total(nbytes, number) for several in each.values() for nbytes in several) for each in batches)
        self.batch = max(zip(sizes, batches, strict=True), key=itemgetter(0))[1]
        self.whole_nbytes: int = min(hosts)
        self.whole_device_nbytes: int | None = None if None in devices else min(devices)
        # Of one call, where several are under way at a time.
        self.host_nbytes, self.device_nbytes = self.whole_nbytes, self.whole_device_nbytes
        self.num_calls = model.num_calls
        self.counts = dict[Hashable, Counted]()
        self.levels = self._levels()
        # Of this run: they go with it.
        self.problem, self._priced, self._timed = cache(self._problem), cache(self._price), cache(self._time)

    # What is given ----------------------------------------------------------------------------------------------------

    @property
    def masters(self) -> Masters:
        """Those that are tried first."""
        return next(iter(self.model.sizes))

    def builder(self, masters: Masters) -> StepBuilder:
        """What lays out the steps of the batch that all ranks plan for."""
        model, expert, sizes = self.model, self.options.expert, self.model.sizes[masters]
        shape = model.layouts[0].shape_of(sizes, model.tied, training=True)
        layout = Layout(
            num_layers=model.layouts[0].split.num_layers,
            **self.batch,
            joints=shape.joints,
            separate=has_own_memory(model.device) or expert.separate_device,
            clip=model.clip,
            accumulates=self.request.accumulate,
            schedule=expert.schedule,
            snake=expert.snake,
            world=self.ranks.number if self.ranks else 1,
            durability=self.options.durability,
        )
        return StepBuilder(sizes=sizes, layout=layout, shape=shape)

    def _problem(self, masters: Masters, layer_tokens: int | None = None) -> Problem:
        others = [each for each in self.model.sizes if each != masters]
        has_others = others and masters == self.masters
        tokens, separate = self.model.layouts[0].num_tokens, has_own_memory(self.model.device)
        pieces = in_pieces.sizes(tokens, self.request, separate=separate)
        return Problem(
            builder=self.builder(masters),
            request=self.request,
            machine=lambda: self.profile,
            code=partial(self._priced, masters, layer_tokens),
            saving=self.levels if layer_tokens is None else None,
            host_nbytes=self.host_nbytes,
            device_nbytes=self.device_nbytes,
            will_run=True,
            whole_masters=partial(self.problem, others[0], layer_tokens) if has_others else None,
            in_pieces={each: partial(self.problem, masters, each) for each in pieces if layer_tokens is None},
            layer_tokens=layer_tokens,
            masters=masters,
            counts=self.counts,
        )

    @cached_property
    def profile(self) -> Profile:
        """Measured by all ranks together if none is named; raises `OptionError` for one of another kind of device."""
        with stage("measuring this machine, once"):
            found = find_profile(self.options.machine, self.options.storage, ranks=self.ranks, where=self.model.where)
        if found.separate and not self.builder(self.masters).layout.separate:
            raise OptionError(
                f"machine is {named(self.options.machine)!r}, whose device has memory of its own, and this model is on "
                f"the {self.model.device}: leave machine out, and {ENVIRONMENT} unset, and this one is measured"
            )
        return found

    @property
    def workload(self) -> Workload:
        """What the layers' code costs here, on all tokens at a time."""
        return self._timed(None)

    def _time(self, layer_tokens: int | None) -> Workload:
        """The same on so many tokens at a time, timed once, with the units as they are tried first.

        Raises `NoFitError` where the device has no memory for that.
        """
        layout, builder = self.model.layouts[0].in_pieces(layer_tokens), self.builder(self.masters)
        workload = workload_of(layout, builder.sizes)
        beside = dict if layer_tokens else partial(self.levels.to_compile, workload, last=self.request.saves_all)
        with suppress(torch.OutOfMemoryError):  # whose frames hold what there was room for
            found = timed(workload, layout, self.times, beside)
            return replace(found, shape=builder.shape, world=builder.layout.world)
        needed = format_bytes(workload.workspace_nbytes)
        raise NoFitError(f"the device has no room for what a unit computes with, {needed}: {remedies(self.request)}")

    @cached_property
    def times(self) -> KnownTimes:
        """Of code that ran on this machine before; where figures are given nothing is kept."""
        if named(self.options.machine):
            return KnownTimes()
        total, device = self.ranks.total if self.ranks else 1, self.model.device
        return KnownTimes(remembered_code(self.options.storage, total, device))

    def measure_again(self, profile: Profile | None = None) -> None:
        """Let what was timed be timed again when it is asked for, on this machine or as a profile says."""
        self.times.forget()
        self._timed.cache_clear()
        self._priced.cache_clear()
        self.problem.cache_clear()
        self.levels = self._levels()
        if profile is not None:
            vars(self)["profile"] = profile

    def _levels(self) -> LayerLevels:
        is_compiled = self.options.expert.compiler != "eager"
        return LayerLevels(self.model.layouts, lambda: self.workload, self.times, compiled=is_compiled)

    def _price(self, masters: Masters, layer_tokens: int | None) -> Workload:
        """The workload with what updates of these units take on this machine."""
        sizes = self.model.sizes[masters]
        if not named(self.options.machine):
            sizes = priced(sizes, self.profile, self.num_threads)
        if self.beside_nbytes:
            sizes = with_products(sizes, self.profile)
        is_narrow = any(size.itemsize < size.gradient_itemsize for size in sizes)
        return replace(self._timed(layer_tokens), sizes=sizes, masters=masters if is_narrow else None)

    # What is decided --------------------------------------------------------------------------------------------------

    def plan(self, former: Mapping[str, Any]) -> Planned:
        """The plan of a call that leaves memory for the others that are under way at the same time.

        former: as of `_plan`, which raises what this does.
        """
        for number in range(MOST_ROUNDS):
            if number == MOST_ROUNDS - 1:
                self.host_nbytes = self.whole_nbytes // self.num_calls
            self.problem.cache_clear()
            try:
                found = self._plan(former)
            except MemoryBudgetError as error:
                if self.num_calls == 1:
                    raise
                raise self._refused(error.message) from error
            if self.num_calls == 1 or self._share_out(found, is_last=number >= MOST_ROUNDS - 2):
                return found
        raise self._refused(f"device_memory is {format_bytes(self.device_nbytes or 0)}: give it more")

    def _refused(self, why: str) -> MemoryBudgetError:
        """why: of each of the calls that wait for their backward."""
        host, device = format_bytes(self.whole_nbytes + self.beside_nbytes), self.whole_device_nbytes
        more = f" and device_memory {format_bytes(device)}" if device is not None else ""
        return MemoryBudgetError(
            f"host_memory is {host}{more} for {self.num_calls} calls of the model that wait for their backward at a "
            f"time; for each, {why}"
        )

    def _share_out(self, found: Planned, *, is_last: bool) -> bool:
        """Whether calls by a plan have room beside each other; if not, a call gets less.

        is_last: so much less of the device that as much may wait there as by this plan.
        """
        programs = list(self.builder(found.masters).programs(found.placement))
        fixed_nbytes = fixed_offsets(found.placement).nbytes  # which all share
        self.host_nbytes = fixed_nbytes + (self.whole_nbytes - fixed_nbytes) // self.num_calls
        fits: bool = max(peak(program, "host") for program in programs) <= self.host_nbytes
        if (whole := self.whole_device_nbytes) is None and found.plan is not None and found.plan.is_solved:
            whole = self.whole_device_nbytes = found.plan.problem.budgets.device_nbytes or None
        if whole is None:
            return fits
        had, waiting = self.device_nbytes or whole, waiting_nbytes(programs[0], found.placement)
        most = whole - (self.num_calls - 1) * waiting
        running = had - waiting  # of one call at a time
        if had > most:
            self.device_nbytes = most if is_last else running + (whole - running) // self.num_calls
        return fits and had <= most

    def _plan(self, former: Mapping[str, Any]) -> Planned:
        """The plan of a commit that the run goes on from, if nothing has changed that it was made for; else a new one.

        former: what the commit has of its plan; empty: there is none. Raises `MemoryBudgetError` where not even the
        least fits; it says what is needed.
        """
        for masters, sizes in self.model.sizes.items():
            made_for = self._made_for(sizes, self.request.accumulate)
            budgets = self.whole_nbytes, self.host_nbytes
            if (placement := as_before(self.problem(masters), former, made_for, *budgets)) is not None:
                log.info("the plan of the resumed run is used again: its conditions have not changed")
                values_nbytes = former["values_nbytes"]
                return Planned(placement=placement, masters=masters, values_nbytes=values_nbytes, facts=former)
        found = self._decided() if self.ranks is None else self._together(self.ranks)
        if found.plan is not None:
            log.info("%s", "; ".join([words(found.plan), *self.levels.refusals()]))
        return found

    def _decided(self) -> Planned:
        plan = self._decide()
        masters, accumulate = plan.problem.masters or self.masters, plan.problem.request.accumulate
        facts: dict[str, Any] = {ACCUMULATES: accumulate, NUM_CALLS: self.num_calls}
        values_nbytes = self.device_nbytes if plan.problem.builder.layout.separate else None
        if plan.is_solved:
            values_nbytes = plan.problem.values_nbytes if plan.profile.separate else values_nbytes
            made_for = self._made_for(self.model.sizes[masters], accumulate)
            facts |= facts_of(plan, made_for, self.whole_nbytes, values_nbytes)
        placement = plan.placement
        return Planned(placement=placement, masters=masters, values_nbytes=values_nbytes, plan=plan, facts=facts)

    def _decide(self) -> StepPlan:
        """The plan of what is asked for, as of `Request.or_storing_gradients`."""
        problem = self.problem(self.masters)
        found = self.request.or_storing_gradients(lambda request: decide(problem.asked(request)))
        if found.problem.request.accumulate and not self.request.accumulate:
            log.warning("%s", STORES_GRADIENTS)
        return found

    def _together(self, ranks: Ranks) -> Planned:
        """The first rank's; what has to be measured for it is measured by all."""
        own_pass = self.request.spec.variants is not None
        first = self.problem(self.masters)
        if self.beside_nbytes:  # whose price needs it
            _ = self.profile
        if ranks.from_first("whether to plan", lambda: own_pass or self._needs_figures(first)):
            _ = self.profile
        here: list[Planned] = []

        def decided() -> Planned:
            here.append(self._decided())
            return replace(here[0], plan=None)

        told = ranks.from_first("the plan", decided)
        return here[0] if here else told

    def _needs_figures(self, problem: Problem) -> bool:
        """Whether the plan needs figures of the machine; raises what `_decide` raises without any."""
        return self.request.or_storing_gradients(lambda request: isinstance(undecided(problem.asked(request)), Problem))

    def _made_for(self, sizes: Sequence[UnitSize], accumulate: bool) -> str:
        model, number = self.model, self.ranks.number if self.ranks else 1
        settled = model.clip, accumulate, has_own_memory(model.device), number
        return fingerprint(self.options, sizes, model.layouts, self.builder(self.masters).shape, *settled)


def words(plan: StepPlan) -> str:
    """What a run's log says of its plan."""
    return paragraph(plan) if plan.is_solved else "; ".join(plan.notes)


def host_budget(options: Options, num_here: int = 1) -> int:
    """The bytes of host memory that this process may map. num_here: ranks on this machine, which share what it has."""
    if options.host_memory is None:
        return int(available_memory() * DEFAULT_SHARE / num_here)
    whole = usable_memory() // num_here
    asked = parse_bytes(options.host_memory, whole=whole, name="host_memory")
    if asked > whole:
        words = format_bytes(asked), format_bytes(whole)
        log.warning("host_memory is %s, and this process may use %s: it is killed if it needs more than that", *words)
    return asked


def device_budget(options: Options, device: torch.device) -> int | None:
    """The bytes of device memory that a run is given; None: nothing is said of it."""
    if options.device_memory is None:
        return None
    whole = device_of(device).memory_nbytes()[1]
    return parse_bytes(options.device_memory, whole=whole, name="device_memory")
