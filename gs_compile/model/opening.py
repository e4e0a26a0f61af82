"""opening: the tiers of a model, as they are planned at its first call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from gs_compile.codegen.compiled import Compilation
from gs_compile.codegen.layout import Layout
from gs_compile.errors import OptionError, ResumeError, StorageError
from gs_compile.model.durable import Trainer, check_alike
from gs_compile.options import Options
from gs_compile.planner.cache import PlanCache
from gs_compile.runtime.former import alike
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.optimizer import Recipe
from gs_compile.runtime.storage.folder import folder_in
from gs_compile.runtime.storage.manifest import StoredParameter, read
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.stream import has_own_memory
from gs_compile.runtime.threads import update_threads
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace

log = logging.getLogger(__name__)


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
    num_components = len(optimizer.components)
    with ExitStack() as undo:
        store, same = None, frozenset[str]()
        if planning.uses_ssd:
            store, same = _open_store(planning, stored, optimizer)
            undo.callback(store.close)
        tiers = Tiers(
            planning.placement,
            layout.dtypes,
            Recipe(rule, layout.runs, {size.unit: num_components + size.has_master for size in layout.sizes}),
            store,
            device,
            trace=Trace(events=expert.trace),
            host_nbytes=planning.host_nbytes,
            num_threads=expert.threads or update_threads(not has_own_memory(device), ranks.num_here if ranks else 1),
            ranks=ranks,
            alike=same,
        )
        undo.pop_all()
    return tiers


def _open_store(
    planning: PlanCache, stored: Sequence[StoredParameter], optimizer: Trainer
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
            same = alike(store.former, planning.placement, stored, [drive.folder for drive in store.drives])
        store.reserve_check(planning.ssd_nbytes - store.nbytes_of(same))
        undo.pop_all()
    return store, same


def former_plan(options: Options, stored: Sequence[StoredParameter], optimizer: Trainer) -> Mapping[str, Any]:
    """What the newest commit that is to go on, if there is one, has kept of its plan.

    Raises ResumeError where it is of something else, before time is lost with a plan; what else is wrong with it is
    raised where the storage is opened.
    """
    goes_on = options.resume or optimizer.kept.storage
    looks_in = dict.fromkeys((*options.storage, *optimizer.kept.storage)) if goes_on else ()
    with suppress(StorageError):
        commits = [found for each in map(folder_in, looks_in) if each.is_dir() and (found := read(each)) is not None]
        if commits:
            newest = max(commits, key=lambda each: each.step)
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
