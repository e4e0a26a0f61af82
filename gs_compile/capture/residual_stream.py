"""residual_stream: the values that flow through a stack of blocks, and where they can be cut.

    x0 --+------------------+--> x1 --+------------------+--> x2 ...
         '--> block 0 --> --'         '--> block 1 --> --'
                            |                            |
                            boundary                     boundary

The stream is all that depends on the input of the first block. A boundary is the first place after a block, in the
order of the graph, at which exactly one value of the stream is alive: made, and still to be read. The modules only say
after which nodes to look for boundaries. A value made before the first block and read after the second has begun is a
side input, not part of the stream. A value that blocks make only for what follows the last block, such as the logits of
routers, bypasses the stream. So if a boundary is missing, values that are read after the last block count as alive only
until their last reader in the blocks; the last block ends as far after its nodes as the others do. If several values
are alive after a block and only the next one reads them, they are packed into one tensor (`packed`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import fx

from gs_compile.capture.graph import TensorSpec, block_of, source_line
from gs_compile.capture.in_place import is_changed
from gs_compile.capture.operations import has_samples, is_free, operation, tensor_spec
from gs_compile.capture.stacks import Stack, stacks
from gs_compile.errors import UniformityError

log = logging.getLogger(__name__)

_PARTS, _COPIES = ("getitem", "narrow", "split", "chunk"), ("detach", "clone", "contiguous", "cpu", "to")

Readers = Mapping[fx.Node, Sequence[fx.Node]]  # nodes in graph order, each with its readers among them


@dataclass(frozen=True)
class ResidualStream:
    """A stream, and its boundaries as places in the order of the graph, one after each block.

    If no place has exactly one live value, the boundary is after the stream's last node before the next block.
    """

    origin: fx.Node  # the first block's input
    nodes: Set[fx.Node]  # that depend on it
    blocks: Stack  # those with nodes of the stream
    boundaries: Sequence[int]
    uncut: Sequence[int]  # the indices of blocks after which no place has exactly one live value

    def start(self, place: Mapping[fx.Node, int]) -> int:
        """The place of the first node that depends on the origin, or is in the first block."""
        return min(place[node] for node in (*self.nodes, *self.blocks[0]))


def residual_streams(readers: Readers, batch: Set[str], *, one: bool) -> list[ResidualStream]:
    """The streams along which to cut a model, in the order of the graph: that of the largest stack that can be cut, and
    those of all other stacks that are compatible with it, pass on the same shapes from block to block, and are larger
    than one of its layers. A smaller stack would need no more memory inside a unit, and a head of several layers is not
    a stack.

    Of a stack that can be cut only in part, these are the streams of its parts (`of_parts`).

    batch: inputs that have the samples. one: return only the largest stack's. If no stack can be cut, it is the
    largest's. Raises `UniformityError` if there is no stack, or its blocks do not run one after the other.
    """
    search = _Search(readers, batch)
    found = [stack for stack in stacks(node for node in readers if not is_free(node)) if _has_parameters(stack, batch)]
    chosen, uncut, least = list[ResidualStream](), list[ResidualStream](), -1
    for stack in found:
        if search.numel(chain.from_iterable(stack)) > least and (stream := search.stream(stack)) is not None:
            if not chosen:
                chosen = [stream] if search.is_cut(stream) else search.of_parts(stream, one=one)
                uncut += [] if chosen else [stream]
                least = max((search.numel(block) for each in chosen for block in each.blocks), default=-1)
            elif search.is_beside(stream, chosen):
                chosen.append(stream)
        if chosen and one:
            break
    if not (chosen or uncut):
        raise UniformityError(_no_stream(readers, found))
    return sorted(chosen or uncut[:1], key=lambda each: each.start(search.place))


def _has_parameters(stack: Stack, batch: Set[str]) -> bool:
    """Whether its blocks read anything but the batch: a dropout that is called twice is not a stack of layers."""
    read = {each for block in stack for node in block for each in node.all_input_nodes}
    return any(is_free(each) and each.name not in batch for each in read)


def fit(values: Sequence[fx.Node]) -> bool:
    """Whether these several values can be packed into one tensor: all have one dtype, for the same samples.

    Values that are changed in place later cannot: their readers would see the memory of a copy.
    """
    specs = [spec for value in values if (spec := tensor_spec(value)) is not None and not is_changed(value)]
    kinds = {(spec.shape[:1], spec.dtype, spec.device, spec.batch_dims) for spec in specs}
    are_rows = all(spec.shape and spec.is_sized and spec.dtype.is_floating_point for spec in specs)
    is_one_kind = len(kinds) == 1 and specs[0].batch_dims in ((0,), ())  # none: the batch is one sample
    return 1 < len(values) == len(specs) and is_one_kind and are_rows


def is_like(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether a value is a tensor of this shape and dtype."""
    return _kind(node) == (spec.shape, spec.dtype)


class _Search:
    def __init__(self, readers: Readers, batch: Set[str]) -> None:
        self.readers, self.batch = readers, batch
        self.place = {node: place for place, node in enumerate(readers)}
        self.last = {  # the place of a value's last reader; readers of its memory have another value
            node: max((self.place[user] for user in node.users if user in self.place), default=place)
            for node, place in self.place.items()
        }

    def numel(self, nodes: Iterable[fx.Node]) -> int:
        """The number of elements of the parameters and buffers that nodes read, each counted once."""
        read = {
            each for node in nodes for each in node.all_input_nodes if is_free(each) and each.name not in self.batch
        }
        return sum(each.meta["spec"].numel for each in read if isinstance(each.meta.get("spec"), TensorSpec))

    def is_cut(self, stream: ResidualStream) -> bool:
        """Whether each block of a stream passes on one value, or several that can be packed."""
        return self._num_cut(stream) == len(stream.blocks)

    def _num_cut(self, stream: ResidualStream) -> int:
        """The number of blocks before the first that passes on neither one value nor several that can be packed."""
        return next((block for block in stream.uncut if not self._exchanges(stream, block)), len(stream.blocks))

    def _exchanges(self, stream: ResidualStream, block: int) -> bool:
        """Whether all values alive after a block are for the next one only, and can be packed."""
        if block + 1 == len(stream.blocks):
            return False
        below, here, above = (-1, *stream.boundaries)[block : block + 3]
        alive = self._alive(stream, here)
        return fit(alive) and all(below < self.place[node] and self.last[node] <= above for node in alive)

    def is_beside(self, stream: ResidualStream, others: Iterable[ResidualStream]) -> bool:
        """Whether a stream can be cut in addition to others."""
        are_apart = all(self.are_apart(stream, each) for each in others)
        return are_apart and self.is_cut(stream) and self._is_even(stream) and not self._is_fed(stream, others)

    def _is_fed(self, stream: ResidualStream, others: Iterable[ResidualStream]) -> bool:
        """Whether the later of two streams reads more of the earlier one than the output of its last layer, such as
        hidden states of an encoder's layers: what layers make in addition may only go to what follows the last stack.
        """
        for one, other in (sorted((stream, each), key=lambda each: each.start(self.place)) for each in others):
            needed = {node for node in other.nodes if self.place[node] <= other.boundaries[-1]}
            made = one.boundaries[-2:]
            for node in reversed(self.place):
                needed.update(node.all_input_nodes if node in needed else ())
            beside = (node for node in one.nodes if self.place[node] <= made[0] and node is not one.origin)
            readers = (reader for node in beside for reader in self.readers[node])
            if any(self.place[reader] > made[-1] and reader in needed for reader in readers):
                return True
        return False

    def _is_even(self, stream: ResidualStream) -> bool:
        """Whether tensors of the same shapes and dtypes are alive at all boundaries, or, at the last, parts of such."""
        first, *inner, last = (self._alive(stream, end) for end in stream.boundaries)
        kinds = set(map(_kind, first))
        is_even = None not in kinds and (len(kinds) == 1 or bool(stream.uncut))
        is_even &= kinds.issuperset(map(_kind, chain.from_iterable(inner)))
        return is_even and all(not kinds.isdisjoint((_kind(node), _kind(_source(node, _PARTS)))) for node in last)

    def _alive(self, stream: ResidualStream, end: int) -> list[fx.Node]:
        """The values of a stream that are alive at a place, in the order of the graph."""
        found = (node for node in stream.nodes if self.place[node] <= end < self.last[node])
        return sorted(found, key=self.place.__getitem__)

    def are_apart(self, one: ResidualStream, other: ResidualStream) -> bool:
        """Whether all layers of one stream come before anything of the other."""
        first, second = sorted((one, other), key=lambda each: each.start(self.place))
        return first.boundaries[-1] < second.start(self.place)

    def stream(self, stack: Stack) -> ResidualStream | None:
        """The stream through a stack; None: it reaches fewer than two blocks.

        Gradients flow through it, so a block that takes ids is not part of it, such as an embedding in one container
        with the layers.
        """
        origin = self._origin(stack)
        if origin is not None and not origin.meta["spec"].dtype.is_floating_point:
            return self.stream(stack[1:]) if len(stack) > 2 else None
        nodes = self._dependent(origin, stack) if origin else set()
        blocks = [block for block in stack if not nodes.isdisjoint(block)]
        if origin is None or len(blocks) < 2:
            return None
        places = [sorted(self.place[node] for node in block if node in nodes) for block in blocks]
        ends, stops = [each[-1] for each in places], [*(each[0] for each in places[1:]), len(self.place)]
        last = {node: self.last[node] for node in nodes}
        found = self._boundaries(origin, ends, stops, last)
        has_taps, behind = None in found, -1  # how far the boundary is after a block's last node
        while has_taps and (further := _furthest(found[:-1], ends)) > behind:
            behind = further
            last = {node: self._last_before(places[-1][0], ends[-1] + behind, node, origin) for node in nodes}
            found = self._boundaries(origin, ends, stops, last)
        order = sorted(map(self.place.__getitem__, nodes))
        boundaries = [
            order[bisect_left(order, stop) - 1] if each is None else each
            for each, stop in zip(found, stops, strict=True)
        ]
        if found[-2] is None:  # far after it, in the next stack or the head, one value may be alive
            found[-1] = boundaries[-1] = min(ends[-1] + _furthest(boundaries[:-1], ends), len(self.place) - 1)
        uncut = [number for number, each in enumerate(found) if each is None]
        return ResidualStream(origin, nodes - {origin}, blocks, boundaries, uncut)

    def of_parts(self, uncut: ResidualStream, *, one: bool) -> list[ResidualStream]:
        """The streams through as many of the last blocks, and then of the first ones, as can be cut; empty: these are
        fewer than half of all. What other blocks make for the last ones is made before their stream, and so is a side
        input.
        """
        blocks, num_cut = uncut.blocks, self._num_cut(uncut)
        ahead = 0 if one or num_cut == 1 else num_cut
        start, stop = max(1, num_cut), len(blocks) - max(2, (len(blocks) + 1) // 2 - ahead)
        later = (self.stream(blocks[place:]) for place in range(start, stop + 1))
        last = next((each for each in later if each is not None and self.is_cut(each)), None)
        if last is None:
            return []
        found = [*self._ahead_of(last, blocks[:ahead]), last]
        if 2 * (number := sum(len(each.blocks) for each in found)) < len(blocks):
            return []
        log.info(
            "%d of %d blocks are streamed: the others make what many read, and are loaded at once", number, len(blocks)
        )
        return found

    def _ahead_of(self, later: ResidualStream, blocks: Stack) -> list[ResidualStream]:
        """The stream through blocks before another stream, if it can be cut in addition to that."""
        found = self.stream(blocks) if len(blocks) > 1 else None
        return [found] if found is not None and self.is_beside(found, [later]) else []

    def _boundaries(
        self, origin: fx.Node, ends: Sequence[int], stops: Sequence[int], last: Mapping[fx.Node, int]
    ) -> list[int | None]:
        """For each block, the first place after its end at which one value is alive; last: the place of each value's
        last reader.

        Hidden states that are made at the end or after it, and that nothing reads, stay alive: they are outputs. Other
        values made there, such as a loss, do not, nor do copies of what is read later, which a hook keeps.
        """
        change = Counter(self.place[node] for node in last)
        at_the_end = (node for node, place in last.items() if not self.readers[node] and place >= ends[-1])
        found = (node for node in at_the_end if is_like(node, origin.meta["spec"]))
        outputs = {node for node in found if last.get(_source(node, _COPIES), -1) <= self.place[node]}
        change.subtract(place for node, place in last.items() if node not in outputs)
        num_alive = list(accumulate(change[place] for place in range(len(self.place))))
        pairs = zip(ends, stops, strict=True)
        return [next((place for place in range(end, stop) if num_alive[place] == 1), None) for end, stop in pairs]

    def _last_before(self, begin: int, end: int, node: fx.Node, origin: fx.Node) -> int:
        """The place of a value's last reader that is not after the stack; begin: of the last block, end: of the stream.
        The value that ends the stream is read at `end`.
        """
        place = self.place[node]
        if self.last[node] <= end or place > end or (place >= begin and is_like(node, origin.meta["spec"])):
            return self.last[node]
        return max((at for at in map(self.place.__getitem__, self.readers[node]) if at <= end), default=place)

    def _origin(self, stack: Stack) -> fx.Node | None:
        """The first block's input: of the values alive when it begins, the one that leaves the fewest side inputs.

        Values that are read after the second block has begun are side inputs themselves, if there are others.
        """
        first, second = (self.place[block[0]] for block in stack[:2])
        alive = [
            node
            for node, place in self.place.items()
            if place < first <= self.last[node] and isinstance(node.meta["spec"], TensorSpec)
            if not is_free(node) or node.name in self.batch
        ]
        likely = min((self.last[node] >= second for node in alive), default=None)
        chosen = [node for node in reversed(alive) if (self.last[node] >= second) == likely]
        return min(chosen, key=lambda node: self._likeliness(node, stack), default=None)

    def _likeliness(self, origin: fx.Node, stack: Stack) -> tuple[int, int, bool, int, bool]:
        """A sort key for candidates, the likeliest first: how many blocks, and how many of their nodes, the stream from
        `origin` leaves out (a mask comes later than the hidden state, and a sum that starts at zeros leaves out what is
        added); whether `origin` is an input; how many values outside of it the stream reads; and whether `origin` has
        no samples, such as a number by which embeddings are multiplied before the first block.
        """
        nodes = self._dependent(origin, stack)
        read = set().union(*(node.all_input_nodes for node in nodes - {origin}))
        num_read = sum(not is_free(node) for node in read - nodes - {origin})
        left_out = len(set(chain.from_iterable(stack)) - nodes)
        return sum(map(nodes.isdisjoint, stack)), left_out, is_free(origin), num_read, not has_samples(origin)

    def _dependent(self, origin: fx.Node, stack: Stack) -> set[fx.Node]:
        """`origin` and what depends on it, except what is made before the stack and read in its second block."""
        first, second = (self.place[block[0]] for block in stack[:2])
        found = {origin}
        for node, users in self.readers.items():
            if node in found:
                found.update(users)
        before = [node for node in self.readers if node in found and self.place[node] < first]
        for node in reversed(before):
            if self.last[node] >= second or not found.issuperset(self.readers[node]):
                found.discard(node)
        return found


def _kind(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a tensor; None for anything else."""
    spec = tensor_spec(node)
    return None if spec is None else (spec.shape, spec.dtype)


def _source(node: fx.Node, operations: Container[str]) -> fx.Node:
    """The value that this one is a part or a copy of, as these operations make it; otherwise the value itself."""
    while node.all_input_nodes and operation(node) in operations:
        node = node.all_input_nodes[0]
    return node


def _furthest(boundaries: Sequence[int | None], ends: Sequence[int]) -> int:
    """The largest distance of a boundary from the last node of its block."""
    return max((found - end for found, end in zip(boundaries, ends, strict=False) if found is not None), default=0)


def _no_stream(nodes: Iterable[fx.Node], found: Sequence[Stack]) -> str:
    numbers: dict[str, set[int]] = defaultdict(set)
    for path, number in filter(None, map(block_of, nodes)):
        numbers[path].add(number)
    if found and any(len(blocks) > 1 for blocks in numbers.values()):
        first, second = (block[0] for block in found[0][:2])
        return (
            f"the blocks do not run one after the other: `{second.name}` ({source_line(second) or operation(second)}) "
            f"does not depend on the block of `{first.name}`"
        )
    here = ", ".join(f"{path} ({len(blocks)} block)" for path, blocks in numbers.items())
    return (
        f"the model has no repeated block: {here or 'no numbered modules at all'}. greedysnake schedules a stack of "
        "blocks layer by layer; keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more, and compile the "
        "model that holds them, not each block"
    )
