"""The single schedule: one forward and one backward over the whole batch (arXiv 2512.17570, section 3.2).

    attention half 0 --x1--> feed-forward half 0 --x2--> attention half 1 --x3--> ...

This is Ratel's order, for comparison: layers are prefetched, and the optimizer runs beside the backward, but there are
no micro-batches. The activations of a layer then grow with the whole batch, so there is also a checkpoint between
attention and feed-forward: half a block's activations are alive at a time, but twice the checkpoints move.
"""

from __future__ import annotations

from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import Program, StepShape


def single(num_layers: int, num_micro_batches: int, *, shape: StepShape | None = None) -> Program:
    """The vertical step of one micro-batch, which is the whole batch; a layer is half a block.

    Layer 2 i is the attention half of block i, layer 2 i + 1 its feed-forward half: `halve` has cut them so.
    """
    assert num_micro_batches == 1, f"{num_micro_batches} micro-batches: the single schedule has the whole batch as one"
    assert num_layers % 2 == 0, f"{num_layers} layers: the single schedule has two of each block"
    program = vertical(num_layers, num_micro_batches, shape=shape)
    return program.with_ops(program.ops, made_by="single")
