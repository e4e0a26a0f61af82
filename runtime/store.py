"""store: extents of bytes on one or several drives, private to one run, and gone when it ends but for its last commit.

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
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from gs_compile.errors import LeftoverError, StorageError
from gs_compile.runtime import manifest, ssd
from gs_compile.runtime.drive import Drive
from gs_compile.runtime.folder import as_storage_error, folder_in
from gs_compile.runtime.grid import lengths
from gs_compile.runtime.manifest import Manifest, StoredFile, StoredPart
from gs_compile.runtime.signals import end_by_exit
from gs_compile.runtime.ssd import File, Transfer, as_bytes

ROW = 16 << 20  # bytes of a row for each drive: two blocks, and 256 MiB are eight rows of two drives


class Store:
    """The storage of one run: extents are allocated from it, and it leaves nothing behind but its last commit.

    `weights` are the bandwidths of the directories, in any unit; without them, several directories are measured, for
    about a third of a second each. `threads` is the number for each direction and directory. durable: there will be
    commits. resume: the last commit that a run has left here, or in these directories, is taken up (`former`); None:
    none is.
    Raises StorageLockedError if another run has one of the directories, LeftoverError if there is in its folder what
    no run makes, or a commit that is not taken up.
    """

    def __init__(
        self,
        directories: Sequence[Path | str],
        *,
        weights: Sequence[float] | None = None,
        threads: int = ssd.THREADS,
        durable: bool = False,
        resume: Sequence[Path] | None = None,
    ) -> None:
        self.pid = os.getpid()
        self.counts = threading.Lock()
        self.moved_nbytes: Counter[tuple[ssd.Verb, str]] = Counter()  # by direction and extent, asked for so far
        self._threads = threads
        with contextlib.ExitStack() as self._opened:
            self.drives = [self._open(Path(directory).absolute()) for directory in directories]
            self._others: dict[str, Drive] = {}  # that have files of the former run, by folder
            found = [
                *self.drives,
                *(self._drive_of(folder_in(each)) for each in resume or () if folder_in(each).is_dir()),
            ]
            self.former = former_of(found, resume=resume is not None)
            self._adopted: list[Extent] = []
            self.run = self.former.run if self.former else secrets.token_hex(4) if durable else ""
            # Files of a former process of the run are there, too.
            self._prefix = f"{self.run}-{secrets.token_hex(2)}-" if durable else ""
            for drive in (*self.drives, *self._others.values()):
                drive.clear(names_in(self.former, drive.folder))
            if weights is None and len(directories) > 1:
                weights = [drive.bytes_per_second() for drive in self.drives]
            self.weights = tuple(weights or (1.0,))
            self._opened = self._opened.pop_all()
        atexit.register(self.close)
        end_by_exit()

    def _open(self, directory: Path, folder: Path | None = None) -> Drive:
        return self._opened.enter_context(contextlib.closing(Drive(directory, self._threads, folder)))

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
            for drive, chunk, length in zip(self.drives, stripe.chunks, lengths(nbytes, stripe.chunks), strict=True):
                files.append(drive.create(f"{self._prefix}{label}", length, chunk))
        except OSError:
            for drive, file in zip(self.drives, files, strict=False):
                drive.remove(file)
            raise
        return Extent(self, self.drives, label, nbytes, stripe, files)

    def adopt(self, part: StoredPart, label: str) -> Extent:
        """An extent of the former run; unless the next commit has it, it goes with that."""
        stripe = Stripe(part.chunks, part.num_rows)
        drives = [self._drive_of(Path(each.folder)) for each in part.files]
        files = [
            drive.adopt(each.name, each.nbytes, chunk, each.sums)
            for drive, each, chunk in zip(drives, part.files, part.chunks, strict=True)
        ]
        found = Extent(self, drives, label, part.nbytes, stripe, files)
        self._adopted.append(found)
        return found

    def _drive_of(self, folder: Path) -> Drive:
        """The drive that has a folder of the former run; it may be none of this run's."""
        for drive in (*self.drives, *self._others.values()):
            if drive.folder == folder:
                return drive
        drive = self._others[str(folder)] = self._open(folder.parent, folder)
        return drive

    def commit(self, extents: Sequence[Extent], make: Callable[[], Manifest]) -> None:
        """Make what `make` gives what a later run goes on from. All of its bytes are on the medium before it says so.

        extents: those that were written since the last commit. Raises StorageError where that fails; then the last
        commit stands.
        """
        syncs = [drive.sync(file, each.label) for each in extents for drive, file in each.on_drives]
        Transfer(syncs).wait()
        made = make()
        for drive in reversed(self.drives):  # any of them has it whole, the first has it last
            with as_storage_error("commit", drive.folder):
                manifest.write(drive.own.fd, made)
            drive.kept = names_in(made, drive.folder)
        self._forget_former(made)

    def _forget_former(self, made: Manifest) -> None:
        """Remove what the former run's commit has and this one's has not."""
        for drive in self._others.values():
            drive.kept = names_in(made, drive.folder)
            if not drive.kept:
                drive.own.unlink(manifest.NAME)
        for extent in self._adopted:
            for drive, file in extent.on_drives:
                if file.path.name not in drive.kept:
                    drive.remove(file)
        self._adopted.clear()
        if self.former is not None:
            for drive in (*self.drives, *self._others.values()):
                for name in names_in(self.former, drive.folder) - drive.kept:
                    drive.own.unlink(name)
        self.former = None

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
    drives: Sequence[Drive]
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

    def stored(self, name: str) -> StoredPart:
        """Where it is, for a manifest, as the part of that name."""
        files = (
            StoredFile(str(drive.folder), file.path.name, file.grid.nbytes, file.sums_text)
            for drive, file in self.on_drives
        )
        return StoredPart(name, self.nbytes, self.stripe.chunks, self.stripe.num_rows, tuple(files))

    @property
    def on_drives(self) -> list[tuple[Drive, File]]:
        return list(zip(self.drives, self.files, strict=True))

    def _begin(self, verb: ssd.Verb, tensor: torch.Tensor, offset: int) -> Transfer:
        memory = as_bytes(tensor)
        if not 0 <= offset <= self.nbytes - memory.nbytes:
            raise ValueError(f"{verb} of {memory.nbytes} bytes at {offset}: {self.label} has {self.nbytes}")
        if os.getpid() != self.store.pid:
            raise StorageError(errno.EPERM, f"{verb} of {self.label} in a forked child: the threads are its parent's")
        blocks: list[Future[None]] = []
        for drive, at, begin, nbytes in self.stripe.pieces(offset, memory.nbytes):
            piece = memory[begin : begin + nbytes]
            blocks += self.drives[drive].submit(verb, self.files[drive], piece, at, self.label)
        with self.store.counts:
            self.store.moved_nbytes[verb, self.label] += memory.nbytes
        return Transfer(blocks)


def former_of(drives: Iterable[Drive], *, resume: bool) -> Manifest | None:
    """The last commit that a run has left on the drives. Each has a manifest, and one may be a commit behind.

    Raises LeftoverError where it is not to be taken up, or is of several runs.
    """
    found = [(each, drive.folder) for drive in drives if (each := drive.own.committed()) is not None]
    if not found:
        return None
    newest, folder = max(found, key=lambda pair: pair[0].step)
    words = ", ".join(dict.fromkeys(f"run {each.run} at step {each.step} ({each.written})" for each, _ in found))
    if len({each.run for each, _ in found}) > 1:
        what = f"several runs have left commits here: {words}. Name the storage of the one that is to go on"
        raise LeftoverError(errno.EEXIST, what, str(folder))
    if not resume:
        what = (
            f'a durable run has left a commit here: {words}. Go on from it with the option resume="auto", or delete '
            f"it: greedysnake store gc --all {folder.parent}"
        )
        raise LeftoverError(errno.EEXIST, what, str(folder))
    return newest


def names_in(made: Manifest | None, folder: Path) -> frozenset[str]:
    """The names of a commit's files in a folder, with its own."""
    files = [file for part in made.parts for file in part.files] if made else []
    return frozenset({file.name for file in files if Path(file.folder) == folder} | {manifest.NAME} if made else ())


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
