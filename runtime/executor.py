"""executor: runs a step program on the units of a model.

A step comes in two halves, because the user's code stands between them: the call of the model runs the forward up to
the heads, `loss.backward()` runs the rest. What lives from one half to the next is the environment. In the horizontal
order the last head comes late: all but the last micro-batch's backward is in the first half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gs_compile.program.ir import Program, Value
from gs_compile.program.reference import Units, perform

FORWARD_VERBS = frozenset(("count", "embed", "forward", "head"))


def turn(program: Program) -> int:
    """Where the forward half ends: after the last head and what is freed there."""
    ops = program.ops
    last = max((index for index, op in enumerate(ops) if op.verb in FORWARD_VERBS), default=-1) + 1
    while last < len(ops) and ops[last].verb == "free":
        last += 1
    return last


class Executor:
    """One step under way: a program, the units it runs on, and the values that are alive."""

    def __init__(self, program: Program, units: Units, inputs: Mapping[Value, Any]) -> None:
        self.program = program
        self.units = units
        self.env: dict[Value, Any] = dict(inputs)

    def forward(self) -> None:
        self._run(0, turn(self.program))

    def backward(self) -> None:
        self._run(turn(self.program), len(self.program.ops))

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients there are: between forward and backward, the head's own."""
        for value, content in list(self.env.items()):
            if value.kind == "dx":
                self.env[value] = content * factor  # not in place: it may be expanded, or be another's memory
            elif value.kind in ("dw", "dside"):
                content.scale(factor)

    def _run(self, start: int, stop: int) -> None:
        env = self.env
        for op in self.program.ops[start:stop]:
            if op.verb == "free":
                del env[op.reads[0]]
                continue
            reads, into = [env[value] for value in op.reads], [env[value] for value in op.into]
            env.update(zip(op.results, perform(op, self.units, reads, into), strict=True))
