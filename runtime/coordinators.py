"""coordinators: who owns which buffers, and what the operations on them do (arXiv 2512.17570, section 5).

    InterLayerTensors   checkpoints in the forward, inter-layer gradients in the backward
    Parameters          a unit's parameters, from their homes to the device
    OptimizerStep       gradients, optimizer states and the update (optimizer_step.py)

The executor asks for memory (`allocate`) when it issues an operation, and has the operation carried out (`carry_out`)
on its lane, later. Each coordinator is the only one to take and give back the buffers of its kinds of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from gs_compile.placement.placement import Part, Placement, UnitPlacement
from gs_compile.program.ir import Op, Unit, Value
from gs_compile.runtime.arena import Arena
from gs_compile.runtime.ssd import Transfer
from gs_compile.runtime.store import Extent, Store
from gs_compile.runtime.stream import Device
from gs_compile.runtime.values import Flat, Gathered, Hold, Kept, Region, Resident, Zone

Tensor = torch.Tensor


class Binding(NamedTuple):
    """A parameter in its unit's flat space, and its place among the inputs of a captured graph."""

    input: int
    offset: int
    shape: tuple[int, ...]
    trained: bool

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        begin = self.offset - start
        return flat[begin : begin + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class Setting:
    """What the coordinators of a run share."""

    placement: Placement
    dtypes: Mapping[Unit, torch.dtype]  # of the parameters of each unit
    arena: Arena
    store: Store | None  # None: everything is in host memory
    device: Device

    def unit(self, value: Value) -> UnitPlacement:
        assert value.unit is not None
        return self.placement.by_unit[value.unit]

    def flat(self, numel: int, dtype: torch.dtype, purpose: str) -> Flat:
        """Host memory of its own."""
        hold = Hold(self.arena.take(numel * dtype.itemsize, purpose))
        return Flat(hold.buffer.view(dtype, numel), (hold.share(),))

    def extent(self, label: str, nbytes: int, kind: str = "") -> Extent:
        assert self.store is not None, f"{label} is on SSD, and there is no storage"
        return self.store.allocate(label, nbytes, kind=kind or label[0])


class Parameters:
    """The parameters of every unit: at home, and on their way."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.extents: dict[Unit, Extent] = {}
        self.zones: dict[Unit, Flat] = {}  # the host zone of a unit, where it is in one piece
        self.residents: dict[Unit, Zone] = {}  # the zone of a unit that lives on the device
        self._slots: dict[Unit, Hold] = {}  # where the SSD zone of a unit is brought together
        self._staged: WeakValueDictionary[Unit, Tensor] = WeakValueDictionary()  # where its pieces come together

    def home(self, unit: UnitPlacement, part: Part) -> Flat | Resident | Region:
        """What a part is where it lives; made on the first call, in memory that is not written yet."""
        dtype = self.setting.dtypes[unit.unit]
        if part.tier == "ssd":
            start, stop = unit.ssd_zone
            if unit.unit not in self.extents:
                self.extents[unit.unit] = self.setting.extent(f"w{unit.unit}", (stop - start) * unit.itemsize)
            offset = (part.start - start) * unit.itemsize
            return Region(self.extents[unit.unit], offset, part.numel * unit.itemsize)
        if part.tier == "device":
            if unit.unit not in self.residents:
                self.residents[unit.unit] = Zone(unit.num_resident, dtype, self.setting.device)
            return Resident(self.residents[unit.unit], part.start, part.stop)
        if self.setting.placement.separate:
            return self.setting.flat(part.numel, dtype, "parameters")
        if unit.unit not in self.zones:
            numel = max(p.stop for p in unit.w.values() if p.tier == "host")
            self.zones[unit.unit] = self.setting.flat(numel, dtype, "parameters")
        return Flat(self.zones[unit.unit].tensor[part.start : part.stop])

    def other(self, unit: UnitPlacement, part: Part) -> Flat | Region:
        """The shadow copy of a part, by itself."""
        if part.tier == "host":
            return self.setting.flat(part.numel, self.setting.dtypes[unit.unit], "parameters")
        nbytes = part.numel * unit.itemsize
        return Region(self.setting.extent(f"sw{unit.unit}-{part.letter}", nbytes, kind="w"), 0, nbytes)

    def commit(self, home: Flat, other: Flat) -> None:
        """Bring home the shadow copy of a part: a unit's host zone stays in one piece."""
        home.tensor.copy_(other.tensor)

    def allocate(self, value: Value) -> Flat:
        unit = self.setting.unit(value)
        dtype = self.setting.dtypes[unit.unit]
        if value.tier == "device":
            if value.piece == 0:
                numel = unit.numel - unit.num_resident
                whole = self._staged[unit.unit] = self.setting.device.empty((numel,), dtype)
                return Flat(whole)
            return Flat(self._staged[unit.unit])
        part = unit.w[value.part]
        if part.tier != "ssd":
            return self.setting.flat(part.numel, dtype, "parameters")
        start, stop = unit.ssd_zone
        slot = self._slots.get(unit.unit)
        if slot is None or not slot.shares:
            nbytes = (stop - start) * unit.itemsize
            slot = self._slots[unit.unit] = Hold(self.setting.arena.take(nbytes, "parameters on their way"))
        whole = slot.buffer.view(dtype, stop - start)
        return Flat(whole[part.start - start : part.stop - start], (slot.share(),))

    def gather(
        self, value: Value, staged: Flat | None, bindings: Sequence[Binding], others: Mapping[int, Tensor]
    ) -> Gathered:
        """A unit's parameters as its code takes them: views, nothing is moved."""
        unit = self.setting.unit(value)
        if self.setting.placement.separate:
            first, tensors = unit.num_resident, dict(others)
            for binding in bindings:
                lives_there = binding.offset < first
                source = self.residents[unit.unit] if lives_there else staged
                assert source is not None
                tensors[binding.input] = binding.view(source.tensor, 0 if lives_there else first)
            return Gathered(tensors)
        zone, slot, start = self.zones.get(unit.unit), self._slots.get(unit.unit), unit.ssd_zone[0]
        dtype, tensors = self.setting.dtypes[unit.unit], dict(others)
        for binding in bindings:
            if zone is not None and binding.offset < len(zone.tensor):
                tensors[binding.input] = binding.view(zone.tensor)
            else:
                assert slot is not None
                numel = unit.ssd_zone[1] - start
                tensors[binding.input] = binding.view(slot.buffer.view(dtype, numel), start)
        return Gathered(tensors, (slot.share(),) if slot is not None and slot.shares else ())

    def carry_out(self, op: Op, reads: Sequence[Any], targets: Sequence[Any], number: int) -> None:
        if op.results and op.results[0].piece is not None:
            self._send_piece(op, reads, targets[0].tensor, number)
        elif op.lane == "h2d":
            for source, target in zip(reads, targets, strict=True):
                self.setting.device.copy(target.tensor, source.tensor)
        else:
            transfer(reads, targets)

    def _send_piece(self, op: Op, reads: Sequence[Flat], whole: Tensor, number: int) -> None:
        """Copy the k-th of n equal shares of a unit from its parts to the device, where they are not there already."""
        unit, (start, stop) = self.setting.unit(op.results[0]), self.share(op.results[0], number)
        first = unit.num_resident
        for value, content in zip(op.reads, reads, strict=True):
            part = unit.w[value.part]
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                source = content.tensor[begin - part.start : end - part.start]
                self.setting.device.copy(whole[begin - first : end - first], source)

    def share(self, piece: Value, number: int) -> tuple[int, int]:
        """The elements of one of so many pieces."""
        unit = self.setting.unit(piece)
        k, first = piece.piece or 0, unit.num_resident
        numel = unit.numel - first
        return first + numel * k // number, first + numel * (k + 1) // number


class InterLayerTensors:
    """Checkpoints and inter-layer gradients away from the device."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._extents: dict[tuple[Value, int], Extent] = {}

    def allocate(self, value: Value, source: Any) -> Any:
        """Memory like `source`, which is to be moved into it: a tensor on the device, or what `Kept` describes."""
        like = source.like if isinstance(source, Kept) else torch.empty_like(source, device="meta")
        nbytes = like.untyped_storage().nbytes()
        if value.tier == "device":
            return self.setting.device.empty(like.shape, like.dtype, like.stride())
        if value.tier == "ssd":
            return Kept(like, region=Region(self._extent(value, nbytes), 0, nbytes))
        hold = Hold(self.setting.arena.take(nbytes, "checkpoints"))
        flat = hold.buffer.tensor[:nbytes].view(like.dtype)
        return Kept(like, flat=flat, holds=(hold.share(),))

    def keep(self, value: Value, source: Any) -> Any:
        """The same memory under another name: the device's is the host's."""
        if value.tier == "device":
            return source.tensor
        nbytes = source.untyped_storage().nbytes()
        memory = source.as_strided((nbytes // source.itemsize,), (1,), 0)
        whole = source if source.is_contiguous() else memory
        charge = self.setting.arena.charge(nbytes, "checkpoints")
        return Kept(torch.empty_like(source, device="meta"), flat=whole.reshape(-1), holds=(charge,))

    def carry_out(self, op: Op, reads: Sequence[Any], targets: Sequence[Any]) -> None:
        if op.lane in ("ssd_read", "ssd_write"):
            transfer([kept.region or kept for kept in reads], [kept.region or kept for kept in targets])
            return
        for source, target in zip(reads, targets, strict=True):
            if isinstance(target, Kept):
                self.setting.device.copy(target.tensor, source)
            else:
                self.setting.device.copy(target, source.tensor)

    def _extent(self, value: Value, nbytes: int) -> Extent:
        """Where a checkpoint lives on SSD; steps of one size use the same."""
        if (value, nbytes) not in self._extents:
            label = f"x{value.unit}_{value.micro_batch}-{nbytes}"
            self._extents[value, nbytes] = self.setting.extent(label, nbytes)
        return self._extents[value, nbytes]


def transfer(reads: Sequence[Any], targets: Sequence[Any]) -> None:
    """Between host memory and SSD: all at once, and back when nothing moves any more, well or badly."""
    moves: list[Transfer] = []
    try:
        for source, target in zip(reads, targets, strict=True):
            if isinstance(source, Region):
                moves.append(source.extent.read(memory_of(target), source.offset))
            else:
                moves.append(target.extent.write(memory_of(source), target.offset))
        for move in moves:
            move.wait()
    finally:
        for move in moves:
            move.settle()


def memory_of(content: Flat | Kept) -> Tensor:
    """As it lies there: what an activation's strides make of it is not contiguous."""
    memory = content.flat if isinstance(content, Kept) else content.tensor
    assert memory is not None
    return memory
