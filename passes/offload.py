"""Give every value the home its placement says, and bring it to where it is used and back, just in time.

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
from dataclasses import replace
from itertools import pairwise

from gs_compile.placement.placement import Group, Part, Placement, UnitPlacement
from gs_compile.program.ir import FILL, Op, Program, Stage, Tier, Value, homed


def offload(program: Program, *, placement: Placement, outputs: Iterable[Value] = ()) -> Program:
    """The same step with its data on the tiers. Values in `outputs` stay on the device: they are results too."""
    ops = list(_Units(program, placement).ops())
    if placement.order == "horizontal":
        ops = list(_with_sums(ops, placement))
    ops = list(_Activations(program.with_ops(ops, "offload"), placement, frozenset(outputs)).ops())
    return program.with_ops(ops, made_by="offload")


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
        for op in self.program.ops:
            unit = self._unit(op)
            if op.verb == "clip":
                yield replace(op, results=(Value("scale", tier="host"),))
            elif op.verb == "commit":
                yield from self._commit(op)
            elif unit is None:
                yield op
            elif op.verb == "gather":
                yield from self._gather(op, unit)
            elif op.verb == "alias":
                yield from self._keep(op, unit)
            elif op.verb == "update":
                yield from self._update(op, unit)
            else:
                yield op

    def _unit(self, op: Op) -> UnitPlacement | None:
        values = (*op.results, *op.into, *op.reads)
        return self.placement.by_unit.get(values[0].unit) if values and values[0].unit is not None else None

    def _gather(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        whole, stage = op.results[0], op.stage
        fresh = set() if unit.unit in self.gathered else self.updated_late  # what the late update has made is there
        self.gathered.add(unit.unit)
        away = [part for part in unit.w.values() if part.tier == "ssd" and (unit.unit, part.letter) not in fresh]
        yield from self._move("prefetch", "w", unit, away, stage)
        parts = tuple(unit.value("w", part, "host") for part in unit.w.values() if part.tier != "device")
        if not self.placement.separate:
            yield Op("gather", parts, stage, (whole,))
            return
        resident = tuple(unit.value("w", part) for part in unit.w.values() if part.tier == "device")
        pieces = tuple(replace(whole, piece=k) for k in range(self.placement.num_pieces) if parts)
        for piece in pieces:
            yield Op("prefetch", parts, stage, (piece,))
        yield Op("gather", (*pieces, *resident), stage, (whole,))

    def _keep(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """The gradient leaves the device, once; early parts where there is a way to go."""
        left = tuple(unit.gradient(unit.dw[value.part]) for value in op.results)
        if self.placement.keeps_gradient(unit):
            yield Op("alias", op.reads, op.stage, left)
        else:
            everything = tuple(unit.gradient(group) for group in unit.trained())
            yield Op("offload", op.reads, op.stage, everything if self.placement.separate else left)

    def _update(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        group = unit.group_of(op.into[0])
        whole, stage, is_late = Value("dw", unit.unit), op.stage, op.stage == FILL
        gradient, left = unit.gradient(group), unit.trained(*self.placement.waiting(redo=True))
        if not is_late and not self.placement.separate:
            gradient = whole
        elif not is_late and group is unit.trained("early")[0] and not left:
            yield Op("offload", (whole,), stage, tuple(unit.gradient(g) for g in unit.trained("early")))
        resident, on_ssd = ([part for part in group.w if part.tier == tier] for tier in ("device", "ssd"))
        if unit.has_master:
            filled = (
                resident + on_ssd + [p for p in group.w if group.when == "late" and self.placement.reclaims(unit, p)]
            )
            for part in filled:
                yield Op("empty", (), stage, (unit.value("w", part, "host"),))
        elif is_late:
            yield from self._move("prefetch", "w", unit, on_ssd, stage)
        yield from self._move("prefetch", "s", unit, [part for part in group.s if part.tier == "ssd"], stage)
        places = {} if is_late or not self.placement.speculative else dict(unit.shadows(group))
        there = {home: other for home, other in places.items() if home.tier == "host"}
        into = tuple(there.get(value, value) for value in self._changed(unit, group))
        scale = (Value("scale", tier="host"),) if self.placement.clip and is_late else ()
        yield Op("update", (gradient, *there, *scale), stage, into=into)
        if resident:
            made = tuple(unit.value("w", part, "host") for part in resident)
            yield Op("prefetch", made, stage, into=tuple(unit.value("w", part) for part in resident))
        for kind, parts in (("w", on_ssd), ("s", [part for part in group.s if part.tier == "ssd"])):
            for moved in self._move("offload", kind, unit, parts, stage):
                yield replace(moved, into=tuple(places.get(value, value) for value in moved.into))

    def _commit(self, op: Op) -> Iterator[Op]:
        """Each part in memory or on SSD, as it is at home, and its shadow copy."""
        unit = self.placement.by_unit[op.into[0].unit or 0]
        homes = (unit.value(v.kind, (unit.w if homed(v).kind == "w" else unit.s)[v.part]) for v in op.into)
        yield Op("commit", (Value("scale", tier="host"),), op.stage, into=tuple(homes))

    def _changed(self, unit: UnitPlacement, group: Group) -> tuple[Value, ...]:
        parts = [unit.value("w", part, "host") for part in group.w]
        return (*parts, *(unit.value("s", part, "host") for part in group.s))

    def _move(self, verb: str, kind: str, unit: UnitPlacement, parts: list[Part], stage: Stage) -> Iterator[Op]:
        """One transfer of `parts` between SSD and host."""
        if not parts:
            return
        on_host = tuple(unit.value(kind, part, "host") for part in parts)
        on_ssd = tuple(unit.value(kind, part, "ssd") for part in parts)
        if verb == "prefetch":
            yield Op(verb, on_ssd, stage, on_host)
        else:
            yield Op(verb, on_host, stage, into=on_ssd)


def _with_sums(ops: list[Op], placement: Placement) -> Iterator[Op]:
    """The same, with gradient sums on their way home and back between two micro-batches.

    In one memory they stay where they are, but for those whose home is the SSD.
    """
    turns: dict[Value, dict[int | None, list[int]]] = {}  # the operations that add to a sum, by micro-batch
    for index, op in enumerate(ops):
        for value in op.into:
            unit = placement.by_unit.get(value.unit) if value.kind == "dw" and value.unit is not None else None
            if unit is not None and (placement.separate or placement.gradient_home(unit) == "ssd"):
                turns.setdefault(value, {}).setdefault(op.micro_batch, []).append(index)
    before: dict[int, list[Value]] = {}
    after: dict[int, list[Value]] = {}
    for value, by_micro_batch in turns.items():
        for here, following in pairwise(by_micro_batch.values()):
            after.setdefault(here[-1], []).append(value)
            before.setdefault(following[0], []).append(value)
    for index, op in enumerate(ops):
        for value in before.get(index, ()):
            yield from _sum_from_home(value, op.stage, placement)
        yield op
        for value in after.get(index, ()):
            yield from _sum_to_home(value, op.stage, placement)


def _sum_to_home(value: Value, stage: Stage, placement: Placement) -> Iterator[Op]:
    assert value.unit is not None
    yield Op("offload" if placement.separate else "alias", (value,), stage, (_on(value, "host"),))
    if placement.gradient_home(placement.by_unit[value.unit]) == "ssd":
        yield Op("offload", (_on(value, "host"),), stage, (_on(value, "ssd"),))


def _sum_from_home(value: Value, stage: Stage, placement: Placement) -> Iterator[Op]:
    assert value.unit is not None
    if placement.gradient_home(placement.by_unit[value.unit]) == "ssd":
        yield Op("prefetch", (_on(value, "ssd"),), stage, (_on(value, "host"),))
    yield Op("prefetch" if placement.separate else "alias", (_on(value, "host"),), stage, (value,))


class _Activations:
    """Checkpoints and inter-layer gradients."""

    def __init__(self, program: Program, placement: Placement, outputs: frozenset[Value]) -> None:
        self.program = program
        self.placement = placement
        self.outputs = outputs
        self.stages = [op.stage for op in program.ops]
        self.users: dict[Value, list[int]] = {}
        for index, op in enumerate(program.ops):
            for value in op.reads:
                if value.kind in ("x", "dx"):
                    self.users.setdefault(value, []).append(index)
        compute = [index for index, op in enumerate(program.ops) if op.micro_batch is not None]
        self.computation_before = {after: before for before, after in pairwise(compute)}
        self.definitions = {value: index for index, op in enumerate(program.ops) for value in op.results}

    def ops(self) -> Iterator[Op]:
        for stage, indices in self._by_stage():
            yield from self._from_ssd(indices, stage)
            outputs: list[Value] = []
            for index in indices:
                op = self.program.ops[index]
                yield from (self._prefetch(value, stage) for value in op.reads if self._comes_back(value, index))
                yield op
                for value in op.results:
                    if self._leaves(value):
                        outputs.append(value)
                        yield self._offload(value, stage)
            yield from self._to_ssd([value for value in outputs if self._on_ssd(value)], stage)

    def _by_stage(self) -> Iterator[tuple[Stage, list[int]]]:
        groups: dict[Stage, list[int]] = {}
        for index, stage in enumerate(self.stages):
            groups.setdefault(stage, []).append(index)
        yield from groups.items()

    # Which values travel ---------------------------------------------------------------------------------------------

    def _recomputed_from(self, value: Value) -> bool:
        """Whether it is a checkpoint: read again in the backward of the layer it goes into."""
        return value.kind == "x" and len(self.users.get(value, ())) > 1

    def _leaves(self, value: Value) -> bool:
        if value.kind not in ("x", "dx") or self._stays(value) or not self.users.get(value):
            return False
        if self.placement.separate:
            return any(self._comes_back(value, use) for use in self.users[value])
        return self._recomputed_from(value)

    def _comes_back(self, value: Value, index: int) -> bool:
        """Whether it is read at `index` and not on the device any more."""
        if value.kind not in ("x", "dx") or self._stays(value):
            return False
        if not self.placement.separate:
            return index != self.users[value][0] and self._recomputed_from(value)
        before = self.computation_before.get(index)  # what it has made or read is still there
        return before not in (self.definitions[value], *self.users[value])

    def _stays(self, value: Value) -> bool:
        return value in self.outputs or self._has_home(value, "device")

    def _on_ssd(self, value: Value) -> bool:
        return self._has_home(value, "ssd")

    def _has_home(self, value: Value, tier: Tier) -> bool:
        stays_near = value.unit == self.program.num_layers  # what the head reads is needed again at once
        return self._recomputed_from(value) and not stays_near and self.placement.checkpoint_home(value) == tier

    # How they travel -------------------------------------------------------------------------------------------------

    def _offload(self, value: Value, stage: Stage) -> Op:
        copied = self.placement.separate or self._on_ssd(value)
        return Op("offload" if copied else "alias", (value,), stage, (_on(value, "host"),))

    def _prefetch(self, value: Value, stage: Stage) -> Op:
        return Op("prefetch" if self.placement.separate else "alias", (_on(value, "host"),), stage, (value,))

    def _to_ssd(self, values: list[Value], stage: Stage) -> Iterator[Op]:
        if values:
            values = sorted(values, key=lambda value: value.micro_batch or 0)
            on_host, on_ssd = (tuple(_on(value, tier) for value in values) for tier in ("host", "ssd"))
            yield Op("offload", on_host, stage, on_ssd)

    def _from_ssd(self, indices: list[int], stage: Stage) -> Iterator[Op]:
        read = [value for index in indices for value in self.program.ops[index].reads]
        values = [v for v in dict.fromkeys(read) if v.kind == "x" and v not in self.outputs and self._on_ssd(v)]
        values = [value for value in values if stage.phase == "backward"]
        if values:
            values.sort(key=lambda value: value.micro_batch or 0)
            on_host, on_ssd = (tuple(_on(value, tier) for value in values) for tier in ("host", "ssd"))
            yield Op("prefetch", on_ssd, stage, on_host)


def _on(value: Value, tier: Tier) -> Value:
    return replace(value, tier=tier)
