"""memory: live bytes inside an ATen graph, counted without running it.

Memory is counted either as the graph is written, with every tensor alive from its operation to its last reader; or as a
fusing compiler uses it, which keeps some values out of memory and their sources alive until they are read
(`capture.loops`). Memory inside kernels is not counted. A tensor whose size depends on values counts with its maximum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import NamedTuple

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from gs_compile.capture.graph import output_values
from gs_compile.capture.inductor import memories_of
from gs_compile.capture.loops import Loops, loops


class Lifetime(NamedTuple):
    """The places in the graph of the node that allocates some memory and of its last reader, and its bytes."""

    made: int
    last: int
    nbytes: int


def peak_nbytes(module: fx.GraphModule, held: Collection[int] = ()) -> int:
    """The peak of live bytes, without the graph's inputs and those of its results whose indices are `held`."""
    return most_alive(lifetimes(module, held))


def lifetimes(module: fx.GraphModule, held: Collection[int] = (), *, compiled: bool = False) -> list[Lifetime]:
    """The lifetimes of all memory, except that of the graph's inputs and of the results whose indices are `held`."""
    found = loops(module) if compiled else Loops({}, {})
    out = {
        memory: {source for each in read for source in memories_of(each)}
        for node, read in found.out.items()
        for memory in memories_of(node)
    }
    nodes, values = list(module.graph.nodes), output_values(module)
    apart = [value for index, value in enumerate(values) if index in held and isinstance(value, fx.Node)]
    inputs = module.graph.find_nodes(op="placeholder")
    given = {memory for node in (*inputs, *apart) for memory in memories_of(node)}
    made: dict[StorageWeakRef, int] = {}
    sizes: dict[StorageWeakRef, int] = {}
    last: dict[StorageWeakRef, int] = {}
    places = {node: place for place, node in enumerate(nodes)}
    for node, place in places.items():
        own = {memory: nbytes for memory, nbytes in memories_of(node).items() if memory not in out}
        for memory in own:
            if memory not in given:
                made.setdefault(memory, places[found.first.get(node, node)])
                sizes[memory] = own[memory]
        for read in (node, *node.all_input_nodes) if own or node.op == "output" else ():
            for memory in memories_of(read):
                last |= dict.fromkeys(out.get(memory, {memory}), place)
    return [Lifetime(place, last[memory], sizes[memory]) for memory, place in made.items()]


def most_alive(memory: Iterable[Lifetime]) -> int:
    """The peak of live bytes."""
    changes: Counter[int] = Counter()
    for made, last, nbytes in memory:
        changes[made] += nbytes
        changes[last + 1] -= nbytes
    return max(accumulate(changes[place] for place in sorted(changes)), default=0)
