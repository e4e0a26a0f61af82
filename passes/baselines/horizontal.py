"""The horizontal schedule: one micro-batch through all layers and back before the next (arXiv 2512.17570, section 3.3).

               embed   layer 0   layer 1   head
micro-batch 0  ----->  ------->  ------->  ---.    Plain gradient accumulation, as ZeRO-Infinity runs it: what the
               <-----  <-------  <-------  ---'    vertical order is compared with. The checkpoints of one
micro-batch 1  ----->  ------->  ------->  ---.    micro-batch are alive at a time. But each micro-batch loads all
               <-----  <-------  <-------  ---'    parameters twice, gradient sums leave and come back between two
                                                   of them, and the optimizer has only the last backward beside it.
"""

from __future__ import annotations

from dataclasses import replace

from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import Op, Program, StepShape


def horizontal(num_layers: int, num_micro_batches: int, *, shape: StepShape | None = None) -> Program:
    """The operations of the vertical step, micro-batch by micro-batch; a stage is of one unit and one micro-batch.

    A gradient from outside is not known before the user's own backward: where one arrives, all forwards come first.
    Gradients of micro-batches are added in the order in which `vertical` adds them, but for parameters that several
    units share: those are kept to rounding.
    """
    shape = shape or StepShape()

    def order(op: Op) -> tuple[bool, int]:
        return bool(shape.outside) and op.stage.phase == "backward", op.stage.micro_batch or 0

    program = vertical(num_layers, num_micro_batches, shape=shape)
    return program.with_ops(sorted(map(_in_its_own_stage, program.ops), key=order), made_by="horizontal")


def _in_its_own_stage(op: Op) -> Op:
    """The operation in a stage of its micro-batch; one that serves all, as `zeros` does, stands with the first."""
    of = op.micro_batch if op.micro_batch is not None else op.results[0].micro_batch
    return replace(op, stage=op.stage._replace(micro_batch=of or 0))
