"""files: tensors in unnamed files; of a mapped one the kernel holds as much in memory as it is used, and has room for.

The files are made with O_TMPFILE: the kernel frees each when its tensor ends, however the process ends. Their space is
reserved at birth, so a full disk is an error there and not a fault later.

Where ranks share a model, each has some rows of a tensor: state dicts, and values before there is an engine, are
DTensors, Shard(0) over all ranks. So torch.distributed.checkpoint saves and loads them, onto any number of ranks.
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gs_compile.errors import RankError, StorageError, StorageFullError
from gs_compile.machine import format_bytes, free_storage
from gs_compile.runtime.stream import is_in_host_memory

Read = Callable[[int, int], Tensor]  # the elements from one place to another
SMALL_NBYTES = 64 << 10  # below, a tensor stays in memory: norms and biases, too little to be worth a file each
CHUNK_NBYTES = 16 << 20  # what is in memory while a file is written: large requests, and a small part of any budget


def mapped(shape: Sequence[int], dtype: torch.dtype, folder: Path, read: Read) -> Tensor:
    """A tensor in a file under `folder`, in memory if it is small; `read` gives its elements from `start` to `stop`."""
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    file = map_file(folder, nbytes) if nbytes >= SMALL_NBYTES else None
    flat = torch.empty(numel if file is None else 0, dtype=dtype, device="cpu")
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
                f"{folder} has no room for the next values: {format_bytes(nbytes)} needed, "
                f"{format_bytes(free_storage(folder))} free. "
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
        is_refused = _madvise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)
        assert not is_refused, os.strerror(ctypes.get_errno())
    elif is_in_host_memory(storage) and storage.nbytes() >= SMALL_NBYTES and not storage.resizable():  # not torch's own
        start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, storage.data_ptr() + storage.nbytes() - start, _MADV_PAGEOUT)  # keeps what has changed


def trim() -> None:
    """Give the free pages of the heap back: the C library keeps those between blocks that are in use."""
    _malloc_trim(0)


# Rows -----------------------------------------------------------------------------------------------------------------


def mapped_rows(shape: Sequence[int], dtype: torch.dtype, folder: Path, read: Read, mesh: DeviceMesh | None) -> Tensor:
    """As `mapped`, of this rank's rows; `read` is called for all elements, in the same order on all ranks.

    mesh: None, or no rows to share: as `mapped`.
    """
    if mesh is None or not shape:
        return mapped(shape, dtype, folder, read)
    width, chunk = math.prod(shape[1:]), CHUNK_NBYTES // dtype.itemsize
    mine = None
    for rank in range(mesh.size()):
        first, last = _bounds(shape[0], rank, mesh.size())
        start, stop = first * width, last * width
        if rank == mesh.get_local_rank():
            mine = mapped((last - first, *shape[1:]), dtype, folder, _from(start, read))
        else:
            for low in range(start, stop, chunk):
                read(low, min(low + chunk, stop))
    assert mine is not None
    return _together(mine, mesh, shape)


def shared(values: Tensor, folder: Path, mesh: DeviceMesh) -> DTensor:
    """Of the first rank's values each rank's rows, mapped from a file in `folder`."""
    trim()  # of what the tensor before has left
    own = distribute_tensor(values.detach(), mesh, [Shard(0)]).to_local()
    leave_memory(values.untyped_storage())
    return _together(copied(own, own.dtype, folder), mesh, values.shape)


def converted(values: Tensor, dtype: torch.dtype, folder: Path) -> Tensor:
    """A copy in another dtype, mapped from a file in `folder`."""
    if isinstance(values, DTensor):
        return _together(copied(values.to_local(), dtype, folder), values.device_mesh, values.shape)
    return copied(values, dtype, folder)


def copied(values: Tensor, dtype: torch.dtype, folder: Path) -> Tensor:
    """A plain tensor's copy, mapped from a file in `folder`."""
    flat = values.reshape(-1)
    return mapped(values.shape, dtype, folder, lambda start, stop: flat[start:stop].to(dtype))


def whole(values: Tensor) -> Tensor:
    """All of a tensor of which ranks have some rows each: all of them call this. Others are as they are."""
    if not isinstance(values, DTensor):
        return values
    trim()  # of what the tensor before has left
    return values.full_tensor()


def own_rows(values: Tensor) -> Tensor:
    """The same; raises `RankError` for rows that a file has of another rank, or of one of another number of ranks."""
    if isinstance(values, DTensor) and (mesh := values.device_mesh).ndim == 1:
        saved, here = (*(mesh.get_coordinate() or ()), mesh.size()), (mesh.get_local_rank(), mesh.get_group().size())
        if saved != here:
            raise RankError(
                f"a file has the rows of rank {saved[0]} of {saved[-1]} of a value of shape {tuple(values.shape)}, and "
                f"this is rank {here[0]} of {here[-1]}: each rank loads the file that it has saved, on as many ranks; "
                "or save and load with torch.distributed.checkpoint"
            )
    return values


def write(target: Tensor, values: Tensor) -> None:
    """Give `target` other values; where ranks have rows of it, all of them call this."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            values = whole(values)
            first, last = _bounds(target.shape[0], target.device_mesh.get_local_rank(), target.device_mesh.size())
            target, values = target.to_local(), values[first:last]
        if target.data_ptr() == values.data_ptr():
            return
        target.copy_(whole(values))
    for each in (target, values):
        leave_memory(each.untyped_storage())


def _together(own: Tensor, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    like = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(own, mesh, [Shard(0)], shape=like.shape, stride=like.stride())


def _from(start: int, read: Read) -> Read:
    return lambda low, high: read(start + low, start + high)


def _bounds(num_rows: int, rank: int, number: int) -> tuple[int, int]:
    """The rows that a rank has, as DTensor shares them."""
    step = -(-num_rows // number)
    return min(num_rows, rank * step), min(num_rows, (rank + 1) * step)


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether one is a view of the other, or both of a third tensor."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() != 0
