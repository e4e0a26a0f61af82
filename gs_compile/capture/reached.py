"""reached: which parameters gradients come to, by a way that torch differentiates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from gs_compile.capture.graph import OutputSpec, TensorSpec, UnitGraph, output_values
from gs_compile.capture.in_place import mutated
from gs_compile.capture.operations import FUNCTION, operation
from gs_compile.program.ir import Unit


def reached_from(
    units: Sequence[UnitGraph], outputs: Iterable[OutputSpec], taps: Sequence[Unit], of_whole: Collection[int]
) -> frozenset[int]:
    """The inputs of the captured graph that a gradient comes to where one comes for these outputs, by index.

    Plain PyTorch leaves None in the `.grad` of others, and optimizers pass over them: not even their weight decay is
    applied. units: in order; taps: which makes each; of_whole: the taps that are read of all samples.
    """
    reached = set[int]()
    given, sides, tapped = defaultdict[Unit, set[tuple[str, int]]](set), set[int](), set[int]()
    for output in outputs:
        is_x = output.kind == "x"  # of the layer above what makes it
        given[units[int(output.unit)].unit if is_x else output.unit].add((output.kind, output.index))
    is_carried = False  # a gradient comes from the unit above
    for unit in reversed(units):
        own = [number for number, maker in enumerate(taps) if maker == unit.unit]
        wanted = given[unit.unit] | {("tap", place) for place, number in enumerate(own) if number in tapped}
        wanted |= {("x", 0)} if is_carried else set()
        if "side" in unit.results:
            wanted |= {("side", index) for index in sides}
            sides = set()
        found, is_carried = _reached(unit, wanted), False
        for source, spec, is_reached in zip(unit.sources, unit.specs, found, strict=True):
            if is_reached and spec.requires_grad:
                is_carried |= source.kind == "x"
                into = {"input": reached, "side": sides, "tap": tapped, "whole": tapped}.get(source.kind, set())
                into |= set(of_whole) if source.kind == "whole" else {source.index}
    return frozenset(reached)


def _reached(unit: UnitGraph, wanted: Collection[tuple[str, int]]) -> list[bool]:
    """Whether gradients of these results pass each placeholder; what is changed in place counts as a result."""
    results, found = output_values(unit.module), set[fx.Node]()
    places = [(kind, unit.results[:at].count(kind)) for at, kind in enumerate(unit.results)]
    ahead = [node for node, place in zip(results, places, strict=True) if place in wanted]
    ahead += filter(mutated, unit.module.graph.nodes) if ahead else []
    while ahead:
        node = ahead.pop()
        spec = node.meta.get("spec")
        if node not in found and (not isinstance(spec, TensorSpec) or spec.requires_grad):
            found.add(node)
            ahead += _led_to(node)
    return [node in found for node in unit.module.graph.nodes if node.op == "placeholder"]


def _led_to(node: fx.Node) -> list[fx.Node]:
    """What a gradient of an operation goes on to; a function of the model's own may give None for some inputs."""
    if operation(node) != FUNCTION:
        return node.all_input_nodes
    made = output_values(node.meta["bodies"][1])
    pairs = zip(node.args[2:], made, strict=False)
    return [each for each, gradient in pairs if isinstance(each, fx.Node) and gradient is not None]


def made_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These values and all that they are made of."""
    found, ahead = set[fx.Node](), list(nodes)
    while ahead:
        if (node := ahead.pop()) not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found
