"""What each verb means, on one device, one operation after the other: the oracle of all tests.

No overlap, no tiers, no memory to save. Whatever runs a program differently must give the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gs_compile.program import Op, Program, Unit, Value


class Units(Protocol):
    """The computations of a model's units, one method a verb.

    `count` and `zeros` are called as written. The others are called as

        embed("e", micro_batch, wants=("x", "side"), batch=..., w=...)

    with one keyword for each value read and each accumulator to add to in place (`dw`, `dside`), by its kind, and
    return a tuple with one entry for each kind in `wants`, in that order.
    """

    def count(self, batches: list[Any]) -> Any: ...

    def zeros(self, value: Value) -> Any: ...

    def embed(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    def forward(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    def head(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    def head_backward(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    def backward(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    def embed_backward(self, unit: Unit, micro_batch: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...


def reference(program: Program, units: Units, inputs: Mapping[Value, Any]) -> dict[Value, Any]:
    """What `program` defines and does not free, given its inputs (batch, w, dy)."""
    env = dict(inputs)
    for op in program.ops:
        results = perform(op, units, [env[value] for value in op.reads], [env[value] for value in op.into])
        env.update(zip(op.results, results, strict=True))
        if op.verb == "free":
            del env[op.reads[0]]
    return {value: result for value, result in env.items() if value not in inputs}


def perform(op: Op, units: Units, reads: Sequence[Any], into: Sequence[Any]) -> tuple[Any, ...]:
    """One operation on the contents of its values: returns its results, and adds in place to those of `into`."""
    match op.verb:
        case "free":
            return ()
        case "zeros":
            return (units.zeros(op.results[0]),)
        case "count":
            return (units.count(list(reads)),)
    contents = zip((*op.reads, *op.into), (*reads, *into), strict=True)
    results: tuple[Any, ...] = getattr(units, op.verb)(
        op.stage.unit,
        op.micro_batch,
        wants=tuple(value.kind for value in op.results),
        **{value.kind: content for value, content in contents},
    )
    return results
