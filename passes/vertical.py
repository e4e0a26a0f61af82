"""The vertical schedule: one layer for all micro-batches before the next layer (arXiv 2512.17570, section 3.4).

      micro-batch 0   1   2            So a layer's parameters are needed for one stage of the forward and one
embed             |   |   |            of the backward, instead of once per micro-batch, its gradient grows in
layer 0           v   v   v            place, and its optimizer step has all other layers' backward to hide
layer 1           v   v   v            behind.
head              v   v   v
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gs_compile.program.ir import EPILOGUE, PROLOGUE, TIED, Op, Program, Stage, StepShape, Unit, Value, beginning
from gs_compile.program.verbs import SIGNATURES, Operand


def vertical(num_layers: int, num_micro_batches: int, *, shape: StepShape | None = None) -> Program:
    """The layer-major step as compute operations only, everything on the device.

    The head runs together with its backward, so its activations are never recomputed, unless gradients for its
    outputs come from outside: these are not known before the user's own backward.
    """
    builder = _Builder(num_layers, num_micro_batches, shape or StepShape())
    return Program(tuple(builder.ops()), num_layers, num_micro_batches, made_by="vertical")


class _Builder:
    """Fills the table of signatures in for one model, keeping account of the gradients that exist so far."""

    def __init__(self, num_layers: int, num_micro_batches: int, shape: StepShape) -> None:
        self.num_layers = num_layers
        self.layers = num_layers, shape.joints
        self.micro_batches = range(num_micro_batches)
        self.shape = shape
        self.gradients: set[Value] = set()  # the dx and accumulators defined so far

    def ops(self) -> Iterator[Op]:
        if self.shape.has_total:
            batches = tuple(Value("batch", micro_batch=j, tier=None) for j in self.micro_batches)
            yield Op("count", batches, Stage("forward", PROLOGUE), (Value("total"),))
        yield from self._stage("embed", "forward", PROLOGUE)
        for i in range(self.num_layers):
            yield from self._stage("join" if i in self.shape.joints else "forward", "forward", i)
        if not self.shape.training:
            yield from self._stage("head", "forward", EPILOGUE)
        else:
            yield from self._head_and_backward()

    def _head_and_backward(self) -> Iterator[Op]:
        if EPILOGUE in self.shape.outside:
            yield from self._stage("head", "forward", EPILOGUE)
            yield from self._stage("head_backward", "backward", EPILOGUE)
        else:
            yield from self._stage("head", "backward" if self.shape.has_loss else "forward", EPILOGUE)
        for i in reversed(range(self.num_layers)):
            yield from self._stage("join_backward" if i in self.shape.joints else "backward", "backward", i)
        yield from self._stage("embed_backward", "backward", PROLOGUE)

    def _stage(self, verb: str, phase: Literal["forward", "backward"], unit: Unit) -> list[Op]:
        """One verb for all micro-batches, after the accumulators it is the first to need."""
        stage = Stage(phase, unit)
        if phase == "backward" and not self._has_gradient(verb, stage, unit):
            return []
        ops = [self._op(verb, stage, unit, j) for j in self.micro_batches]
        needed = [value for op in ops for value in op.into]
        zeros = [Op("zeros", (), stage, (value,)) for value in dict.fromkeys(needed) if value not in self.gradients]
        self.gradients.update(needed, (value for op in ops for value in op.results if value.kind == "dx"))
        return zeros + ops

    def _has_gradient(self, verb: str, stage: Stage, unit: Unit) -> bool:
        """Whether a gradient arrives, the head's own loss included, and there is still someone who wants it."""
        wanted = self.shape.first_grad == unit or self.shape.needs_grad_below(unit)
        sources = {operand.kind for operand in SIGNATURES[verb].reads} & {"dx", "dy", "dside"}
        arrives = any(value.kind in sources for value in self._op(verb, stage, unit, 0).reads)
        return wanted and (arrives or verb == "head")

    def _op(self, verb: str, stage: Stage, unit: Unit, micro_batch: int) -> Op:
        def present(operands: tuple[Operand, ...]) -> tuple[Value, ...]:
            values = ((operand, operand.value(unit, micro_batch, *self.layers)) for operand in operands)
            return tuple(value for operand, value in values if self._is_present(operand, value, stage.phase, unit))

        signature = SIGNATURES[verb]
        reads, results, into = present(signature.reads), present(signature.results), present(signature.into)
        return Op(verb, reads, stage, results, into, micro_batch)

    def _is_present(self, operand: Operand, value: Value, phase: str, unit: Unit) -> bool:
        """Whether this model's step has what an operand of the table leaves open."""
        shape = self.shape
        match operand.kind, operand.role:
            case (("dx" | "dside"), "reads"):
                return value in self.gradients
            case "dx", "results":
                return phase == "backward" and shape.needs_grad_below(unit)
            case "dy", _:
                return value.unit in shape.outside
            case "w", _:
                return not operand.tied or unit in shape.tied
            case "dw", _:
                owner = TIED if operand.tied else unit
                return phase == "backward" and owner not in shape.frozen and (not operand.tied or unit in shape.tied)
            case "dside", "into":
                return phase == "backward" and shape.has_side_gradient(unit)
            case "side", _:
                return (beginning(unit, shape.joints) if operand.role == "reads" else unit) in shape.sides
            case _:
                has = {"loss": shape.has_loss, "total": shape.has_total, "a": False}
                return has.get(operand.kind, True) and (operand.kind != "y" or unit in shape.emits)
