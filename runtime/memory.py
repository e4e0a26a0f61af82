"""memory: how host memory is mapped: pages of the system, which a device with memory of its own copies from and to."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

from gs_compile.runtime.stream import Device

HUGE_PAGE_NBYTES = 2**21


def map_memory(nbytes: int, device: Device | None = None) -> torch.Tensor:
    """`nbytes` of host memory, zero, as uint8 at the start of a page; unmapped when no tensor refers to it any more.

    device: pins the memory for as long as it is mapped, where it has memory of its own; RuntimeError where the system
    refuses that.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_NBYTES:  # the first touch of 50 MB then takes 3 to 4 ms instead of 10 to 12
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device is not None and device.has_own_memory:
        address = memory.data_ptr()
        device.pin(address, nbytes)
        pages.unpin = lambda: device.unpin(address)
    return memory


class _Pages(mmap.mmap):
    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:  # the device lets go of the pages before they are unmapped
        if self.unpin is not None:
            self.unpin()
        self.close()
