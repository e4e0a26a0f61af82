"""Where the data of a step lives: the homes of all parts (`units`), of checkpoints and of gradient sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from gs_compile.options import Ratios
from gs_compile.placement.activations import ActivationHomes
from gs_compile.placement.boundaries import BoundaryNbytes
from gs_compile.placement.levels import Levels, Share, Shares, is_chosen
from gs_compile.placement.stacks import Stacks, stack_of, stacks
from gs_compile.placement.units import Group, Part, UnitPlacement
from gs_compile.program.ir import COPIES, Op, Schedule, Tier, Unit, Value
from gs_compile.schedules import BY_MICRO_BATCH


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What the step before has left to a step, and which of the two is to be committed.

    late: gradients wait for their late update; not in the first step, nor after a `flush`.
    redo: those of speculative updates wait too: these updates were rolled back.
    warm: the parameters of `Decision.carried` are in host memory.
    copies: this step is to be committed, so what it changes in memory is also written to SSD. Its late updates are in
        the next program, which `seals` it.
    """

    late: bool = False
    redo: bool = True
    warm: bool = False
    copies: bool = False
    seals: bool = False

    def waiting(self, placement: Placement) -> tuple[str, ...]:
        """The groups whose gradients the step before has left."""
        return placement.waiting(redo=self.redo) if self.late else ()


STARTS = StepContext()  # the first step
ALL_LATE = StepContext(late=True)  # all gradients that may wait do: such a step takes the most memory


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is given for a step: the layers of a model, a batch, and how steps are laid out on one device.

    It has no `StepShape`: the homes of a model are the same for steps of every shape.

    x_nbytes, side_nbytes, dside_nbytes: the bytes of the checkpoint, of the side inputs and of their gradient, for each
        micro-batch, at each boundary.
    levels: what each layer saves at levels 1, 2 ...; some layers may have fewer levels than others.
    joints: layers that begin another stack.
    separate: the device has memory of its own. Otherwise its memory is the host's, and nothing is copied between them
        except what has to be collected for the SSD.
    clip: gradients are clipped by the norm of all.
    accumulates: a step has several backwards. The sums of their gradients have homes of their own, and all updates are
        late, in the first forward of the next step.
    schedule: of a training step; snake: that pass runs, if the schedule has it.
    world: the ranks that share all units; all sizes except those of activations are one rank's share.
    durability: a number N: every N-th step is committed, so that it outlives the process; 0: none is.
    home_nbytes: the least host memory that is set apart for what lives on: a run has mapped this much for it, although
        this step may keep less.
    """

    num_layers: int = 0
    x_nbytes: tuple[BoundaryNbytes, ...] = ()
    side_nbytes: tuple[BoundaryNbytes, ...] = ()
    dside_nbytes: tuple[BoundaryNbytes, ...] = ()
    levels: Levels = ()
    joints: frozenset[int] = frozenset()
    separate: bool = False
    clip: bool = False
    accumulates: bool = False
    schedule: Schedule = "vertical"
    snake: bool = True
    world: int = 1
    durability: int = 0
    home_nbytes: int = 0

    @property
    def num_micro_batches(self) -> int:
        return len(self.x_nbytes)

    @property
    def has_sums(self) -> bool:
        """Whether gradient sums leave the device: between two micro-batches, or between two backwards."""
        return self.accumulates or self.schedule in BY_MICRO_BATCH

    @property
    def num_items(self) -> int:
        """Pairs of a layer and a micro-batch."""
        return self.num_layers * self.num_micro_batches

    @cached_property
    def stacks(self) -> Stacks:
        return stacks(self.num_layers, self.joints)


UNITS = ("carried", "retained", "held")  # the fields of a decision that list units


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is chosen for a step.

    ratios: those of all stacks, or of each stack. What they put neither in host memory nor on the device is on SSD.
        `gradient` is the part of units that have their gradient sums in host memory between two micro-batches, or two
        backwards; None: all.
    alpha: the part of each update that is late, in the next forward.
    shares: the items that save activations. They are counted among the items of which the ratios of checkpoints are.
    speculative: with clipping, early updates run before the norm is known, and write to shadow copies. If gradients
        have to be scaled, these updates are rolled back and repeated as late ones.
    layer_updates: the number of updates in which a layer's elements are taken.
    layer_tokens: the tokens that a layer's code, except its attention, runs on at a time; None: as the options say.
    carried: units whose early parameters, stored on SSD, also stay in host memory from their update to the first use
        in the next step; tied ones until the head has used them.
    retained: units whose parameters, stored on SSD, stay in host memory from the forward to their backward.
    held: layers whose checkpoints, which would be on SSD, stay in host memory from the forward to the backward.
    ahead: the states of updates after the last backward are read this many stages earlier than others.
    lookahead: everything is read from SSD this many stages earlier than it has to be to be hidden by computation.
    own: what the schedule has decided in addition, which only its own pass reads; None: nothing.
    """

    ratios: tuple[Ratios, ...] = (Ratios(checkpoint=1.0, parameter=1.0, optimizer=1.0),)
    alpha: float = 0.0
    shares: Shares = Shares()  # noqa: RUF009  (a tuple)
    speculative: bool = False
    layer_updates: int = 1
    layer_tokens: int | None = None
    carried: tuple[Unit, ...] = ()
    retained: tuple[Unit, ...] = ()
    held: tuple[int, ...] = ()
    ahead: int = 0
    lookahead: int = 0
    own: object | None = None

    def as_dict(self) -> dict[str, Any]:
        """The decision for JSON; `of` is the inverse."""
        ratios, shares = [each.given() for each in self.ratios], [list(share) for share in self.shares]
        units = {name: list(getattr(self, name)) for name in UNITS}
        return {**asdict(self), "ratios": ratios, "shares": shares, **units}

    def stacks(self, layout: Layout) -> Stacks:
        """The stacks that its ratios are of: those of the model, or all layers as one."""
        return layout.stacks if len(self.ratios) > 1 else stacks(layout.num_layers)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Decision:
        """The decision of a dict; KeyError, TypeError, ValueError or OptionError if the dict has another form."""
        known = {each.name: values[each.name] for each in fields(cls)}
        ratios = tuple(Ratios(**each) for each in known.pop("ratios"))
        shares = Shares(Share(*each) for each in known.pop("shares"))
        known |= {name: tuple(known[name]) for name in UNITS}
        return cls(ratios=ratios, shares=shares, **known)


@dataclass(frozen=True)
class Placement:
    """Where a model's data lives, and its sizes: the units, cut as a decision says, in a layout.

    Without `units`, parameters stay in the user's memory, and only checkpoints move.
    """

    units: tuple[UnitPlacement, ...] = ()
    layout: Layout = Layout()
    decision: Decision = Decision()

    def __post_init__(self) -> None:
        on_device = self.activations.are_on_device or any(unit.num_resident for unit in self.units)
        assert self.separate or not on_device, "the device has no memory of its own for anything to live in"
        assert len(self.decision.ratios) == len(self.stacks), "ratios of stacks that there are not"
        assert self.activations.are_possible(), "more checkpoints than there are"
        assert self.layout.clip or not self.speculative, "without clipping no update is rolled back"
        waits = not self.has_early and not self.by_micro_batch
        assert waits or not self.accumulates, "what several backwards add up is updated after the last of them"

    def laid_out(self, **changes: Any) -> Placement:
        """The placement with other fields of its layout."""
        return replace(self, layout=replace(self.layout, **changes))

    def decided(self, **changes: Any) -> Placement:
        """The placement with other fields of its decision; only those by which units are not cut may change."""
        return replace(self, decision=replace(self.decision, **changes))

    @property
    def by_micro_batch(self) -> bool:
        """Whether a training step runs one micro-batch through all layers before the next."""
        return self.layout.schedule in BY_MICRO_BATCH

    @cached_property
    def by_unit(self) -> Mapping[Unit | None, UnitPlacement]:
        return {unit.unit: unit for unit in self.units}

    @cached_property
    def _order(self) -> Mapping[Unit | None, int]:
        return {unit: at for at, unit in enumerate(self.by_unit)}

    def unit_of(self, op: Op) -> UnitPlacement | None:
        """The placed unit that the first of an operation's values belongs to, if there is one."""
        return self.by_unit.get(op.values[0].unit) if op.values else None

    @cached_property
    def decodes(self) -> bool:
        """Whether units have encoded matrices."""
        return any(unit.decoded_nbytes for unit in self.units)

    @cached_property
    def has_early(self) -> bool:
        """Whether updates run beside the backward."""
        return any(unit.trained("early") for unit in self.units)

    @cached_property
    def has_late(self) -> bool:
        """Whether a step may leave gradients to the next one."""
        return any(unit.trained(*self.waiting(redo=True)) for unit in self.units)

    def waiting(self, *, redo: bool) -> tuple[str, ...]:
        """The groups whose update is in the next forward; `redo`: speculative ones, too, which were rolled back."""
        return ("early", "late") if self.speculative and redo else ("late",)

    @cached_property
    def stacks(self) -> Stacks:
        """The stacks that have ratios of their own."""
        return self.decision.stacks(self.layout)

    @cached_property
    def activations(self) -> ActivationHomes:
        chosen, number = self.decision, self.layout.num_micro_batches
        levels = self.layout.levels if chosen.shares else ()
        return ActivationHomes(chosen.ratios, chosen.shares, chosen.held, levels, self.stacks, number)

    def recomputing(self) -> Placement:
        """The placement with layers that save their inputs alone, on the tiers where their activations were."""
        return self.decided(**self.activations.recomputed())

    def moved(self, source: Tier, target: Tier) -> Placement:
        """The placement with all activations of one tier on another, slower one."""
        return self.decided(**self.activations.moved(source, target))

    def gradient_home(self, unit: UnitPlacement) -> Tier:
        """The tier of a unit's gradient sums between micro-batches or backwards: host for the ratio's part of units."""
        ratio = self.decision.ratios[stack_of(unit.unit, self.stacks)].gradient
        return "host" if is_chosen(self._order[unit.unit], 1.0 if ratio is None else ratio) else "ssd"

    def sums(self, unit: UnitPlacement) -> tuple[Value, ...]:
        """The sums of the gradients of a step's backwards, by group, at home; () if a step has one backward."""
        if not self.accumulates:
            return ()
        home = self.gradient_home(unit)
        return tuple(unit.gradient(group)._replace(tier=home) for group in unit.trained())

    @property
    def device_tier(self) -> Tier:
        """Where the device's memory is counted."""
        return "device" if self.separate else "host"

    def pieces(self, unit: UnitPlacement) -> Sequence[int]:
        """The numbers of the pieces that go to the device: one a micro-batch, or those that ranks exchange."""
        if self.world > 1:
            return [number for number, (start, _) in enumerate(unit.pieces) if start >= unit.num_resident]
        return range(1 if self.by_micro_batch else self.layout.num_micro_batches)

    def piece(self, unit: UnitPlacement, number: int) -> tuple[int, int]:
        """Where one of `pieces` starts and stops in its unit."""
        if self.world > 1:
            return unit.pieces[number]
        first, of = unit.num_resident, len(self.pieces(unit))
        numel = unit.numel - first
        return first + numel * number // of, first + numel * (number + 1) // of

    def speculated(self, unit: UnitPlacement) -> tuple[Group, ...]:
        """The groups of a unit whose updates may be rolled back."""
        return unit.trained("early") if self.speculative else ()

    def rolls_back(self, *, confirmed: bool) -> bool:
        """Whether a step's early updates are rolled back, to run again; `confirmed`: nothing is scaled or skipped."""
        return self.speculative and not confirmed and any(self.speculated(unit) for unit in self.units)

    @cached_property
    def carried_values(self) -> frozenset[Value]:
        """The copies in host memory of what `carried` says; a unit without early updates has none."""
        units = [unit for unit in self.units if unit.unit in self.decision.carried and unit.trained("early")]
        return _from_ssd((unit, group) for unit in units for group in unit.groups if group.when != "late")

    @cached_property
    def retained_values(self) -> frozenset[Value]:
        """The copies in host memory of what `retained` says."""
        units = (unit for unit in self.units if unit.unit in self.decision.retained)
        return _from_ssd((unit, group) for unit in units for group in unit.groups)

    @property
    def held_values(self) -> frozenset[Value]:
        """The checkpoints that are not on SSD by what `held` says."""
        return self.activations.held_values

    def homes(self, *, late: bool, redo: bool = True, warm: bool = False) -> frozenset[Value]:
        """The values that live on between steps. late: gradients wait for their update; redo: those of early updates,
        too; warm: so do the copies that one training step carries into the next.
        """
        homes: set[Value] = set()
        for unit in self.units:
            homes.update(self.sums(unit))
            for group in unit.groups:
                stale = late and group.when == "late"
                if group in self.speculated(unit):
                    homes.update(other for _, other in unit.shadows(group))
                if self.durability:
                    homes.update(other for _, other in unit.copies(group))
                if late and group.when in self.waiting(redo=redo) and not self.accumulates:
                    homes.add(unit.gradient(group))
                homes |= {unit.value("s", part) for part in group.s}
                homes |= {unit.value("w", part) for part in group.w if not (stale and self.reclaims(unit, part))}
        if late and self.clip:
            homes.add(Value("scale", tier="host"))
        return frozenset(homes | self.carried_values if warm else homes)

    def num_extents(self, value: Value) -> int:
        """The number of extents on SSD that a part or its copy has: two, if a write must not go to the one that the
        last commit names.
        """
        return 2 if self.durability and value.kind in ("w", "s", *COPIES.values()) else 1

    def present(self, ops: Iterable[Op]) -> frozenset[Value]:
        """What is at home when `ops` begin, gradients and copies of the step before included if `ops` read any."""
        defined, found = set[Value](), set[Value]()
        for op in ops:
            found.update(value for value in op.reads if value.kind in ("dw", "w") and value not in defined)
            defined.update(value for value in op.results if value.kind in ("dw", "w"))
        gradients = [value for value in found if value.kind == "dw"]
        placed = ((self.by_unit.get(value.unit), value.part) for value in gradients)
        groups = {unit.dw[part].when for unit, part in placed if unit}
        warm = not found.isdisjoint(self.carried_values)
        return self.homes(late=bool(gradients), redo="early" in groups, warm=warm)

    def reclaims(self, unit: UnitPlacement, part: Part) -> bool:
        """Whether a late part's host memory is free between backward and update (paper, section 4.3).

        The parameter is stale then, and its update makes it from the master. If the device reads host memory itself, a
        unit's host zone stays one piece. If another backward may come, the parameter is not stale.
        """
        return self.separate and unit.has_master and part.tier == "host" and not self.accumulates

    def keeps_gradient(self, unit: UnitPlacement) -> bool:
        """Whether late gradients stay where they were summed: in one memory, if all of the unit's may be late."""
        return not self.separate and not self.accumulates and (self.speculative or not unit.trained("early"))

    # What the layout and the decision say ----

    @property
    def separate(self) -> bool:
        return self.layout.separate

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def durability(self) -> int:
        return self.layout.durability

    @property
    def accumulates(self) -> bool:
        return self.layout.accumulates

    @property
    def speculative(self) -> bool:
        return self.decision.speculative

    @property
    def clip(self) -> bool:
        """Whether late updates wait for the scale, which follows from the norms of all gradients. If updates are
        neither all late nor speculative, the program is one without clipping.
        """
        return self.layout.clip and (self.speculative or self.decision.alpha == 1.0)


def _from_ssd(groups: Iterable[tuple[UnitPlacement, Group]]) -> frozenset[Value]:
    """The copies in host memory of parameters that are stored on SSD."""
    parts = ((unit, part) for unit, group in groups for part in group.w if part.tier == "ssd")
    return frozenset(unit.value("w", part, "host") for unit, part in parts)
