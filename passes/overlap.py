"""Put the optimizer step beside the backward, and its late part beside the next forward (arXiv 2512.17570, 4.3, 4.4).

    fill         update(late)                    of the step before, unit by unit
    forward i    gather -> forward forward ...
    backward i   gather -> backward backward ... -> norm -> update(early)
    drain        clip                            where updates wait for the norm of all gradients
                 commit                          or do not, and hold only if that says so

After this pass a unit's parameters are parts, which updates change, and exist as a whole (`gather`) only for the
stages that use them. Everything is still on the device.

Speculative updates read what is at home and write to shadow copies, so that nothing has to be undone: unless `commit`
makes these the homes, the next step finds what this one has found, and all gradients, and updates everything late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from gs_compile.placement.placement import Group, Placement, UnitPlacement
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, Value


def overlap(program: Program, *, placement: Placement, late: bool = False, redo: bool = True) -> Program:
    """The same step with the optimizer in it; `late`: the step before has left gradients that wait for their update.

    The first step after a start, or after all updates were brought to an end, is without late ones. `redo`: of updates
    that are speculative the gradients were left too, as they did not hold.
    """
    early = any(unit.trained("early") for unit in placement.units)
    waits = placement.clip and not placement.speculative
    assert not (waits and early), "with clipping all updates are late: they wait for the norm of all gradients"
    return program.with_ops(_ops(program, placement, late, redo), made_by="overlap")


def _ops(program: Program, placement: Placement, late: bool, redo: bool) -> Iterator[Op]:
    used = {op.unit for op in program.ops if op.micro_batch is not None}
    complete = _completions(program)
    if late:
        for unit in sorted(placement.units, key=lambda unit: _first_use(program, unit)):
            for group in unit.trained(*placement.waiting(redo=redo)):
                yield _update(unit, group, Value("dw", unit.unit, part=group.letter), placement, FILL)
    for stage, ops in program.stages():
        for unit in _read(ops, placement):
            parts = tuple(unit.value("w", part, "device") for part in unit.w.values())
            yield Op("gather", parts, stage, (Value("w", unit.unit),))
        yield from ops
        for unit in placement.units:
            if complete.get(Value("dw", unit.unit)) == stage:
                yield from _step(unit, placement, stage)
    norms = tuple(Value("norm", unit.unit) for unit in placement.units if Value("dw", unit.unit) in complete)
    if placement.clip and norms and used:
        yield Op("clip", norms, DRAIN, (Value("scale"),))
    if placement.speculative and used:
        for unit in placement.units:
            if Value("dw", unit.unit) in complete:
                yield from _commit(unit)


def _step(unit: UnitPlacement, placement: Placement, stage: Stage) -> Iterator[Op]:
    """What follows once a unit's gradient is complete."""
    gradient = Value("dw", unit.unit)
    yield Op("norm", (gradient,), stage, (Value("norm", unit.unit),))
    left = unit.trained(*placement.waiting(redo=True))
    if left:
        yield Op("alias", (gradient,), stage, tuple(Value("dw", unit.unit, part=group.letter) for group in left))
    for group in unit.trained("early"):
        update = _update(unit, group, gradient, placement, stage)
        yield _speculative(update, unit, group) if placement.speculative else update


def _update(unit: UnitPlacement, group: Group, gradient: Value, placement: Placement, stage: Stage) -> Op:
    scale = (Value("scale"),) if placement.clip else ()
    parts = [unit.value("w", part, "device") for part in group.w] + [unit.value("s", p, "device") for p in group.s]
    return Op("update", (gradient, *scale), stage, into=tuple(parts))


def _speculative(update: Op, unit: UnitPlacement, group: Group) -> Op:
    """The update before the scale is known: from what is at home to shadow copies."""
    places = dict(_on_device(unit, group))
    into = tuple(places.get(value, value) for value in update.into)
    return replace(update, reads=(*update.reads[:1], *places), into=into)


def _commit(unit: UnitPlacement) -> Iterator[Op]:
    pairs = [pair for group in unit.trained("early") for pair in _on_device(unit, group)]
    if pairs:
        yield Op("commit", (Value("scale"),), DRAIN, into=tuple(chain.from_iterable(pairs)))


def _on_device(unit: UnitPlacement, group: Group) -> Iterator[tuple[Value, Value]]:
    for pair in unit.shadows(group):
        home, other = (replace(value, tier="device") for value in pair)
        yield home, other


def _read(ops: tuple[Op, ...], placement: Placement) -> list[UnitPlacement]:
    """The placed units whose parameters a stage reads."""
    read = dict.fromkeys(value.unit for op in ops for value in op.reads if value.kind == "w")
    return [placement.by_unit[unit] for unit in read if unit is not None and unit in placement.by_unit]


def _completions(program: Program) -> dict[Value, Stage]:
    """The stage in which each gradient is added to for the last time."""
    return {value: op.stage for op in program.ops for value in op.into if value.kind == "dw"}


def _first_use(program: Program, unit: UnitPlacement) -> int:
    whole = Value("w", unit.unit)
    return next((index for index, op in enumerate(program.ops) if whole in op.reads), len(program.ops))
