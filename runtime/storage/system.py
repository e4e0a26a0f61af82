"""system: the system calls on files, as functions that tests can make fail, and their errors as StorageErrors.

A file is opened by a name in an open folder: no link is followed, no child inherits it, and its mode is 0600.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gs_compile.errors import StorageError, StorageFullError
from gs_compile.machine import format_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES: Mapping[int, str] = {  # by error number
    **dict.fromkeys(FULL, "make room or choose another storage="),
    errno.EIO: "check this drive (dmesg, smartctl) or choose another storage=",
    errno.EROFS: "after errors the system lets nobody write to a drive (dmesg): check it or choose another storage=",
    errno.EFBIG: "a limit (ulimit -f) or this file system allows no file of this size: choose another storage=",
    errno.ENOENT: "another program has removed it, or its folder: give storage= a directory that nothing else clears",
    errno.EMFILE: "a run has a file for each part and each checkpoint: raise the limit (ulimit -Hn), give a larger "
    "micro_batch_size, or keep more in memory (host_memory=)",
}
OF_ANY_PATH = (*FULL, errno.EIO, errno.EMFILE)
SPARE_FILES = 64  # left for everything else in the process: libraries, loaders, commits
MOST_FILES = 1 << 17  # with a limit of a thousand million, some programs take seconds to close all possible files


def allow_files() -> None:
    """Raise this process's limit of open files, which is usually 1024, as far as it may: checkpoints on storage have a
    file for each layer and micro-batch.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if resource.RLIM_INFINITY != soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_files(number: int, folder: Path) -> None:
    """Raise StorageError if this process may not open `number` more files."""
    limit, num_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(list(Path("/proc/self/fd").iterdir()))
    if resource.RLIM_INFINITY != limit < number + num_open + SPARE_FILES:
        what = f"the run needs {number} files, and this process may have {limit} open, of which it has {num_open}"
        raise StorageError(errno.EMFILE, f"{what}: {REMEDIES[errno.EMFILE]}", str(folder))


def failed(what: str, error: OSError, path: Path, remedy: str = "") -> StorageError:
    """An error of the system as a StorageError, which says what failed, why, and what to do.

    remedy: for a path that the user gave; not used if any other path would fail in the same way.
    """
    number = error.errno or errno.EIO
    if not remedy or number in OF_ANY_PATH:
        remedy = REMEDIES.get(number, "")
    kind = StorageFullError if number in FULL else StorageError
    return kind(number, f"{what}: {error.strerror}{remedy and '; '}{remedy}", str(path))


@contextlib.contextmanager
def as_storage_error(what: str, path: Path, remedy: str = "") -> Iterator[None]:
    """Raise an error of the system as a StorageError; remedy: see `failed`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise failed(f"{what} failed", error, path, remedy) from error


def full(nbytes: int, room_nbytes: int, number: int, folder: Path, beside: str = "") -> StorageFullError:
    """The error of a drive without room. number: the system's; beside: what has room already, in words."""
    room = f"{format_bytes(nbytes)} are needed{beside} and {format_bytes(room_nbytes)} are free"
    return StorageFullError(number, f"{room} ({os.strerror(number)}): {REMEDIES[number]}", str(folder))


def open_file(name: str, flags: int, folder_fd: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)


def open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def is_read_only(fd: int) -> bool:
    """Whether the file system of a file is read-only, as after errors of its drive."""
    return bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)


def fallocate(fd: int, nbytes: int) -> None:
    os.posix_fallocate(fd, 0, nbytes)


def preadv(fd: int, memory: npt.NDArray[np.uint8], offset: int) -> int:
    return os.preadv(fd, [memory.data], offset)


def pwritev(fd: int, memory: npt.NDArray[np.uint8], offset: int) -> int:
    return os.pwritev(fd, [memory.data], offset)


def datasync(fd: int) -> None:
    os.fdatasync(fd)


def sync_folder(folder_fd: int) -> None:
    os.fsync(folder_fd)


def rename(name: str, to: str, folder_fd: int) -> None:
    os.rename(name, to, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)


def unlink(name: str, folder_fd: int) -> None:
    os.unlink(name, dir_fd=folder_fd)


def make_folder(folder: Path) -> None:
    """An existing folder is left as it is."""
    folder.mkdir(mode=0o700, exist_ok=True)


def remove_folder(folder: Path) -> None:
    folder.rmdir()
