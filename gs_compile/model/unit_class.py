"""unit_class: units of equal code as an inspection shows them, and its words for numbers and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.program.ir import StepShape, Unit, height


@dataclass(frozen=True)
class UnitClass:
    """Units of equal code, and that code: one forward and one backward, called with each unit's own parameters."""

    units: tuple[Unit, ...]
    graph: UnitGraph  # of the first: its module, in torch functions, and what is bound to the placeholders
    inputs: tuple[str, ...]  # of all graphs, as the first unit binds them: "x", "side 0", "h.0.mlp.c_fc.weight"
    code: Differentiated

    @property
    def forward(self) -> fx.GraphModule:
        """The ATen graph of the forward; traced now if no call has needed it yet."""
        return self.code.graph("forward")

    @property
    def backward(self) -> fx.GraphModule | None:
        """The ATen graph of the forward again and its backward; None where nothing has a gradient.

        A layer's takes the gradient of its result after its other inputs; that of a head with a loss starts from the
        loss. Returns the gradients of the inputs that have one, the head's after its results.
        """
        if not self.graph.differentiable or not self.graph.differentiated:
            return None
        return self.code.graph("both" if "loss" in self.graph.results else "backward")

    @property
    def num_operations(self) -> int:
        """Operations of the forward as the model's code has them, views included."""
        return sum(node.op.startswith("call_") for node in self.graph.module.graph.nodes)


def counted(number: int, one: str) -> str:
    ending = "" if number == 1 else "es" if one.endswith(("s", "ch")) else "s"
    return f"{number} {one}{ending}"


def describe_shape(shape: StepShape) -> str:
    """``forward and backward, the head computes the loss, side inputs for the layers``"""
    units = {name: " ".join(map(str, in_order(getattr(shape, name)))) for name in ("emits", "outside", "frozen")}
    parts = {
        "forward and backward" if shape.training else "forward alone": True,
        "the head computes the loss": shape.has_loss,
        "divided by a total over the whole batch": shape.has_total,
        "side inputs for the layers": shape.has_side,
        f"other outputs of {units['emits']}": shape.emits,
        f"gradients from outside for {units['outside']}": shape.outside,
        f"frozen: {units['frozen']}": shape.frozen,
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def in_order(value: Any) -> Any:
    """Units in their order; other values as they are."""
    return sorted(value, key=height) if isinstance(value, frozenset) else value
