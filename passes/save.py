"""save: a layer's forward leaves more than its input to its backward, which then has less to compute again.

    before      x2_0.device = forward(x1_0.device, w1.device)
                dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)

    after       x2_0.device, a1_0.device = forward(x1_0.device, w1.device)
                dx1_0.device = backward(a1_0.device, dx2_0.device, w1.device, into=dw1.device)

The placement's shares say for which layers and micro-batches. The backward still reads the input if it recomputes
something from it.
"""

from __future__ import annotations

from dataclasses import replace

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Program, Value


def save(program: Program, placement: Placement) -> Program:
    """The same step with saved activations, from the forward of each of their layers to its backward."""
    backwards = {(op.unit, op.micro_batch) for op in program.ops if op.verb == "backward"}

    def rewritten(op: Op) -> Op:
        if op.verb not in ("forward", "backward") or (op.unit, op.micro_batch) not in backwards:
            return op
        saved = Value("a", op.unit, op.micro_batch)
        if (level := placement.activations.level_of(saved)) is None:
            return op
        if op.verb == "forward":
            return replace(op, results=(*op.results, saved))
        first, *others = op.reads
        return replace(op, reads=(*((first,) if level.reads_input else ()), saved, *others))

    return program.with_ops(tuple(map(rewritten, program.ops)), made_by="save")
