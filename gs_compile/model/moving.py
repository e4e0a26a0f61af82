"""moving: parameters move to the tiers at a model's first call, and first values are kept until a step has ended.

[1] A first value stays in the file that `init_on_storage` has made, or in memory if it was there.
[2] If the plan needs that memory, the value goes to a file of its own.

So the model has its values whatever ends the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gs_compile.machine import available_memory
from gs_compile.model.files import copied, directory, leave_memory, trim, whole
from gs_compile.model.parameter_store import ParameterStore, pieces_of
from gs_compile.model.residency import adopt, hand_back, is_offloaded, residency_of, stash
from gs_compile.progress import stage
from gs_compile.runtime.former import FormerHomes
from gs_compile.runtime.rest import read_rest
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.storage.stored import StoredParameter
from gs_compile.runtime.stream import is_in_host_memory
from gs_compile.runtime.tiers import Tiers

Bring = Callable[[nn.Parameter, Slice], Tensor | None]  # a value to the tiers; gives what stays as its first one


def move_in(store: ParameterStore, spans: Mapping[nn.Parameter, Slice], host_nbytes: int, folder: Path) -> None:
    """Move values into the tiers. If that fails midway, the parameters are stashed as before.

    host_nbytes: what the tiers may map; if memory has less room beside the model, first values go to files in `folder`.
    """
    ranks = store.tiers.setting.ranks
    copies = sum(4 * each.numel() for each in spans if not is_in_host_memory(each))  # they come on top
    fits = host_nbytes * (ranks.num_here if ranks else 1) + copies <= available_memory()

    def bring(parameter: nn.Parameter, span: Slice) -> Tensor:
        stashed = residency_of(parameter).stashed_value(parameter)
        values = whole(stashed).cpu()
        if ranks and not isinstance(stashed, DTensor):
            ranks.broadcast(values := values.contiguous(), 0)
        store.tiers.fill(span, residency_of(parameter).as_stashed(parameter, values))
        leave_memory(values.untyped_storage())  # of a file
        if residency_of(parameter).folder is not None:
            return stashed
        return values if fits else copied(values, values.dtype, directory(folder))  # [1] or [2]

    _move(store, spans, "moving parameters", bring)
    trim()  # of what capturing and converting have left


def take_up(
    store: ParameterStore, spans: Mapping[nn.Parameter, Slice], stored: Sequence[StoredParameter]
) -> dict[str, Tensor]:
    """Bring values and states from the resumed commit to the tiers, by the names of `stored`.

    Returns the commit's tensors that are not on the tiers. Parameters that only an evaluation reads keep their values.
    If this fails midway, the commit is unchanged, and the parameters have the values that they had before.
    """
    tiers, entries = store.tiers, dict(zip(spans, stored, strict=True))
    assert tiers.setting.store is not None, "a commit is on storage"
    assert tiers.commits is not None, "who goes on commits"
    former = FormerHomes(tiers.setting.store, tiers.setting.ranks)
    rest = read_rest(tiers.setting.store)

    def bring(parameter: nn.Parameter, span: Slice) -> Tensor | None:
        entry = entries[parameter]
        if (source := former.spans.get(entry.name)) is None:
            stashed = residency_of(parameter).stashed_value(parameter)
            tiers.fill(span, residency_of(parameter).as_stashed(parameter, whole(stashed).cpu()))
            return stashed
        is_whole = bool(span.codec or source.codec)
        pairs = [(span, source)] if is_whole else zip(pieces_of(span, 4), pieces_of(source, 4), strict=True)
        for piece, source in pairs:
            _take_up_piece(tiers, former, piece, source, len(store.moments_of(span)) if entry.trained else 0)
        return residency_of(parameter).stash

    _move(store, spans, "taking up parameters", bring)
    store.has_loaded_state = True
    for parameter in spans:  # their values before are dropped: the commit has the first values now
        if entries[parameter].name in former.spans:
            residency_of(parameter).stash = None
    tiers.commits.takes_up = False
    trim()
    return rest


def _move(store: ParameterStore, spans: Mapping[nn.Parameter, Slice], words: str, bring: Bring) -> None:
    """Move parameters to the tiers, one after the other: all of them, or none."""
    with stage(words, len(spans)) as advance, ExitStack() as undo:
        for parameter, span in spans.items():
            if not is_offloaded(parameter):
                stash(parameter)
            first = bring(parameter, span)
            adopt(parameter, store, span, first)
            undo.callback(hand_back, parameter)
            advance()
        store.tiers.fill_up()
        undo.pop_all()


def _take_up_piece(tiers: Tiers, former: FormerHomes, piece: Slice, source: Slice, num_components: int) -> None:
    """Ranks read together, each of them all of it."""
    components = [None, 0] if tiers.has_master(piece) else [None]
    if tiers.setting.ranks or any(tiers.is_changed(piece, each) for each in components):
        tiers.fill(piece, former.stored(source, master=True))
    for number in range(num_components):
        own = number + tiers.has_master(piece)
        if tiers.setting.ranks or tiers.is_changed(piece, own):
            tiers.write_state(piece, own, former.read_state(source, number + former.has_master(source)))
