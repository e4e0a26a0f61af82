"""pages: memory of whole pages, which no forked child has.

After a fork, of a DataLoader's workers say, the parent would copy each page that it writes to; pages that are pinned
are copied by the fork itself; and open(2) forbids O_DIRECT into memory that a fork shares.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

HUGE_PAGE_NBYTES = 2**21

_not_ours: list[Pages] = []  # pages of the parent, at whose addresses a forked child may have mapped others


class Pages(mmap.mmap):
    """`nbytes` of private memory, zero. `unpin` runs before it is unmapped."""

    unpin: Callable[[], None] | None = None
    process: int

    def __new__(cls, nbytes: int, *, touched: bool = False) -> Pages:
        """touched: with all pages there from the start; else they come as they are touched, in huge pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if touched else 0)
        pages = super().__new__(cls, -1, nbytes, flags=flags)
        pages.madvise(mmap.MADV_DONTFORK)
        if (
            nbytes >= HUGE_PAGE_NBYTES and not touched
        ):  # the first touch of 50 MB then takes 3 to 4 ms instead of 10 to 12
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        pages.process = os.getpid()
        return pages

    # The device lets go of pages before they are unmapped. As the interpreter ends, this module has no names left.
    def __del__(self, getpid: Callable[[], int] = os.getpid, not_ours: list[Pages] = _not_ours) -> None:
        if self.process != getpid():
            not_ours.append(self)  # alive, it unmaps nothing
            return
        if self.unpin is not None:
            self.unpin()
        self.close()
