"""kinds: one row for each kind of value: what it belongs to, how long it lives, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from gs_compile.placement.boundaries import at
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Tier, Value, homed


class Slot(NamedTuple):
    """Memory that values share: it lasts as long as any of them. `offset` is where the value begins in it, in bytes."""

    key: object
    tier: Tier
    nbytes: int
    offset: int = 0

    @property
    def is_in_slab(self) -> bool:
        """Whether it is in the one block of host memory that `slab` plans."""
        return self.tier == "host" and self.nbytes > 0


class Kind(NamedTuple):
    """A row of the table.

    of: "batch": a micro-batch, or what is counted over all of them; "units": the model's parameters and their updates.
    lives: "step": it ends in the step that defines it. "placed": the same for placed units, unless it is at home.
        "caller": it is an input or a result of the step.
    slot: the memory of a value of this kind.
    """

    of: Literal["batch", "units"]
    lives: Literal["step", "placed", "caller"]
    slot: Callable[[Placement, Value], Slot]


def slot_of(placement: Placement, value: Value) -> Slot:
    """The memory that a value is in."""
    return KIND_TABLE[value.kind].slot(placement, value)


def nbytes_of(placement: Placement, value: Value) -> int:
    """The bytes of a value that moves: a part, a gradient sum, a checkpoint or an inter-layer gradient."""
    if not is_of_units(value):
        return slot_of(placement, value).nbytes
    unit = placement.by_unit[value.unit]
    match homed(value).kind:
        case "w":
            return unit.w[value.part].numel * unit.itemsize
        case "s":
            return int(unit.s[value.part].numel * unit.state_itemsize)
        case "dshard":
            return unit.num_trained * unit.gradient_itemsize
        case _:
            numel = unit.dw[value.part].numel if value.part else placement.world * unit.num_trained
            return numel * unit.gradient_itemsize


def ends_in_step(placement: Placement, value: Value) -> bool:
    """Whether a value ends with its last use in a step, unless it is at home."""
    lives = KIND_TABLE[value.kind].lives
    return lives == "step" or (lives == "placed" and (value.unit is None or value.unit in placement.by_unit))


def is_of_units(value: Value) -> bool:
    """Whether a value does not depend on the batch of a step."""
    return KIND_TABLE[value.kind].of == "units"


def _alone(value: Value, nbytes: int) -> Slot:
    """Memory that a value shares with no other."""
    return Slot(value, value.tier or "device", nbytes)


def _none(placement: Placement, value: Value) -> Slot:
    """Memory that is not counted: a few bytes, or the caller's."""
    return _alone(value, 0)


def _activation(placement: Placement, value: Value) -> Slot:
    assert value.micro_batch is not None
    known = value.micro_batch < placement.layout.num_micro_batches
    return _alone(value, at(placement.layout.x_nbytes[value.micro_batch], value.unit) if known else 0)


def _saved(placement: Placement, value: Value) -> Slot:
    level = placement.activations.level_of(value)
    assert level is not None, f"{value}: its layer saves its input alone"
    return _alone(value, level.nbytes[value.micro_batch or 0])


def _side(placement: Placement, value: Value) -> Slot:
    """A joint's side inputs have the size of the boundary above it, the prologue's that of the first boundary."""
    layout = placement.layout
    if not (nbytes := layout.side_nbytes if value.kind == "side" else layout.dside_nbytes):
        return _none(placement, value)
    boundary = 0 if value.unit is None else int(value.unit) + 1
    return _alone(value, at(nbytes[value.micro_batch or 0], boundary))


def _part(placement: Placement, value: Value) -> Slot:
    """A part by itself; on SSD with all of the extents between which commits alternate."""
    nbytes = nbytes_of(placement, value) if value.unit in placement.by_unit else 0
    return _alone(value, nbytes * (placement.num_extents(value) if value.tier == "ssd" else 1))


def _parameters(placement: Placement, value: Value) -> Slot:
    """Parts that come from SSD are contiguous in host memory, as in their file. If the device reads host memory itself,
    the unit's host zone is one piece, too. What is gathered from all ranks has memory of its own.
    """
    unit = placement.by_unit.get(value.unit)
    if unit is None:
        return _none(placement, value)
    part = unit.w.get(value.part)
    if part is None and placement.world > 1:
        whole = placement.world * unit.numel * unit.itemsize
        return Slot((value.unit, "w.device"), placement.device_tier, whole)
    if part is None and placement.separate:
        return Slot((value.unit, "w.device"), "device", (unit.numel - unit.num_resident) * unit.itemsize)
    if part is None or (value.tier != "ssd" and part.tier == "ssd"):
        start, stop = unit.ssd_zone
        offset = (part.start - start) * unit.itemsize if part else 0
        return Slot((value.unit, "w.host"), "host", (stop - start) * unit.itemsize, offset)
    if value.tier == "host" and not placement.separate:
        return Slot((value.unit, "w"), "host", unit.host_numel * unit.itemsize, part.start * unit.itemsize)
    return _part(placement, value)


def _gradient(placement: Placement, value: Value) -> Slot:
    """The sum on the device, and what stays in its memory if the device reads host memory itself.

    The sums over several backwards have memory of their own.
    """
    unit = placement.by_unit.get(value.unit)
    if unit is None:
        return _none(placement, value)
    stays = not placement.separate and value.tier == "host" and (not value.part or placement.keeps_gradient(unit))
    if stays and value.part and placement.world > 1:
        return _gradient_shard(placement, value)
    if (value.tier == "device" and not value.part) or stays:
        whole = placement.world * unit.num_trained * unit.gradient_itemsize
        return Slot((value.unit, "dw"), placement.device_tier, whole)
    return _part(placement, value)


def _shard(placement: Placement, value: Value) -> Slot:
    unit = placement.by_unit[value.unit]
    start, stop = unit.pieces[value.piece or 0]
    return Slot(value, "device", (stop - start) * unit.itemsize)


def _gradient_shard(placement: Placement, value: Value) -> Slot:
    nbytes = nbytes_of(placement, value._replace(kind="dshard"))
    return Slot((value.unit, "dshard"), placement.device_tier, nbytes)


KIND_TABLE: Mapping[str, Kind] = {
    "batch": Kind("batch", "caller", _none),
    "total": Kind("batch", "step", _none),
    "x": Kind("batch", "step", _activation),
    "a": Kind("batch", "step", _saved),
    "side": Kind("batch", "step", _side),
    "w": Kind("units", "placed", _parameters),
    "loss": Kind("batch", "caller", _none),
    "y": Kind("batch", "caller", _none),
    "dx": Kind("batch", "step", _activation),
    "dy": Kind("batch", "step", _none),
    "dside": Kind("batch", "step", _side),
    "dw": Kind("units", "placed", _gradient),
    "shard": Kind("units", "step", _shard),
    "dshard": Kind("units", "step", _gradient_shard),
    "s": Kind("units", "placed", _part),
    "norm": Kind("units", "caller", _none),
    "scale": Kind("units", "placed", _none),
    "sw": Kind("units", "caller", _part),
    "ss": Kind("units", "caller", _part),
    "cw": Kind("units", "caller", _part),
    "cs": Kind("units", "caller", _part),
}
