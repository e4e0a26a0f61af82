"""The meaning of each verb, on one device, one operation after the other: the oracle of all tests.

No overlap, no tiers, no memory to save. Whatever runs a program differently must give the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from gs_compile.program.ir import Op, Program, Value, homed


def reference(program: Program, units: Any, inputs: Mapping[Value, Any]) -> dict[Value, Any]:
    """The values that `program` defines and does not free, given its inputs (batch, w, dy).

    units: one method for each verb that computes, called as those of `runtime.units.CompiledUnits` are; for a program
        with tiers also

        gather(whole, parts by letter), split(part, gradient), empty(part)    a unit's parts, which are flat
        norm(gradient), clip(norms), confirmed(scale)                         what clipping needs
        update(reads, into)                                                   the optimizer, in place, on parts by value
    """
    env = dict(inputs)
    for op in program.ops:
        results = perform(op, units, [env[value] for value in op.reads], [env[value] for value in op.into])
        env.update(zip(op.results, results, strict=True))
        if op.verb == "free":
            del env[op.reads[0]]
    return {value: result for value, result in env.items() if value not in inputs or result is not inputs[value]}


def perform(op: Op, units: Any, reads: Sequence[Any], into: Sequence[Any]) -> tuple[Any, ...]:
    """One operation on the contents of its values: returns its results, and adds in place to those of `into`."""
    match op.verb:
        case "free" | "seal":
            return ()
        case "zeros":
            return (units.zeros(op.results[0]),)
        case "count":
            return (units.count(list(reads)),)
        case "empty":
            return (units.empty(op.results[0]),)
        case "norm":  # sums begin with the first backward of a step: here it has no other
            for value, total in zip(op.into, into, strict=True):
                total.copy_(units.split(value, reads[0]))
            return (units.norm(reads[0]),)
        case "clip":
            return (units.clip(reads),)
        case "gather":
            return (units.gather(op.results[0], _gathered(op.reads, reads)),)
        case "update":
            _update(op, units, dict(zip(op.reads, reads, strict=True)), into)
            return ()
        case "commit":
            for home, other in zip(into[::2], into[1::2], strict=True):
                if units.confirmed(reads[0]):
                    home.copy_(other)
            return ()
        case "prefetch" | "offload" | "alias":
            return _moved(op, units, reads, into)
    results: tuple[Any, ...] = getattr(units, op.verb)(
        op.unit,
        op.micro_batch,
        wants=tuple(value.kind for value in op.results),
        **dict(zip(op.keywords, (*reads, *into), strict=True)),
    )
    return results


def _moved(op: Op, units: Any, reads: Sequence[Any], into: Sequence[Any]) -> tuple[Any, ...]:
    if op.reads[0].kind == "dw" and not op.reads[0].part and op.results[0].part:
        return tuple(units.split(value, reads[0]) for value in op.results)
    if op.reads[0].kind == "dw" and not op.reads[0].part:
        return (deepcopy(reads[0]),)  # a sum that is still to grow
    if op.results and op.results[0].piece is not None:
        return (_by_letter(op.reads, reads),)  # a piece of every part; what they are is known once they are together
    for target, content in zip(into, reads, strict=False):
        target.copy_(content)
    return tuple(content if op.verb == "alias" else _copied(content) for content in reads[: len(op.results)])


def _update(op: Op, units: Any, reads: dict[Value, Any], into: Sequence[Any]) -> None:
    """Parameters and state that are read are changed in their shadow copies."""
    for value, content in zip(op.into, into, strict=True):
        if homed(value) in reads:
            content.copy_(reads.pop(homed(value)))
    units.update(reads, {homed(value): content for value, content in zip(op.into, into, strict=True)})


def _by_letter(values: Sequence[Value], contents: Sequence[Any]) -> dict[str, Any]:
    return {value.part: _copied(content) for value, content in zip(values, contents, strict=True)}


def _gathered(values: Sequence[Value], contents: Sequence[Any]) -> dict[str, Any]:
    """Parts by letter, those that have come in pieces and those that were there."""
    found: dict[str, Any] = {}
    for value, content in zip(values, contents, strict=True):
        found |= _by_letter([value], [content]) if value.piece is None else content
    return found


def _copied(content: Any) -> Any:
    return content.clone() if hasattr(content, "clone") else content
