"""End every value after its last use. Runs last: lifetimes follow from what all other passes made of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gs_compile.program import Op, Program, Value

# What a step makes for itself. Inputs (batch, w) are not its to end; results (loss, y, dw) are what it is run for.
TRANSIENT_KINDS = frozenset({"x", "side", "total", "dx", "dy", "dside"})


def free(program: Program, *, keep: Iterable[Value] = ()) -> Program:
    """The same program with `free(value)` right after the last operation that uses the value.

    A value that nothing uses ends where it is defined. Values in `keep` are never freed in this program: they are
    results too, such as the hidden states that a model returns.
    """
    kept = frozenset(keep)
    last_use = {value: index for index, op in enumerate(program.ops) for value in _values(op)}
    return program.with_ops(_with_frees(program, last_use, kept), made_by="free")


def _with_frees(program: Program, last_use: dict[Value, int], kept: frozenset[Value]) -> Iterator[Op]:
    for index, op in enumerate(program.ops):
        yield op
        for value in dict.fromkeys(_values(op)):
            if last_use[value] == index and value.kind in TRANSIENT_KINDS and value not in kept:
                yield Op("free", (value,), op.stage)


def _values(op: Op) -> Iterable[Value]:
    return (*op.reads, *op.into, *op.results)
