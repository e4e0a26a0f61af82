"""coordinators: one class for each group of kinds of values: their memory, and the transfers of them (arXiv 2512.17570,
section 5).

    Activations     checkpoints in the forward, inter-layer gradients in the backward
    Parameters      a unit's parameters, from where they are stored to the device
    OptimizerStep   gradients, optimizer states and the update (optimizer.py)

When the executor issues an operation, it asks for the content of each result (`allocate`); the lane fills it later. A
value in host memory is where the plan has put it: `memory` is these bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.placement.units import UnitPlacement
from gs_compile.program.ir import Op, Unit, Value, homed
from gs_compile.runtime.codecs import Encoded
from gs_compile.runtime.formats import Types
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.spans import Binding
from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.store import Extent, Store
from gs_compile.runtime.stream import Device
from gs_compile.runtime.values import Saved, tensors_of, without_contents

Activation = Tensor | Saved


@dataclass(frozen=True)
class Bindings:
    """How one capture of the model reads its inputs: each unit's parameters, and its inputs that are not parameters."""

    parameters: Mapping[Unit, Sequence[Binding]]
    others: Mapping[Unit, Mapping[int, Tensor]]


@dataclass(eq=False, repr=False)
class Setting:
    """What the coordinators of a run share: where values live, in which type, on which device, and with which ranks.

    types: of each unit's parameters and state. store: None if nothing is on SSD. ranks: None if there is one.
    """

    placement: Placement
    types: Mapping[Unit, Types]
    store: Store | None
    device: Device
    ranks: Ranks | None = None
    _extents: dict[str, Extent] = field(default_factory=dict, init=False)

    def unit(self, value: Value) -> UnitPlacement:
        return self.placement.by_unit[value.unit]

    def dtype(self, unit: Unit) -> torch.dtype:
        """The dtype of a unit's parameters."""
        return self.types[unit].parameter

    def wide(self, unit: Unit) -> torch.dtype:
        """The dtype of a unit's gradient and masters."""
        return self.types[unit].wide

    def part(self, value: Value, memory: Tensor | None) -> Tensor:
        """A part of parameters or gradients in the host memory planned for it; a part of state as bytes."""
        unit = self.unit(value).unit
        dtype = {"w": self.dtype(unit), "s": torch.uint8}.get(homed(value).kind, self.wide(unit))
        return flat(memory, nbytes_of(self.placement, value) // dtype.itemsize, dtype)

    def extent(self, label: str, nbytes: int) -> Extent:
        """A file on SSD, the same one whenever it is asked for."""
        assert self.store is not None, f"{label} is on SSD, and there is no storage"
        if label not in self._extents:
            self._extents[label] = self.store.allocate(label, nbytes)
        return self._extents[label]


def flat(memory: Tensor | None, numel: int, dtype: torch.dtype) -> Tensor:
    """The first `numel` elements of some bytes."""
    nbytes = numel * dtype.itemsize
    assert memory is not None, "no memory was planned"
    assert nbytes <= memory.nbytes, f"{nbytes} bytes, and {memory.nbytes} were planned"
    return (memory if nbytes == memory.nbytes else memory[:nbytes]).view(dtype)


class Parameters:
    """The parameters of every unit, at home and in transfers; the homes of states and of shadow copies."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._zones: dict[Unit, Tensor] = {}  # what a unit's code reads where it is stored
        self._staged: WeakValueDictionary[Unit, Tensor] = WeakValueDictionary()  # where its pieces come together

    def close(self) -> None:
        """Let go of all memory."""
        self._zones.clear()

    def home(self, value: Value, memory: Tensor | None) -> Tensor | Extent:
        """The content of a part at home, not written yet. A state is its components, one after the other.

        A unit's zone on the device is allocated with its first part, after the model's own values have left the device.
        """
        setting, unit = self.setting, self.setting.unit(value)
        if value.tier == "ssd":
            return setting.extent(f"{value.kind}{value.unit}-{value.part}", nbytes_of(setting.placement, value))
        if value.tier == "device" and value.kind != "w":  # the shadow copy of a part of the zone
            return setting.device.empty((unit.w[value.part].numel,), setting.dtype(unit.unit))
        if value.tier == "device":
            if unit.unit not in self._zones:
                self._zones[unit.unit] = setting.device.empty((unit.num_resident,), setting.dtype(unit.unit))
            part = unit.w[value.part]
            return self._zones[unit.unit][part.start : part.stop]
        if value.kind == "w" and not setting.placement.separate and unit.w[value.part].start == 0:
            self._zones[unit.unit] = flat(memory, unit.host_numel, setting.dtype(unit.unit))
        return setting.part(value, memory)

    def commit(self, home: Tensor, shadow: Tensor) -> None:
        """Bring home the shadow copy of a part: a unit's zone stays in one piece."""
        self.setting.device.copy(home, shadow)

    def allocate(self, value: Value, memory: Tensor | None) -> Tensor:
        """Memory for a part in host memory, or on the device for a piece of a shard, or for a whole unit."""
        if value.tier != "device":
            return self.setting.part(value, memory)
        placement, unit = self.setting.placement, self.setting.unit(value)
        dtype = self.setting.dtype(unit.unit)
        if value.kind == "shard":
            start, stop = unit.pieces[value.piece or 0]
            return self.setting.device.empty((stop - start,), dtype)
        numel = placement.world * unit.numel if placement.world > 1 else unit.numel - unit.num_resident
        if not placement.separate:
            return flat(memory, numel, dtype)
        if value.piece != 0:
            return self._staged[unit.unit]
        whole = self._staged[unit.unit] = self.setting.device.empty((numel,), dtype)
        return whole

    def gather(
        self, value: Value, staged: Tensor | None, memory: Tensor | None, bindings: Sequence[Binding]
    ) -> dict[int, Tensor | Encoded]:
        """A unit's parameters as its code takes them: views, nothing moves. `decode` follows for encoded matrices.

        They are in the zone that stays where it is stored, or in what was transferred; if ranks share the unit, all
        are in what was gathered.
        """
        unit = self.setting.unit(value)
        if self.setting.ranks:
            assert staged is not None
            return {binding.input: binding.view(staged) for binding in bindings}
        stays, first, came = self._zones.get(unit.unit), unit.num_resident, staged
        if not self.setting.placement.separate:
            first, (start, stop) = unit.host_numel, unit.ssd_zone
            came = flat(memory, stop - start, self.setting.dtype(unit.unit)) if memory is not None else None
        tensors: dict[int, Tensor | Encoded] = {}
        for binding in bindings:
            has_come = binding.span.offset >= first and came is not None  # an empty one may be behind all that stays
            source = came if has_come else stays
            assert source is not None
            tensors[binding.input] = binding.view(source, first if has_come else 0)
        return tensors

    def send_piece(self, op: Op, reads: Sequence[Tensor], whole: Tensor, elements: tuple[int, int]) -> None:
        """Copy a piece of a unit, the range `elements` of it, from its parts to the device."""
        unit, (start, stop) = self.setting.unit(op.results[0]), elements
        first = start if op.results[0].kind == "shard" else unit.num_resident
        for value, content in zip(op.reads, reads, strict=True):
            part = unit.w[value.part]
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                source = content[begin - part.start : end - part.start]
                self.setting.device.copy(whole[begin - first : end - first], source)

    def all_gather(self, op: Op, reads: Sequence[Tensor], whole: Tensor) -> None:
        """Gather a piece of a unit from all ranks. This rank's share is contiguous, also if it is of several parts."""
        ranks, unit = self.setting.ranks, self.setting.unit(op.results[0])
        assert ranks is not None
        start, stop = unit.pieces[op.results[0].piece or 0]
        first = start if op.reads[0].kind == "shard" else unit.w[op.reads[0].part].start
        offset = int(reads[0].storage_offset()) + start - first
        share = reads[0].as_strided((stop - start,), (1,), offset)
        ranks.all_gather(whole[ranks.number * start : ranks.number * stop], share)


class Activations:
    """Checkpoints, saved activations and inter-layer gradients away from the device."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._extents = defaultdict[str, list[Extent]](list)  # by value, the larger ones last

    def allocate(
        self, value: Value, source: Activation | Extent, memory: Tensor | None, number: int = 0
    ) -> Activation | Extent:
        """Memory into which `source` can be moved; number: see `file`."""
        like = source.like if isinstance(source, Extent) else without_contents(source)
        assert like is not None
        if value.tier == "device":
            made = [self.setting.device.empty(each.shape, each.dtype, each.stride()) for each in tensors_of(like)]
            return Saved(made) if isinstance(like, Saved) else made[0]
        if value.tier == "ssd":
            return replace(self.file(value, like.nbytes, number), nbytes=like.nbytes, like=like)
        if isinstance(like, Saved):
            return like.within(flat(memory, like.nbytes, torch.uint8))
        return flat(memory, like.numel(), like.dtype).as_strided(like.shape, like.stride())

    def file(self, value: Value, nbytes: int, number: int) -> Extent:
        """A file for a value of `nbytes`. From the second on, sizes are powers of two, so that batches of many sizes
        need few files.

        number: of the step among those under way, each of which has files of its own.
        """
        name = f"{value.kind}{value.unit}_{value.micro_batch}" + (f"-{number}" if number else "")
        known = self._extents[name]
        if (found := next((each for each in known if each.nbytes >= nbytes), None)) is None:
            size = 1 << (nbytes - 1).bit_length() if known else nbytes
            known.append(found := self.setting.extent(f"{name}-{size}", size))
        return found

    def keep(self, value: Value, source: Activation, memory: Tensor | None) -> Activation:
        """An activation in the memory planned for it, which the device reads directly."""
        if value.tier == "device":
            return source
        kept = self.allocate(value, source, memory)
        assert not isinstance(kept, Extent)
        for target, tensor in zip(tensors_of(kept), tensors_of(source), strict=True):
            target.copy_(tensor)
        return kept


def transfer(reads: Sequence[Activation | Extent], targets: Sequence[Activation | Extent]) -> None:
    """Move contents between host memory and SSD, all at once. Returns or raises when nothing moves any more."""
    moves: list[Transfer] = []
    for source, target in zip(reads, targets, strict=True):
        if isinstance(target, Tensor | Saved):
            assert not isinstance(source, Tensor | Saved)
            moves.append(source.read(_as_it_lies(target)))
        else:
            assert isinstance(source, Tensor | Saved)
            moves.append(target.write(_as_it_lies(source)))
    Transfer(part for each in moves for part in each.left.items()).wait()


def _as_it_lies(content: Activation) -> Tensor:
    """An activation's memory in one dimension: its strides may not be contiguous, but it is dense."""
    if isinstance(content, Saved):
        assert content.flat is not None
        return content.flat
    return content.as_strided((content.numel(),), (1,))
