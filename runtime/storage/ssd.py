"""ssd: read and write files in the background, each block with a checksum; the thread that waits gets the error.

A request is cut at the grid of its file (grid.py), and its blocks are moved by a few threads of the drive (movers.py),
some of which read and some write, so that neither waits for the other. Reading, writing and hashing release the GIL.
With O_DIRECT the drive reads and writes the caller's memory itself: no page cache, no second copy.

[1] A whole block is hashed in memory: before it is written, and after it is read. Its checksum stays with the run, not
    on the drive: bytes that differ from the last ones written there are refused, for whatever reason they differ.
[2] To move a part of a block, the whole is read and checked, and for a write changed and hashed.
[3] O_DIRECT moves whole pages of the file to and from page-aligned memory. Less than a page at the end of the file, or
    memory that is not aligned, goes piece by piece through aligned pages.
[4] Without O_DIRECT the kernel copies, and is told to drop each block from its cache at once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from gs_compile.errors import CorruptionError
from gs_compile.placement.slab import rounded
from gs_compile.runtime.pages import Pages
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.grid import PAGE, Block, Grid
from gs_compile.runtime.stream import is_in_host_memory

Memory: TypeAlias = npt.NDArray[np.uint8]
Sums: TypeAlias = npt.NDArray[np.uint64]
Verb = Literal["read", "write"]

BOUNCE = 1 << 20  # bytes of memory that is not aligned that are copied at a time: this buffer is in no budget
THREADS = 4  # of a drive, for each direction: two are slower, eight are no faster (benchmarks/ssd.py)
MAX_RETRIES = 64  # without progress, after pauses that add up to three seconds: then the drive is not coming back
MAX_PAUSE_SECONDS = 0.05


@dataclass(eq=False)
class File:
    """A file of fixed size, open for reading and writing; `direct` if it was opened with O_DIRECT.

    sums: xxh3 of each block of its grid as it was last written.
    """

    path: Path
    fd: int
    direct: bool
    grid: Grid
    sums: Sums
    locks: Sequence[threading.Lock] = field(init=False)  # of each block: its bytes and its sum change together

    def __post_init__(self) -> None:
        assert len(self.sums) == len(self.grid), f"{self.path}: {len(self.sums)} checksums of {len(self.grid)} blocks"
        self.locks = [threading.Lock() for _ in self.sums]

    @property
    def sums_text(self) -> str:
        """The checksums as a manifest has them: 16 hex digits each, one after the other."""
        return self.sums.astype(">u8").tobytes().hex()


def sums_of_zeros(grid: Grid) -> Sums:
    """The checksums of a new file."""
    starts = [start for start, _ in grid.cut(0, grid.nbytes)]
    return np.array([_sum_of_zeros(grid.at(start).nbytes) for start in starts], np.uint64)


def sums_of_text(text: str) -> Sums:
    """The inverse of `File.sums_text`."""
    return np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)


@cache
def _sum_of_zeros(nbytes: int) -> int:
    return xxh3_64_intdigest(bytes(nbytes))


def move_block(verb: Verb, file: File, memory: Memory, offset: int, label: str) -> None:
    """Read or write one block, or a part of one, or raise a StorageError; a CorruptionError where its bytes changed."""
    block = file.grid.at(offset)
    with file.locks[block.number]:
        if memory.nbytes < block.nbytes:
            _move_part(verb, file, block, memory, offset, label)
        elif verb == "read":
            _read(file, block, memory, label)
        else:
            _write(file, block, memory, memory, offset, label)


def _read(file: File, block: Block, memory: Memory, label: str) -> None:
    _move_pages("read", file, memory, block.start, label)
    if xxh3_64_intdigest(memory.data) != file.sums[block.number]:  # [1]
        what = (
            f"read of {label} found {block.nbytes} bytes at offset {block.start} that are not those written there: the "
            "drive or another program has changed them. None of them was used. Check this drive or choose another "
            "storage=, and resume from the last commit or saved state"
        )
        raise CorruptionError(errno.EBADMSG, what, str(file.path))


def _write(file: File, block: Block, whole: Memory, memory: Memory, offset: int, label: str) -> None:
    """Write the pages `memory`, after which the block is `whole`. If this fails, later reads may refuse the block."""
    found = xxh3_64_intdigest(whole.data)
    _move_pages("write", file, memory, offset, label)
    file.sums[block.number] = found


def _move_part(verb: Verb, file: File, block: Block, memory: Memory, offset: int, label: str) -> None:
    whole = _pages(block.nbytes)[: block.nbytes]  # [2]
    _read(file, block, whole, label)
    part = whole[offset - block.start :][: memory.nbytes]
    if verb == "read":
        memory[:] = part
        return
    part[:] = memory
    first, last = offset - offset % PAGE, rounded(offset + memory.nbytes)
    _write(file, block, whole, whole[first - block.start : last - block.start], first, label)


def _move_pages(verb: Verb, file: File, memory: Memory, offset: int, label: str) -> None:
    """Read or write from the beginning of a page to the end of one, or of the file."""
    is_aligned = not file.direct or memory.ctypes.data % PAGE == 0
    straight = memory.nbytes - (memory.nbytes % PAGE if file.direct else 0) if is_aligned else 0
    move(verb, file, memory[:straight], offset, label)
    rest = memory[straight:]
    pages = _pages(min(rest.nbytes, BOUNCE)) if rest.nbytes else rest  # [3]
    for begin in range(0, rest.nbytes, BOUNCE):
        piece = rest[begin : begin + BOUNCE]
        nbytes = piece.nbytes
        if verb == "write":
            pages[:nbytes], pages[nbytes:] = piece, 0
        move(verb, file, pages[: rounded(nbytes)], offset + straight + begin, label)
        if verb == "read":
            piece[:] = pages[:nbytes]


def _pages(nbytes: int) -> Memory:
    """Memory of whole pages, page-aligned."""
    return np.frombuffer(Pages(rounded(nbytes), touched=True), np.uint8)


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
                what = f"{verb} of {label} failed, {memory.nbytes} bytes at offset {offset}"
                raise system.failed(what, error, file.path) from error
            retries += 1
            time.sleep(min(0.001 * retries, MAX_PAUSE_SECONDS))
    if not file.direct:  # [4]
        os.posix_fadvise(file.fd, offset, memory.nbytes, os.POSIX_FADV_DONTNEED)


def sync(file: File, label: str) -> None:
    """Return when everything written to a file is on the drive. A failed sync is not repeated: data may be lost."""
    with system.as_storage_error(f"sync of {label}", file.path):
        system.datasync(file.fd)


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
