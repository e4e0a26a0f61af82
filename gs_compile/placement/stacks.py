"""stacks: the layers of a model, stack by stack.

    e   0   1 | 2   3   4 | 5   6   h         layers 2 and 5 are joints, which begin a stack
    `--first--'           '---last--'

A step may keep different parts of its stacks in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gs_compile.program.ir import EPILOGUE, Unit

Stacks = tuple[range, ...]  # the layers of each


def stacks(num_layers: int, joints: Iterable[int] = ()) -> Stacks:
    """The stacks of so many layers, which begin at the joints; one stack if there are none."""
    return tuple(range(*ends) for ends in pairwise([*sorted({0, *joints}), num_layers]))


def stack_of(unit: Unit | None, among: Sequence[range]) -> int:
    """The stack of a unit. The epilogue belongs to the last one, the prologue and what units share to the first."""
    if isinstance(unit, int):
        return bisect_right(among, unit, key=lambda layers: layers.start) - 1
    return len(among) - 1 if unit == EPILOGUE else 0


def part_of(stack: int, among: Sequence[range]) -> float:
    """The part of all layers that is in a stack."""
    return len(among[stack]) / (among[-1].stop or 1) if len(among) > 1 else 1.0
