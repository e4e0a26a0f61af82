"""opening: the tiers of a model, as they are planned at its first call."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from gs_compile.codegen.layout import Layout
from gs_compile.options import Options
from gs_compile.planner.cache import PlanCache
from gs_compile.runtime.optimizer import Recipe
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.store import Store
from gs_compile.runtime.stream import has_own_memory
from gs_compile.runtime.threads import update_threads
from gs_compile.runtime.tiers import Tiers
from gs_compile.runtime.trace import Trace


def open_tiers(
    planning: PlanCache, options: Options, layout: Layout, recipe: Recipe, device: torch.device, ranks: Ranks | None
) -> Tiers:
    """The tiers of a plan, with their storage if it uses any; raises as `Store` and `Tiers` do, and leaves nothing."""
    expert = options.expert
    with ExitStack() as undo:
        store = Store(options.storage) if planning.uses_ssd else None
        if store is not None:
            undo.callback(store.close)
            store.reserve_check(planning.ssd_nbytes)
        tiers = Tiers(
            planning.placement,
            layout.dtypes,
            recipe,
            store,
            device,
            trace=Trace(events=expert.trace),
            host_nbytes=planning.host_nbytes,
            num_threads=expert.threads or update_threads(beside_compute=not has_own_memory(device)),
            ranks=ranks,
        )
        undo.pop_all()
    return tiers
