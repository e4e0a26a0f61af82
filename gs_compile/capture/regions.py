"""liveness: which nodes a result needs, and which nodes read a value, with what no data edge shows.

Changes in place and vmap regions act on values without being their inputs: a change is needed by whoever later looks
at the same memory, and what opens or closes a vmap by what is inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from gs_compile.capture.operations import is_mutation, mutated


def live_nodes(graph: fx.Graph, wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that `wanted` need, in graph order; a change in place is needed by whatever shares its memory."""
    needed = set(wanted)
    memory = {node.meta.get("storage") for node in needed}
    nodes = [node for node in graph.nodes if node.op != "output"]
    regions = vmap_regions(graph)
    for node in reversed(nodes):
        if not needed.isdisjoint(regions.get(node, ())):
            needed.add(node)
        if node not in needed and is_mutation(node) and mutated(node).meta.get("storage") in memory - {None}:
            needed.add(node)
        if node in needed:
            needed.update(node.all_input_nodes)
            memory.update(source.meta.get("storage") for source in (node, *node.all_input_nodes))
    return [node for node in nodes if node in needed]


def vmap_regions(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that open and close a vmap, which no data connects to what they enclose, with what they enclose."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "lazy_load_decompositions":
            before.append(node)
        elif name == "_vmap_increment_nesting":
            opened.append(([*before, node], []))
            before = []
        elif name == "_vmap_decrement_nesting":
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
            if opened:
                opened[-1][1].extend([*brackets, *inside, node])
        elif opened:
            opened[-1][1].append(node)
    return regions


def readers_of(nodes: Sequence[fx.Node], regions: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """The readers of each of `nodes`, among them; a change in place is read by all later readers of the same memory."""
    live = set(nodes)
    readers = {node: [user for user in node.users if user in live] for node in nodes}
    for bracket in regions.keys() & live:
        readers[bracket] = [node for node in regions[bracket] if node in live]
    later = defaultdict[Any, list[fx.Node]](list)
    for node in reversed(nodes):
        if is_mutation(node):
            readers[node] += [user for user in later[mutated(node).meta.get("storage")] if user is not node]
        for source in node.all_input_nodes:
            later[source.meta.get("storage")].append(node)
    return readers
