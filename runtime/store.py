"""store: extents of bytes on one or several drives, private to one run, and gone when it ends.

    <directory>/greedysnake-run/    the only folder that is touched, 0700; others' files beside it stay as they are
        .lock                       held with flock while the run lives; says by whom
        w3, s3, x5, ...             this directory's share of each extent, 0600, preallocated

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
import fcntl
import mmap
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gs_compile.errors import LeftoverError, SlowStorageWarning, StorageError, StorageFullError, StorageLockedError
from gs_compile.machine import free_storage
from gs_compile.runtime import ssd
from gs_compile.runtime.memory import host_memory
from gs_compile.runtime.ssd import Engine, File, Memory, Transfer, as_bytes, told

FOLDER = "greedysnake-run"
LOCK = ".lock"
PROBE = ".probe"  # names that begin with a dot hold nothing of a run
ROW = 16 << 20  # bytes of a row for each drive: two blocks, and 256 MiB are eight rows of two drives
PROBE_BLOCK = 8 << 20
PROBE_NBYTES = 128 << 20
PROBE_SECONDS = 0.15  # each for writing and reading


class Store:
    """The storage of one run: extents are allocated from it, and it leaves nothing behind.

    `weights` are the bandwidths of the directories, in any unit; without them, several directories are measured, for
    less than a third of a second each. `threads` is the number for each direction and directory. Raises
    StorageLockedError if another run has one of the directories, LeftoverError if one was killed there.
    """

    def __init__(
        self,
        directories: Sequence[Path | str],
        *,
        weights: Sequence[float] | None = None,
        threads: int | None = None,
    ) -> None:
        if not directories or (weights is not None and len(weights) != len(directories)):
            raise ValueError(f"{len(directories)} directories and {len(weights or ())} weights: one or more, as many")
        if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise ValueError(f"weights={list(weights)}: bandwidths are positive")
        self._pid = os.getpid()
        self._extents: dict[str, Extent] = {}
        self._counts = threading.Lock()
        self.read_nbytes: Counter[str] = Counter()  # of each kind, asked for so far
        self.written_nbytes: Counter[str] = Counter()
        with contextlib.ExitStack() as opened:
            self._drives = [
                opened.enter_context(contextlib.closing(Drive(Path(directory).absolute(), threads or ssd.THREADS)))
                for directory in directories
            ]
            if weights is None and len(directories) > 1:
                weights = [drive.bytes_per_second() for drive in self._drives]
            self.weights = tuple(weights or (1.0,))
            self._opened = opened.pop_all()
        atexit.register(self.close)

    def reserve_check(self, nbytes: int) -> None:
        """Raise StorageFullError if extents of `nbytes` together would not fit on the drives as they are now."""
        needed: Counter[int] = Counter()
        for drive, weight in zip(self._drives, self.weights, strict=True):
            device = drive.folder.stat().st_dev
            needed[device] += int(nbytes * weight / sum(self.weights))
            drive.check_room(needed[device])

    def allocate(self, label: str, nbytes: int, *, kind: str | None = None) -> Extent:
        """An extent that reads as zeros until it is written; `kind` says where its traffic is counted.

        Raises StorageFullError if it does not fit; then nothing of it is left.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", label):
            raise ValueError(f"{label!r} is no label: letters and digits, such as 'w3'")
        if nbytes <= 0:
            raise ValueError(f"{label}: an extent of {nbytes} bytes")
        if label in self._extents:
            raise ValueError(f"{label} is allocated already")
        stripe = Stripe.of(nbytes, self.weights)
        files: list[File] = []
        try:
            for drive, chunk in zip(self._drives, stripe.chunks, strict=True):
                files.append(drive.create(label, stripe.num_rows * chunk))
        except OSError:
            for drive, file in zip(self._drives, files, strict=False):
                drive.remove(file)
            raise
        kind = kind or re.sub(r"[0-9].*", "", label) or label
        self._extents[label] = extent = Extent(self, label, kind, nbytes, stripe, files)
        return extent

    def close(self) -> None:
        """Finish what is in flight, end the threads, remove every file, release the directories; once is enough."""
        if os.getpid() != self._pid:
            return  # a forked child's copy: the run goes on in the parent
        atexit.unregister(self.close)
        for extent in list(self._extents.values()):
            extent.free()
        self._opened.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _transfer(self, extent: Extent, verb: str, memory: Memory, offset: int) -> Transfer:
        if os.getpid() != self._pid:
            raise StorageError(errno.EPERM, f"{verb} of {extent.label} in a forked child: the threads are its parent's")
        blocks = []
        for drive, at, begin, nbytes in extent.stripe.pieces(offset, memory.nbytes):
            engine = self._drives[drive].engine
            submit = engine.read if verb == "read" else engine.write
            blocks += submit(extent.files[drive], memory[begin : begin + nbytes], at, extent.label)
        with self._counts:
            counter = self.read_nbytes if verb == "read" else self.written_nbytes
            counter[extent.kind] += memory.nbytes
        return Transfer(blocks)

    def _free(self, extent: Extent) -> None:
        del self._extents[extent.label]
        for drive, file in zip(self._drives, extent.files, strict=True):
            drive.remove(file)


class Extent:
    """`nbytes` of storage under one name. Offsets are in bytes; tensors are contiguous, in memory, of any dtype."""

    def __init__(self, store: Store, label: str, kind: str, nbytes: int, stripe: Stripe, files: Sequence[File]) -> None:
        self.label = label
        self.kind = kind
        self.nbytes = nbytes
        self.stripe = stripe
        self.files = files
        self._store = store
        self._in_flight: list[Transfer] = []
        self._guard = threading.Lock()  # reads and writes come from two lanes
        self._is_free = False

    def read(self, into: torch.Tensor, offset: int = 0) -> Transfer:
        """Begin to fill `into` from `offset` on; it may be used when the transfer's `wait` has returned."""
        return self._begin("read", into, offset)

    def write(self, source: torch.Tensor, offset: int = 0) -> Transfer:
        """Begin to write `source` at `offset`; it may be changed when the transfer's `wait` has returned."""
        return self._begin("write", source, offset)

    def free(self) -> None:
        """Wait for what is in flight and remove the files; once is enough."""
        with self._guard:
            if self._is_free:
                return
            self._is_free = True
        for transfer in self._in_flight:
            transfer.settle()
        self._store._free(self)

    def _begin(self, verb: str, tensor: torch.Tensor, offset: int) -> Transfer:
        memory = as_bytes(tensor)
        if not 0 <= offset <= self.nbytes - memory.nbytes:
            raise ValueError(f"{verb} of {memory.nbytes} bytes at {offset}: {self.label} has {self.nbytes}")
        with self._guard:
            if self._is_free:
                raise ValueError(f"{verb} of {self.label}, which was freed")
            transfer = self._store._transfer(self, verb, memory, offset)
            self._in_flight = [each for each in self._in_flight if not each.done]
            self._in_flight.append(transfer)
        return transfer


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


class Drive:
    """One directory: the folder of our files in it, locked, and the threads that move them."""

    def __init__(self, directory: Path, threads: int) -> None:
        self.folder = directory / FOLDER
        with contextlib.ExitStack() as opened, told("open", self.folder):
            self._folder_fd, self._lock_fd = lock(self.folder)
            opened.callback(self._release)
            self.engine = Engine(threads)
            opened.callback(self.engine.close)
            refuse_leftovers(self.folder)
            self.is_direct = True
            self.is_direct = self._takes_direct()
            self._opened = opened.pop_all()
        if not self.is_direct:
            slow = f"{directory} refuses direct I/O: storage works through the page cache, slower and with more copies"
            warnings.warn(slow, SlowStorageWarning, stacklevel=4)

    def create(self, name: str, nbytes: int) -> File:
        """A new file of zeros with its room reserved; StorageFullError, and no file, if there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.is_direct else 0)
        with told(f"creation of {name}", self.folder):
            file = File(self.folder / name, ssd._open(name, flags, self._folder_fd), direct=self.is_direct)
            try:
                if nbytes:
                    ssd._fallocate(file.fd, nbytes)
            except OSError as error:
                self.remove(file)
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._full(nbytes, error.errno) from error
                raise
        return file

    def remove(self, file: File) -> None:
        file.close()
        with contextlib.suppress(FileNotFoundError):  # someone else was tidying
            os.unlink(file.path.name, dir_fd=self._folder_fd)

    def check_room(self, nbytes: int) -> None:
        if nbytes > free_storage(self.folder):
            raise self._full(nbytes, errno.ENOSPC)

    def bytes_per_second(self) -> float:
        """The bandwidth of writing and reading the same amount, measured on a file that is removed again."""
        file = self.create(PROBE, PROBE_NBYTES)
        try:
            memory = np.frombuffer(host_memory().map(PROBE_BLOCK), np.uint8)  # as a run's is
            written, write_seconds = timed(self.engine.write, file, memory, PROBE_NBYTES)
            read, read_seconds = timed(self.engine.read, file, memory, written)
            return (written + read) / (write_seconds + read_seconds)
        finally:
            self.remove(file)

    def close(self) -> None:
        self._opened.close()

    def _takes_direct(self) -> bool:
        """Whether a page can be written and read with O_DIRECT; some filesystems refuse at open, others later."""
        page = np.frombuffer(mmap.mmap(-1, ssd.PAGE), np.uint8)
        try:
            file = self.create(PROBE, ssd.PAGE)
            try:
                ssd.write_block(file, page, 0, PROBE)
                ssd.read_block(file, page, 0, PROBE)
            finally:
                self.remove(file)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):  # open may have made the file before it refused
                os.unlink(PROBE, dir_fd=self._folder_fd)
            return False
        return True

    def _full(self, nbytes: int, number: int) -> StorageFullError:
        what = (
            f"{nbytes} bytes are needed and {free_storage(self.folder)} are free: make room or choose another storage="
        )
        return StorageFullError(number, what, str(self.folder))

    def _release(self) -> None:
        with contextlib.suppress(OSError):  # not empty: someone is taking it over, or put a file there
            os.unlink(LOCK, dir_fd=self._folder_fd)
            self.folder.rmdir()
        os.close(self._lock_fd)
        os.close(self._folder_fd)


def lock(folder: Path) -> tuple[int, int]:
    """Make the folder and lock it: its descriptor, and that of the lock."""
    while True:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as opened:
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder_fd)
            owner = os.fstat(folder_fd)
            if owner.st_uid != os.geteuid() or owner.st_mode & 0o077:
                what = "others can get at this folder, and storage holds weights: delete it or choose another storage="
                raise StorageError(errno.EPERM, what, str(folder))
            try:
                lock_fd = ssd._open(LOCK, os.O_RDWR | os.O_CREAT, folder_fd)
            except FileNotFoundError:
                continue  # the run before removes its folder at this moment
            opened.callback(os.close, lock_fd)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(lock_fd, 200, 0).decode(errors="replace") or "a process that is just starting"
                who = "another model of this process" if f"pid {os.getpid()}," in holder else "another run"
                what = f"{who} uses this folder, {holder}: wait for its end or choose another storage="
                raise StorageLockedError(errno.EAGAIN, what, str(folder)) from error
            if os.fstat(lock_fd).st_nlink == 0:
                continue  # that was the lock of the run before, just removed
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"pid {os.getpid()}, started {date_of(time.time())}".encode(), 0)
            opened.pop_all()
            return folder_fd, lock_fd


def refuse_leftovers(folder: Path) -> None:
    """Raise LeftoverError if a run that had the lock could not remove its files."""
    found = [path.lstat() for path in folder.iterdir() if not path.name.startswith(".")]
    if found:
        nbytes = sum(each.st_blocks * 512 for each in found)
        when = date_of(max(each.st_mtime for each in found))
        what = (
            f"a run was killed and left {len(found)} files, {nbytes} bytes, last written {when}; "
            "nothing in them can be resumed: delete the folder or choose another storage="
        )
        raise LeftoverError(errno.EEXIST, what, str(folder))
    with contextlib.suppress(FileNotFoundError):
        (folder / PROBE).unlink()


def timed(
    request: Callable[[File, Memory, int, str], list[Future[None]]], file: File, memory: Memory, limit: int
) -> tuple[int, float]:
    """Bytes moved and seconds taken by requests one after the other, until the limit or for PROBE_SECONDS."""
    begin = time.perf_counter()
    nbytes = 0
    seconds = 0.0
    while nbytes < limit and seconds < PROBE_SECONDS:
        Transfer(request(file, memory, nbytes, PROBE)).wait()
        nbytes += memory.nbytes
        seconds = time.perf_counter() - begin
    return nbytes, seconds


def date_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
