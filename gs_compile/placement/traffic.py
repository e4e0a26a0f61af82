"""What a step moves: bytes by lane and kind, counted on the program before anything has run.

    traffic(program, placement)["ssd_read", "w"]

is what the runtime has to read from SSD of parameters, and should be what it measures.
"""

from __future__ import annotations

from collections import Counter

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import TRANSFERS, Op, Program


def traffic(program: Program, placement: Placement) -> dict[tuple[str, str], int]:
    """The bytes that the transfers of `program` move, by lane ("h2d", "ssd_write" ...) and kind of value (`Op.kind`).

    Counted are the bytes that move, whatever memory they go to and whatever requests a transfer is made of: parts in
    the type in which they are stored, and the pieces of a unit that goes to the device as one unit together. Lanes and
    kinds that move nothing are not in the result.
    """
    moved: Counter[tuple[str, str]] = Counter()
    for op in program.ops:
        if op.verb in TRANSFERS:
            moved[op.lane, op.kind] += op_nbytes(op, placement)
    return {key: nbytes for key, nbytes in sorted(moved.items()) if nbytes}


def op_nbytes(op: Op, placement: Placement) -> int:
    """The bytes that one transfer moves. A collective counts what comes from other ranks; as many bytes go there."""
    if op.verb == "reduce_scatter":
        return (placement.world - 1) * nbytes_of(placement, op.results[0])
    piece = op.results[0].piece if op.results else None
    if piece is not None:
        unit = placement.by_unit[op.results[0].unit]
        start, stop = placement.piece(unit, piece)
        return (stop - start) * unit.itemsize * (placement.world - 1 if op.lane == "net" else 1)
    # A whole gradient leaves the device as parts, and not always all of them: what arrives is what has moved.
    return sum(nbytes_of(placement, value) for value in (*op.results, *op.into))
