"""Share every unit among the ranks: gather its parameters from all, and sum its gradient over all (ZeRO stage 3).

    w1.device[0] = all_gather(w1a.host, w1b.host)           a piece of the unit, of which each rank has a share
    w1.device = gather(w1.device[0], w1.device[1])
    dshard1.device, norm1.device = reduce_scatter(dw1.device)

On a device with memory of its own a shard comes in the same pieces first:

    shard1.device[0] = prefetch(w1a.host, w1b.host)         this rank's share of a piece
    w1.device[0] = all_gather(shard1.device[0])

Everything else is as for one rank, on the rank's shard. Number and order of the collectives do not depend on the number
of micro-batches, so ranks may have different ones. A unit is gathered once for all micro-batches of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gs_compile.placement.placement import Placement
from gs_compile.placement.units import UnitPlacement
from gs_compile.program.ir import Op, Program, Value


def shard(program: Program, placement: Placement) -> Program:
    """The same step, for one of several ranks."""
    return program.with_ops(_ops(program, placement), made_by="shard")


def _ops(program: Program, placement: Placement) -> Iterator[Op]:
    shared: dict[Value, Value] = {}  # a gradient that was summed over ranks, and this rank's share of it
    for op in program.ops:
        unit = placement.unit_of(op)
        if unit is not None and op.verb == "gather":
            yield from _gather(op, unit)
        elif unit is not None and op.verb == "norm":
            shared[op.reads[0]] = share = Value("dshard", unit.unit)
            yield Op("reduce_scatter", op.reads, op.stage, (share, *op.results), op.into)
        elif op.results and op.results[0].piece is not None:
            yield replace(op, results=(op.results[0]._replace(kind="shard"),))
        else:
            yield replace(op, reads=tuple(shared.get(value, value) for value in op.reads))


def _gather(op: Op, unit: UnitPlacement) -> Iterator[Op]:
    """Each piece is gathered from where this rank has its share: on the device, where it was prefetched to or lives, or
    in host memory that the device reads.
    """
    come = {value.piece for value in op.reads if value.piece is not None}
    whole = tuple(op.results[0]._replace(piece=k) for k in range(len(unit.pieces)))
    for piece, (start, stop) in zip(whole, unit.pieces, strict=True):
        stored = (value for value in op.reads if value.part)
        parts = [v for v in stored if unit.w[v.part].start < stop and start < unit.w[v.part].stop]
        reads = (piece._replace(kind="shard"),) if piece.piece in come else tuple(parts)
        yield Op("all_gather", reads, op.stage, (piece,))
    yield Op("gather", whole, op.stage, op.results)
