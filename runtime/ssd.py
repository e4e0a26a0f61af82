"""ssd: files moved to and from memory in the background; whoever waits gets the error.

A request is cut into blocks, and the blocks are moved by two small pools of threads, one that reads and one that
writes, so that neither waits for the other. `os.preadv` and `os.pwritev` release the GIL; the threads cost a few per
cent of one core. With O_DIRECT the drive reads and writes the caller's memory itself: no page cache, no second copy.

    request   |  head  |        blocks, in whole pages        |  tail  |
                 |        |         |         |         |         |
    file     page     page                                     page    page

[1] O_DIRECT moves whole pages of the file to and from page-aligned memory: those blocks go straight.
[2] The head and the tail, less than a page each, go through a small buffer of the thread; so does a block whose memory
    is not aligned, piece by piece. Writing a part of a page reads the page first, under the file's lock: two writes may
    share a page.
[3] Without O_DIRECT the kernel copies, and is told to forget each block at once.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gs_compile.errors import StorageError
from gs_compile.placement.slab import PAGE_NBYTES, rounded
from gs_compile.runtime import system
from gs_compile.runtime.stream import is_in_host_memory

Memory: TypeAlias = npt.NDArray[np.uint8]
Verb = Literal["read", "write"]

PAGE = PAGE_NBYTES
BLOCK = 8 << 20  # 1 to 16 MiB are equally fast with enough threads (benchmarks/ssd.py); large ones cost less CPU
BOUNCE = 1 << 20  # of a thread's buffer: all threads' are not in the budget
SMALL_BLOCK = 1 << 20  # a short request is cut finer, to this and no less, so that it too has several in flight
THREADS = 4  # of a drive, for each direction: two are slower, eight are no faster (benchmarks/ssd.py)
MAX_RETRIES = 64  # without progress, after pauses that add up to three seconds: then the drive is not coming back
MAX_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class File:
    """A file of fixed size, open for reading and writing; `direct` if it was opened with O_DIRECT."""

    path: Path
    fd: int
    direct: bool
    parts: threading.Lock = field(default_factory=threading.Lock)  # one part of a page is written at a time


@dataclass(frozen=True)
class Transfer:
    """Bytes on their way between memory and storage; the memory is the transfer's until `wait` has returned."""

    blocks: Sequence[Future[None]]

    def wait(self) -> None:
        """Return when every byte has arrived; raises the StorageError of the first block that failed."""
        wait_for(self.blocks, return_when=FIRST_EXCEPTION)
        ended = (block for block in self.blocks if block.done() and not block.cancelled())
        broken = next((block for block in ended if block.exception() is not None), None)
        if broken is not None:
            for block in self.blocks:
                block.cancel()  # a broken drive answers slowly: what has not begun need not
            self.settle()
            broken.result()

    def settle(self) -> None:
        """Return when nothing moves any more, whatever became of it."""
        wait_for(self.blocks)


def blocks(offset: int, nbytes: int, threads: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a file: first and last what is less than a page, between them blocks of whole pages."""
    end = offset + nbytes
    first, last = rounded(offset), end - end % PAGE
    cuts = {offset, end}
    if first < last:
        num_blocks = -(-(last - first) // min(BLOCK, max(SMALL_BLOCK, (last - first) // threads)))
        cuts.update(range(first, last, rounded(-(-(last - first) // num_blocks))))
    if first <= last:
        cuts.add(last)
    return pairwise(sorted(cuts))


def move_block(verb: Verb, file: File, memory: Memory, offset: int, label: str) -> None:
    """Read or write one block, all of it, or raise a StorageError."""
    places = memory.ctypes.data, offset, memory.nbytes
    if not file.direct or not any(place % PAGE for place in places):  # [1]
        move(verb, file, memory, offset, label)
        return
    for begin in range(0, memory.nbytes, BOUNCE):
        _move_bounced(verb, file, memory[begin : begin + BOUNCE], offset + begin, label)


def _move_bounced(verb: Verb, file: File, memory: Memory, offset: int, label: str) -> None:
    inside, pages = bounce(offset, memory.nbytes)  # [2]
    begin = offset - inside.start
    if verb == "read":
        move("read", file, pages, begin, label)
        memory[:] = pages[inside]
        return
    is_part = memory.nbytes < pages.nbytes
    with file.parts if is_part else contextlib.nullcontext():
        if is_part:
            move("read", file, pages, begin, label)
        pages[inside] = memory
        move("write", file, pages, begin, label)


_thread = threading.local()


def bounce(offset: int, nbytes: int) -> tuple[slice, Memory]:
    """Memory of this thread, page-aligned and the same at every call, for the pages around a range, BOUNCE at most; and
    where in it the range is.
    """
    if not hasattr(_thread, "bounce"):
        _thread.bounce = np.frombuffer(mmap.mmap(-1, BOUNCE), np.uint8)
    start = offset % PAGE
    return slice(start, start + nbytes), _thread.bounce[: rounded(start + nbytes)]


def move(verb: Verb, file: File, memory: Memory, offset: int, label: str) -> None:
    """Read or write all of `memory`, in as many system calls as it takes."""
    done = 0
    retries = 0
    while done < memory.nbytes:
        try:
            done += move_some(verb, file, memory[done:], offset + done)
            retries = 0
        except OSError as error:
            is_transient = isinstance(error, BlockingIOError | InterruptedError)  # EAGAIN, EINTR
            if not is_transient or retries == MAX_RETRIES:
                what = f"{verb} of {label} failed, {memory.nbytes} bytes at offset {offset}: {error.strerror}"
                raise StorageError(error.errno or errno.EIO, what, str(file.path)) from error
            retries += 1
            time.sleep(min(0.001 * retries, MAX_PAUSE_SECONDS))
    if not file.direct:  # [3]
        os.posix_fadvise(file.fd, offset, memory.nbytes, os.POSIX_FADV_DONTNEED)


def sync(file: File, label: str) -> None:
    """Return when what was written to a file is on the medium. It is not tried again: what failed may be lost."""
    try:
        system.datasync(file.fd)
    except OSError as error:
        what = f"sync of {label} failed: {error.strerror}"
        raise StorageError(error.errno or errno.EIO, what, str(file.path)) from error


def move_some(verb: Verb, file: File, memory: Memory, offset: int) -> int:
    """One system call: the bytes it moved, at least one, and whole pages if that is not all and the file is direct."""
    count = system.preadv(file.fd, memory, offset) if verb == "read" else system.pwritev(file.fd, memory, offset)
    if count == 0:
        raise OSError(errno.EIO, "the file ended" if verb == "read" else "nothing was written")
    if count < memory.nbytes and file.direct:
        count -= count % PAGE
        if count == 0:
            raise BlockingIOError(errno.EAGAIN, "less than a page was moved")
    return count


def as_bytes(tensor: torch.Tensor) -> Memory:
    """The tensor's memory itself, not a copy."""
    if not is_in_host_memory(tensor) or not tensor.is_contiguous():
        raise ValueError(f"a tensor on {tensor.device} with strides {tensor.stride()}: storage moves contiguous memory")
    memory: Memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memory
