"""opening: the tiers of a model, as they are planned at its first call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.layout import Layout, arrange, stored_types, tied_units
from gs_compile.errors import MemoryBudgetError, OptionError, ResumeError, StepOrderError, StorageError
from gs_compile.model.durable import Trainer, check_alike
from gs_compile.model.trained import param_groups
from gs_compile.options import Options
from gs_compile.planner.cache import PlanCache
from gs_compile.runtime.former import alike
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.optimizer import Recipe
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.storage.folder import folder_in
from gs_compile.runtime.storage.last_commit import commits_in, newest_of
from gs_compile.runtime.storage.manifest import Manifest, StoredParameter
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace

log = logging.getLogger(__name__)
FASTER = 0.99  # of the time with split masters: less is what two timings of the same code differ by


def planned(
    optimizer: Trainer,
    compilation: Compilation,
    models: Sequence[SpecializedModel],
    args: Sequence[Any],
    ranks: Ranks | None = None,
) -> tuple[Layout, tuple[StoredParameter, ...], PlanCache]:
    """The layout of a model, its parameters as commits say them, and its plan.

    Masters are split where nothing else is asked for. What lives on a device goes to the host for its update then, and
    late updates need the old halves: where parameters live there, or nothing fits, whole masters may be better.
    """
    options, split = compilation.options, models[0].split
    parameters = [index for index, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter)]
    groups, clip = param_groups(compilation, models[0], args, optimizer.group_of), optimizer.max_grad_norm is not None

    def found(*, pairs: bool) -> tuple[Layout, tuple[StoredParameter, ...], PlanCache]:
        layout = arrange(split, compilation.captured, stored_types(optimizer.moments, pairs=pairs), groups, ranks=ranks)
        device, tied = next(args[index].device for index in layout.spans), tied_units(split, layout.spans)
        stored = stored_parameters(compilation, layout, args)
        former = {} if ranks else former_plan(options, stored, optimizer)
        cache = PlanCache(options, layout.sizes, models, tied, clip=clip, device=device, ranks=ranks, former=former)
        return layout, stored, cache

    if options.expert.masters or ranks or not any(args[index].dtype == torch.bfloat16 for index in parameters):
        return found(pairs=options.expert.masters != "whole")
    try:
        first = found(pairs=True)
    except MemoryBudgetError as error:
        log.info("with split masters it does not fit, so they are whole: %s", error)
        return found(pairs=False)
    one = first[-1].planner.plan
    if one is None or not any(unit.num_resident for unit in first[-1].placement.units):
        return first
    other = found(pairs=False)
    two = other[-1].planner.plan
    return other if two is None or two.seconds < FASTER * one.seconds else first


def open_tiers(
    planning: PlanCache, layout: Layout, rule: Rule, stored: Sequence[StoredParameter], optimizer: Trainer
) -> Tiers:
    """The tiers of a plan, with their storage if it uses any, and the commit there that is to go on.

    Raises as `Store` and `Tiers` do, and leaves nothing; ResumeError for a commit of something else.
    """
    planner = planning.planner
    options, expert, device, ranks = planner.options, planner.options.expert, planner.device, planner.ranks
    if optimizer.kept.storage and not options.durability:
        raise OptionError(
            'gs_compile.resume() was called, and durability is "off": give durability="step", or a number'
        )
    asked, together = optimizer.kept.ranks, ranks.names if ranks else ()
    if asked is not None and asked != together:
        one, other = (f"ranks {', '.join(map(str, each))}" if each else "one process" for each in (asked, together))
        raise OptionError(
            f"gs_compile.resume looked for the commit of {one}, and by the model's options it is trained by {other}: "
            "give resume the same group= or mesh= as the model"
        )
    with ExitStack() as undo:
        store, same = None, frozenset[str]()
        if planning.uses_ssd:
            store, same = _open_store(planning, layout, stored, optimizer)
            undo.callback(store.close)
        tiers = Tiers(
            planning.placement,
            layout.types,
            Recipe(rule, layout.runs),
            store,
            device,
            trace=Trace(events=expert.trace),
            host_nbytes=planning.host_nbytes,
            num_threads=planner.num_threads,
            ranks=ranks,
            alike=same,
        )
        undo.pop_all()
    return tiers


def _open_store(
    planning: PlanCache, layout: Layout, stored: Sequence[StoredParameter], optimizer: Trainer
) -> tuple[Store, frozenset[str]]:
    """The storage of a plan, and the names of the parts there that stay in their files."""
    options, ranks, same = planning.planner.options, planning.planner.ranks, frozenset[str]()
    anew = optimizer.kept.begins_anew
    looks_in = optimizer.kept.storage or (() if options.resume or anew else None)
    agree = partial(ranks.agree, "the steps that are committed") if ranks and options.durability else None
    if options.durability:
        optimizer.kept.snapshot(optimizer.param_groups)  # before time is lost: it raises for what no commit can keep
    with ExitStack() as undo:
        store = Store(options.storage, durable=options.durability > 0, resume=looks_in, agree=agree)
        undo.callback(store.close)
        if anew:
            store.former = None
        found = store.former.step if store.former else 0
        if optimizer.kept.step not in (None, found):
            one, other = (f"a commit of step {step}" if step else "no commit" for step in (optimizer.kept.step, found))
            named, here = (", ".join(map(str, each)) for each in (looks_in or (), options.storage))
            raise ResumeError(
                f"gs_compile.resume found {one} in {named}, and with {here} there is {other}: give it the directories "
                "that have the newest commit"
            )
        if store.former is None and looks_in is not None and not anew:
            words = ", ".join(map(str, looks_in or options.storage))
            log.info("no durable run has left a commit in %s: this one begins anew", words)
        if store.former is not None:
            log.info("run %s goes on from step %d (%s)", store.run, store.former.step, store.former.written)
            check_alike(store.former, optimizer, stored, planning.placement.world)
            _refuse_what_was_read(store.former, optimizer)
            folders = [drive.folder for drive in store.drives]
            same = alike(store.former, planning.placement, layout.types, stored, folders)
        store.reserve_check(planning.ssd_nbytes - store.nbytes_of(same))
        undo.pop_all()
    return store, same


def _refuse_what_was_read(former: Manifest, optimizer: Trainer) -> None:
    """Raise StepOrderError where the user has been told another number of steps than the run goes on from."""
    found, read = former.step - former.num_skipped, optimizer.num_steps_read
    if optimizer.kept.step is None and read not in (None, found):
        raise StepOrderError(
            f"optimizer.num_steps was read as {read} before the model's first call, and run {former.run} goes on from "
            f"{found} steps: call `run = gs_compile.resume(model, optimizer, storage=...)` before that, and begin with "
            "batch run.step"
        )


def former_plan(options: Options, stored: Sequence[StoredParameter], optimizer: Trainer) -> Mapping[str, Any]:
    """What the newest commit that is to go on, if there is one, has kept of its plan.

    Raises ResumeError where it is of something else, before time is lost with a plan; what else is wrong with it is
    raised where the storage is opened.
    """
    goes_on = options.resume or optimizer.kept.storage
    looks_in = dict.fromkeys((*options.storage, *optimizer.kept.storage)) if goes_on else ()
    with suppress(StorageError):
        newest = newest_of(commits_in(map(folder_in, looks_in)))
        if newest is not None:
            check_alike(newest, optimizer, stored, world=1)
            return newest.plan
    return {}


def stored_parameters(compilation: Compilation, layout: Layout, args: Sequence[Any]) -> tuple[StoredParameter, ...]:
    """Where each parameter is in its unit, as commits say it, in the order of the layout."""
    names = [entry.path for entry in compilation.captured.inputs]
    return tuple(
        StoredParameter(names[index], span.unit, span.offset, tuple(span.shape), bool(args[index].requires_grad))
        for index, span in layout.spans.items()
    )
