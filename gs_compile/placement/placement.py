"""Where the data of a step lives: the homes of all parts (`units`), of checkpoints and of gradient sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gs_compile.placement.units import Group, Part, UnitPlacement
from gs_compile.program.ir import COPIES, ORDERS, Op, Order, Schedule, Tier, Unit, Value


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the schedule `lifetime` may fill with what is inactive, and what moving costs.

    device_nbytes, host_nbytes: the planned peaks that it keeps; of the device only where that has memory of its own.
    bytes_per_second: of each lane that moves data, alone.
    """

    device_nbytes: int
    host_nbytes: int
    bytes_per_second: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Placement:
    """Homes and sizes for one model. Without `units` the parameters are the user's and only checkpoints move.

    separate: the device has memory of its own; otherwise it is the host's, and nothing is copied between them but
        what has to be collected for the SSD.
    clip: late updates wait for the scale that follows from all gradients' norms.
    speculative: early ones do not; should gradients have to be scaled, they are rolled back and are late ones too. What
        they make goes to shadow copies until the scale is known.
    x_nbytes, side_nbytes: of the checkpoint, and of the side inputs, of each micro-batch.
    schedule: the order of a training step. layer_updates: in how many updates a layer's elements are taken.
    device_checkpoint_ratio: of the checkpoints, how many stay in memory of the device's own.
    gradient_ratio: of the units, how many have their gradient sums in host memory between two micro-batches of the
        horizontal order; those of the others go to SSD.
    world: the ranks that share all units; `units` and all sizes but activations are one rank's share.
    room: for what the schedule `lifetime` keeps where it is; None: nothing is kept, as in the horizontal schedule.
    durability: every so many steps are committed: what the last of them has left outlives the process; 0: none are.
    """

    units: tuple[UnitPlacement, ...] = ()
    separate: bool = False
    clip: bool = False
    checkpoint_ratio: float = 1.0
    x_nbytes: tuple[int, ...] = ()
    side_nbytes: tuple[int, ...] = ()
    num_layers: int = 0
    schedule: Schedule = "vertical"
    gradient_ratio: float = 1.0
    device_checkpoint_ratio: float = 0.0
    room: Room | None = None
    speculative: bool = False
    world: int = 1
    layer_updates: int = 1
    durability: int = 0

    def __post_init__(self) -> None:
        on_device = self.device_checkpoint_ratio or any(unit.num_resident for unit in self.units)
        assert self.separate or not on_device, "the device has no memory of its own for anything to live in"
        assert self.checkpoint_ratio + self.device_checkpoint_ratio <= 1 + 1e-9, "more checkpoints than there are"
        assert self.clip or not self.speculative, "without clipping no update is rolled back"

    @property
    def order(self) -> Order:
        return ORDERS[self.schedule]

    @cached_property
    def by_unit(self) -> Mapping[Unit, UnitPlacement]:
        return {unit.unit: unit for unit in self.units}

    def unit_of(self, op: Op) -> UnitPlacement | None:
        """The placed unit that the first of an operation's values belongs to, if there is one."""
        unit = op.values[0].unit if op.values else None
        return None if unit is None else self.by_unit.get(unit)

    @cached_property
    def has_late(self) -> bool:
        """Whether a step may leave gradients to the next one."""
        return any(unit.trained(*self.waiting(redo=True)) for unit in self.units)

    def waiting(self, *, redo: bool) -> tuple[str, ...]:
        """The groups whose update is in the next forward; `redo`: early ones were rolled back, if they may be."""
        return ("early", "late") if self.speculative and redo else ("late",)

    def checkpoint_home(self, value: Value) -> Tier:
        """Device, host or SSD, for the input of a layer: the ratios' shares of all of them, spread evenly."""
        assert isinstance(value.unit, int)
        assert value.micro_batch is not None
        at, ratio = value.unit * len(self.x_nbytes) + value.micro_batch, self.checkpoint_ratio
        if _is_chosen(at, ratio):
            return "host"
        elsewhere = at - int(at * ratio + 1e-9)  # of those before it: the device has a share of these
        return "device" if _is_chosen(elsewhere, self.device_checkpoint_ratio / (1 - ratio)) else "ssd"

    def gradient_home(self, unit: UnitPlacement) -> Tier:
        """Host or SSD, for a unit's gradient sums between two micro-batches: the ratio's share of all units."""
        return "host" if _is_chosen(self.units.index(unit), self.gradient_ratio) else "ssd"

    @property
    def device_tier(self) -> Tier:
        """Where the device's memory is counted."""
        return "device" if self.separate else "host"

    def pieces(self, unit: UnitPlacement) -> Mapping[int, tuple[int, int]]:
        """Where each piece that goes to the device starts and stops: one a micro-batch, or those ranks exchange."""
        first = unit.num_resident
        if self.world > 1:
            return {k: (start, stop) for k, (start, stop) in enumerate(unit.pieces) if start >= first}
        number, numel = 1 if self.order == "horizontal" else len(self.x_nbytes), unit.numel - first
        return {k: (first + numel * k // number, first + numel * (k + 1) // number) for k in range(number)}

    def speculated(self, unit: UnitPlacement) -> tuple[Group, ...]:
        """The groups of a unit whose updates may be rolled back."""
        return unit.trained("early") if self.speculative else ()

    def rolls_back(self, *, confirmed: bool) -> bool:
        """Whether early updates of a step are rolled back, and run again; `confirmed`: nothing is scaled or skipped."""
        return self.speculative and not confirmed and any(self.speculated(unit) for unit in self.units)

    def homes(self, *, late: bool, redo: bool = True) -> frozenset[Value]:
        """What lives on between steps; `late`: gradients wait for their update; `redo`: also those of early ones."""
        found: set[Value] = set()
        for unit in self.units:
            for group in unit.groups:
                stale = late and group.when == "late"
                if group in self.speculated(unit):
                    found.update(other for _, other in unit.shadows(group))
                if self.durability:
                    found.update(other for _, other in unit.copies(group))
                if late and group.when in self.waiting(redo=redo):
                    found.add(unit.gradient(group))
                found |= {unit.value("s", part) for part in group.s}
                found |= {unit.value("w", part) for part in group.w if not (stale and self.reclaims(unit, part))}
        if late and self.clip:
            found.add(Value("scale", tier="host"))
        return frozenset(found)

    def num_extents(self, value: Value) -> int:
        """The extents on SSD that a part, its shadow copy or its other copy has: a write never goes to the one that the
        last commit names.
        """
        return 2 if self.durability and value.kind in ("w", "s", *COPIES.values()) else 1

    def present(self, ops: Iterable[Op]) -> frozenset[Value]:
        """What is at home when `ops` begin: they read gradients of the step before, or there are none."""
        defined: set[Value] = set()
        found: dict[Value, None] = {}
        for op in ops:
            found |= dict.fromkeys(value for value in op.reads if value.kind == "dw" and value not in defined)
            defined.update(op.results)
        placed = ((self.by_unit.get(value.unit), value.part) for value in found if value.unit is not None)
        groups = {unit.dw[part].when for unit, part in placed if unit}
        return self.homes(late=bool(found), redo="early" in groups)

    def reclaims(self, unit: UnitPlacement, part: Part) -> bool:
        """Whether a late part's host memory is free between backward and update (paper, section 4.3).

        The parameter is then stale, and its update can do without it: the master is elsewhere. Where the device reads
        host memory itself, a unit's host zone stays in one piece.
        """
        return self.separate and unit.has_master and part.tier == "host"

    def keeps_gradient(self, unit: UnitPlacement) -> bool:
        """Whether late gradients stay where they were summed: in one memory, if all of the unit's may be late."""
        return not self.separate and (self.speculative or not unit.trained("early"))


def _is_chosen(at: int, ratio: float) -> bool:
    """Whether the one at a place among many is, such that the ratio's share of them, spread evenly, are."""
    return int((at + 1) * ratio + 1e-9) > int(at * ratio + 1e-9)
