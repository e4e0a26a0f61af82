"""drive: one directory of a run's storage: its folder, who has it, and the threads that move its files.

<directory>/greedysnake-run/    the only folder that is touched, 0700; others' files beside it stay as they are
                                (greedysnake-run-3 of the process that a launcher calls rank 3, and with .2 at its end
                                of a process's second model)
    .lock                       held with flock while the run lives; says by whom
    w3-b, s3-a, dw3, ...        this directory's share of each extent, 0600, preallocated
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import get_args

import numpy as np
import torch.distributed as dist

from gs_compile.errors import LeftoverError, SlowStorageWarning, StorageError, StorageFullError, StorageLockedError
from gs_compile.machine import format_bytes, free_storage
from gs_compile.runtime import ssd, system
from gs_compile.runtime.ssd import File, Memory, Transfer, Verb

log = logging.getLogger(__name__)

FOLDER = "greedysnake-run"
LOCK = ".lock"
PROBE = ".probe"  # names that begin with a dot hold nothing of a run
PROBE_BLOCK = 8 << 20
PROBE_NBYTES = 128 << 20
PROBE_SECONDS = 0.15  # for writing; what was written is then read


class Drive:
    """One directory: the folder of our files in it, locked, and the threads that move them."""

    def __init__(self, directory: Path, threads: int) -> None:
        with contextlib.ExitStack() as opened, _as_storage_error("open", directory):
            self.folder, self._folder_fd, lock_fd = _own_folder(directory)
            opened.callback(release, self.folder, self._folder_fd, lock_fd)
            self._files: list[File] = []
            opened.callback(lambda: list(map(self.remove, list(self._files))))
            self._threads = threads
            self._pools = {
                verb: opened.enter_context(ThreadPoolExecutor(threads, f"greedysnake-{verb}"))
                for verb in get_args(Verb)
            }
            _clear(self.folder, self._folder_fd)
            for other in directory.glob(f"{self.folder.name}.*"):  # of further models of a run that was killed
                with contextlib.suppress(StorageLockedError):
                    if (locked := lock(other)) is not None:
                        opened.callback(release, other, *locked)
                        _clear(other, locked[0])
            self.is_direct = True
            self.is_direct = self._takes_direct()
            self._opened = opened.pop_all()
        if not self.is_direct:
            slow = f"{directory} refuses direct I/O: storage works through the page cache, slower and with more copies"
            warnings.warn(slow, SlowStorageWarning, stacklevel=4)

    def create(self, name: str, nbytes: int) -> File:
        """A new file of zeros with its room reserved; StorageFullError, and no file, if there is none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.is_direct else 0)
        with _as_storage_error(f"creation of {name}", self.folder):
            file = File(self.folder / name, system.open_file(name, flags, self._folder_fd), self.is_direct)
            self._files.append(file)
            try:
                if nbytes:
                    system.fallocate(file.fd, nbytes)
            except OSError as error:
                self.remove(file)
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._full(nbytes, error.errno) from error
                raise
        return file

    def remove(self, file: File) -> None:
        """Never fails: it runs where something else may have failed."""
        self._files.remove(file)
        with contextlib.suppress(OSError):  # of writes that came to nothing; the descriptor is closed
            os.close(file.fd)
        self._unlink(file.path.name)

    def submit(self, verb: Verb, file: File, memory: Memory, offset: int, label: str) -> list[Future[None]]:
        """Begin to fill `memory` from `offset` of the file on, or to write it there; `label` names it in an error.

        Each direction is served in the order of its requests, at the drive's full speed.
        """
        return [
            self._pools[verb].submit(ssd.move_block, verb, file, memory[begin - offset : end - offset], begin, label)
            for begin, end in ssd.blocks(offset, memory.nbytes, self._threads)
        ]

    def check_room(self, nbytes: int) -> None:
        if nbytes > free_storage(self.folder):
            raise self._full(nbytes, errno.ENOSPC)

    def bytes_per_second(self) -> float:
        """The bandwidth of writing and reading the same amount, measured on a file that is removed again."""
        memory = np.frombuffer(mmap.mmap(-1, PROBE_BLOCK), np.uint8)
        with self._probe(PROBE_NBYTES) as file:
            begin, nbytes = time.perf_counter(), 0
            while nbytes < PROBE_NBYTES and time.perf_counter() - begin < PROBE_SECONDS:
                Transfer(self.submit("write", file, memory, nbytes, PROBE)).wait()
                nbytes += PROBE_BLOCK
            for offset in range(0, nbytes, PROBE_BLOCK):
                Transfer(self.submit("read", file, memory, offset, PROBE)).wait()
            return 2 * nbytes / (time.perf_counter() - begin)

    def close(self) -> None:
        """Finish what is in flight, end the threads, remove every file and the folder."""
        self._opened.close()

    def _takes_direct(self) -> bool:
        """Whether a page can be written and read with O_DIRECT; some filesystems refuse at open, others later."""
        page = np.frombuffer(mmap.mmap(-1, ssd.PAGE), np.uint8)
        try:
            with self._probe(ssd.PAGE) as file:
                ssd.move_block("write", file, page, 0, PROBE)
                ssd.move_block("read", file, page, 0, PROBE)
        except StorageError as error:
            if error.errno != errno.EINVAL:
                raise
            self._unlink(PROBE)  # open may have made the file before it refused
            return False
        return True

    def _full(self, nbytes: int, number: int) -> StorageFullError:
        room = f"{nbytes} bytes are needed and {free_storage(self.folder)} are free"
        return StorageFullError(number, f"{room}: make room or choose another storage=", str(self.folder))

    @contextlib.contextmanager
    def _probe(self, nbytes: int) -> Iterator[File]:
        file = self.create(PROBE, nbytes)
        try:
            yield file
        finally:
            self.remove(file)

    def _unlink(self, name: str) -> None:
        try:
            system.unlink(name, self._folder_fd)
        except FileNotFoundError:
            pass  # someone else has removed it
        except OSError as error:
            log.warning("%s/%s cannot be removed: %s; the next run here removes it", self.folder, name, error.strerror)


def folder_in(directory: Path, number: int = 1) -> Path:
    """The folder of this process's model of that number.

    Of several processes that a launcher starts, such as torchrun, each has its own by its RANK; of those that meet
    without one, by torch.distributed's.
    """
    rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "")
    name = f"{FOLDER}-{int(rank)}" if rank.isdecimal() and int(rank) else FOLDER
    return directory / (name if number == 1 else f"{name}.{number}")


def _own_folder(directory: Path) -> tuple[Path, int, int]:
    """The first folder that no other model of this process has, locked, with the descriptors of `lock`."""
    for number in count(1):
        folder = folder_in(directory, number)
        if (locked := lock(folder)) is not None:
            return folder, *locked
    raise AssertionError


def lock(folder: Path) -> tuple[int, int] | None:
    """Make the folder and lock it: its descriptor, and that of the lock; None: another model of this process has it.

    Raises StorageLockedError where another process has it.
    """
    while True:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                system.make_folder(path)
        with contextlib.ExitStack() as opened:
            folder_fd = system.open_folder(folder)
            opened.callback(os.close, folder_fd)
            owner = os.fstat(folder_fd)
            if owner.st_uid != os.geteuid() or owner.st_mode & 0o077:
                what = "others can get at this folder, and storage holds weights: delete it or choose another storage="
                raise StorageError(errno.EPERM, what, str(folder))
            try:
                lock_fd = system.open_file(LOCK, os.O_RDWR | os.O_CREAT, folder_fd)
            except FileNotFoundError:
                continue  # the run before removes its folder at this moment
            opened.callback(os.close, lock_fd)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(lock_fd, 200, 0).decode(errors="replace") or "a process that is just starting"
                if f"pid {os.getpid()}," in holder:
                    return None
                what = f"another run uses this folder, {holder}: wait for its end or choose another storage="
                raise StorageLockedError(errno.EAGAIN, what, str(folder)) from error
            if os.fstat(lock_fd).st_nlink == 0:
                continue  # that was the lock of the run before, just removed
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"pid {os.getpid()}, started {date_of(time.time())}".encode(), 0)
            opened.pop_all()
            return folder_fd, lock_fd


def release(folder: Path, folder_fd: int, lock_fd: int) -> None:
    """The inverse of `lock`; a folder that is not empty stays."""
    with contextlib.suppress(OSError):  # not empty: someone is taking it over, or put a file there
        system.unlink(LOCK, folder_fd)
        system.remove_folder(folder)
    os.close(lock_fd)
    os.close(folder_fd)


def leftovers(folder: Path) -> str:
    """What a run that was killed has left in a folder that nobody has locked, in words; empty: nothing.

    Raises LeftoverError where something is there that no run makes.
    """
    found = {path.name: path.lstat() for path in folder.iterdir() if not path.name.startswith(".")}
    if foreign := [name for name, each in found.items() if not stat.S_ISREG(each.st_mode)]:
        what = f"{', '.join(foreign)} in this folder is of no run: move it, or choose another storage="
        raise LeftoverError(errno.EEXIST, what, str(folder))
    if not found:
        return ""
    nbytes, when = sum(each.st_blocks * 512 for each in found.values()), max(each.st_mtime for each in found.values())
    return f"a run was killed and left {len(found)} files, {format_bytes(nbytes)}, last written {date_of(when)}"


def _clear(folder: Path, folder_fd: int) -> None:
    """Remove what a run that was killed has left in a folder that is locked; the log says so."""
    if words := leftovers(folder):
        log.warning("%s: %s; they are removed, as nothing in them can be resumed", folder, words)
    for path in folder.iterdir():
        if path.name != LOCK:
            system.unlink(path.name, folder_fd)


def date_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@contextlib.contextmanager
def _as_storage_error(what: str, folder: Path) -> Iterator[None]:
    """Raise an error of the system as a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"{what} failed: {error.strerror}", str(folder)) from error
