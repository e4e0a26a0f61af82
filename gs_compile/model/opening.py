"""opening: the tiers of a model, as they are planned at its first call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from gs_compile.codegen.compiled import Compilation
from gs_compile.codegen.layout import Layout
from gs_compile.errors import OptionError, ResumeError
from gs_compile.model.durable import Trainer, check_alike
from gs_compile.planner.cache import PlanCache
from gs_compile.runtime.former import alike
from gs_compile.runtime.manifest import StoredParameter
from gs_compile.runtime.optimizer import Recipe
from gs_compile.runtime.store import Store
from gs_compile.runtime.stream import has_own_memory
from gs_compile.runtime.threads import update_threads
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace


def open_tiers(
    planning: PlanCache, layout: Layout, recipe: Recipe, stored: Sequence[StoredParameter], optimizer: Trainer
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
    with ExitStack() as undo:
        store, same = None, frozenset[str]()
        if planning.uses_ssd:
            looks_in = optimizer.kept.storage or (() if options.resume else None)
            agree = None
            if planner.ranks is not None and options.durability:
                agree = partial(planner.ranks.agree, "the steps that are committed")
            store = Store(options.storage, durable=options.durability > 0, resume=looks_in, agree=agree)
            undo.callback(store.close)
            found = store.former.step if store.former else None
            if optimizer.kept.step not in (None, found):
                raise ResumeError(
                    f"the commit of step {optimizer.kept.step} was to go on, and that of {found} is there"
                )
            if store.former is not None:
                check_alike(store.former, optimizer, stored, planning.placement.world)
                same = alike(store.former, planning.placement, stored)
            store.reserve_check(planning.ssd_nbytes - store.nbytes_of(same))
        tiers = Tiers(
            planning.placement,
            layout.dtypes,
            recipe,
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


def stored_parameters(compilation: Compilation, layout: Layout, args: Sequence[Any]) -> tuple[StoredParameter, ...]:
    """Where each parameter is in its unit, as commits say it, in the order of the layout."""
    names = [entry.path for entry in compilation.captured.inputs]
    return tuple(
        StoredParameter(names[index], span.unit, span.offset, tuple(span.shape), bool(args[index].requires_grad))
        for index, span in layout.spans.items()
    )
