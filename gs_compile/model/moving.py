"""moving: parameters go to the tiers at a model's first call, and what they were at first stays until a step has ended.

[1] The file that `init_on_storage` has made has the first value; a value that was in memory stays there.
[2] Where that memory is counted on, the value goes to a file of its own.

So whatever ends the first step, the model has its values.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSet
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gs_compile.machine import available_memory
from gs_compile.model.mapped import directory, leave_memory, trim
from gs_compile.model.parameter_store import ParameterStore
from gs_compile.model.residency import Residency, adopt, hand_back, is_offloaded, residency_of, stash
from gs_compile.model.rows import copied, whole
from gs_compile.progress import stage
from gs_compile.runtime.homes import Slice
from gs_compile.runtime.stream import is_in_host_memory


def move_in(store: ParameterStore, spans: Mapping[nn.Parameter, Slice], host_nbytes: int, folder: Path) -> None:
    """Move values into the tiers. What fails midway stashes again what it has moved, and ends the tiers.

    host_nbytes: what the tiers may map; where there is less besides the model, first values go to files in `folder`.
    """
    ranks = store.tiers.setting.ranks
    copies = sum(4 * each.numel() for each in spans if not is_in_host_memory(each))  # they come on top
    fits = host_nbytes * (ranks.num_here if ranks else 1) + copies <= available_memory()
    with stage("moving parameters", len(spans)) as advance, ExitStack() as undo:
        undo.callback(store.tiers.close)
        for parameter, span in spans.items():
            if not is_offloaded(parameter):
                stash(parameter)
            place = residency_of(parameter)
            stashed = place.stashed_value(parameter)
            values = whole(stashed).cpu()
            if ranks and not isinstance(stashed, DTensor):
                ranks.broadcast(values, 0)
            store.tiers.fill(span, values)
            leave_memory(values.untyped_storage())  # of a file
            adopt(parameter, store, span, stashed if place.folder else _kept(values, None if fits else folder))
            undo.callback(hand_back, parameter)
            advance()
        store.tiers.fill_up()
        undo.pop_all()
    trim()  # of what capturing and converting have left


def let_go(places: MutableSet[Residency]) -> None:
    """First values end: a step has ended, and nobody goes back to them."""
    while places:
        places.pop().stash = None
    trim()


def _kept(values: Tensor, folder: Path | None) -> Tensor:
    """A value that was in memory: there [1], or in a file [2]."""
    return values if folder is None else copied(values, values.dtype, directory(folder))
