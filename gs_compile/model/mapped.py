"""Tensors in unnamed files: of a mapped tensor the kernel holds as much in memory as it is used, and has room for.

The files are made with O_TMPFILE: the kernel frees each when its tensor ends, however the process ends. Their space is
reserved at birth, so a full disk is an error there and not a fault later.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gs_compile.errors import StorageError, StorageFullError
from gs_compile.machine import free_storage
from gs_compile.runtime.stream import is_in_host_memory

SMALL_NBYTES = 64 << 10  # below, a tensor stays in memory: norms and biases, too little to be worth a file each
CHUNK_NBYTES = 16 << 20  # what is in memory while a file is written: large requests, and a small part of any budget


def mapped(
    shape: Sequence[int], dtype: torch.dtype, folder: Path, read: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """A tensor in a file under `folder`, in memory if it is small; `read` gives its elements from `start` to `stop`."""
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    file = map_file(folder, nbytes) if nbytes >= SMALL_NBYTES else None
    flat = torch.empty(numel if file is None else 0, dtype=dtype)
    flat = flat if file is None else flat.set_(file, 0, (numel,), (1,))
    step = CHUNK_NBYTES // dtype.itemsize
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        flat[start:stop] = read(start, stop)
        if file is not None:
            leave_memory(file)
    return flat.view(tuple(shape))


def directory(folder: Path) -> Path:
    """The directory of the files; made for this user alone if it is not there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: the storage directory cannot be made: {error}") from error
    return folder


def map_file(folder: Path, nbytes: int) -> torch.UntypedStorage:
    """Zeros in an unnamed file under `folder`, mapped; the file ends with the storage."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFullError(
                f"{folder} has no room for the next values: {nbytes} bytes needed, {free_storage(folder)} free. "
                "Give another directory as storage="
            ) from error
        raise StorageError(f"{folder}: cannot make a file of {nbytes} bytes: {error}") from error
    except RuntimeError as error:
        raise StorageError(f"{folder}: cannot map a file of {nbytes} bytes: {error}") from error
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether `map_file` has made it."""
    return (storage.filename or "").startswith("/dev/fd/")


_malloc_trim = ctypes.CDLL(None).malloc_trim
_MADV_PAGEOUT = 21  # Linux 5.4; not among mmap's names
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def leave_memory(storage: torch.UntypedStorage) -> None:
    """Have the kernel take back the pages of a mapped file; they come back as they were when they are next used.

    That is one of `map_file`, or one that others have mapped, as safetensors does with a checkpoint.
    """
    if is_mapped(storage):
        assert _madvise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED) == 0, os.strerror(ctypes.get_errno())
    elif is_in_host_memory(storage) and storage.nbytes() >= SMALL_NBYTES and not storage.resizable():  # not torch's own
        start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, storage.data_ptr() + storage.nbytes() - start, _MADV_PAGEOUT)  # keeps what has changed


def trim() -> None:
    """Give the free pages of the heap back: the C library keeps those between blocks that are in use."""
    _malloc_trim(0)
