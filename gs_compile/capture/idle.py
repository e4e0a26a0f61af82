"""idle: which parameters the loss does not depend on by a way that torch differentiates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from gs_compile.capture.graph import TensorSpec, UnitGraph, output_values
from gs_compile.capture.operations import is_mutation


def without_gradient(units: Iterable[UnitGraph]) -> frozenset[int]:
    """The inputs of the captured graph that require a gradient and never get one, by index, as those that only choose.

    Plain PyTorch leaves None in their `.grad`, and optimizers pass over them: not even their weight decay is applied.
    """
    asking, reached = set[int](), set[int]()
    for unit in units:
        differentiated = _differentiated(unit)
        places = (node for node in unit.module.graph.nodes if node.op == "placeholder")
        for place, source, spec in zip(places, unit.sources, unit.specs, strict=True):
            if source.kind == "input" and spec.requires_grad:
                asking.add(source.index)
                reached |= {source.index} if place in differentiated else set()
    return frozenset(asking - reached)


def _differentiated(unit: UnitGraph) -> set[fx.Node]:
    """The nodes that gradients of the unit's results pass; what is changed in place counts as a result."""
    results = output_values(unit.module)
    ahead = [results[index] for index in unit.differentiated]
    ahead += filter(is_mutation, unit.module.graph.nodes)
    found = set[fx.Node]()
    while ahead:
        node = ahead.pop()
        spec = node.meta.get("spec")
        if node not in found and (not isinstance(spec, TensorSpec) or spec.requires_grad):
            found.add(node)
            ahead += node.all_input_nodes
    return found
