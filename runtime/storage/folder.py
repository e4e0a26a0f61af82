"""folder: a run's folder in a directory of storage: which process has it, what is in it, and what stays.

<directory>/greedysnake-run/    the only folder that is touched, 0700; others' files beside it stay as they are
                                (greedysnake-run-3 of the process that a launcher calls rank 3, and with .2 at its end
                                of a process's second model)
    .lock                       held with flock while the run lives; says by whom
    .status.json                what the run is doing (gs_compile.status), once a second
    manifest.json               of a durable run: the last commit, and the files that belong to it
    w3-b, s3-a, dw3, ...        this directory's share of each extent, 0600, preallocated; of a durable run
    1f0a77c2-w3-b.0, ...        with its name before, and the version behind
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Collection
from itertools import count
from pathlib import Path

import torch.distributed as dist

from gs_compile.errors import LeftoverError, StorageError, StorageLockedError
from gs_compile.machine import format_bytes
from gs_compile.runtime.forks import leave_in_children
from gs_compile.runtime.storage import manifest, system
from gs_compile.runtime.storage.stored import FOLDER, OURS

log = logging.getLogger(__name__)

LOCK = ".lock"
TO_BE = "storage= has to be a directory in which this user may make files, or the name of a new one"  # of `open`
PROBE = ".probe"  # names that begin with a dot hold nothing of a run
STATUS, NEXT_STATUS = ".status.json", ".status.next"
LOOK_SECONDS = 0.05  # longer than `holder` has a lock
PROCESS = secrets.token_hex(8)  # with its number: another of that number may share a volume, from its own container
OTHERS = (manifest.NAME, manifest.NEXT, manifest.BESIDE, PROBE, STATUS, NEXT_STATUS)  # names beside those of extents


class Folder:
    """A folder that this process has locked."""

    def __init__(self, path: Path, fd: int, lock_fd: int) -> None:
        self.path = path
        self.fd = fd
        self._lock_fd = lock_fd
        leave_in_children(self)

    @classmethod
    def lock(cls, path: Path, *, reads: bool = False) -> Folder | None:
        """Make the folder and lock it; None: another model of this process has it.

        reads: also where nothing can be written, as to a drive after its errors.
        Raises StorageLockedError where another process has it, StorageError where others can get at it.
        """
        while True:
            for parent in (*reversed(path.parents), path):
                if not parent.exists():
                    system.make_folder(parent)
            with contextlib.ExitStack() as opened:
                try:
                    fd = system.open_folder(path)
                except FileNotFoundError:
                    continue  # the run before has removed it at this moment
                opened.callback(os.close, fd)
                owner = os.fstat(fd)
                if owner.st_uid != os.geteuid() or owner.st_mode & 0o077:
                    what = (
                        f"other users can access this folder, but storage holds weights: {manifest.AFTER_A_COPY} "
                        f"{path}, or choose another storage="
                    )
                    raise StorageError(errno.EPERM, what, str(path))
                is_read_only = reads and system.is_read_only(fd)
                try:
                    lock_fd = system.open_file(LOCK, os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT, fd)
                except FileNotFoundError:
                    if not is_read_only:
                        continue  # the run before removes its folder at this moment
                    opened.pop_all()
                    return cls(path, fd, os.dup(fd))  # who has it has made a lock
                opened.callback(os.close, lock_fd)
                if not _is_locked_now(path, lock_fd):
                    return None
                if os.fstat(lock_fd).st_nlink == 0:
                    continue  # that was the lock of the run before, just removed
                if not is_read_only:
                    os.ftruncate(lock_fd, 0)
                    words = f"pid {os.getpid()}, started {date_of(time.time())}\n{_this_process()}"
                    os.pwrite(lock_fd, words.encode(), 0)
                opened.pop_all()
                return cls(path, fd, lock_fd)

    @classmethod
    def first_free(cls, directory: Path, *, is_durable: bool) -> Folder:
        """The first folder in a directory that no other model of this process has.

        is_durable: no other may have one there. Otherwise the folder of a run would depend on the order of first calls,
        and later processes look in the first one.
        """
        path = folder_in(directory)
        found = cls.lock(path)
        if found is None and is_durable:
            what = "another model of this process uses this folder, and a durable run needs a directory of its own"
            remedy = "give it another storage=, or drop the model that has this one"
            raise StorageLockedError(errno.EAGAIN, f"{what}: {remedy}", str(path))
        return found or next(filter(None, (cls.lock(folder_in(directory, number)) for number in count(2))))

    @classmethod
    def take(cls, path: Path) -> Folder:
        """A folder that exists, and that no model of this process has."""
        if not path.is_dir():
            raise StorageError(errno.ENOENT, "this folder of the run to resume is missing", str(path))
        if (found := cls.lock(path, reads=True)) is None:
            raise StorageLockedError(errno.EAGAIN, "another model of this process uses this folder", str(path))
        return found

    def promote(self) -> None:
        """Make the prepared commit the last one."""
        with system.as_storage_error("commit", self.path):
            system.rename(manifest.NEXT, manifest.NAME, self.fd)
            system.sync_folder(self.fd)

    def withdraw(self) -> None:
        """Remove the prepared commit, for good: ranks prepare that step anew, with other files, and a power loss must
        not bring this one back for it.
        """
        self.unlink(manifest.NEXT)
        with system.as_storage_error("resuming", self.path):
            system.sync_folder(self.fd)

    def clear(self, keep: Collection[str] = ()) -> None:
        """Remove what a run that was killed has left, but for the names that belong to its commit; the log says so."""
        if words := leftovers(self.path, keep):
            log.warning("%s: %s; they are removed, as they belong to no commit", self.path, words)
        for path in self.path.iterdir():
            if path.name not in keep and is_made(path):
                system.unlink(path.name, self.fd)

    def sync(self) -> None:
        """Sync the names of new files and the folder's own, as far as the folders above can be opened."""
        system.sync_folder(self.fd)
        for above in self.path.resolve().parents:
            if above.stat().st_dev == os.fstat(self.fd).st_dev:
                with contextlib.suppress(PermissionError), contextlib.ExitStack() as opened:
                    fd = system.open_folder(above)
                    opened.callback(os.close, fd)
                    system.sync_folder(fd)

    def unlink(self, name: str) -> None:
        """Never fails: it runs where something else may have failed."""
        try:
            system.unlink(name, self.fd)
        except FileNotFoundError:
            pass  # someone else has removed it
        except OSError as error:
            log.warning("%s/%s cannot be removed: %s; the next run here removes it", self.path, name, error.strerror)

    def release(self) -> None:
        """Unlock it, and remove it; one that is not empty stays."""
        with contextlib.suppress(OSError):  # not empty: someone is taking it over, or put a file there
            system.unlink(LOCK, self.fd)
            system.remove_folder(self.path)
        lock_fd, self._lock_fd = self._lock_fd, -1  # a child that is forked from now on has nothing to close
        os.close(lock_fd)
        os.close(self.fd)

    def leave(self) -> None:
        """A forked child would hold the lock when its parent is killed."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def folder_in(directory: Path, number: int = 1) -> Path:
    """The folder of this process's model of that number. Each rank has its own, by torch.distributed's rank or by the
    launcher's RANK.
    """
    rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "")
    return folder_of(directory, int(rank) if rank.isdecimal() else 0, number)


def folder_of(directory: Path, rank: int, number: int = 1) -> Path:
    """The same for a process of the given rank."""
    name = f"{FOLDER}-{rank}" if rank else FOLDER
    return directory / (name if number == 1 else f"{name}.{number}")


def _is_locked_now(path: Path, lock_fd: int) -> bool:
    """Lock it; False where this process has locked it already. Raises StorageLockedError where another has."""
    if _locks(lock_fd):
        return True
    if os.pread(lock_fd, 200, 0).decode(errors="replace").endswith(f"\n{_this_process()}"):
        return False
    time.sleep(LOOK_SECONDS)  # who only looks has it for a moment
    if _locks(lock_fd):
        return True
    what = f"another run uses this folder, {_told_by(lock_fd)}: wait for its end or choose another storage="
    raise StorageLockedError(errno.EAGAIN, what, str(path))


def _locks(lock_fd: int, how: int = fcntl.LOCK_EX) -> bool:
    """Try to lock it until it is closed. Returns whether no other process has it."""
    try:
        fcntl.flock(lock_fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: Path) -> str:
    """The process that has a folder locked, in words; empty: none. Nothing is changed."""
    with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
        fd = system.open_folder(path)
        opened.callback(os.close, fd)
        lock_fd = system.open_file(LOCK, os.O_RDONLY | os.O_NONBLOCK, fd)
        opened.callback(os.close, lock_fd)
        if not _locks(lock_fd, fcntl.LOCK_SH):
            return _told_by(lock_fd)
    return ""


def _this_process() -> str:
    """Text that no other process writes to a lock."""
    return f"{PROCESS} {os.getpid()}"


def _told_by(lock_fd: int) -> str:
    """What a lock says of the process that has it, in words."""
    words = os.pread(lock_fd, 200, 0).decode(errors="replace").partition("\n")[0]
    return "".join(filter(str.isprintable, words)) or "a process that is just starting"


def is_made(path: Path) -> bool:
    """Whether this user's store has made a file, by its name and its kind."""
    found = path.lstat()
    is_named = OURS.fullmatch(path.name) or path.name in OTHERS
    return bool(is_named) and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def leftovers(folder: Path, keep: Collection[str]) -> str:
    """What a run that was killed has left in a folder that nobody has locked, in words; empty: nothing.

    keep: names that belong to its commit. Raises LeftoverError where something is there that no run makes.
    """
    files = {
        path.name: path.lstat()
        for path in folder.iterdir()
        if not path.name.startswith(".") and path.name not in (*keep, manifest.NAME)
    }
    foreign = [name for name, each in files.items() if not stat.S_ISREG(each.st_mode) or not OURS.fullmatch(name)]
    if foreign:
        what = f"{', '.join(sorted(foreign)[:5])} in this folder is of no run: move it, or choose another storage="
        raise LeftoverError(errno.EEXIST, what, str(folder))
    if not files:
        return ""
    nbytes, when = sum(each.st_blocks * 512 for each in files.values()), max(each.st_mtime for each in files.values())
    return f"a run was killed and left {len(files)} files, {format_bytes(nbytes)}, last written {date_of(when)}"


def date_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
