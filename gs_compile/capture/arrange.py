"""arrange: assigns each node to a unit; and which nodes some values need, with the readers of each.

Units are counted from the bottom: 0 is the prologue, 1 ... L the layers, L + 1 the epilogue. Between two stacks one
layer is their joint: it takes the output of the first stack and begins the second, as the prologue begins the first.

    prologue    layers    joint             layers    epilogue
    embeds ids  encoder   embeds other ids  decoder   head          what the encoder's layers make at last is a side
                                                                    input of the decoder's: the joint gives it to them

Changes in place and vmap regions affect values without being their inputs. So whatever later reads the same memory
counts as a reader of a change, and what is inside a vmap as a reader of what opens and closes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import fx

from gs_compile.capture.graph import block_of
from gs_compile.capture.in_place import is_changed, mutated, storage_of
from gs_compile.capture.operations import SUMMING, has_samples, is_free, operation, tensor_spec
from gs_compile.capture.residual_stream import Readers, ResidualStream, residual_streams
from gs_compile.capture.vmapped import BRACKETS, INNER, LAZY, OUTER


def needed_by(wanted: Iterable[fx.Node], graph: fx.Graph) -> Readers:
    """The nodes of `graph` that `wanted` need, with their readers. A value needs the changes in place of its memory."""
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
    """As `needed_by`, but first moves the addition of numbers that a forward sums over its blocks, such as losses of
    experts, to where the sum is read: otherwise each block would pass the sum so far to the next.
    """
    values = list(wanted)
    readers, is_between = needed_by(values, graph), False
    for node in reversed([*readers]):
        read, is_of_block = readers[node], block_of(node) is not None
        is_between |= is_of_block
        if is_between and not is_of_block and read and all(block_of(reader) is None for reader in read):
            is_last = all(readers.get(each, [node]) == [node] for each in mutated(node))
            if is_last and _adds_numbers(node):
                min(read).prepend(node)
    return needed_by(values, graph)


def _adds_numbers(node: fx.Node) -> bool:
    """Whether a node adds or scales numbers, or copies one to change it, that no later operation changes."""
    read = [each for each in node.all_input_nodes if each not in mutated(node)]
    is_sum = operation(node) in SUMMING | {"clone"} and all(map(_is_number, (node, *node.all_input_nodes)))
    return is_sum and not any(map(is_changed, read))


def _is_number(node: fx.Node) -> bool:
    """Whether a value is a number, or a vector of them, such as one for each expert, without samples."""
    return (spec := tensor_spec(node)) is not None and len(spec.shape) < 2 and not spec.batch_dims


class Arrangement(NamedTuple):
    """at: the unit of each node. origins: for each unit that begins a stack, the input of the stack's first layer."""

    at: dict[fx.Node, int]
    num_layers: int
    origins: Mapping[int, fx.Node]


def arrange(readers: Readers, batch: Set[str], *, one: bool) -> Arrangement:
    """The unit of each node. `batch`: names of inputs with samples; one: all layers are of one stack.

    A node of a stream runs according to its place between the boundaries, until the next stack begins. Any other node
    runs with its readers, if all are in one unit that is the epilogue, begins a stack, or is the layer of the node's
    own block; in any layer, if the node does not grow with the batch. All other nodes run in the unit that begins the
    readers' stack: so what one block makes for others is a side input of theirs. So is a layer's entry of a vector that
    layers share: in the layer, its index would make that layer's code different from the others'.

    Raises `UniformityError` if no stream runs through a stack of blocks.
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
    """Whether the output of an earlier stream's last layer, or what is computed from it alone, such as text and image
    in one tensor, is the input of this stream's first layer, and nothing else reads it, or other values computed from
    the earlier stream by then.
    """
    start, end, stop = earlier.boundaries[-1], order[stream.origin], stream.boundaries[0]
    between = [node for node in earlier.nodes if start < order[node] <= end]
    beside = [node for node in earlier.nodes - stream.nodes if end < order[node] <= stop]
    made = [node for node in earlier.nodes if order[node] <= start]
    taken = [node for node in made if any(start < order[each] <= stop for each in readers[node])]
    is_made_of_them = all(earlier.nodes >= {*node.all_input_nodes} for node in between)
    is_alone = all(order[each] <= stop for node in (*taken, *between, *beside) for each in readers[node])
    return stream.origin in earlier.nodes and is_made_of_them and is_alone


def _with_readers(
    readers: Readers,
    position: dict[fx.Node, int],
    own: Mapping[fx.Node, int],
    origins: Mapping[int, fx.Node],
    num_layers: int,
) -> None:
    """Add the units of nodes that are not part of a stream."""

    def begin(unit: int) -> int:
        return max(each for each in origins if each <= unit)

    others, begun = [node for node in readers if node not in position], {node: at for at, node in origins.items()}
    brackets = [node for node in others if node.target in BRACKETS]  # a bracket may come after what it encloses
    for node in chain(filter(lambda node: node not in brackets, reversed(others)), brackets):
        units = {position[reader] for reader in readers[node]} | ({begun[node]} if node in begun else set())
        unit = own.get(node, num_layers + 1) if not units else min(units) if len(units) == 1 else begin(min(units))
        is_of_layer = own.get(node) == unit or not (has_samples(node) or _is_entry(node, readers))
        stays = unit > num_layers or unit in origins or is_of_layer
        position[node] = unit if stays else begin(unit)


def _is_entry(node: fx.Node, readers: Readers) -> bool:
    """Whether a node reads a constant index of a value that others read too: ``scales[3]`` of all layers' scales."""
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
    """The nodes that open and close a vmap, each with those that it encloses, to which no data connects it."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in nodes:
        if node.target is OUTER:
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
        if node.target not in BRACKETS:  # an inner vmap's nodes are also the outer one's
            for _, inside in opened:
                inside.append(node)
        if node.target in (LAZY, INNER):
            before.append(node)
        if node.target is INNER:
            opened.append((before, []))
            before = []
    return regions
