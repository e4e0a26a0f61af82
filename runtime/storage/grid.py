"""grid: how a file is cut into blocks. Each has a checksum of its own, and is moved by one thread at a time.

An extent on several drives is moved in chunks (store.py), so blocks also begin at each chunk: to move an extent is to
move whole blocks.

    file      |        chunk        |        chunk        | last  |
    blocks    |      |      |       |      |      |       |      ||

A commit stores the checksums of these blocks: another block size would be another format of manifests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from gs_compile.placement.slab import PAGE_NBYTES, rounded

PAGE = PAGE_NBYTES
BLOCK = 4 << 20  # 1 to 16 MiB are equally fast (benchmarks/ssd.py); part of a block costs the reading of all of it
SMALL_BLOCK = 1 << 20  # a short chunk is cut finer, down to this, so that it also has several blocks in flight
NUM_BLOCKS = 4  # of a short chunk: as many as a drive has threads


def lengths(nbytes: int, chunks: Sequence[int]) -> tuple[int, ...]:
    """The bytes of each drive's file, of `nbytes` in rows of these chunks: the last row may not be full."""
    rows, rest = divmod(nbytes, sum(chunks))
    starts = accumulate(chunks[:-1], initial=0)
    return tuple(rows * chunk + max(0, min(chunk, rest - start)) for chunk, start in zip(chunks, starts, strict=True))


class Block(NamedTuple):
    """The bytes of a file from `start` to before `stop`."""

    number: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Grid:
    """The blocks of a file. nbytes: without the padding of its last page; block: the largest block, in whole pages."""

    nbytes: int
    chunk: int
    block: int

    @staticmethod
    def of(nbytes: int, chunk: int | None = None) -> Grid:
        """The grid of a file of this size. chunk: in whole pages; None: the file is one chunk."""
        chunk = chunk or rounded(nbytes) or PAGE
        num_blocks = -(-chunk // min(BLOCK, max(SMALL_BLOCK, chunk // NUM_BLOCKS)))
        return Grid(nbytes, chunk, rounded(-(-chunk // num_blocks)))

    def __len__(self) -> int:
        return self.at(self.nbytes - 1).number + 1 if self.nbytes else 0

    def at(self, offset: int) -> Block:
        """The block that has a byte."""
        row, inside = divmod(offset, self.chunk)
        column, per_chunk = inside // self.block, -(-self.chunk // self.block)
        start, end = row * self.chunk + column * self.block, (row + 1) * self.chunk
        return Block(row * per_chunk + column, start, min(start + self.block, end, self.nbytes))

    def cut(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """A range of the file, block by block: the first and the last may be parts of theirs."""
        begin, end = offset, offset + nbytes
        while begin < end:
            stop = min(self.at(begin).stop, end)
            yield begin, stop
            begin = stop
