"""ssd: files moved to and from memory in the background, and every error told to whoever waits.

A request is cut into blocks, and the blocks are moved by two small pools of threads, one that reads and one that
writes, so that neither waits for the other. `os.preadv` and `os.pwritev` release the GIL; the threads cost a few per
cent of one core. With O_DIRECT the drive reads and writes the caller's memory itself: no page cache, no second copy.

    request   |  head  |        blocks, in whole pages        |  tail  |
                 |        |         |         |         |         |
    file     page     page                                     page    page

[1] O_DIRECT moves whole pages of the file to and from page-aligned memory: those blocks go straight.
[2] The head and the tail, less than a page each, go through a buffer of the thread; so does a block whose memory is not
    aligned. Writing a part of a page reads the page first, under the file's lock: two writes may share a page.
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
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from gs_compile.errors import StorageError
from gs_compile.runtime.stream import is_in_host_memory

Memory: TypeAlias = npt.NDArray[np.uint8]

PAGE = 4096  # what O_DIRECT asks of addresses, offsets and lengths; no drive asks for more
BLOCK = 8 << 20  # 1 to 16 MiB are equally fast with enough threads (benchmarks/ssd.py); large ones cost less CPU
SMALL_BLOCK = 1 << 20  # a short request is cut finer, to this and no less, so that it too has several in flight
THREADS = 4  # for each direction: two are slower, eight are no faster (benchmarks/ssd.py)
MAX_RETRIES = 64  # without progress, after pauses that add up to three seconds: then the drive is not coming back
MAX_PAUSE_SECONDS = 0.05


class File:
    """A file of fixed size, open for reading and writing; `direct` if it was opened with O_DIRECT."""

    def __init__(self, path: Path, fd: int, *, direct: bool) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self.parts = threading.Lock()  # one part of a page is written at a time

    def close(self) -> None:
        os.close(self.fd)


class Transfer:
    """What is on its way between memory and storage; the memory is the transfer's until `wait` has returned."""

    def __init__(self, blocks: Sequence[Future[None]]) -> None:
        self._blocks = blocks

    @property
    def done(self) -> bool:
        """Whether nothing moves any more, well or badly: `wait` returns or raises at once."""
        return all(block.done() for block in self._blocks)

    def wait(self) -> None:
        """Return when every byte has arrived; raises the StorageError of the first block that failed."""
        wait_for(self._blocks, return_when=FIRST_EXCEPTION)
        if any(failed(block) for block in self._blocks):
            for block in self._blocks:
                block.cancel()  # a broken drive answers slowly: what has not begun need not
        self.settle()
        for block in self._blocks:
            if failed(block):
                block.result()

    def settle(self) -> None:
        """Return when nothing moves any more, whatever became of it."""
        wait_for(self._blocks)


def failed(block: Future[None]) -> bool:
    return block.done() and not block.cancelled() and block.exception() is not None


class Engine:
    """The threads of one drive. Each direction is served in the order of its requests, at the drive's full speed."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._readers = ThreadPoolExecutor(threads, "greedysnake-read")
        self._writers = ThreadPoolExecutor(threads, "greedysnake-write")

    def read(self, file: File, memory: Memory, offset: int, label: str) -> list[Future[None]]:
        """Fill `memory` from `offset` of the file on; `label` says in an error what was read."""
        cut = blocks(offset, memory.nbytes, self._threads)
        return [
            self._readers.submit(read_block, file, memory[begin - offset : end - offset], begin, label)
            for begin, end in cut
        ]

    def write(self, file: File, memory: Memory, offset: int, label: str) -> list[Future[None]]:
        """Write `memory` at `offset` of the file; `label` says in an error what was written."""
        cut = blocks(offset, memory.nbytes, self._threads)
        return [
            self._writers.submit(write_block, file, memory[begin - offset : end - offset], begin, label)
            for begin, end in cut
        ]

    def close(self) -> None:
        """Finish what was asked for, and end the threads."""
        self._readers.shutdown()
        self._writers.shutdown()


def blocks(offset: int, nbytes: int, threads: int) -> Iterator[tuple[int, int]]:
    """Cut a range of a file: first and last what is less than a page, between them blocks of whole pages."""
    end = offset + nbytes
    first, last = round_up(offset), end - end % PAGE
    if first > last:  # within one page
        if nbytes:
            yield offset, end
        return
    if offset < first:
        yield offset, first
    if first < last:
        num_blocks = -(-(last - first) // min(BLOCK, max(SMALL_BLOCK, (last - first) // threads)))
        size = round_up(-(-(last - first) // num_blocks))
        for begin in range(first, last, size):
            yield begin, min(begin + size, last)
    if last < end:
        yield last, end


def read_block(file: File, memory: Memory, offset: int, label: str) -> None:
    """Read one block, all of it, or raise a StorageError."""
    if goes_straight(file, memory, offset):  # [1]
        move("read", file, memory, offset, label)
    else:  # [2]
        begin = offset - offset % PAGE
        page = bounce(round_up(offset + memory.nbytes) - begin)
        move("read", file, page, begin, label)
        memory[:] = page[offset - begin : offset - begin + memory.nbytes]


def write_block(file: File, memory: Memory, offset: int, label: str) -> None:
    """Write one block, all of it, or raise a StorageError."""
    if goes_straight(file, memory, offset):  # [1]
        move("write", file, memory, offset, label)
    elif is_whole(offset) and is_whole(memory.nbytes):
        page = bounce(memory.nbytes)
        page[:] = memory
        move("write", file, page, offset, label)
    else:  # [2]
        begin = offset - offset % PAGE
        page = bounce(round_up(offset + memory.nbytes) - begin)
        with file.parts:
            move("read", file, page, begin, label)
            page[offset - begin : offset - begin + memory.nbytes] = memory
            move("write", file, page, begin, label)


def goes_straight(file: File, memory: Memory, offset: int) -> bool:
    return not file.direct or (is_whole(memory.ctypes.data) and is_whole(offset) and is_whole(memory.nbytes))


_thread = threading.local()


def bounce(nbytes: int) -> Memory:
    """Page-aligned memory of this thread, the same at every call: it never holds more than a block."""
    if not hasattr(_thread, "bounce"):
        _thread.bounce = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)
    memory: Memory = _thread.bounce
    return memory[:nbytes]


def move(verb: str, file: File, memory: Memory, offset: int, label: str) -> None:
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


def move_some(verb: str, file: File, memory: Memory, offset: int) -> int:
    """One system call: the bytes it moved, at least one, and whole pages if that is not all and the file is direct."""
    count = _preadv(file.fd, memory, offset) if verb == "read" else _pwritev(file.fd, memory, offset)
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


@contextlib.contextmanager
def told(what: str, folder: Path) -> Iterator[None]:
    """Tell an error of the system as one of ours."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"{what} failed: {error.strerror}", str(folder)) from error


def round_up(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE) * PAGE


def is_whole(nbytes: int) -> bool:
    return nbytes % PAGE == 0


# The system calls, by names of our own: the tests let each of them fail.


def _open(name: str, flags: int, folder: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)


def _fallocate(fd: int, nbytes: int) -> None:
    os.posix_fallocate(fd, 0, nbytes)


def _preadv(fd: int, memory: Memory, offset: int) -> int:
    return os.preadv(fd, [memory.data], offset)


def _pwritev(fd: int, memory: Memory, offset: int) -> int:
    return os.pwritev(fd, [memory.data], offset)
