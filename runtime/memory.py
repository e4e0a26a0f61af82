"""memory: how host memory is mapped: pages of the system, as they are or registered with CUDA, or torch's own blocks.

What `map` returns is memory that unmaps itself with the last reference to it; `torch.frombuffer` takes and keeps one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from gs_compile.runtime.stream import Device, pinned_block

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2**21
BLOCK_SIZES = tuple(2**power for power in range(12, 41))  # a page to a terabyte: what torch rounds pinned memory to


class Memory(Protocol):
    """Where an arena's memory comes from."""

    def block_sizes(self, count: int, nbytes: int) -> Sequence[int]:
        """What to map for `count` buffers of `nbytes`."""
        ...

    def map(self, nbytes: int) -> Any:
        """Memory with the buffer interface and weak references, unmapped with the last reference to it."""
        ...


class Packing(NamedTuple):
    """Blocks that hold equal buffers, largest first, and the bytes of them that no buffer uses."""

    blocks: tuple[int, ...]
    waste: int


def pack(count: int, nbytes: int, block_sizes: Sequence[int] = BLOCK_SIZES) -> Packing:
    """The blocks that hold `count` buffers of `nbytes` in the least memory, and among those the fewest blocks.

    A buffer lies inside one block. With c(b) = b // nbytes buffers to a block of size b, and best(k) the least
    (memory, number of blocks) for k buffers:

        best(0) = (0, 0)        best(k) = min over b of best(max(0, k - c(b))) + (b, 1)

    torch rounds every pinned allocation up to a power of two, which wastes up to half of it; buffers of one size
    together waste little. Source: GreedySnake, System Implementation.
    """
    fitting = [size for size in sorted(block_sizes) if size >= nbytes]
    assert fitting, f"no block holds {nbytes} bytes"
    best = [(0, 0)]
    last = [0]  # the block that best(k) adds
    for k in range(1, count + 1):
        options = []
        for size in fitting:
            total, num_blocks = best[max(0, k - size // nbytes)]
            options.append((total + size, num_blocks + 1, size))
        total, num_blocks, size = min(options)
        best.append((total, num_blocks))
        last.append(size)
    blocks: list[int] = []
    left = count
    while left > 0:
        blocks.append(last[left])
        left -= last[left] // nbytes
    return Packing(tuple(sorted(blocks, reverse=True)), best[count][0] - count * nbytes)


class Pages:
    """Anonymous pages of the system, exactly as many as asked for."""

    def block_sizes(self, count: int, nbytes: int) -> Sequence[int]:
        return [nbytes] * count

    def map(self, nbytes: int) -> Any:
        return _advised(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class RegisteredPages(Pages):
    """Pages registered with the device while they are mapped: pinned, with nothing wasted."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister

    def map(self, nbytes: int) -> Any:
        """Raises what `register` raises; the pages are then unmapped at once."""
        pages = _Registered(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(_advised(pages), dtype=torch.uint8).data_ptr()
        self._register(address, nbytes)
        pages.unregister = lambda: self._unregister(address)
        return pages


class PinnedBlocks:
    """torch's own pinned memory, in powers of two. torch keeps what is freed, for its next block of that size."""

    def __init__(self, block_sizes: Sequence[int] = BLOCK_SIZES) -> None:
        self._block_sizes = block_sizes

    def block_sizes(self, count: int, nbytes: int) -> Sequence[int]:
        return pack(count, nbytes, self._block_sizes).blocks

    def map(self, nbytes: int) -> Any:
        return pinned_block(nbytes).numpy()  # an array can be referred to weakly


def memory_for(device: Device) -> Memory:
    """Host memory that `device` copies from and to."""
    return pinned_memory(device.pin, device.unpin) if device.has_own_memory else host_memory()


def host_memory() -> Memory:
    """Pageable memory."""
    return Pages()


def pinned_memory(register: Callable[[int, int], None], unregister: Callable[[int], None]) -> Memory:
    """Pinned memory: registered pages if the system lets us register one, else torch's blocks."""
    pages = RegisteredPages(register, unregister)
    try:
        pages.map(PAGE_NBYTES)
    except RuntimeError:
        return PinnedBlocks()
    return pages


class _Registered(mmap.mmap):
    unregister: Callable[[], None] | None = None

    def __del__(self) -> None:  # unregistered first, then unmapped, and only then counted out by whoever watches
        if self.unregister is not None:
            self.unregister()
        self.close()


def _advised(pages: mmap.mmap) -> mmap.mmap:
    """Asks for huge pages: the first touch of 50 MB then takes 3 to 4 ms instead of 10 to 12."""
    if len(pages) >= HUGE_PAGE_NBYTES:
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
