"""Give every value the tier its placement says, and bring it to where it is used and back, just in time.

    w1b.host = prefetch(w1b.ssd)                    parameters, from SSD to host: all parts of a unit at once
    w1.device[0] = prefetch(w1a.host, w1b.host)     from host to device, in as many pieces as there are micro-batches
    x2_0.host = offload(x2_0.device)                a layer's output, as soon as it is there
    x2_0.ssd, x2_1.ssd = offload(x2_0.host, x2_1.host)      checkpoints of a layer, all at once
    a1_0.ssd = offload(a1_0.host)                   what a layer has saved beside, one micro-batch at a time

and in the horizontal order

    dw1.host = offload(dw1.device)                  a gradient sum, after each micro-batch but the last
    dw1.device = prefetch(dw1.host)                 and back, before each but the first

A part that lives on the device is read where it is; its update runs in host memory, so it comes back:

    prefetch(w1a.host, into=w1a.device)

A part that lives in memory has a copy on SSD for commits, written in a step that is to be committed:

    offload(s1a.host, into=cs1a.ssd)

Where the device has no memory of its own, there are no transfers to it, and an output is only copied to host memory if
it goes on to SSD. Nothing overlaps yet: `pipeline` gives each transfer its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

from gs_compile.placement.placement import Placement, StepContext
from gs_compile.placement.units import Group, UnitPlacement
from gs_compile.program.ir import EPILOGUE, FILL, TIED, Op, Program, Stage, Tier, Value, homed

SCALE = Value("scale", tier="host")
MOVED = frozenset({"x", "dx", "a"})  # activations of a layer and a micro-batch
Pairs = tuple[tuple[Value, Value], ...]  # parts and the copy of each


def offload(program: Program, placement: Placement, context: StepContext) -> Program:
    """The same step with its data on the tiers."""
    placed = program.with_ops(_Units(program, placement, context).ops(), "offload")
    if placement.by_micro_batch:
        placed = placed.with_ops(_with_sums(placed, placement), "offload")
    return placed.with_ops(_Activations(placed, placement).ops(), "offload")


class _Units:
    """Parameters, gradients and optimizer states."""

    def __init__(self, program: Program, placement: Placement, context: StepContext) -> None:
        self.program = program
        self.placement = placement
        self.context = context
        self.carries = TIED in placement.decision.carried and program.trains
        self.fresh = {  # parts of parameters that a late update has made, or stay, until their unit is gathered
            (value.unit, value.part)
            for op in program.ops
            if op.verb == "update" and op.stage == FILL
            for value in op.into
            if value.kind == "w"
        } | {(value.unit, value.part) for value in (placement.carried_values if context.warm else ())}

    def ops(self) -> Iterator[Op]:
        rewrites = {"gather": self._gather, "alias": self._leave, "commit": self._commit, "update": self._update}
        for op in self.program.ops:
            unit = self.placement.unit_of(op)
            if unit is not None and op.verb == "norm" and op.into:
                yield from self._add(op, unit)
            elif op.verb == "clip":
                yield replace(op, results=(SCALE,))
            elif unit is not None and op.verb in rewrites:
                yield from rewrites[op.verb](op, unit)
            else:
                yield op

    def _gather(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        whole, stage = op.results[0], op.stage
        stored = [unit.value("w", part) for part in unit.w.values()]
        yield from _fetch((v for v in stored if v.tier == "ssd" and (v.unit, v.part) not in self.fresh), stage)
        change = self.fresh.update if self._stays(unit, stage) else self.fresh.difference_update
        change((value.unit, value.part) for value in stored)
        parts = tuple(_on(value, "host") for value in stored if value.tier != "device")
        if not self.placement.separate:
            yield Op("gather", parts, stage, (whole,))
            return
        pieces = tuple(whole._replace(piece=k) for k in self.placement.pieces(unit) if parts)
        for piece in pieces:
            yield Op("prefetch", parts, stage, (piece,))
        yield Op("gather", (*pieces, *(value for value in stored if value.tier == "device")), stage, (whole,))

    def _stays(self, unit: UnitPlacement, stage: Stage) -> bool:
        """Whether a unit's parts stay in memory after a gathering, until they are gathered next."""
        is_forward, is_head = stage.phase == "forward", stage.unit == EPILOGUE
        until_head = self.carries and unit.unit == TIED and is_forward and not is_head
        return until_head or (unit.unit in self.placement.decision.retained and (is_forward or is_head))

    def _leave(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """The gradient leaves the device, once; early parts where there is a way to go."""
        left = tuple(unit.gradient(unit.dw[value.part]) for value in op.results)
        if self.placement.keeps_gradient(unit):
            yield Op("alias", op.reads, op.stage, left)
        else:
            everything = tuple(unit.gradient(group) for group in unit.trained())
            yield Op("offload", op.reads, op.stage, everything if self.placement.separate else left)

    def _add(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """A complete gradient is added to the step's sums where it is: on the device, or in memory that this reads.

        The ranks' shares of it are added up in host memory.
        """
        stored = self.placement.sums(unit)
        in_host, on_device = (tuple(_on(value, tier) for value in stored) for tier in ("host", "device"))
        comes = self.placement.separate and self.placement.world == 1
        if stored != in_host:
            yield Op("prefetch", stored, op.stage, in_host)
        if comes:
            yield Op("prefetch", in_host, op.stage, on_device)
        yield replace(op, into=on_device if comes else in_host)
        if comes:
            yield Op("offload", on_device, op.stage, into=in_host)
        if stored != in_host:
            yield Op("offload", in_host, op.stage, into=stored)

    def _commit(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """Each part in memory or on SSD, where it is stored, and its shadow copy."""
        stored = (unit.value(v.kind, (unit.w if homed(v).kind == "w" else unit.s)[v.part]) for v in op.into)
        yield Op("commit", (SCALE,), op.stage, into=tuple(stored))

    def _update(self, op: Op, unit: UnitPlacement) -> Iterator[Op]:
        """One update with all that moves for it: the gradient out, its parts in, and what it has made to the tiers."""
        placement, group, is_late = self.placement, unit.group_of(op.into[0]), op.stage == FILL
        w, s = [unit.value("w", part) for part in group.w], [unit.value("s", part) for part in group.s]
        shadows = dict(unit.shadows(group)) if placement.speculative and not is_late else {}
        yield from self._gradient_out(op, unit, group)
        yield from self._parts_in(op, unit, group)

        in_host = {part: shadow for part, shadow in shadows.items() if part.tier == "host"}
        gradient = unit.gradient(group) if is_late or placement.separate else Value("dw", unit.unit)
        scale = (SCALE,) if placement.clip and is_late else ()
        into = tuple(in_host.get(value, _on(value, "host")) for value in (*w, *s))
        yield Op("update", (gradient, *in_host, *scale), op.stage, into=into)

        for verb, tier, values in (("prefetch", "device", w), ("offload", "ssd", w), ("offload", "ssd", s)):
            stored = [value for value in values if value.tier == tier]
            if stored:
                made = tuple(_on(value, "host") for value in stored)
                yield Op(verb, made, op.stage, into=tuple(shadows.get(value, value) for value in stored))
        if self.context.seals if is_late else self.context.copies:
            yield from self._copied(op, unit.copies(group), shadows)

    def _copied(self, op: Op, copies: Pairs, shadows: Mapping[Value, Value]) -> Iterator[Op]:
        """What an update has made of the parts that live in memory, as it is there, to their copies on SSD."""
        in_host = {part: _on(part, "host") if part.tier == "device" else shadows.get(part, part) for part, _ in copies}
        for kind in ("w", "s"):
            pairs = [(in_host[part], copy) for part, copy in copies if part.kind == kind]
            if pairs:
                yield Op("offload", tuple(made for made, _ in pairs), op.stage, into=tuple(copy for _, copy in pairs))

    def _gradient_out(self, op: Op, unit: UnitPlacement, group: Group) -> Iterator[Op]:
        """All early gradients at once, before the first early update, unless they have left with the late ones."""
        early = unit.trained("early")
        has_left = op.stage == FILL or unit.trained(*self.placement.waiting(redo=True))
        if self.placement.separate and not has_left and group is early[0]:
            yield Op("offload", (Value("dw", unit.unit),), op.stage, tuple(map(unit.gradient, early)))

    def _parts_in(self, op: Op, unit: UnitPlacement, group: Group) -> Iterator[Op]:
        """State from SSD, and parameters where the update reads them; where it fills them, memory for them.

        What is on SSD is in host memory in the backward anyway, and stays there for an early update.
        """
        if unit.has_master:
            filled = [part for tier in ("device", "ssd") for part in group.w if part.tier == tier]
            filled += [part for part in group.w if group.when == "late" and self.placement.reclaims(unit, part)]
            for part in filled:
                yield Op("empty", (), op.stage, (unit.value("w", part, "host"),))
        else:
            there = tuple(unit.value("w", part) for part in group.w if part.tier == "device")
            if there:
                yield Op("offload", there, op.stage, tuple(_on(value, "host") for value in there))
            if op.stage == FILL:
                yield from _fetch((unit.value("w", part) for part in group.w if part.tier == "ssd"), op.stage)
        yield from _fetch((unit.value("s", part) for part in group.s if part.tier == "ssd"), op.stage)
        yield from _fetch((v for v in self.placement.sums(unit) if (v.part, v.tier) == (group.letter, "ssd")), op.stage)


def _fetch(stored: Iterable[Value], stage: Stage) -> Iterator[Op]:
    """One transfer of parts from SSD to host."""
    values = tuple(stored)
    if values:
        yield Op("prefetch", values, stage, tuple(_on(value, "host") for value in values))


def _with_sums(program: Program, placement: Placement) -> Iterator[Op]:
    """The same, with gradient sums on their way to where they are stored and back between two micro-batches.

    In one memory they stay where they are, but for those that are stored on SSD.
    """
    before, after = defaultdict[int, list[Value]](list), defaultdict[int, list[Value]](list)
    latest: dict[Value, int] = {}  # the operation that has added to a sum last
    for index, op in enumerate(program.ops):
        for value in op.into:
            if (
                value.kind == "dw"
                and value.unit in placement.by_unit
                and (placement.separate or _on_ssd(value, placement))
            ):
                last = latest.get(value, index)
                if program.ops[last].micro_batch != op.micro_batch:
                    after[last].append(value)
                    before[index].append(value)
                latest[value] = index
    for index, op in enumerate(program.ops):
        for value in before[index]:
            if _on_ssd(value, placement):
                yield Op("prefetch", (_on(value, "ssd"),), op.stage, (_on(value, "host"),))
            yield Op("prefetch" if placement.separate else "alias", (_on(value, "host"),), op.stage, (value,))
        yield op
        for value in after[index]:
            yield Op("offload" if placement.separate else "alias", (value,), op.stage, (_on(value, "host"),))
            if _on_ssd(value, placement):
                yield Op("offload", (_on(value, "host"),), op.stage, (_on(value, "ssd"),))


def _on_ssd(gradient: Value, placement: Placement) -> bool:
    """Whether a gradient sum is stored on SSD between two micro-batches."""
    return placement.gradient_home(placement.by_unit[gradient.unit]) == "ssd"


class _Activations:
    """Checkpoints, saved activations and inter-layer gradients."""

    def __init__(self, program: Program, placement: Placement) -> None:
        self.program = program
        self.placement = placement
        self.uses = defaultdict[Value, list[int]](list)  # the operations that read a value
        for index, op in enumerate(program.ops):
            for value in op.reads:
                if value.kind in MOVED:
                    self.uses[value].append(index)
        computations = [index for index, op in enumerate(program.ops) if op.micro_batch is not None]
        self.before = {after: program.ops[before] for before, after in pairwise(computations)}
        self.home = cache(placement.activations.home)
        self.leaves = cache(self._leaves)

    def ops(self) -> Iterator[Op]:
        stages: dict[Stage, list[int]] = {}
        for index, op in enumerate(self.program.ops):
            stages.setdefault(op.stage, []).append(index)
        for stage, indices in stages.items():
            ops = [self.program.ops[index] for index in indices]
            if stage.phase == "backward":
                coming = self._stored_on_ssd(dict.fromkeys(value for op in ops for value in op.reads))
                yield from _fetch((_on(value, "ssd") for value in coming), stage)
            for index, op in zip(indices, ops, strict=True):
                for value in op.reads:
                    if self._comes_back(value, index):
                        if value.kind == "a" and self._is_on(value, "ssd"):
                            yield from _fetch((_on(value, "ssd"),), stage)
                        verb = "prefetch" if self.placement.separate else "alias"
                        yield Op(verb, (_on(value, "host"),), stage, (value,))
                yield op
                for value in filter(self.leaves, op.results):
                    is_copied = self.placement.separate or self._is_on(value, "ssd")
                    yield Op("offload" if is_copied else "alias", (value,), stage, (_on(value, "host"),))
                    if value.kind == "a" and self._is_on(value, "ssd"):
                        yield Op("offload", (_on(value, "host"),), stage, (_on(value, "ssd"),))
            going = self._stored_on_ssd(value for op in ops for value in op.results if self.leaves(value))
            if going:
                on_host, on_ssd = (tuple(_on(value, tier) for value in going) for tier in ("host", "ssd"))
                yield Op("offload", on_host, stage, on_ssd)

    def _stored_on_ssd(self, values: Iterable[Value]) -> list[Value]:
        """The checkpoints that are stored on SSD: one transfer moves all of a stage. Saved activations are larger: of
        these each micro-batch's moves by itself.
        """
        return sorted(
            (v for v in values if v.kind == "x" and self._is_on(v, "ssd")), key=lambda value: value.micro_batch or 0
        )

    def _is_checkpoint(self, value: Value) -> bool:
        """Whether it is kept for the backward of a layer: its input that is read again, and what else it saves."""
        return value.kind == "a" or (value.kind == "x" and len(self.uses.get(value, ())) > 1)

    def _is_on(self, value: Value, tier: Tier) -> bool:
        """Whether a checkpoint is stored on a tier; what the head reads is needed again at once."""
        is_far = value.unit != self.program.num_layers
        return self._is_checkpoint(value) and is_far and self.home(value) == tier

    def _leaves(self, value: Value) -> bool:
        if self.placement.separate:
            return any(self._comes_back(value, use) for use in self.uses.get(value, ()))
        return self._is_checkpoint(value)

    def _comes_back(self, value: Value, index: int) -> bool:
        """Whether it is read at `index` and not on the device any more."""
        if value.kind not in MOVED or self._is_on(value, "device"):
            return False
        if not self.placement.separate:
            return self._is_checkpoint(value) and (value.kind == "a" or index != self.uses[value][0])
        before = self.before.get(index)  # what it has made or read is still there
        return before is None or value not in before.values


def _on(value: Value, tier: Tier) -> Value:
    return Value(value.kind, value.unit, value.micro_batch, tier, value.part, value.piece)
