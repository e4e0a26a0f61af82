"""system: the calls of the operating system on files, by names of our own: tests let each of them fail.

A file is opened by a name in an open folder: no link is followed, no child inherits it, and it is made 0600.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt

MOST_FILES = 1 << 17  # with a limit of a thousand million some programs take seconds to close what they do not have


def allow_files() -> None:
    """Let this process have as many files open as it may allow itself; the usual 1024 are few.

    A checkpoint on storage has a file for each layer and micro-batch.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if resource.RLIM_INFINITY != soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_file(name: str, flags: int, folder_fd: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)


def open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


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
    """One that is there already is left as it is."""
    folder.mkdir(mode=0o700, exist_ok=True)


def remove_folder(folder: Path) -> None:
    folder.rmdir()
