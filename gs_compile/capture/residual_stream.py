"""residual_stream: what goes through a stack of blocks, and where it can be cut.

    x0 --+------------------+--> x1 --+------------------+--> x2 ...
         '--> block 0 --> --'         '--> block 1 --> --'
                            |                            |
                            boundary                     boundary

The stream is all that depends on the value that the first block takes in. A boundary is the first place behind a block,
in the order of the graph, at which one value of the stream is alive: made, and still to be read. The modules say only
behind which nodes boundaries are looked for. What was made before the first block, and is read once the second has
begun, is a side input and no part of the stream. What blocks make for what follows the last of them alone, as the
logits of routers, goes there beside the stream. So where a boundary is missing, what is read behind the last block
counts as alive until its last reader in the blocks; the last block ends as far behind its nodes as the others do.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from torch import fx

from gs_compile.capture.graph import TensorSpec, block_of, source_line
from gs_compile.capture.operations import has_samples, is_free, operation
from gs_compile.capture.stacks import Stack, stacks
from gs_compile.errors import UniformityError

log = logging.getLogger(__name__)

LARGER = 10  # a stack is so many times another that cut as it is, so that this one is no layers: it embeds times, say

Readers = Mapping[fx.Node, Sequence[fx.Node]]  # nodes in graph order, each with those of them that read it


@dataclass(frozen=True)
class ResidualStream:
    """A stream, and its boundaries as places in the order of the graph, one behind each block.

    Where no place has one value alive, the boundary is where the next block begins.
    """

    origin: fx.Node  # the first block's input
    nodes: Set[fx.Node]  # that depend on it
    blocks: Stack  # those with nodes of the stream
    boundaries: Sequence[int]
    num_cut: int  # how many of the blocks come before the first behind which no place has one value alive

    @property
    def is_cut(self) -> bool:
        return self.num_cut == len(self.blocks)

    def start(self, place: Mapping[fx.Node, int]) -> int:
        """The place of the first that depends on its origin, or is in its first block."""
        return min(place[node] for node in (*self.nodes, *self.blocks[0]))


def residual_streams(readers: Readers, batch: Set[str], *, one: bool) -> list[ResidualStream]:
    """The streams that a model is cut along, in the order of the graph: of the largest stack that can be cut, and of
    all others that can be beside it, whose blocks hand on tensors of one shape, and that are larger than a layer of it:
    smaller ones take no more memory as a part of a unit, and a head of several layers is no stack.

    Of one that can be cut only in part they are those of its parts (`of_parts`).

    batch: inputs that have the samples; one: of the largest stack alone. Where no stack can be cut it is the largest.
    Raises `UniformityError` where there is no stack, or its blocks do not run one after the other.
    """
    search = _Search(readers, batch)
    found = [stack for stack in stacks(node for node in readers if not is_free(node)) if _has_parameters(stack, batch)]
    chosen, uncut, least = list[ResidualStream](), list[ResidualStream](), -1
    for stack in found:
        if search.numel(chain.from_iterable(stack)) > least and (stream := search.stream(stack)) is not None:
            if not chosen:
                chosen = [stream] if stream.is_cut else search.of_parts(stream, one=one)
                uncut += [] if chosen else [stream]
                least = max((search.numel(block) for each in chosen for block in each.blocks), default=-1)
            elif stream.is_cut and search.is_even(stream) and all(search.are_apart(stream, each) for each in chosen):
                chosen.append(stream)
        if chosen and one:
            break
    if not (chosen or uncut):
        raise UniformityError(_no_stream(readers, found))
    if uncut and LARGER * sum(map(search.size, chosen)) < search.size(uncut[0]) and search.is_exchanged(uncut[0]):
        chosen = []
    return sorted(chosen or uncut[:1], key=lambda each: each.start(search.place))


def _has_parameters(stack: Stack, batch: Set[str]) -> bool:
    """Whether its blocks read anything but the batch: a dropout that is called twice makes no layers."""
    read = {each for block in stack for node in block for each in node.all_input_nodes}
    return any(is_free(each) and each.name not in batch for each in read)


def is_like(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether a value is a tensor of this shape and dtype."""
    found = node.meta["spec"]
    return isinstance(found, TensorSpec) and (found.shape, found.dtype) == (spec.shape, spec.dtype)


class _Search:
    def __init__(self, readers: Readers, batch: Set[str]) -> None:
        self.readers, self.batch = readers, batch
        self.place = {node: place for place, node in enumerate(readers)}
        self.last = {  # the place at which a value is read last; who reads its memory has another value there
            node: max((self.place[user] for user in node.users if user in self.place), default=place)
            for node, place in self.place.items()
        }

    def numel(self, nodes: Iterable[fx.Node]) -> int:
        """The elements of the parameters and buffers that nodes read, each once."""
        read = {
            each for node in nodes for each in node.all_input_nodes if is_free(each) and each.name not in self.batch
        }
        return sum(each.meta["spec"].numel for each in read if isinstance(each.meta.get("spec"), TensorSpec))

    def size(self, stream: ResidualStream) -> int:
        """The elements of what its blocks read."""
        return self.numel(chain.from_iterable(stream.blocks))

    def is_exchanged(self, stream: ResidualStream) -> bool:
        """Whether each block of a stream hands several tensors on that one can have (`packed`), to the next alone."""
        for end, stop in pairwise(stream.boundaries):
            alive = [node for node in stream.nodes if self.place[node] <= end < self.last[node]]
            specs = [node.meta["spec"] for node in alive if self.last[node] <= stop]
            sized = [spec for spec in specs if isinstance(spec, TensorSpec) and len(spec.shape) > 1]
            rows = [spec.dtype for spec in sized if spec.batch_dims == (0,) and spec.dtype.is_floating_point]
            if not 1 < len(rows) == len(alive) or len({*rows}) > 1:
                return False
        return True

    def is_even(self, stream: ResidualStream) -> bool:
        """Whether tensors of one shape and dtype are alive at all boundaries."""
        alive = [
            node for node in stream.nodes for end in stream.boundaries if self.place[node] <= end < self.last[node]
        ]
        specs = [node.meta["spec"] for node in alive]
        return isinstance(specs[0], TensorSpec) and all(is_like(node, specs[0]) for node in alive)

    def are_apart(self, one: ResidualStream, other: ResidualStream) -> bool:
        """Whether all layers of one of two streams come before anything of the other."""
        first, second = sorted((one, other), key=lambda each: each.start(self.place))
        return first.boundaries[-1] < second.start(self.place)

    def stream(self, stack: Stack) -> ResidualStream | None:
        """The stream through a stack; None where it does not come to two blocks.

        Gradients go through it, so it has no block that takes in ids, as an embedding in one container with layers.
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
        has_taps, behind = None in found, -1  # of a block's last node, where the boundary is
        while has_taps and (further := _furthest(found[:-1], ends)) > behind:
            behind = further
            last = {node: self._last_before(places[-1][0], ends[-1] + behind, node, origin) for node in nodes}
            found = self._boundaries(origin, ends, stops, last)
        boundaries = [stop - 1 if each is None else each for each, stop in zip(found, stops, strict=True)]
        num_cut = found.index(None) if None in found else len(found)
        return ResidualStream(origin, nodes - {origin}, blocks, boundaries, num_cut)

    def of_parts(self, uncut: ResidualStream, *, one: bool) -> list[ResidualStream]:
        """The streams through the most of the last blocks that can be cut, and through the first ones that can, at
        least half of all together; empty: through fewer. What the blocks between, or before, make for the last ones is
        made ahead of their stream, and so is a side input.
        """
        blocks, ahead = uncut.blocks, 0 if one or uncut.num_cut == 1 else uncut.num_cut
        start, stop = max(1, uncut.num_cut), len(blocks) - max(2, (len(blocks) + 1) // 2 - ahead)
        later = (self.stream(blocks[place:]) for place in range(start, stop + 1))
        last = next((each for each in later if each is not None and each.is_cut), None)
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
        """The stream through blocks ahead of another stream, where it can be beside that."""
        found = self.stream(blocks) if len(blocks) > 1 else None
        if found is None or not (found.is_cut and self.is_even(found) and self.are_apart(found, later)):
            return []
        return [found]

    def _boundaries(
        self, origin: fx.Node, ends: Sequence[int], stops: Sequence[int], last: Mapping[fx.Node, int]
    ) -> list[int | None]:
        """Behind the end of each block, the first place at which one value is alive; last: where each is read last.

        Hidden states that are made at the end, or behind it, and that nothing reads stay alive: they are outputs. What
        else is made there, as a loss, is none.
        """
        change = Counter(self.place[node] for node in last)
        at_the_end = (node for node, place in last.items() if not self.readers[node] and place >= ends[-1])
        outputs = {node for node in at_the_end if is_like(node, origin.meta["spec"])}
        change.subtract(place for node, place in last.items() if node not in outputs)
        num_alive = list(accumulate(change[place] for place in range(len(self.place))))
        pairs = zip(ends, stops, strict=True)
        return [next((place for place in range(end, stop) if num_alive[place] == 1), None) for end, stop in pairs]

    def _last_before(self, begin: int, end: int, node: fx.Node, origin: fx.Node) -> int:
        """The place at which a value is read last, before what follows the stack alone; begin: of the last block, end:
        of the stream. The value that ends the stream is read there.
        """
        place = self.place[node]
        if self.last[node] <= end or place > end or (place >= begin and is_like(node, origin.meta["spec"])):
            return self.last[node]
        return max((at for at in map(self.place.__getitem__, self.readers[node]) if at <= end), default=place)

    def _origin(self, stack: Stack) -> fx.Node | None:
        """The first block's input: of the values that are alive as it begins, the one that leaves fewest side inputs.

        Values that are read once the second block has begun are side inputs themselves, if there are others.
        """
        first, second = (self.place[block[0]] for block in stack[:2])
        alive = [
            node
            for node, place in self.place.items()
            if place < first <= self.last[node] and isinstance(node.meta["spec"], TensorSpec)
            if not is_free(node) or node.name in self.batch
        ]
        likely = min(((self.last[node] >= second, is_free(node)) for node in alive), default=None)
        chosen = [node for node in reversed(alive) if (self.last[node] >= second, is_free(node)) == likely]
        return min(chosen, key=lambda node: self._likeliness(node, stack), default=None)

    def _likeliness(self, origin: fx.Node, stack: Stack) -> tuple[int, int, int, bool]:
        """How many blocks the stream from `origin` leaves out, and how many of their nodes: a mask comes later than the
        hidden state; how many values it reads that are not of it; and whether `origin` has no samples: a number by
        which the embedding is multiplied ahead of the first block is none.
        """
        nodes = self._dependent(origin, stack)
        read = set().union(*(node.all_input_nodes for node in nodes - {origin}))
        num_read = sum(not is_free(node) for node in read - nodes - {origin})
        left_out = len(set(chain.from_iterable(stack)) - nodes)
        return sum(map(nodes.isdisjoint, stack)), left_out, num_read, not has_samples(origin)

    def _dependent(self, origin: fx.Node, stack: Stack) -> set[fx.Node]:
        """`origin` and what depends on it, without what is made before the stack and read in its second block."""
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


def _furthest(boundaries: Sequence[int | None], ends: Sequence[int]) -> int:
    """How far behind the last node of its block a boundary is, at most."""
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
