"""store: extents of bytes on one or several drives, private to one run; when it ends, only its last commit stays.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gs_compile.errors import StorageError
from gs_compile.runtime.signals import end_by_exit
from gs_compile.runtime.storage import manifest, ssd, system
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.folder import folder_in
from gs_compile.runtime.storage.grid import PAGE, lengths
from gs_compile.runtime.storage.last_commit import Agree, folders_of, last_commit, names_in
from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.ssd import File, as_bytes
from gs_compile.runtime.storage.stored import Manifest, StoredFile, StoredPart, StoredTensor

MOST_FULL = 0.99  # of the room of a drive that has less than its share: chunks are whole pages
ROW = 16 << 20  # bytes of a row for each drive: two blocks, and 256 MiB are eight rows of two drives


class Store(contextlib.AbstractContextManager["Store"]):
    """The storage of one run: extents are allocated from it, and it leaves nothing behind but its last commit.

    `weights` are the bandwidths of the directories, in any unit; without them, several directories are measured, for
    about a third of a second each. `threads` is the number for each direction and directory. durable: there will be
    commits. resume: take up (`former`) the last commit that a run has left in `directories` or in these further ones;
    None: take up none. agree: as in `last_commit`.
    Raises StorageLockedError if another run has one of the directories, LeftoverError if its folder has files that no
    run makes, or a commit that is not taken up.
    """

    def __init__(
        self,
        directories: Sequence[Path | str],
        *,
        weights: Sequence[float] | None = None,
        threads: int = ssd.THREADS,
        durable: bool = False,
        resume: Sequence[Path] | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.pid = os.getpid()
        # Held by `commit` and `close`, which removes what no commit names. Reentrant: garbage collection within `close`
        # may call it again.
        self._folders = threading.RLock()
        self._closed = False
        self._threads = threads
        system.allow_files()
        with contextlib.ExitStack() as self._opened:
            self.drives = [self._open(Path(each).absolute(), is_durable=durable) for each in directories]
            self._others: dict[str, Drive] = {}  # further drives with files of the former run, by folder
            asked = [self._drive_of(folder_in(each)) for each in resume or () if folder_in(each).is_dir()]
            found = dict.fromkeys([*self.drives, *asked])
            self.former = self.made = last_commit(found, resume=resume is not None, agree=agree)
            self._last = self.former  # its files are removed by the first commit
            self._checked_rest: Sequence[StoredTensor] | None = None  # with which a manifest was last read back
            self._adopted: dict[str, Extent] = {}
            self._goes_on: set[str] = set()
            self.run = self._last.run if self._last else secrets.token_hex(4) if durable else ""
            self._prefix = f"{self.run}-{secrets.token_hex(2)}-" if durable else ""  # others are of a former process
            for folder in folders_of(self.former) if self.former else ():
                self._drive_of(folder)  # also where nobody has named it: its files stay, until the next commit
            for drive in (*self.drives, *self._others.values()):
                drive.clear(names_in(self.former, drive.folder))
            if weights is None and len(directories) > 1:
                weights = [drive.bytes_per_second() for drive in self.drives]
            self.weights = tuple(weights or (1.0,))
            self._opened = self._opened.pop_all()
        atexit.register(self.close)
        end_by_exit()

    def _open(self, directory: Path, folder: Path | None = None, *, is_durable: bool = False) -> Drive:
        drive = Drive(directory, self._threads, folder, is_durable=is_durable)
        return self._opened.enter_context(contextlib.closing(drive))

    def reserve(self, nbytes: int, number: int = 0) -> None:
        """Check that extents of `nbytes` together fit on the drives. A drive without room for its share by bandwidth
        leaves the rest to others, which changes `weights`. Raises StorageFullError if all together have no room, and
        StorageError if this process may not open the files of `number` extents.
        """
        if number:
            system.check_files(number * len(self.drives), self.drives[0].folder)
        weights, drives, parts = defaultdict[int, float](float), dict[int, Drive](), dict[int, float]()  # by filesystem
        for drive, weight in zip(self.drives, self.weights, strict=True):
            weights[drive.device] += weight
            drives[drive.device] = drive
        *fullest, roomiest = sorted(drives.values(), key=lambda each: each.room_nbytes / weights[each.device])
        whole, left = sum(self.weights), float(nbytes)
        for drive in fullest:
            share = left * weights[drive.device] / (whole - sum(weights[each] for each in parts))
            parts[drive.device] = min(share, MOST_FULL * drive.room_nbytes)
            left -= parts[drive.device]
        beside = f" beside those of step {self._last.step}, which stay until the next commit," if self._last else ""
        roomiest.check_room(int(left), beside)
        parts[roomiest.device] = left
        if left > nbytes * weights[roomiest.device] / whole + PAGE:  # more than its share
            self.weights = tuple(
                weight * parts[drive.device] / weights[drive.device]
                for drive, weight in zip(self.drives, self.weights, strict=True)
            )

    def allocate(self, label: str, nbytes: int) -> Extent:
        """An extent that reads as zeros until it is written. Raises StorageFullError, and leaves nothing, if it does
        not fit.
        """
        assert nbytes > 0, f"{label}: an extent of {nbytes} bytes"
        stripe = Stripe.of(nbytes, self.weights)
        files: list[File] = []
        try:
            for drive, chunk, length in zip(self.drives, stripe.chunks, lengths(nbytes, stripe.chunks), strict=True):
                files.append(drive.create(f"{self._prefix}{label}", length, chunk))
        except BaseException:  # also where the user interrupts it
            for drive, file in zip(self.drives, files, strict=False):
                drive.remove(file)
            raise
        return Extent(self, self.drives, label, nbytes, stripe, files)

    def adopt(self, name: str, *, goes_on: bool = False) -> Extent:
        """A part of the former run, by its name. The next commit removes it, unless it has it or the part `goes_on`."""
        assert self.former is not None, f"{name}: there was no run before"
        if goes_on:
            self._goes_on.add(name)
        if name not in self._adopted:
            part = next(each for each in self.former.parts if each.value == name)
            drives = [self._drive_of(Path(each.folder)) for each in part.files]
            files = [
                drive.adopt(each.name, each.nbytes, chunk, each.sums)
                for drive, each, chunk in zip(drives, part.files, part.chunks, strict=True)
            ]
            stripe = Stripe(part.chunks, part.num_rows)
            self._adopted[name] = Extent(self, drives, f"{name} of run {self.run}", part.nbytes, stripe, files)
        return self._adopted[name]

    def nbytes_of(self, names: Set[str]) -> int:
        """The bytes of some parts of the former run."""
        return sum(part.nbytes for part in self.former.parts if part.value in names) if self.former else 0

    def _drive_of(self, folder: Path) -> Drive:
        """The drive of a folder of the former run; it may not be one of this run's."""
        for drive in (*self.drives, *self._others.values()):
            if drive.folder == folder:
                return drive
        return self._others.setdefault(str(folder), self._open(folder.parent, folder))

    def commit(
        self,
        extents: Sequence[Extent],
        make: Callable[[], Manifest],
        together: Callable[[int], None] | None = None,
        old: Sequence[Extent] = (),
    ) -> None:
        """Commit the manifest that `make` returns: a later run resumes from it. All of its bytes are synced before.

        extents: those that were written since the last commit. together: with several ranks, returns when all have
        prepared the step; until then the last commit can still be resumed. After a StorageError the last commit is
        still valid. The first manifest, and each whose `rest` has changed, is read back before it is written.
        old: extents that the last commit may name, and later ones do not: they are removed.
        """
        syncs = [
            (drive.movers["write"], [partial(ssd.sync, file, each.label)])
            for each in extents
            for drive, file in each.on_drives
        ]
        Transfer(syncs).wait()
        new = replace(make(), number=self.made.number + 1 if self.made else 1)
        if new.rest != self._checked_rest:
            manifest.refuse_unreadable(new)
            self._checked_rest = new.rest
        with self._folders:
            if self._closed:
                raise StorageError(errno.ECANCELED, f"the commit of step {new.step} came after the end of its run")
            for drive in self.drives:
                drive.sync_names()
            name = manifest.NEXT if together else manifest.NAME
            for drive in reversed(self.drives):  # any of them has it whole, the first has it last
                manifest.write(drive.folder, drive.own.fd, new, name, partial(self._keep_both, new))
            if together is not None:
                together(new.step)
                for drive in reversed(self.drives):
                    drive.own.promote()
            for drive in self.drives:
                drive.lasting = names_in(new, drive.folder)
            self.made = new
            for drive, file in chain.from_iterable(each.on_drives for each in old):
                drive.remove(file)
            if self._last is not None:
                self._forget_former()

    def _keep_both(self, made: Manifest) -> None:
        """Keep the files of this commit and of the last one: until all drives have this one, either may count."""
        for drive in self.drives:
            drive.lasting |= names_in(made, drive.folder)

    def _forget_former(self) -> None:
        """Remove the files of the former run's commit, except those that this run's commit or its parts use."""
        for drive in self._others.values():
            drive.lasting = frozenset()  # new files are on this run's drives, and no other's stay in use
            drive.own.unlink(manifest.NAME)
        adopted = {(drive, file.path.name): file for each in self._adopted.values() for drive, file in each.on_drives}
        go_on = {(drive, file.path.name) for name in self._goes_on for drive, file in self._adopted[name].on_drives}
        for drive in (*self.drives, *self._others.values()):
            for name in names_in(self._last, drive.folder) - drive.lasting:
                if (drive, name) not in go_on:
                    file = adopted.get((drive, name))
                    drive.remove(file) if file else drive.own.unlink(name)
        self._adopted.clear()
        self.former = self._last = None

    def close(self) -> None:
        """Finish transfers, end the threads, remove files, release the directories; further calls do nothing."""
        if os.getpid() != self.pid:
            return  # a forked child's copy: the run goes on in the parent
        with self._folders:
            self._closed = True
            atexit.unregister(self.close)
            self._opened.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class Extent:
    """`nbytes` of storage under one name. Offsets are in bytes; tensors are contiguous, in memory, of any dtype.

    like: of an activation in it, the shapes and strides, on the meta device.
    """

    store: Store
    drives: Sequence[Drive]
    label: str
    nbytes: int
    stripe: Stripe
    files: Sequence[File]
    like: Any = None

    def read(self, into: torch.Tensor, offset: int = 0) -> Transfer:
        """A transfer that fills `into` from `offset` on; it may be used when the transfer's `wait` has returned."""
        return self._transfer("read", into, offset)

    def write(self, source: torch.Tensor, offset: int = 0) -> Transfer:
        """A transfer that writes `source` at `offset`; it may be changed when the transfer's `wait` has returned."""
        return self._transfer("write", source, offset)

    def stored(self, name: str) -> StoredPart:
        """The manifest's entry for it, as the part `name`. Raises StorageError if a file of it has been removed."""
        for _, file in self.on_drives:
            if not os.fstat(file.fd).st_nlink:
                raise StorageError(errno.ENOENT, "another program has removed this file of the run", str(file.path))
        files = (
            StoredFile(str(drive.folder), file.path.name, file.grid.nbytes, file.sums_text)
            for drive, file in self.on_drives
        )
        return StoredPart(name, self.nbytes, self.stripe.chunks, self.stripe.num_rows, tuple(files))

    @property
    def on_drives(self) -> list[tuple[Drive, File]]:
        return list(zip(self.drives, self.files, strict=True))

    def _transfer(self, verb: ssd.Verb, tensor: torch.Tensor, offset: int) -> Transfer:
        memory = as_bytes(tensor)
        if not 0 <= offset <= self.nbytes - memory.nbytes:
            raise ValueError(f"{verb} of {memory.nbytes} bytes at {offset}: {self.label} has {self.nbytes}")
        if os.getpid() != self.store.pid:
            raise StorageError(errno.EPERM, f"{verb} of {self.label} in a forked child: the threads are its parent's")
        parts = [
            self.drives[drive].part(verb, self.files[drive], memory[begin : begin + size], at, self.label)
            for drive, at, begin, size in self.stripe.pieces(offset, memory.nbytes)
        ]
        return Transfer(parts)


class DriveRange(NamedTuple):
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
        row_pages = -(-nbytes // (num_rows * PAGE))
        ends = [round(row_pages * sum(weights[: drive + 1]) / sum(weights)) for drive in range(len(weights))]
        return Stripe(tuple((end - begin) * PAGE for begin, end in zip([0, *ends[:-1]], ends, strict=True)), num_rows)

    def pieces(self, offset: int, nbytes: int) -> Iterator[DriveRange]:
        """The parts of a range, in its order."""
        position = offset
        while position < offset + nbytes:
            row, inside = divmod(position, sum(self.chunks))
            drive = 0
            while inside >= self.chunks[drive]:
                inside -= self.chunks[drive]
                drive += 1
            length = min(self.chunks[drive] - inside, offset + nbytes - position)
            yield DriveRange(drive, row * self.chunks[drive] + inside, position - offset, length)
            position += length
