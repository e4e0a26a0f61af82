"""Alternate the micro-batch order between neighbouring stages (arXiv 2512.17570, section 4.2).

layer i-1   2  1  0
                  |      what micro-batch 0 puts out last is what the next layer takes in first:
layer i           0  1  2      it stays on the device
                        |
layer i+1               2  1  0
"""

from __future__ import annotations

from gs_compile.program.ir import Op, Program


def snake(program: Program) -> Program:
    """The same stages, every second one with its micro-batches from last to first; layer 0 keeps the natural order.

    A stage's last micro-batch is then the next stage's first, so that its checkpoint, or on the way back its
    inter-layer gradient, is neither offloaded nor fetched. The order in which micro-batch gradients are added changes
    with it, so those are kept to rounding (two that are added as they are, not as a product, to the bit); everything
    else is kept to the bit.
    """
    ops: list[Op] = []
    for place, (_, stage_ops) in enumerate(program.stages()):
        computations = sorted(
            (op for op in stage_ops if op.micro_batch is not None),
            key=lambda op: op.micro_batch or 0,
            reverse=place % 2 == 0,  # the prologue, place 0, comes before layer 0
        )
        ops += [*(op for op in stage_ops if op.micro_batch is None), *computations]
    return program.with_ops(ops, made_by="snake")
