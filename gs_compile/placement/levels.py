"""levels: what a layer's forward saves for its backward, and where.

At level 0 a layer saves its input, its checkpoint, and its backward runs the forward again. At level 1 and above the
forward also leaves saved activations, with which the backward has less to run again. An item is one layer and one
micro-batch; the shares say how many items have which level and home.

    layer 3   host   ssd    -       A share is spread evenly over all items that are in no other share: while one item
    layer 2   host   ssd    -       moves, others compute that do not move, and all layers take the same time.
    layer 1   host   ssd    -
    layer 0   host   ssd    -       -: level 0

    layer 3   host   host   host    Or it has the topmost items: they are needed again first, so that their memory is
    layer 2   host   -      -       free before gradients and states need it.
    layer 1   -      -      -
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gs_compile.placement.stacks import Stacks
from gs_compile.program.ir import TIERS, Tier

Item = tuple[int, int]  # a layer, and a micro-batch
TOLERANCE = 1e-9  # in a part of all items
ALIGNMENT = 64  # bytes, of each saved tensor where they stand together


@dataclass(frozen=True, slots=True)
class Level:
    """What one level of a layer saves: bytes for each micro-batch; reads_input: its backward reads the input, too."""

    nbytes: tuple[int, ...]
    reads_input: bool


Levels = tuple[tuple[Level, ...], ...]  # 1, 2 ... of each layer; () of one that can save its input alone


class Share(NamedTuple):
    """A part of all items that is saved at a level, on a tier: the topmost ones, or spread evenly.

    stack: the stack whose layers it is of; None: all layers.
    """

    level: int
    tier: Tier
    part: float
    is_topmost: bool = False
    stack: int | None = None


class Shares(tuple[Share, ...]):
    """What is saved of all items; what is in no share is at level 0."""

    __slots__ = ()

    def part(self, tier: Tier | None = None) -> float:
        """The part of all items that is in any share, or in a share on `tier`."""
        return sum(share.part for share in self if tier in (None, share.tier))

    def of(self, stack: int) -> Shares:
        """The shares that the layers of a stack may be in."""
        return Shares(share for share in self if share.stack in (None, stack))

    def moved(self, source: Tier, target: Tier) -> Shares:
        """The shares with what is on one tier on another."""
        return Shares(share._replace(tier=target) if share.tier == source else share for share in self)


def items(
    shares: Sequence[Share], levels: Sequence[Sequence[Level]], num_micro_batches: int, stacks: Stacks = ()
) -> Mapping[Item, Share]:
    """The share that each item belongs to. Items of level 0 have none; a layer may have no other level.

    stacks: those that the shares name.
    """
    number, by_item = len(levels) * num_micro_batches, dict[Item, Share]()
    rest = [(unit, j) for unit, above in enumerate(levels) if above for j in range(num_micro_batches)]
    for share in sorted(shares, key=lambda each: (not each.is_topmost, TIERS.index(each.tier))):
        free = rest if share.stack is None else [item for item in rest if item[0] in stacks[share.stack]]
        count = min(int(share.part * number + TOLERANCE * number), len(free))
        if share.is_topmost:
            chosen = sorted(free, key=lambda item: (-item[0], item[1]))[:count]
        else:
            chosen = [item for at, item in enumerate(free) if is_chosen(at, count / len(free))] if free else []
        by_item |= {item: share._replace(level=min(share.level, len(levels[item[0]]))) for item in chosen}
        rest = [item for item in rest if item not in by_item]
    return by_item


def aligned(nbytes: int) -> int:
    """The bytes that a saved tensor takes beside others, aligned."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_chosen(at: int, ratio: float) -> bool:
    """Whether the item at place `at` is chosen, where a part `ratio` of all items is, spread evenly."""
    return int((at + 1) * ratio + TOLERANCE) > int(at * ratio + TOLERANCE)
