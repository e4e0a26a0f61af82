"""flops: what a unit's code costs, counted on its graphs: floating-point operations, and memory inside.

Nothing runs. The ATen graphs of forward and backward are those that are compiled, traced with tensors without memory.
"""

from __future__ import annotations

from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.placement.workload import LevelCost, UnitCost
from gs_compile.program.ir import EPILOGUE


def unit_cost(unit: UnitGraph, code: Differentiated) -> UnitCost:
    """The cost of `unit`, whose code this is, for one micro-batch."""
    backward = code.cost(code.last_name).flops if code.is_trained or unit.unit == EPILOGUE else 0.0
    return UnitCost(
        forward_flops=code.cost("forward").flops,
        backward_flops=backward,
        workspace_nbytes=code.workspace_nbytes,
        on_all=code.on_all,
    )


def unit_levels(code: Differentiated) -> tuple[LevelCost, ...]:
    """What a unit may save beside its input, for one micro-batch."""
    return tuple(
        LevelCost(
            nbytes=level.nbytes,
            reads_input=level.reads_input,
            forward_flops=level.forward_flops,
            backward_flops=level.backward_flops,
        )
        for level in code.levels
    )
