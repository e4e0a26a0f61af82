"""executor: runs a step program on the units of a model, one operation after the other.

A step comes in two halves, because the user's code stands between them: the call of the model runs the forward up to
the heads, `loss.backward()` runs the rest. What lives from one half to the next is the environment. In the horizontal
order the last head comes late: all but the last micro-batch's backward is in the first half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gs_compile.program.ir import Op, Program, Value
from gs_compile.runtime.units import CompiledUnits


class Executor:
    """One step under way: a program, the units it runs on, and the contents of the values that are alive."""

    def __init__(self, program: Program, units: CompiledUnits, inputs: Mapping[Value, Any]) -> None:
        self.program = program
        self.units = units
        self.env: dict[Value, Any] = dict(inputs)
        self.wanted: frozenset[Value] = frozenset()  # values that the model returns, also where the program frees them
        self.returned: dict[Value, Any] = {}  # their contents so far
        self._half = program.forward_end

    def forward(self) -> None:
        self._run(0, self._half)

    def backward(self) -> None:
        self._run(self._half, len(self.program.ops))

    def give(self, values: Mapping[Value, Any]) -> None:
        """Add values that no operation defines, such as gradients that arrive for outputs."""
        self.env.update(values)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients that there are: between forward and backward, those of the head."""
        for value, content in list(self.env.items()):
            if value.kind == "dx":
                self.env[value] = content * factor  # not in place: it may be expanded, or share memory
            elif value.kind in ("dw", "dside"):
                content.scale(factor)
        self.units.scale(factor)

    def _run(self, start: int, stop: int) -> None:
        for op in self.program.ops[start:stop]:
            self._issue(op)

    def _issue(self, op: Op) -> None:
        if op.verb == "free":
            del self.env[op.reads[0]]
        elif op.verb == "zeros":
            self.env[op.results[0]] = self.units.zeros(op.results[0])
        else:
            reads, into = [self.env[value] for value in op.reads], [self.env[value] for value in op.into]
            self.env.update(zip(op.results, self._call(op, reads, into), strict=True))

    def level(self, op: Op) -> int:
        """The level at which an operation's layer and micro-batch save activations."""
        raise AssertionError(f"{op}: nothing is saved without a placement")

    def _call(self, op: Op, reads: Sequence[Any], into: Sequence[Any]) -> tuple[Any, ...]:
        """Run a unit's code, as `runtime.units` has a method for each verb."""
        if op.verb == "count":
            return (self.units.count(list(reads)),)
        keywords = dict(zip(op.keywords, (*reads, *into), strict=True))
        if any(value.kind == "a" for value in op.values):
            keywords["level"] = self.level(op)
        wants = tuple(value.kind for value in op.results)
        results: tuple[Any, ...] = getattr(self.units, op.verb)(op.unit, op.micro_batch, wants=wants, **keywords)
        pairs = zip(op.results, results, strict=True)
        self.returned |= {value: result for value, result in pairs if value in self.wanted}
        return results
