"""arrange: which nodes some values need, which nodes read each of them, and the unit in which each runs.

Units are counted from the bottom: 0 is the prologue, 1 ... L the layers, L + 1 the epilogue. Between two stacks a layer
is their joint: it takes what the blocks of the first hand on, and begins the second, as the prologue begins the first.

    prologue    layers    joint             layers    epilogue
    embeds ids  encoder   embeds other ids  decoder   head          what the encoder's layers make at last is a side
                                                                    input of the decoder's: the joint gives it to them

Changes in place and vmap regions act on values without being their inputs: a change is read by whoever later looks at
the same memory, and what opens or closes a vmap by what is inside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import fx

from gs_compile.capture.graph import block_of
from gs_compile.capture.in_place import mutated, storage_of
from gs_compile.capture.operations import SUMMING, has_samples, is_free, operation, tensor_spec
from gs_compile.capture.residual_stream import Readers, ResidualStream, residual_streams
from gs_compile.capture.vmapped import BRACKETS, INNER, LAZY, OUTER


def needed_by(wanted: Iterable[fx.Node], graph: fx.Graph) -> Readers:
    """The nodes of `graph` that `wanted` need; a change in place is needed by whatever shares its memory."""
    live = set(wanted)
    memory = {storage_of(node) for node in live} - {None}
    nodes = [node for node in graph.nodes if node.op != "output"]
    readers = _readers(nodes)
    for node in reversed(nodes):
        changes_a_result = any(storage_of(each) in memory for each in mutated(node))
        if changes_a_result or not live.isdisjoint((node, *readers[node])):
            live.update((node, *node.all_input_nodes))  # sources now: what closes a vmap comes before what is inside
    return {node: [reader for reader in readers[node] if reader in live] for node in nodes if node in live}


def postpone_sums(wanted: Iterable[fx.Node], graph: fx.Graph) -> Readers:
    """`needed_by`, where single numbers that a forward adds up between its blocks, as losses of their experts, are
    computed where the sum is read: else each block would hand on the sum so far.
    """
    values = list(wanted)
    readers, is_between = needed_by(values, graph), False
    for node in reversed([*readers]):
        read, is_of_block = readers[node], block_of(node) is not None
        is_between |= is_of_block
        if is_between and not is_of_block and len(read) == 1 and block_of(read[0]) is None:
            is_last = all(readers.get(each, [node]) == [node] for each in mutated(node))
            if is_last and operation(node) in SUMMING and all(map(_is_number, (node, *node.all_input_nodes))):
                read[0].prepend(node)
    return needed_by(values, graph)


def _is_number(node: fx.Node) -> bool:
    return (spec := tensor_spec(node)) is not None and spec.shape == ()


class Arrangement(NamedTuple):
    """at: the unit of each node. origins: of each unit that begins a stack, what the stack's first layer takes in."""

    at: dict[fx.Node, int]
    num_layers: int
    origins: Mapping[int, fx.Node]


def arrange(readers: Readers, batch: Set[str], *, one: bool) -> Arrangement:
    """The units of nodes. `batch`: names of inputs with samples; one: the layers are those of one stack.

    What is of a stream runs by its place between the boundaries, until the next stack begins. Anything else runs with
    its readers, if they are in one unit: the epilogue, what begins a stack, the layer of its own block, or any layer if
    it does not grow with the batch. All the rest runs in what begins the readers' stack: so what one block makes for
    others is a side input of theirs. So is a layer's entry of a vector that layers share: in the layer, its index would
    make that layer's code unlike the others'.
    Raises `UniformityError` where no stream runs through a stack of blocks.
    """
    streams, order = residual_streams(readers, batch, one=one), {node: place for place, node in enumerate(readers)}
    starts = [stream.start(order) for stream in streams]
    boundaries, origins, own = list[int](), dict[int, fx.Node](), dict[fx.Node, int]()
    for stream, earlier, start in zip(streams, [None, *streams], starts, strict=False):
        if earlier is None or not _goes_on(stream, earlier, readers, order):
            boundaries += [start - 1] if origins else []  # of a joint
            origins[len(boundaries)] = stream.origin
        own |= {node: at for at, block in enumerate(stream.blocks, len(boundaries) + 1) for node in block}
        boundaries += stream.boundaries
    position = dict.fromkeys(filter(is_free, readers), 0)
    for stream, stop in zip(streams, [*starts[1:], len(order)], strict=True):
        by_place = (node for node in stream.nodes if order[node] < stop)
        position |= {node: bisect_left(boundaries, order[node]) + 1 for node in by_place}
    position.setdefault(streams[0].origin, 0)
    _with_readers(readers, position, own, origins, len(boundaries))
    return Arrangement(position, len(boundaries), origins)


def _goes_on(stream: ResidualStream, earlier: ResidualStream, readers: Readers, order: Mapping[fx.Node, int]) -> bool:
    """Whether a stream's first layer takes in what the last layer of an earlier one hands on, or what is made of that
    alone, as text and image in one tensor, and no other does.
    """
    start, end, stop = earlier.boundaries[-1], order[stream.origin], stream.boundaries[0]
    between = [node for node in earlier.nodes if start < order[node] <= end]
    made = [node for node in earlier.nodes if order[node] <= start]
    taken = [node for node in made if any(start < order[each] <= stop for each in readers[node])]
    is_made_of_them = all(earlier.nodes >= {*node.all_input_nodes} for node in between)
    is_alone = all(order[each] <= stop for node in (*taken, *between) for each in readers[node])
    return stream.origin in earlier.nodes and is_made_of_them and is_alone


def _with_readers(
    readers: Readers,
    position: dict[fx.Node, int],
    own: Mapping[fx.Node, int],
    origins: Mapping[int, fx.Node],
    num_layers: int,
) -> None:
    """Add the units of nodes that are not at a place of a stream."""

    def begin(unit: int) -> int:
        return max(each for each in origins if each <= unit)

    others, begun = [node for node in readers if node not in position], {node: at for at, node in origins.items()}
    brackets = [node for node in others if node.target in BRACKETS]  # of what may come before them in the graph
    for node in chain(filter(lambda node: node not in brackets, reversed(others)), brackets):
        units = {position[reader] for reader in readers[node]} | ({begun[node]} if node in begun else set())
        unit = own.get(node, num_layers + 1) if not units else min(units) if len(units) == 1 else begin(min(units))
        is_of_layer = own.get(node) == unit or not (has_samples(node) or _is_entry(node, readers))
        stays = unit > num_layers or unit in origins or is_of_layer
        position[node] = unit if stays else begin(unit)


def _is_entry(node: fx.Node, readers: Readers) -> bool:
    """Whether a node indexes, by constants alone, a value that others read too: ``scales[3]`` of all layers' scales."""
    sources = node.all_input_nodes
    return operation(node) in ("getitem", "select") and len(sources) == 1 and len(readers[sources[0]]) > 1


def _readers(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    readers = {node: list(node.users) for node in nodes}
    later = defaultdict[Any, list[fx.Node]](list)  # the readers of each memory
    for node in reversed(nodes):
        for target in mutated(node):
            readers[node] += [user for user in later[storage_of(target)] if user is not node]
        for source in node.all_input_nodes:
            later[storage_of(source)].append(node)
    return readers | _inside_vmaps(nodes)


def _inside_vmaps(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that open and close a vmap, which no data connects to what they enclose, with what they enclose."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in nodes:
        if node.target is OUTER:
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
        if node.target not in BRACKETS:  # those of a vmap inside of another have the nodes of both
            for _, inside in opened:
                inside.append(node)
        if node.target in (LAZY, INNER):
            before.append(node)
        if node.target is INNER:
            opened.append((before, []))
            before = []
    return regions
