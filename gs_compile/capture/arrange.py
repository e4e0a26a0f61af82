"""arrange: which nodes some values need, which nodes read each of them, and the unit in which each runs.

Units are counted from the bottom: 0 is the prologue, 1 ... L the layers, L + 1 the epilogue. Changes in place and vmap
regions act on values without being their inputs: a change is read by whoever later looks at the same memory, and what
opens or closes a vmap by what is inside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import Any

from torch import fx

from gs_compile.capture.operations import has_samples, is_mutation, mutated
from gs_compile.capture.residual_stream import Readers, is_free, residual_stream, storage_of

VMAP_BRACKETS = LOAD, ENTER, LEAVE = "lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"


def needed_by(wanted: Iterable[fx.Node], graph: fx.Graph) -> Readers:
    """The nodes of `graph` that `wanted` need; a change in place is needed by whatever shares its memory."""
    live = set(wanted)
    memory = {storage_of(node) for node in live} - {None}
    nodes = [node for node in graph.nodes if node.op != "output"]
    readers = _readers(nodes)
    for node in reversed(nodes):
        changes_a_result = is_mutation(node) and storage_of(mutated(node)) in memory
        if changes_a_result or not live.isdisjoint((node, *readers[node])):
            live.update((node, *node.all_input_nodes))  # sources now: what closes a vmap comes before what is inside
    return {node: [reader for reader in readers[node] if reader in live] for node in nodes if node in live}


def arrange(readers: Readers, batch: Set[str]) -> tuple[dict[fx.Node, int], int, fx.Node]:
    """The unit of each node, the number of layers, and the first one's input. `batch`: names of inputs with samples.

    What is of the stream runs by its place between the boundaries. Anything else runs with its readers, if they are in
    one unit: the epilogue, the layer of its own block, or any layer if it does not grow with the batch. All the rest
    runs in the prologue: so what one block makes for others is a side input of theirs.
    Raises `UniformityError` where no stream runs through a stack of blocks.
    """
    stream = residual_stream(readers, batch)
    num_layers = len(stream.boundaries)
    order = {node: index for index, node in enumerate(readers)}
    position = {node: bisect_left(stream.boundaries, order[node]) + 1 for node in stream.nodes}
    position |= dict.fromkeys([stream.origin, *filter(is_free, readers)], 0)
    own = {node: place for place, block in enumerate(stream.blocks, start=1) for node in block}
    others = [node for node in readers if node not in position]
    brackets = [node for node in others if _name(node) in VMAP_BRACKETS]  # of what may come before them in the graph
    for node in chain(filter(lambda node: node not in brackets, reversed(others)), brackets):
        units = {position[reader] for reader in readers[node]}
        unit = units.pop() if len(units) == 1 else 0 if units else own.get(node, num_layers + 1)
        stays = unit > num_layers or own.get(node) == unit or not has_samples(node)
        position[node] = unit if stays else 0
    return position, num_layers, stream.origin


def _readers(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    readers = {node: list(node.users) for node in nodes}
    later = defaultdict[Any, list[fx.Node]](list)  # the readers of each memory
    for node in reversed(nodes):
        if is_mutation(node):
            readers[node] += [user for user in later[storage_of(mutated(node))] if user is not node]
        for source in node.all_input_nodes:
            later[storage_of(source)].append(node)
    return readers | _inside_vmaps(nodes)


def _inside_vmaps(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that open and close a vmap, which no data connects to what they enclose, with what they enclose."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in nodes:
        name = _name(node)
        if name == LEAVE:
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
        for _, inside in opened:
            inside.append(node)
        if name in (LOAD, ENTER):
            before.append(node)
        if name == ENTER:
            opened.append((before, []))
            before = []
    return regions


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))
