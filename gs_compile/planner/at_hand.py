"""at_hand: the input of a run's plan: a model that is in this process, and its code's figures on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.errors import NoFitError, OptionError
from gs_compile.machine import format_bytes
from gs_compile.options import Masters, Options
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.cost.known_times import KnownTimes
from gs_compile.planner.cost.timing import LayerLevels, priced, timed
from gs_compile.planner.cost.workload import workload_of
from gs_compile.planner.measure.machines import Where, code_file
from gs_compile.planner.measure.machines import profile as measured_profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.measure.shipped import ENVIRONMENT, named
from gs_compile.planner.request import Request
from gs_compile.planner.settled import remedies
from gs_compile.planner.simulate.prices import with_products
from gs_compile.progress import stage
from gs_compile.runtime.ranks import Ranks

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import SpecializedModel


@dataclass(frozen=True, kw_only=True)
class ModelAtHand:
    """A model that is in this process, as a plan takes it.

    sizes: of its units, for each kind of masters that may be chosen; "split" comes first. layouts: of each micro-batch.
    tied: the units that share parameters. clip: the optimizer clips gradients. is_provisional: the plan is for an
        evaluation, which shows neither what layers can save nor how large steps are: the first step gets another one.
    accumulate: a step is known to have several backwards. num_calls: the calls between forward and backward at a time,
        as far as that is known. host_nbytes: the budget of host memory, if it is known; None: as the options say.
        rest_nbytes: of a commit's tensors that are not on the tiers.
    where: the device, and the bytes of parameters that will leave it.
    """

    options: Options
    sizes: Mapping[Masters, tuple[UnitSize, ...]]
    layouts: Sequence[SpecializedModel]
    tied: Set[Any]
    where: Where
    clip: bool
    is_provisional: bool = False
    accumulate: bool = False
    num_calls: int = 1
    host_nbytes: int | None = None
    rest_nbytes: int = 0
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        return self.where.device

    @property
    def masters(self) -> Masters:
        """The kind of masters that is tried first."""
        return next(iter(self.sizes))

    @property
    def num_here(self) -> int:
        """The ranks on this machine."""
        return self.ranks.num_here if self.ranks else 1


class Figures:
    """The rates of this machine, and the seconds that a model's code takes on it; each is measured when first needed.

    builder: for the model's units with the masters that are tried first. num_threads: of the optimizer on the CPU.
    """

    def __init__(self, model: ModelAtHand, request: Request, builder: StepBuilder, num_threads: int) -> None:
        self.model, self.request, self.builder, self.num_threads = model, request, builder, num_threads
        compiled = model.options.expert.compiler != "eager"
        self.levels = LayerLevels(model.layouts, lambda: self.workload, self.times, compiled=compiled)
        self.timed, self.priced = cache(self._timed), cache(self._priced)  # cached as long as this object lives

    @cached_property
    def profile(self) -> Profile:
        """The machine's profile, measured by all ranks together if the options name none; raises `OptionError` for one
        of another kind of device.
        """
        options, device = self.model.options, self.model.device
        with stage("measuring this machine, once"):
            profile = measured_profile(options.machine, options.storage, ranks=self.model.ranks, where=self.model.where)
        if profile.separate and not self.builder.layout.separate:
            raise OptionError(
                f"machine is {named(options.machine)!r}, whose device has memory of its own, and this model is on "
                f"the {device}: leave machine out, and {ENVIRONMENT} unset, and this one is measured"
            )
        return profile

    @cached_property
    def times(self) -> KnownTimes:
        """The times of code that ran on this machine before."""
        options, num_ranks = self.model.options, self.model.ranks.total if self.model.ranks else 1
        return KnownTimes(code_file(options.machine, options.storage, num_ranks, self.model.device))

    @property
    def workload(self) -> Workload:
        """The workload, with the layers' code timed on all tokens at a time."""
        return self.timed(None)

    def _timed(self, layer_tokens: int | None) -> Workload:
        """The workload with its code timed on so many tokens at a time, with the masters that are tried first.

        Raises `NoFitError` if the device has no memory for that.
        """
        layout, builder = self.model.layouts[0].in_pieces(layer_tokens), self.builder
        workload = workload_of(layout, builder.sizes)
        beside = dict if layer_tokens else partial(self.levels.to_compile, workload, last=self.request.saves_all)
        with suppress(torch.OutOfMemoryError):  # the error must not live on: its frames hold memory
            with_seconds = timed(workload, layout, self.times, beside)
            return replace(with_seconds, shape=builder.shape, world=builder.layout.world)
        needed = format_bytes(workload.workspace_nbytes)
        raise NoFitError(f"the device has no room for what a unit computes with, {needed}: {remedies(self.request)}")

    def _priced(self, masters: Masters, layer_tokens: int | None) -> Workload:
        """The workload with the cost of these units' updates on this machine."""
        sizes = self.model.sizes[masters]
        if not named(self.model.options.machine):
            sizes = priced(sizes, self.profile, self.num_threads)
        if any(size.products for size in sizes):  # else no figure of this machine is needed, and none is measured
            sizes = with_products(sizes, self.profile)
        is_narrow = any(size.itemsize < size.gradient_itemsize for size in sizes)
        return replace(self.timed(layer_tokens), sizes=sizes, masters=masters if is_narrow else None)
