"""store: extents of bytes on one or several drives, private to one run, and gone when it ends.

Several directories share each extent in proportion to their bandwidth, row by row, so that one request keeps every
drive busy:

    extent        | row 0               | row 1               | row 2               |
    first drive   | chunk |             | chunk |             | chunk |
    second drive          | chunk       |       | chunk       |       | chunk       |
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from gs_compile.errors import StorageError
from gs_compile.runtime import ssd
from gs_compile.runtime.drive import Drive
from gs_compile.runtime.signals import end_by_exit
from gs_compile.runtime.ssd import File, Transfer, as_bytes

ROW = 16 << 20  # bytes of a row for each drive: two blocks, and 256 MiB are eight rows of two drives


class Store:
    """The storage of one run: extents are allocated from it, and it leaves nothing behind.

    `weights` are the bandwidths of the directories, in any unit; without them, several directories are measured, for
    about a third of a second each. `threads` is the number for each direction and directory. Raises StorageLockedError
    if another run has one of the directories, LeftoverError if there is in its folder what no run makes.
    """

    def __init__(
        self,
        directories: Sequence[Path | str],
        *,
        weights: Sequence[float] | None = None,
        threads: int = ssd.THREADS,
    ) -> None:
        self.pid = os.getpid()
        self.counts = threading.Lock()
        self.moved_nbytes: Counter[tuple[ssd.Verb, str]] = Counter()  # by direction and extent, asked for so far
        with contextlib.ExitStack() as opened:
            self.drives = [
                opened.enter_context(contextlib.closing(Drive(Path(directory).absolute(), threads)))
                for directory in directories
            ]
            if weights is None and len(directories) > 1:
                weights = [drive.bytes_per_second() for drive in self.drives]
            self.weights = tuple(weights or (1.0,))
            self._opened = opened.pop_all()
        atexit.register(self.close)
        end_by_exit()

    def reserve_check(self, nbytes: int) -> None:
        """Raise StorageFullError if extents of `nbytes` together would not fit on the drives as they are now."""
        needed: Counter[int] = Counter()
        for drive, weight in zip(self.drives, self.weights, strict=True):
            device = drive.folder.stat().st_dev
            needed[device] += int(nbytes * weight / sum(self.weights))
            drive.check_room(needed[device])

    def allocate(self, label: str, nbytes: int) -> Extent:
        """An extent that reads as zeros until it is written.

        Raises StorageFullError if it does not fit; then nothing of it is left.
        """
        assert nbytes > 0, f"{label}: an extent of {nbytes} bytes"
        stripe = Stripe.of(nbytes, self.weights)
        files: list[File] = []
        try:
            for drive, chunk in zip(self.drives, stripe.chunks, strict=True):
                files.append(drive.create(label, stripe.num_rows * chunk))
        except OSError:
            for drive, file in zip(self.drives, files, strict=False):
                drive.remove(file)
            raise
        return Extent(self, label, nbytes, stripe, files)

    def close(self) -> None:
        """Finish what is in flight, end the threads, remove every file, release the directories; once is enough."""
        if os.getpid() != self.pid:
            return  # a forked child's copy: the run goes on in the parent
        atexit.unregister(self.close)
        self._opened.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class Extent:
    """`nbytes` of storage under one name. Offsets are in bytes; tensors are contiguous, in memory, of any dtype.

    like: the shape and strides of an activation that is in it, on the meta device.
    """

    store: Store
    label: str
    nbytes: int
    stripe: Stripe
    files: Sequence[File]
    like: torch.Tensor | None = None

    def read(self, into: torch.Tensor, offset: int = 0) -> Transfer:
        """Begin to fill `into` from `offset` on; it may be used when the transfer's `wait` has returned."""
        return self._begin("read", into, offset)

    def write(self, source: torch.Tensor, offset: int = 0) -> Transfer:
        """Begin to write `source` at `offset`; it may be changed when the transfer's `wait` has returned."""
        return self._begin("write", source, offset)

    def _begin(self, verb: ssd.Verb, tensor: torch.Tensor, offset: int) -> Transfer:
        memory = as_bytes(tensor)
        if not 0 <= offset <= self.nbytes - memory.nbytes:
            raise ValueError(f"{verb} of {memory.nbytes} bytes at {offset}: {self.label} has {self.nbytes}")
        if os.getpid() != self.store.pid:
            raise StorageError(errno.EPERM, f"{verb} of {self.label} in a forked child: the threads are its parent's")
        blocks: list[Future[None]] = []
        for drive, at, begin, nbytes in self.stripe.pieces(offset, memory.nbytes):
            piece = memory[begin : begin + nbytes]
            blocks += self.store.drives[drive].submit(verb, self.files[drive], piece, at, self.label)
        with self.store.counts:
            self.store.moved_nbytes[verb, self.label] += memory.nbytes
        return Transfer(blocks)


class Piece(NamedTuple):
    """A range of an extent on one drive."""

    drive: int
    at: int  # offset in the drive's file
    begin: int  # offset in the request
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """How an extent lies on its drives: `num_rows` rows, in each a chunk of fixed size for each drive."""

    chunks: tuple[int, ...]
    num_rows: int

    @staticmethod
    def of(nbytes: int, weights: Sequence[float]) -> Stripe:
        """Rows as even as possible, in chunks of whole pages that are in proportion to the weights."""
        num_rows = -(-nbytes // (ROW * len(weights))) if len(weights) > 1 else 1
        row_pages = -(-nbytes // (num_rows * ssd.PAGE))
        ends = [round(row_pages * sum(weights[: drive + 1]) / sum(weights)) for drive in range(len(weights))]
        return Stripe(
            tuple((end - begin) * ssd.PAGE for begin, end in zip([0, *ends[:-1]], ends, strict=True)), num_rows
        )

    def pieces(self, offset: int, nbytes: int) -> Iterator[Piece]:
        """The parts of a range, in its order."""
        position = offset
        while position < offset + nbytes:
            row, inside = divmod(position, sum(self.chunks))
            drive = 0
            while inside >= self.chunks[drive]:
                inside -= self.chunks[drive]
                drive += 1
            length = min(self.chunks[drive] - inside, offset + nbytes - position)
            yield Piece(drive, row * self.chunks[drive] + inside, position - offset, length)
            position += length
