"""boundaries: the bytes at each boundary of a model, for one micro-batch.

Boundary i is below layer i: x of layer i is there, and the side inputs of a stack that the unit below it begins. The
layers of different stacks may hand on tensors of different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from gs_compile.program.ir import Unit

BoundaryNbytes = tuple[int, ...]  # of each boundary, from below; the last number holds for all boundaries above, too


def shortest(nbytes: Sequence[int]) -> BoundaryNbytes:
    """The bytes of each boundary, in as few numbers as possible."""
    number = len(nbytes)
    while number > 1 and nbytes[number - 2] == nbytes[-1]:
        number -= 1
    return tuple(nbytes[:number])


def at(nbytes: BoundaryNbytes, boundary: Unit | None) -> int:
    """The bytes at a boundary, which has the number of the layer above it."""
    assert isinstance(boundary, int), f"no boundary is called {boundary}"
    return nbytes[min(boundary, len(nbytes) - 1)]


def total(nbytes: BoundaryNbytes, number: int) -> int:
    """The bytes of the first boundaries together."""
    return sum(at(nbytes, boundary) for boundary in range(number))


def scaled(nbytes: BoundaryNbytes, factor: float) -> BoundaryNbytes:
    return tuple(int(each * factor) for each in nbytes)


def in_parts(nbytes: BoundaryNbytes) -> BoundaryNbytes:
    """The bytes as multiples of the largest part that divides all of them; one part if there are no bytes."""
    largest = gcd(*nbytes)
    return tuple(each // largest for each in nbytes) if largest else (1,)


def part_nbytes(nbytes: BoundaryNbytes, parts: BoundaryNbytes) -> float:
    """The bytes of one of `parts`."""
    return sum(nbytes) / sum(parts)
