"""run: the plan of a model in this process, made at its first call, together with the other ranks if there are any.

`decide` makes it, for the model's own micro-batches. The machine is measured and the layers' code is timed if the
decision needs it. Ranks share the plan of the first rank, for the largest batch of all and the smallest budgets. The
log (`gs_compile.planner.run`) says what was decided.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import DEFAULT_SHARE, available_memory, format_bytes, parse_bytes, usable_memory
from gs_compile.options import Masters, Options
from gs_compile.placement.boundaries import total
from gs_compile.placement.device_memory import waiting_nbytes
from gs_compile.placement.liveness import live_ranges
from gs_compile.placement.placement import Layout, Placement
from gs_compile.placement.slab import fixed_offsets
from gs_compile.placement.workload import UnitSize, beside_slab
from gs_compile.planner import in_pieces
from gs_compile.planner.at_hand import Figures, ModelAtHand
from gs_compile.planner.builder import StepBuilder, planned_peak
from gs_compile.planner.cost.workload import activations
from gs_compile.planner.decide import decide
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.reasons import STORES_GRADIENTS
from gs_compile.planner.request import Request
from gs_compile.planner.resumed import ACCUMULATES, NUM_CALLS, as_before, facts_of, fingerprint
from gs_compile.planner.settled import undecided
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import paragraph
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import device_of, has_own_memory
from gs_compile.runtime.threads import update_threads

log = logging.getLogger(__name__)

MANY = 5000  # pairs of a layer and a micro-batch: a plan lowers and simulates whole steps, 2000 pairs in 10 s and more
MOST_ROUNDS = 4  # of planning with less: what several calls share is only known after planning


class CallBudgets(NamedTuple):
    """What one call of the model may use if several are open at a time; of the device None: no bound."""

    host_nbytes: int
    device_nbytes: int | None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was decided for a run.

    plan: made by this rank, the first; None: it is another rank's, or the resumed run's.
    masters: of parameters in bf16. budgets: of a call. device_nbytes: the device memory, if a budget is given;
        values_nbytes: the same without the workspace of code, if that is known; None: no bound.
    facts: what commits store of the plan.
    """

    placement: Placement
    masters: Masters
    budgets: CallBudgets
    device_nbytes: int | None = None
    values_nbytes: int | None
    plan: StepPlan | None = None
    facts: Mapping[str, Any]


class RunPlanner:
    """Plans a model in this process: its request, its memory budgets, and the measured figures.

    whole_nbytes, whole_device_nbytes: the budgets of all open calls together.
    """

    def __init__(self, model: ModelAtHand) -> None:
        options, ranks, layouts = model.options, model.ranks, model.layouts
        self.model, self.ranks, self.options, self.num_calls = model, ranks, options, model.num_calls
        request = Request.of(options, clip=model.clip, accumulate=model.accumulate)
        self.request = request.recomputing() if model.is_provisional else request
        self.num_threads = options.expert.threads or update_threads(not has_own_memory(model.device), model.num_here)
        self.beside_nbytes = beside_slab(chain.from_iterable(model.sizes.values()))
        host_nbytes = model.host_nbytes or host_budget(options, model.num_here) - self.beside_nbytes
        here = host_nbytes, device_budget(options, model.device), activations(layouts)
        every_rank = ranks.agree("the budgets and batches", here) if ranks else [here]
        hosts, devices, batches = zip(*every_rank, strict=True)
        number = layouts[0].split.num_layers
        sizes = (sum(total(nbytes, number) for several in each.values() for nbytes in several) for each in batches)
        self.batch = max(zip(sizes, batches, strict=True), key=itemgetter(0))[1]
        self.whole_nbytes: int = min(hosts)
        self.whole_device_nbytes: int | None = None if None in devices else min(devices)
        self.counts = dict[Hashable, Counted]()
        self.figures = Figures(model, self.request, self.builder(model.masters), self.num_threads)
        self.problem = cache(self._problem)  # cached as long as this object lives

    def measure_again(self, profile: Profile | None = None) -> None:
        """Forget timings, so that they are measured again when they are needed, on this machine or on a profile's."""
        former = self.figures
        former.times.forget()
        self.figures = Figures(self.model, self.request, former.builder, self.num_threads)
        vars(self.figures)["profile"] = profile or former.profile
        self.problem.cache_clear()

    # What is given ----------------------------------------------------------------------------------------------------

    def builder(self, masters: Masters) -> StepBuilder:
        """The builder of steps with the batch for which all ranks plan."""
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

    def _problem(self, budgets: CallBudgets, masters: Masters, layer_tokens: int | None = None) -> Problem:
        others = [each for each in self.model.sizes if each != masters]
        has_others = others and masters == self.model.masters
        tokens, separate = self.model.layouts[0].num_tokens, has_own_memory(self.model.device)
        pieces = in_pieces.sizes(tokens, self.request, separate=separate) if layer_tokens is None else ()
        figures = self.figures
        return Problem(
            builder=self.builder(masters),
            request=self.request,
            machine=lambda: figures.profile,
            code=partial(figures.priced, masters, layer_tokens),
            saving=figures.levels if layer_tokens is None else None,
            host_nbytes=budgets.host_nbytes,
            device_nbytes=budgets.device_nbytes,
            will_run=True,
            whole_masters=partial(self.problem, budgets, others[0], layer_tokens) if has_others else None,
            in_pieces={each: partial(self.problem, budgets, masters, each) for each in pieces},
            layer_tokens=layer_tokens,
            masters=masters,
            counts=self.counts,
        )

    # What is decided --------------------------------------------------------------------------------------------------

    def plan(self, former: Mapping[str, Any]) -> Planned:
        """The plan of a call that leaves memory for the others that are open at the same time.

        former, and errors: see `_plan`.
        """
        whole_device = self.whole_device_nbytes
        budgets = CallBudgets(self.whole_nbytes, whole_device)
        if self.num_calls == 1:
            return self._plan(budgets, former)
        for number in range(MOST_ROUNDS):
            if number == MOST_ROUNDS - 1:
                budgets = budgets._replace(host_nbytes=self.whole_nbytes // self.num_calls)
            try:
                planned = self._plan(budgets, former)
            except MemoryBudgetError as error:
                raise self._refused(error.message, whole_device) from error
            whole_device = whole_device or planned.device_nbytes
            budgets, fits = self._shared_out(planned, whole_device, is_last=number >= MOST_ROUNDS - 2)
            if fits:
                return replace(planned, budgets=budgets)
        why = f"device_memory is {format_bytes(budgets.device_nbytes or 0)}: give it more"
        raise self._refused(why, whole_device)

    def _refused(self, why: str, device_nbytes: int | None) -> MemoryBudgetError:
        """why: of each of the calls that wait for their backward; device_nbytes: of all of them."""
        host = format_bytes(self.whole_nbytes + self.beside_nbytes)
        more = f" and device_memory {format_bytes(device_nbytes)}" if device_nbytes is not None else ""
        return MemoryBudgetError(
            f"host_memory is {host}{more} for {self.num_calls} calls of the model that wait for their backward at a "
            f"time; for each, {why}"
        )

    def _shared_out(self, planned: Planned, whole_device: int | None, *, is_last: bool) -> tuple[CallBudgets, bool]:
        """The budgets of one call beside the others, by a plan, and whether the plan keeps them.

        whole_device: the device's bytes for all calls. is_last: a call gets so much less that waiting calls may take as
        much as by this plan.
        """
        programs = list(self.builder(planned.masters).programs(planned.placement))
        fixed_nbytes = fixed_offsets(planned.placement).nbytes  # shared by all calls
        budgets = planned.budgets._replace(
            host_nbytes=fixed_nbytes + (self.whole_nbytes - fixed_nbytes) // self.num_calls
        )
        fits: bool = max(planned_peak(program, "host") for program in programs) <= budgets.host_nbytes
        if whole_device is None:
            return budgets, fits
        before, ranges = budgets.device_nbytes or whole_device, live_ranges(programs[0].ops, planned.placement)
        waiting = waiting_nbytes(ranges, programs[0])
        most = whole_device - (self.num_calls - 1) * waiting
        if before <= most:
            return budgets, fits
        running = before - waiting  # of one call at a time
        less = most if is_last else running + (whole_device - running) // self.num_calls
        return budgets._replace(device_nbytes=less), False

    def _plan(self, budgets: CallBudgets, former: Mapping[str, Any]) -> Planned:
        """The plan of the resumed commit, if nothing has changed that it was made for; otherwise a new one.

        former: what the commit stores of its plan; empty: there is none. Raises `MemoryBudgetError` if not even the
        smallest step fits; it says what is needed.
        """
        for masters, sizes in self.model.sizes.items():
            made_for, problem = self._made_for(sizes, self.request.accumulate), self.problem(budgets, masters)
            placement = as_before(problem, former, made_for, self.whole_nbytes, budgets.host_nbytes)
            if placement is not None:
                log.info("the plan of the resumed run is used again: its conditions have not changed")
                values_nbytes = former["values_nbytes"]
                return Planned(
                    placement=placement, masters=masters, budgets=budgets, values_nbytes=values_nbytes, facts=former
                )
        planned = self._decided(budgets) if self.ranks is None else self._together(self.ranks, budgets)
        if planned.plan is not None:
            log.info("%s", "; ".join([words(planned.plan), *self.figures.levels.refusals()]))
        return planned

    def _decided(self, budgets: CallBudgets) -> Planned:
        plan = self._decide(budgets)
        masters, accumulate = plan.problem.masters or self.model.masters, plan.problem.request.accumulate
        facts: dict[str, Any] = {ACCUMULATES: accumulate, NUM_CALLS: self.num_calls}
        values_nbytes = budgets.device_nbytes if plan.problem.builder.layout.separate else None
        if plan.is_solved:
            values_nbytes = plan.problem.values_nbytes if plan.profile.separate else values_nbytes
        if plan.is_solved and not self.model.is_provisional:  # no step may use a provisional plan
            made_for = self._made_for(self.model.sizes[masters], accumulate)
            facts |= facts_of(plan, made_for, self.whole_nbytes, values_nbytes)
        return Planned(
            placement=plan.placement,
            masters=masters,
            budgets=budgets,
            device_nbytes=(plan.problem.budgets.device_nbytes or None) if plan.is_solved else None,
            values_nbytes=values_nbytes,
            plan=plan,
            facts=facts,
        )

    def _decide(self, budgets: CallBudgets) -> StepPlan:
        """The plan of the request; if that does not fit, as of `Request.or_storing_gradients`."""
        problem = self.problem(budgets, self.model.masters)
        layout = problem.builder.layout
        if layout.num_micro_batches * layout.num_layers > MANY:
            sizes = layout.num_micro_batches, layout.num_layers
            log.warning("a step of %d micro-batches in %d layers takes minutes to plan: raise micro_batch_size", *sizes)
        plan = self.request.or_storing_gradients(lambda request: decide(problem.asked(request)))
        if plan.problem.request.accumulate and not self.request.accumulate:
            log.warning("%s", STORES_GRADIENTS)
        return plan

    def _together(self, ranks: Ranks, budgets: CallBudgets) -> Planned:
        """The first rank's plan; all ranks take part in measurements for it."""
        first = self.problem(budgets, self.model.masters)
        if self.beside_nbytes:  # the cost of such updates needs the profile
            _ = self.figures.profile
        if ranks.from_first("whether to plan", lambda: self.request.spec.fills_memory or self._needs_figures(first)):
            _ = self.figures.profile
        here: list[Planned] = []

        def decided() -> Planned:
            here.append(self._decided(budgets))
            return replace(here[0], plan=None)

        of_first = ranks.from_first("the plan", decided)
        return here[0] if here else of_first

    def _needs_figures(self, problem: Problem) -> bool:
        """Whether the plan needs figures of the machine; raises what `_decide` raises without any."""
        return self.request.or_storing_gradients(lambda request: isinstance(undecided(problem.asked(request)), Problem))

    def _made_for(self, sizes: Sequence[UnitSize], accumulate: bool) -> str:
        model, number = self.model, self.ranks.number if self.ranks else 1
        settled = model.clip, accumulate, has_own_memory(model.device), number
        return fingerprint(self.options, sizes, model.layouts, self.builder(model.masters).shape, *settled)


def words(plan: StepPlan) -> str:
    """A plan in words, for a run's log."""
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
    """The bytes of device memory that the options give a run; None: they say nothing."""
    if options.device_memory is None:
        return None
    whole = device_of(device).memory_nbytes()[1]
    return parse_bytes(options.device_memory, whole=whole, name="device_memory")
