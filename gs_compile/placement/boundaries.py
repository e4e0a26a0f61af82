"""boundaries: the bytes of what is there once at each boundary of a model, for one micro-batch.

Boundary i is below layer i: x of layer i is there, and the side inputs of the stack that begins with what is below it.
Where all boundaries are alike one number says it. The layers of another stack may hand on tensors of another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from gs_compile.program.ir import Unit

Nbytes = int | tuple[int, ...]  # of every boundary, or of each


def alike(nbytes: Sequence[int]) -> Nbytes:
    """The bytes of each boundary, in one number if that can be."""
    return nbytes[0] if len(set(nbytes)) == 1 else tuple(nbytes)


def at(nbytes: Nbytes, boundary: Unit | None) -> int:
    """The bytes at a boundary, which goes by the layer above it."""
    if isinstance(nbytes, int):
        return nbytes
    assert isinstance(boundary, int), f"no boundary is called {boundary}"
    return nbytes[boundary]


def total(nbytes: Nbytes, number: int) -> int:
    """Of the first boundaries together."""
    return number * nbytes if isinstance(nbytes, int) else sum(nbytes[:number])


def scaled(nbytes: Nbytes, factor: float) -> Nbytes:
    return int(nbytes * factor) if isinstance(nbytes, int) else tuple(int(each * factor) for each in nbytes)


def in_parts(nbytes: Nbytes) -> Nbytes:
    """The same in a whole number of equal parts: where all are alike one, else as few as can be."""
    return 1 if isinstance(nbytes, int) else tuple(each // gcd(*nbytes) for each in nbytes)


def part_nbytes(nbytes: Nbytes, parts: Nbytes) -> float:
    """The bytes of one of `parts`."""
    return nbytes / parts if isinstance(nbytes, int) and isinstance(parts, int) else _sum(nbytes) / _sum(parts)


def _sum(nbytes: Nbytes) -> int:
    assert isinstance(nbytes, tuple), "boundaries are all alike, or each has a number"
    return sum(nbytes)
