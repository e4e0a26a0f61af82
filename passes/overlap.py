"""Put the optimizer step beside the backward, and its late part beside the next forward (arXiv 2512.17570, 4.3, 4.4).

    fill         update(late)                    of the step before, unit by unit
                 seal                            where that step is to be durable
    forward i    gather -> forward forward ...
    backward i   gather -> backward backward ... -> norm -> update(early)
                 norm(into=dw1a)                 where a step has several backwards: added to those before
    drain        clip                            where updates wait for the norm of all gradients
                 commit                          or do not, and hold only if that says so

After this pass a unit's parameters are parts, which updates change, and exist as a whole (`gather`) only for the
stages that use them. Everything is still on the device.

Speculative updates read what is at home and write to shadow copies, so that nothing has to be undone: unless `commit`
makes these the homes, the next step finds what this one has found, and all gradients, and updates everything late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from gs_compile.placement.placement import Placement, StepContext
from gs_compile.placement.units import Group, UnitPlacement
from gs_compile.program.ir import DRAIN, FILL, Op, Program, Stage, Unit, Value


def overlap(program: Program, placement: Placement, context: StepContext) -> Program:
    """The same step with the optimizer in it."""
    waits = placement.clip and not placement.speculative
    assert not (waits and placement.has_early), "with clipping all updates are late: they wait for the norm of all"
    # The stage in which each unit's gradient is added to for the last time.
    completions = {value.unit: op.stage for op in program.ops for value in op.into if value.kind == "dw"}
    before = (
        *_late(program, placement, context.waiting(placement)),
        *([Op("seal", (), FILL)] if context.seals else []),
    )
    ops = (*before, *_stages(program, placement, completions), *_end(placement, completions))
    return program.with_ops(ops, made_by="overlap")


def _late(program: Program, placement: Placement, when: tuple[str, ...]) -> Iterator[Op]:
    """The updates of the step before, in the order in which units are used."""
    in_order = (*_read(program.ops, placement), *placement.units)
    for unit in {unit.unit: unit for unit in in_order}.values() if when else ():
        for group in unit.trained(*when):
            yield _update(unit, group, Value("dw", unit.unit, part=group.letter), placement, FILL)


def _stages(program: Program, placement: Placement, completions: dict[Unit | None, Stage]) -> Iterator[Op]:
    completed: dict[Stage | None, list[UnitPlacement]] = defaultdict(list)
    for unit in placement.units:
        completed[completions.get(unit.unit)].append(unit)
    for stage, ops in program.stages():
        for unit in _read(ops, placement):
            parts = tuple(unit.value("w", part, "device") for part in unit.w.values())
            yield Op("gather", parts, stage, (Value("w", unit.unit),))
        yield from ops
        for unit in completed[stage]:
            yield from _step(unit, placement, stage)


def _end(placement: Placement, completions: dict[Unit | None, Stage]) -> Iterator[Op]:
    """The scale, and what depends on it."""
    complete = [unit for unit in placement.units if unit.unit in completions]
    if placement.clip and complete:
        yield Op("clip", tuple(Value("norm", unit.unit) for unit in complete), DRAIN, (Value("scale"),))
    for unit in complete if placement.speculative else ():
        pairs = [pair for group in unit.trained("early") for pair in _shadows(unit, group)]
        if pairs:
            yield Op("commit", (Value("scale"),), DRAIN, into=tuple(chain.from_iterable(pairs)))


def _step(unit: UnitPlacement, placement: Placement, stage: Stage) -> Iterator[Op]:
    """The operations that follow once a unit's gradient is complete."""
    gradient = Value("dw", unit.unit)
    left = unit.trained(*placement.waiting(redo=True))
    sums = tuple(value._replace(tier="device") for value in placement.sums(unit))
    yield Op("norm", (gradient,), stage, (Value("norm", unit.unit),), into=sums)
    if left and not sums:
        yield Op("alias", (gradient,), stage, tuple(Value("dw", unit.unit, part=group.letter) for group in left))
    for group in unit.trained("early"):
        update = _update(unit, group, gradient, placement, stage)
        if placement.speculative:  # before the scale is known: from the parts to their shadow copies
            shadows = dict(_shadows(unit, group))
            into = tuple(shadows.get(value, value) for value in update.into)
            update = replace(update, reads=(gradient, *shadows), into=into)
        yield update


def _update(unit: UnitPlacement, group: Group, gradient: Value, placement: Placement, stage: Stage) -> Op:
    scale = (Value("scale"),) if placement.clip else ()
    into = tuple(value._replace(tier="device") for value in unit.parts(group))
    return Op("update", (gradient, *scale), stage, into=into)


def _shadows(unit: UnitPlacement, group: Group) -> Iterator[tuple[Value, Value]]:
    """The parts of a group that have shadow copies, and these."""
    for part, shadow in unit.shadows(group):
        yield part._replace(tier="device"), shadow._replace(tier="device")


def _read(ops: tuple[Op, ...], placement: Placement) -> list[UnitPlacement]:
    """The placed units whose parameters a stage reads."""
    read = dict.fromkeys(value.unit for op in ops for value in op.reads if value.kind == "w")
    return [placement.by_unit[unit] for unit in read if unit in placement.by_unit]
