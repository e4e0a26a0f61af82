"""reached: which parameters get a gradient, by a path that torch differentiates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from torch import fx

from gs_compile.capture.graph import OutputSpec, TensorSpec, UnitGraph, output_values
from gs_compile.capture.in_place import mutated, storage_of
from gs_compile.capture.operations import FUNCTION, is_free, of_values, operation
from gs_compile.capture.packed import parts_of, parts_read
from gs_compile.program.ir import Unit


def reached_from(
    units: Sequence[UnitGraph], outputs: Iterable[OutputSpec], taps: Sequence[Unit], of_whole: Collection[int]
) -> frozenset[int]:
    """The inputs of the captured graph that get a gradient if these outputs do, by index.

    Plain PyTorch leaves None in the `.grad` of others, and optimizers skip them: they do not even apply weight decay.
    units: in order. taps: the unit that makes each. of_whole: the taps that are read of all samples.
    """
    reached = set[int]()
    given, sides, tapped = defaultdict[Unit, set[tuple[str, int]]](set), set[int](), set[int]()
    for output in outputs:
        is_x = output.kind == "x"  # named after the layer above the one that makes it
        given[units[int(output.unit)].unit if is_x else output.unit].add((output.kind, output.index))
    carried = set[int]()  # the parts of its checkpoint that get a gradient from the unit above
    for unit in reversed(units):
        own = [number for number, maker in enumerate(taps) if maker == unit.unit]
        wanted = given[unit.unit] | {("tap", place) for place, number in enumerate(own) if number in tapped}
        if "side" in unit.results:
            wanted |= {("side", index) for index in sides}
            sides = set()
        found, carried = _reached(unit, wanted, carried), set()
        entries = unit.module.graph.find_nodes(op="placeholder")
        for entry, source, spec in zip(entries, unit.sources, unit.specs, strict=True):
            if entry in found and spec.requires_grad:
                carried |= parts_read(entry, found) if source.kind == "x" else set()
                into = {"input": reached, "side": sides, "tap": tapped, "whole": tapped}.get(source.kind, set())
                into |= set(of_whole) if source.kind == "whole" else {source.index}
    return frozenset(reached)


def _reached(unit: UnitGraph, wanted: Collection[tuple[str, int]], carried: Collection[int]) -> set[fx.Node]:
    """The nodes that gradients of these results, and of these parts of its checkpoint, pass through."""
    results, found = output_values(unit.module), set[fx.Node]()
    places = [(kind, unit.results[:at].count(kind)) for at, kind in enumerate(unit.results)]
    ahead = [node for node, place in zip(results, places, strict=True) if place in wanted]
    ahead += [parts_of(results[unit.results.index("x")])[part] for part in carried]
    changes = {node: set(map(storage_of, mutated(node))) for node in unit.module.graph.nodes if mutated(node)}
    while ahead:
        node = ahead.pop()
        spec = node.meta.get("spec")
        if node not in found and (not isinstance(spec, TensorSpec) or spec.requires_grad):
            found.add(node)
            ahead += [*_led_to(node), *_changed_by(node, changes)]
    return found


def _changed_by(value: fx.Node, changes: Mapping[fx.Node, Set[int | None]]) -> list[fx.Node]:
    """The changes in place of a value's memory; all changes, if that memory is not known."""
    if is_free(value) or value in changes or isinstance(value.meta.get("spec"), tuple):
        return []
    own = storage_of(value)
    return [change for change, memory in changes.items() if own is None or not memory.isdisjoint((own, None))]


def _led_to(node: fx.Node) -> list[fx.Node]:
    """The inputs to which an operation's gradient passes; a function of the model may return None for some."""
    if operation(node) != FUNCTION:
        return of_values(node)
    made = output_values(node.meta["bodies"][1])
    pairs = zip(node.args[2:], made, strict=False)
    return [each for each, gradient in pairs if isinstance(each, fx.Node) and gradient is not None]


def made_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These values and all that they are computed from."""
    found, ahead = set[fx.Node](), list(nodes)
    while ahead:
        if (node := ahead.pop()) not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found
