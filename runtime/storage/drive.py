"""drive: one directory of a run's storage: the run's folder in it, and the threads that move its files."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np

from gs_compile.errors import (
    CorruptionError,
    SlowStorageWarning,
    StorageError,
    StorageLockedError,
)
from gs_compile.machine import file_system, free_storage
from gs_compile.placement.slab import rounded
from gs_compile.runtime.alarm import OF_US
from gs_compile.runtime.storage import manifest, ssd, system
from gs_compile.runtime.storage.folder import PROBE, TO_BE, Folder
from gs_compile.runtime.storage.grid import PAGE, Grid
from gs_compile.runtime.storage.movers import Move, Movers, Transfer
from gs_compile.runtime.storage.ssd import File, Memory, Sums, Verb
from gs_compile.runtime.storage.stored import FOLDERS

PROBE_BLOCK = 8 << 20
PROBE_NBYTES = 128 << 20
PROBE_SECONDS = 0.15  # for writing; what was written is then read
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems; from Linux 6.6 on the first takes direct I/O


class Drive:
    """One directory: the folder of our files in it, locked, and the threads that move them."""

    def __init__(self, directory: Path, threads: int, folder: Path | None = None, *, is_durable: bool = False) -> None:
        """folder: a folder of another run, instead of the first free one; is_durable: see `Folder.first_free`."""
        with contextlib.ExitStack() as opened, system.as_storage_error("open", directory, TO_BE):
            self.own = Folder.take(folder) if folder else Folder.first_free(directory, is_durable=is_durable)
            opened.callback(self.own.release)
            self.folder = self.own.path
            self.device = self.folder.stat().st_dev
            self.lasting: Set[str] = frozenset()  # names of files that stay when the run is over
            self._has_new_names = False
            self._files: list[File] = []
            opened.callback(lambda: list(map(self.leave, list(self._files))))
            self.movers: Mapping[Verb, Movers] = {
                verb: opened.enter_context(contextlib.closing(Movers(threads, f"{OF_US}-{verb}")))
                for verb in get_args(Verb)
            }
            self.is_direct = True
            self.is_read_only = system.is_read_only(self.own.fd)  # as of a former run's, which can still be read
            self.is_direct = not self.is_read_only and self._takes_direct()
            if self.drawback and not self.is_read_only:
                warnings.warn(f"{directory} {self.drawback}", SlowStorageWarning, stacklevel=4)
            self._opened = opened.pop_all()

    @property
    def drawback(self) -> str:
        """In words, how the directory is worse than one on a local drive; "": it is not."""
        if (kind := file_system(self.device)) in IN_MEMORY:
            return f"is in memory ({kind}): what is stored there takes memory that host_memory does not count"
        if not self.is_direct:
            return "refuses direct I/O: storage works through the page cache, slower and with more copies"
        return ""

    def create(self, name: str, nbytes: int, chunk: int | None = None) -> File:
        """A new file of zeros with its room reserved; StorageFullError, and no file, if there is none."""
        with system.as_storage_error(f"creation of {name}", self.folder):
            fd = self._open(name, os.O_CREAT | os.O_EXCL)
            self._has_new_names = True
            try:
                if nbytes:
                    system.fallocate(fd, rounded(nbytes))
            except BaseException as error:  # also where the user interrupts it
                self._discard(fd, name)
                if isinstance(error, OSError) and error.errno in system.FULL:
                    raise system.full(nbytes, self.room_nbytes, error.errno, self.folder) from error
                raise
        grid = Grid.of(nbytes, chunk)
        return self._take(fd, name, grid, ssd.sums_of_zeros(grid))

    def adopt(self, name: str, nbytes: int, chunk: int, sums: str) -> File:
        """A file that an earlier run has left, with the checksums that it had then, as `File.sums_text` gives them.

        Raises StorageError if it is not a file of this user's alone, or not of this size.
        """
        with system.as_storage_error(f"opening of {name}", self.folder), contextlib.ExitStack() as opened:
            fd = self._open(name, 0)
            opened.callback(os.close, fd)
            status, path = os.fstat(fd), str(self.folder / name)
            is_own = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 1
            if not (stat.S_ISREG(status.st_mode) and is_own):
                remedy = f"{manifest.AFTER_A_COPY} {self.folder}"
                what = f"other users can access this file, so it cannot be trusted: {remedy}"
                raise StorageError(errno.EPERM, what, path)
            if status.st_size != rounded(nbytes):
                what = f"{status.st_size} bytes, and the run that has left this file wrote {nbytes}"
                raise CorruptionError(errno.EBADMSG, what, path)
            opened.pop_all()
        return self._take(fd, name, Grid.of(nbytes, chunk), ssd.sums_of_text(sums))

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_RDONLY if self.is_read_only else os.O_RDWR
        return system.open_file(name, flags | (os.O_DIRECT if self.is_direct else 0), self.own.fd)

    def _take(self, fd: int, name: str, grid: Grid, sums: Sums) -> File:
        file = File(self.folder / name, fd, self.is_direct, grid, sums)
        self._files.append(file)
        return file

    def leave(self, file: File) -> None:
        """Close a file and, unless it is among those that stay, remove it. Never fails."""
        if file.path.name not in self.lasting:
            self.remove(file)
            return
        self._files.remove(file)
        with contextlib.suppress(OSError):  # what a commit names is on the medium
            os.close(file.fd)

    def remove(self, file: File) -> None:
        """Never fails: it runs where something else may have failed."""
        self._files.remove(file)
        self._discard(file.fd, file.path.name)

    def _discard(self, fd: int, name: str) -> None:
        with contextlib.suppress(OSError):  # of writes that came to nothing; the descriptor is closed
            os.close(fd)
        self.own.unlink(name)

    def sync_names(self) -> None:
        """Sync the names of new files: otherwise a power loss takes the files, whatever was written to them."""
        if self._has_new_names:
            self._has_new_names = False  # first: a file that another thread makes meanwhile is left to the next call
            with system.as_storage_error("sync", self.folder):
                self.own.sync()

    def clear(self, keep: Set[str]) -> None:
        """Remove what a run that was killed has left in the folder, and its further models in folders beside.

        keep: names of files that belong to its last commit.
        """
        with system.as_storage_error("open", self.folder):
            self.own.clear(keep)
            self.lasting = keep
            beside = self.folder.parent.glob(f"{self.folder.name}.*")
            for path in filter(lambda path: FOLDERS.fullmatch(path.name), beside):
                with contextlib.suppress(StorageLockedError):
                    if (other := Folder.lock(path)) is not None:
                        with contextlib.ExitStack() as opened:
                            opened.callback(other.release)
                            if not any(manifest.read(path, name) for name in (manifest.NAME, manifest.NEXT)):
                                other.clear()

    def transfer(self, verb: Verb, file: File, memory: Memory, offset: int, label: str) -> Transfer:
        """The transfer of one file: fill `memory` from `offset` on, or write it there; `label` names it in an error."""
        return Transfer([self.part(verb, file, memory, offset, label)])

    def part(self, verb: Verb, file: File, memory: Memory, offset: int, label: str) -> tuple[Movers, Iterator[Move]]:
        """What a transfer moves here, block by block."""
        blocks = file.grid.cut(offset, memory.nbytes)
        places = ((memory[begin - offset : end - offset], begin) for begin, end in blocks)
        return self.movers[verb], (partial(ssd.move_block, verb, file, *place, label) for place in places)

    @property
    def room_nbytes(self) -> int:
        return free_storage(self.folder)

    def check_room(self, nbytes: int, beside: str = "") -> None:
        """beside: what has room already, in words."""
        if nbytes > self.room_nbytes:
            raise system.full(nbytes, self.room_nbytes, errno.ENOSPC, self.folder, beside)

    def bytes_per_second(self) -> float:
        """The bandwidth of writing and reading the same amount, measured on a file that is removed again."""
        memory = np.frombuffer(mmap.mmap(-1, PROBE_BLOCK), np.uint8)
        with self._probe(PROBE_NBYTES) as file:
            begin, nbytes = time.perf_counter(), 0
            while nbytes < PROBE_NBYTES and time.perf_counter() - begin < PROBE_SECONDS:
                self.transfer("write", file, memory, nbytes, PROBE).wait()
                nbytes += PROBE_BLOCK
            for offset in range(0, nbytes, PROBE_BLOCK):
                self.transfer("read", file, memory, offset, PROBE).wait()
            return 2 * nbytes / (time.perf_counter() - begin)

    def close(self) -> None:
        """Finish what is in flight, end the threads, remove every file and the folder."""
        self._opened.close()

    def _takes_direct(self) -> bool:
        """Whether a page can be written and read with O_DIRECT; some filesystems refuse at open, others later."""
        page = np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)
        try:
            with self._probe(PAGE) as file:
                ssd.move_block("write", file, page, 0, PROBE)
                ssd.move_block("read", file, page, 0, PROBE)
        except StorageError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.own.unlink(PROBE)  # open may have made the file before it refused
            return False
        return True

    @contextlib.contextmanager
    def _probe(self, nbytes: int) -> Iterator[File]:
        self.own.unlink(PROBE)  # of a run that was killed
        file = self.create(PROBE, nbytes)
        try:
            yield file
        finally:
            self.remove(file)
