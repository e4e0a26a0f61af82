"""shards: how ranks share a unit's parameters, gradients and optimizer states among themselves.

A rank's shard is a unit's flat space as everything else knows it: it is cut into parts, stored and updated like the
whole unit of a run with one rank. Trained elements come first, then frozen ones, and each of these is cut into pieces.
The same piece of all ranks, end to end, is a stretch of the unit's whole space, so that one collective gathers it:

    shard of rank 0    [ piece 0 | piece 1 ]            whole space    [ piece 0 of 0, of 1 | piece 1 of 0, of 1 ]
    shard of rank 1    [ piece 0 | piece 1 ]

Pieces follow from the size of the shard alone. So for one number of ranks each element is summed in the same order
wherever data is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from gs_compile.placement.workload import UnitSize, Workload

# Elements. Cuts are at multiples, so that a part begins on a 4 KiB page in 16 bits and in 32, that the optimizer's
# vector code takes every element the same way wherever a unit is cut, and that no block of a state in 8 bits is cut.
QUANTUM = 2048
MOST_PIECES = 4  # of what is trained, and of what is frozen: one comes from other ranks beside the next on the link


class Owned(NamedTuple):
    """Elements that are next to each other in a shard and in the whole space: where they start in each."""

    local: int
    whole: int
    numel: int


def sharded(size: UnitSize, world: int) -> UnitSize:
    """What one of `world` ranks has of a unit. Its cuts between tiers are at ends of pieces, as those of one rank are
    at ends of tensors.
    """
    if world == 1:
        return size
    trained, frozen = (_cut(share(sum(numels), world)) for numels in (size.trained_numels, size.frozen_numels))
    products = size.products and replace(size.products, shared_nbytes=2 * sum(trained) * (world - 1))
    return replace(size, trained_numels=trained, frozen_numels=frozen, products=products)


def shared(workload: Workload, world: int) -> Workload:
    """What one of `world` ranks has of a model; each has micro-batches of its own."""
    if world == 1:
        return workload
    return replace(workload, sizes=tuple(sharded(size, world) for size in workload.sizes), world=world)


def share(numel: int, world: int) -> int:
    """The elements that each rank has of so many: a multiple of the quantum."""
    return -(-numel // (world * QUANTUM)) * QUANTUM


def pieces(num_trained: int, numel: int) -> tuple[tuple[int, int], ...]:
    """Where each piece of a shard of so many elements starts and stops in it."""
    return tuple(pairwise(accumulate((*_cut(num_trained), *_cut(numel - num_trained)), initial=0)))


def owned(cuts: Sequence[tuple[int, int]], rank: int, world: int, start: int, stop: int) -> Iterator[Owned]:
    """What a rank has of the elements from `start` to `stop` of the whole space. cuts: the `pieces` of the unit."""
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
