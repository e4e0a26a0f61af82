"""shards: how ranks share a unit's parameters, gradients and optimizer states.

All other code takes a rank's shard as the unit's flat space: the shard is cut into parts, stored and updated like the
whole unit of a run with one rank. Trained elements come first, then frozen ones, and each of the two is cut into
pieces. The same piece of all ranks, end to end, is a range of the unit's whole space, which one collective gathers:

    shard of rank 0    [ piece 0 | piece 1 ]            whole space    [ piece 0 of 0, of 1 | piece 1 of 0, of 1 ]
    shard of rank 1    [ piece 0 | piece 1 ]

Pieces follow from the size of the shard alone. So with the same number of ranks each element is summed in the same
order, wherever data is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from gs_compile.placement.workload import UnitSize, Workload

# Elements. Cuts are at multiples of it: so a part begins on a 4 KiB page both in 16 and in 32 bits, the optimizer's
# vector code treats every element the same wherever a unit is cut, and no block of a state in 8 bits is cut.
QUANTUM = 2048
MOST_PIECES = 4  # of trained and of frozen elements each: ranks exchange one while the next is on the link


class Owned(NamedTuple):
    """Elements that are contiguous in a shard and in the whole space, and where they start in each."""

    local: int
    whole: int
    numel: int


def sharded(size: UnitSize, world: int) -> UnitSize:
    """The share of a unit that one of `world` ranks has. It may be cut at ends of pieces, as a unit is at ends of
    tensors.
    """
    if world == 1:
        return size
    trained, frozen = (_cut(share(sum(numels), world)) for numels in (size.trained_numels, size.frozen_numels))
    products = size.products and replace(size.products, shared_nbytes=2 * sum(trained) * (world - 1))
    return replace(size, trained_numels=trained, frozen_numels=frozen, products=products)


def shared(workload: Workload, world: int) -> Workload:
    """The share of a model that one of `world` ranks has; each rank has micro-batches of its own."""
    if world == 1:
        return workload
    return replace(workload, sizes=tuple(sharded(size, world) for size in workload.sizes), world=world)


def share(numel: int, world: int) -> int:
    """The elements of each rank's share of `numel`: a multiple of the quantum."""
    return -(-numel // (world * QUANTUM)) * QUANTUM


def pieces(num_trained: int, numel: int) -> tuple[tuple[int, int], ...]:
    """Where each piece of a shard starts and stops in it."""
    return tuple(pairwise(accumulate((*_cut(num_trained), *_cut(numel - num_trained)), initial=0)))


def owned(cuts: Sequence[tuple[int, int]], rank: int, world: int, start: int, stop: int) -> Iterator[Owned]:
    """A rank's elements between `start` and `stop` of the whole space. cuts: the `pieces` of the unit."""
    if world == 1:
        yield Owned(start, start, stop - start)
        return
    for low, high in cuts:
        mine = world * low + rank * (high - low)
        first, last = max(start, mine), min(stop, mine + high - low)
        if first < last:
            yield Owned(low + first - mine, first, last - first)


def place_of(cuts: Sequence[tuple[int, int]], rank: int, world: int, local: int) -> int:
    """Where an element of a rank's shard is in the whole space: the inverse of `owned`."""
    low, high = next((low, high) for low, high in cuts if low <= local < high)
    return world * low + rank * (high - low) + local - low


def _cut(numel: int) -> tuple[int, ...]:
    """The sizes of the pieces of so many elements."""
    number = min(MOST_PIECES, numel // QUANTUM)
    ends = [numel * k // number // QUANTUM * QUANTUM for k in range(number + 1)] if number else []
    return tuple(stop - start for start, stop in pairwise(ends))
