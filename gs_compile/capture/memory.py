"""memory: live bytes inside an ATen graph, counted without running it.

Memory is counted either as the graph is written, with every tensor alive from its operation to its last reader; or as a
fusing compiler uses it, which keeps some values out of memory and their sources alive until they are read
(`capture.loops`). Memory inside kernels is not counted. A tensor whose size depends on values counts with its maximum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from gs_compile.capture.graph import hint, output_values, tensors_in
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
        storage: {source for each in read for source, _ in _storages(each)}
        for node, read in found.out.items()
        for storage, _ in _storages(node)
    }
    nodes = list(module.graph.nodes)
    given = {storage for node in nodes if node.op == "placeholder" for storage, _ in _storages(node)}
    values = output_values(module)
    apart = [value for index, value in enumerate(values) if index in held and isinstance(value, fx.Node)]
    given |= {storage for node in apart for storage, _ in _storages(node)}
    made: dict[StorageWeakRef, int] = {}
    sizes: dict[StorageWeakRef, int] = {}
    last: dict[StorageWeakRef, int] = {}
    places = {node: place for place, node in enumerate(nodes)}
    for node, place in places.items():
        own = [(storage, nbytes) for storage, nbytes in _storages(node) if storage not in out]
        for storage, nbytes in own:
            if storage not in given:
                made.setdefault(storage, places[found.first.get(node, node)])
                sizes[storage] = nbytes
        for read in (node, *node.all_input_nodes) if own or node.op == "output" else ():
            for storage, _ in _storages(read):
                last |= dict.fromkeys(out.get(storage, {storage}), place)
    return [Lifetime(place, last[storage], sizes[storage]) for storage, place in made.items()]


def most_alive(memory: Iterable[Lifetime]) -> int:
    """The peak of live bytes."""
    changes: Counter[int] = Counter()
    for made, last, nbytes in memory:
        changes[made] += nbytes
        changes[last + 1] -= nbytes
    return max(accumulate(changes[place] for place in sorted(changes)), default=0)


def _storages(node: fx.Node) -> Iterator[tuple[StorageWeakRef, int]]:
    """The memory of a node's tensors, with its bytes; views share it."""
    for storage in (each.untyped_storage() for each in tensors_in(node)):
        yield StorageWeakRef(storage), hint(storage.nbytes())
