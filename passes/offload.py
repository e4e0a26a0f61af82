"""Give every value the tier its placement says, and bring it to where it is used and back, just in time.

    w1b.host = prefetch(w1b.ssd)                    parameters, from SSD to host: all parts of a unit at once
    w1.device[0] = prefetch(w1a.host, w1b.host)     from host to device, in as many pieces as there are micro-batches
    x2_0.host = offload(x2_0.device)                a layer's output, as soon as it is there
    x2_0.ssd, x2_1.ssd = offload(x2_0.host, x2_1.host)      checkpoints of a layer, all at once

and in the horizontal order

    dw1.host = offload(dw1.device)                  a gradient sum, after each micro-batch but the last
    dw1.device = prefetch(dw1.host)                 and back, before each but the first

What lives on the device is read where it is; a part that was updated comes from the host's memory:

    w1a.device is changed by prefetch(w1a.host, into=w1a.device)

Where the device has no memory of its own the second kind vanishes, and of the third only what has to be collected for
the SSD is copied. Nothing overlaps yet: `pipeline` gives each transfer its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from gs_compile.placement.placement import Group, Part, Placement, UnitPlacement
from gs_compile.program.ir import FILL, Op, Program, Stage, Tier, Value, homed


@dataclass(frozen=True)
class Offload:
    """The same step with its data on the tiers."""

    name: ClassVar[str] = "offload"

    placement: Placement

    def __call__(self, program: Program) -> Program:
        placed = program.with_ops(_Units(program, self.placement).ops(), self.name)
        if self.placement.order == "horizontal":
            placed = placed.with_ops(_with_sums(placed, self.placement), self.name)
        return placed.with_ops(_Activations(placed, self.placement).ops(), self.name)


class _Units:
    """Parameters, gradients and optimizer states."""

    def __init__(self, program: Program, placement: Placement) -> None:
        self.program = program
        self.placement = placement
        self.updated_late = {
            (value.unit, value.part)
            for op in program.ops
            if op.verb == "update" and op.stage == FILL
            for value in op.into
            if value.kind == "w"
        }
        self.gathered: set[object] = set()  # units gathered before

    def ops(self) -> Iterator[Op]:
        rewrites = {"gather": self._gather, "alias": self._leave, "commit": self._commit}
        for op in self.program.ops:
            values = op.values
            unit = self.placement.by_unit.get(values[0].unit) if values and values[0].unit is not None else None
            if op.verb == "clip":
                yield replace(op, results=(Value("scale", tier="host"),))
            elif unit is not None and op.verb == "update":
                yield from _Update(self.placement, unit, unit.group_of(op.into[0]), op.stage).ops()
            elif unit is not None and op.verb in rewrites:
                yield from rewrites[op.verb](op, unit)
            else:
                yield op

    def _gather(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        whole, stage = op.results[0], op.stage
        fresh = set() if unit.unit in self.gathered else self.updated_late  # what the late update has made is there
        self.gathered.add(unit.unit)
        away = [part for part in unit.w.values() if part.tier == "ssd" and (unit.unit, part.letter) not in fresh]
        yield from _fetch("w", unit, away, stage)
        parts = tuple(unit.value("w", part, "host") for part in unit.w.values() if part.tier != "device")
        if not self.placement.separate:
            yield Op("gather", parts, stage, (whole,))
            return
        resident = tuple(unit.value("w", part) for part in unit.w.values() if part.tier == "device")
        pieces = tuple(replace(whole, piece=k) for k in range(self.placement.num_pieces) if parts)
        for piece in pieces:
            yield Op("prefetch", parts, stage, (piece,))
        yield Op("gather", (*pieces, *resident), stage, (whole,))

    def _leave(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """The gradient leaves the device, once; early parts where there is a way to go."""
        left = tuple(unit.gradient(unit.dw[value.part]) for value in op.results)
        if self.placement.keeps_gradient(unit):
            yield Op("alias", op.reads, op.stage, left)
        else:
            everything = tuple(unit.gradient(group) for group in unit.trained())
            yield Op("offload", op.reads, op.stage, everything if self.placement.separate else left)

    def _commit(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """Each part in memory or on SSD, where it is stored, and its shadow copy."""
        stored = (unit.value(v.kind, (unit.w if homed(v).kind == "w" else unit.s)[v.part]) for v in op.into)
        yield Op("commit", (Value("scale", tier="host"),), op.stage, into=tuple(stored))


@dataclass(frozen=True)
class _Update:
    """One update with all that moves for it: the gradient out, its parts in, and what it has made to the tiers."""

    placement: Placement
    unit: UnitPlacement
    group: Group
    stage: Stage

    def ops(self) -> Iterator[Op]:
        yield from self._gradient_out()
        yield from self._parts_in()
        yield self._update()
        yield from self._parts_out()

    @property
    def _is_late(self) -> bool:
        return self.stage == FILL

    @property
    def _shadows(self) -> dict[Value, Value]:
        """The shadow copies, by part, that a speculative update writes."""
        return dict(self.unit.shadows(self.group)) if self.placement.speculative and not self._is_late else {}

    def _parts(self, kind: str, tier: Tier) -> list[Part]:
        return [part for part in (self.group.w if kind == "w" else self.group.s) if part.tier == tier]

    def _gradient_out(self) -> Iterator[Op]:
        """All early gradients at once, before the first early update, unless they have left with the late ones."""
        early = self.unit.trained("early")
        has_left = self._is_late or self.unit.trained(*self.placement.waiting(redo=True))
        if self.placement.separate and not has_left and self.group is early[0]:
            gradients = tuple(self.unit.gradient(group) for group in early)
            yield Op("offload", (Value("dw", self.unit.unit),), self.stage, gradients)

    def _parts_in(self) -> Iterator[Op]:
        """State from SSD, and parameters where the update reads them; where it fills them, memory for them."""
        if self.unit.has_master:
            filled = self._parts("w", "device") + self._parts("w", "ssd")
            if self.group.when == "late":
                filled += [part for part in self.group.w if self.placement.reclaims(self.unit, part)]
            for part in filled:
                yield Op("empty", (), self.stage, (self.unit.value("w", part, "host"),))
        elif self._is_late:
            yield from _fetch("w", self.unit, self._parts("w", "ssd"), self.stage)
        yield from _fetch("s", self.unit, self._parts("s", "ssd"), self.stage)

    def _update(self) -> Op:
        in_host = {part: shadow for part, shadow in self._shadows.items() if part.tier == "host"}
        parts = [("w", part) for part in self.group.w] + [("s", part) for part in self.group.s]
        values = (self.unit.value(kind, part, "host") for kind, part in parts)
        is_whole = not self._is_late and not self.placement.separate
        gradient = Value("dw", self.unit.unit) if is_whole else self.unit.gradient(self.group)
        scale = (Value("scale", tier="host"),) if self.placement.clip and self._is_late else ()
        into = tuple(in_host.get(value, value) for value in values)
        return Op("update", (gradient, *in_host, *scale), self.stage, into=into)

    def _parts_out(self) -> Iterator[Op]:
        resident = self._parts("w", "device")
        if resident:
            made = tuple(self.unit.value("w", part, "host") for part in resident)
            yield Op("prefetch", made, self.stage, into=tuple(self.unit.value("w", part) for part in resident))
        for kind in ("w", "s"):
            parts = self._parts(kind, "ssd")
            if parts:
                made = tuple(self.unit.value(kind, part, "host") for part in parts)
                stored = (self.unit.value(kind, part) for part in parts)
                yield Op("offload", made, self.stage, into=tuple(self._shadows.get(v, v) for v in stored))


def _fetch(kind: str, unit: UnitPlacement, parts: list[Part], stage: Stage) -> Iterator[Op]:
    """One transfer of `parts` from SSD to host."""
    if parts:
        on_ssd, on_host = (tuple(unit.value(kind, part, tier) for part in parts) for tier in ("ssd", "host"))
        yield Op("prefetch", on_ssd, stage, on_host)


def _with_sums(program: Program, placement: Placement) -> Iterator[Op]:
    """The same, with gradient sums on their way to where they are stored and back between two micro-batches.

    In one memory they stay where they are, but for those that are stored on SSD.
    """
    additions: dict[Value, dict[int | None, list[int]]] = {}  # the operations that add to a sum, by micro-batch
    for index, op in enumerate(program.ops):
        for value in op.into:
            unit = placement.by_unit.get(value.unit) if value.kind == "dw" and value.unit is not None else None
            if unit is not None and (placement.separate or placement.gradient_home(unit) == "ssd"):
                additions.setdefault(value, {}).setdefault(op.micro_batch, []).append(index)
    before: dict[int, list[Value]] = {}
    after: dict[int, list[Value]] = {}
    for value, by_micro_batch in additions.items():
        for here, following in pairwise(by_micro_batch.values()):
            after.setdefault(here[-1], []).append(value)
            before.setdefault(following[0], []).append(value)
    for index, op in enumerate(program.ops):
        for value in before.get(index, ()):
            yield from _sum_in(value, op.stage, placement)
        yield op
        for value in after.get(index, ()):
            yield from _sum_out(value, op.stage, placement)


def _sum_out(value: Value, stage: Stage, placement: Placement) -> Iterator[Op]:
    assert value.unit is not None
    yield Op("offload" if placement.separate else "alias", (value,), stage, (_on(value, "host"),))
    if placement.gradient_home(placement.by_unit[value.unit]) == "ssd":
        yield Op("offload", (_on(value, "host"),), stage, (_on(value, "ssd"),))


def _sum_in(value: Value, stage: Stage, placement: Placement) -> Iterator[Op]:
    assert value.unit is not None
    if placement.gradient_home(placement.by_unit[value.unit]) == "ssd":
        yield Op("prefetch", (_on(value, "ssd"),), stage, (_on(value, "host"),))
    yield Op("prefetch" if placement.separate else "alias", (_on(value, "host"),), stage, (value,))


class _Activations:
    """Checkpoints and inter-layer gradients."""

    def __init__(self, program: Program, placement: Placement) -> None:
        self.program = program
        self.placement = placement
        self.users: dict[Value, list[int]] = {}
        for index, op in enumerate(program.ops):
            for value in op.reads:
                if value.kind in ("x", "dx"):
                    self.users.setdefault(value, []).append(index)
        compute = [index for index, op in enumerate(program.ops) if op.micro_batch is not None]
        self.computation_before = {after: before for before, after in pairwise(compute)}
        self.definitions = {value: index for index, op in enumerate(program.ops) for value in op.results}

    def ops(self) -> Iterator[Op]:
        stages: dict[Stage, list[int]] = {}
        for index, op in enumerate(self.program.ops):
            stages.setdefault(op.stage, []).append(index)
        for stage, indices in stages.items():
            if stage.phase == "backward":
                read = dict.fromkeys(value for index in indices for value in self.program.ops[index].reads)
                yield from self._with_ssd("prefetch", list(read), stage)
            outputs: list[Value] = []
            for index in indices:
                op = self.program.ops[index]
                yield from (self._prefetch(value, stage) for value in op.reads if self._comes_back(value, index))
                yield op
                for value in op.results:
                    if self._leaves(value):
                        outputs.append(value)
                        yield self._offload(value, stage)
            yield from self._with_ssd("offload", outputs, stage)

    def _is_checkpoint(self, value: Value) -> bool:
        """Whether it is read again in the backward of the layer it goes into."""
        return value.kind == "x" and len(self.users.get(value, ())) > 1

    def _is_on(self, value: Value, tier: Tier) -> bool:
        """Whether a checkpoint is stored on a tier; what the head reads is needed again at once."""
        is_far = value.unit != self.program.num_layers
        return self._is_checkpoint(value) and is_far and self.placement.checkpoint_home(value) == tier

    def _leaves(self, value: Value) -> bool:
        if value.kind not in ("x", "dx") or self._is_on(value, "device"):
            return False
        if self.placement.separate:
            return any(self._comes_back(value, use) for use in self.users.get(value, ()))
        return self._is_checkpoint(value)

    def _comes_back(self, value: Value, index: int) -> bool:
        """Whether it is read at `index` and not on the device any more."""
        if value.kind not in ("x", "dx") or self._is_on(value, "device"):
            return False
        if not self.placement.separate:
            return index != self.users[value][0] and self._is_checkpoint(value)
        before = self.computation_before.get(index)  # what it has made or read is still there
        return before not in (self.definitions[value], *self.users[value])

    def _offload(self, value: Value, stage: Stage) -> Op:
        is_copied = self.placement.separate or self._is_on(value, "ssd")
        return Op("offload" if is_copied else "alias", (value,), stage, (_on(value, "host"),))

    def _prefetch(self, value: Value, stage: Stage) -> Op:
        return Op("prefetch" if self.placement.separate else "alias", (_on(value, "host"),), stage, (value,))

    def _with_ssd(self, verb: str, values: Iterable[Value], stage: Stage) -> Iterator[Op]:
        """The transfer, between host and SSD, of those checkpoints that are stored there: all at once."""
        moved = sorted((v for v in values if self._is_on(v, "ssd")), key=lambda value: value.micro_batch or 0)
        if moved:
            on_host, on_ssd = (tuple(_on(value, tier) for value in moved) for tier in ("host", "ssd"))
            reads, results = (on_ssd, on_host) if verb == "prefetch" else (on_host, on_ssd)
            yield Op(verb, reads, stage, results)


def _on(value: Value, tier: Tier) -> Value:
    return replace(value, tier=tier)
