"""memory: how host memory is mapped: pages of the system, as they are or registered with CUDA, or torch's own blocks.

What `map` returns is memory that unmaps itself with the last reference to it; `torch.frombuffer` takes and keeps one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from gs_compile.runtime.stream import Device, pinned_block

PAGE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2**21


class Memory(Protocol):
    """Where an arena's memory comes from."""

    def block_nbytes(self, nbytes: int) -> int:
        """What is mapped for a buffer of `nbytes`."""
        ...

    def map(self, nbytes: int) -> Any:
        """Memory with the buffer interface and weak references, unmapped with the last reference to it."""
        ...


class Pages:
    """Anonymous pages of the system, exactly as many as asked for."""

    def block_nbytes(self, nbytes: int) -> int:
        return nbytes

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

    def block_nbytes(self, nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length()

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
