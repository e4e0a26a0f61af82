"""pages: memory of whole pages, which forked children do not get.

Otherwise, after a fork (of a DataLoader's workers, for example), the parent would copy each page that it writes to, the
fork itself would copy pinned pages, and open(2) forbids O_DIRECT into memory that is shared by a fork.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

from gs_compile.runtime.forks import leave_in_children

HUGE_PAGE_NBYTES = 2**21


class Pages(mmap.mmap):
    """`nbytes` of private memory, zero. `unpin` runs before it is unmapped."""

    unpin: Callable[[], None] | None = None
    process: int

    def __new__(cls, nbytes: int, *, touched: bool = False) -> Pages:
        """touched: all pages are allocated now; otherwise when they are first touched, as huge pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if touched else 0)
        pages = super().__new__(cls, -1, nbytes, flags=flags)
        pages.madvise(mmap.MADV_DONTFORK)
        if nbytes >= HUGE_PAGE_NBYTES and not touched:  # touching 50 MB then takes 3 to 4 ms instead of 10 to 12
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        pages.process = os.getpid()
        leave_in_children(pages)
        return pages

    def leave(self) -> None:
        """A child has nothing to release: it must not unmap the memory."""

    # The device lets go of pages before they are unmapped. As the interpreter ends, this module has no names left.
    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        if self.process != getpid():  # a child that ends
            return
        if self.unpin is not None:
            self.unpin()
