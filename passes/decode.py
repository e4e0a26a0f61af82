"""Dequantize the matrices that a unit stores encoded, each time that the unit comes to the device.

    w1.device = gather(w1.device[0], w1.device[1])
    decode(into=w1.device)

All micro-batches of the stage compute with these values, which leave the device together with the unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Program


def decode(program: Program, placement: Placement) -> Program:
    """The same step, its encoded matrices decoded where they arrive."""
    return program.with_ops(_ops(program, placement), made_by="decode")


def _ops(program: Program, placement: Placement) -> Iterator[Op]:
    for op in program.ops:
        yield op
        unit = placement.unit_of(op)
        if op.verb == "gather" and unit is not None and unit.decoded_nbytes:
            yield Op("decode", (), op.stage, into=op.results)
