"""files: tensors in unnamed files; of a mapped one the kernel holds as much in memory as it is used, and has room for.

The files are made with O_TMPFILE: the kernel frees each when its tensor ends, however the process ends. Their space is
reserved at birth, so a full disk is an error there and not a fault later.

Where ranks share a model, each has some rows of a tensor: state dicts, and values before there is an engine, are
DTensors, Shard(0) over all ranks. So torch.distributed.checkpoint saves and loads them, onto any number of ranks. Those
of a state dict that ranks of one machine make are rows of one file: all else gets the whole tensor (`RowShard`).
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gs_compile.capture.internals import changes, tree_leaves, tree_map_only
from gs_compile.errors import RankError, StorageError
from gs_compile.machine import free_storage
from gs_compile.model.stand_in import StandIn, applied, plain
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.folder import TO_BE
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
    _fill(flat, read)
    return flat.view(tuple(shape))


def _fill(flat: Tensor, read: Read) -> None:
    step = CHUNK_NBYTES // flat.itemsize
    for start in range(0, len(flat), step):
        stop = min(start + step, len(flat))
        flat[start:stop] = read(start, stop)
        leave_memory(flat.untyped_storage())


def directory(folder: Path) -> Path:
    """The directory of the files; made for this user alone if it is not there."""
    with system.as_storage_error("creation of the directory", folder, TO_BE):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def map_file(folder: Path, nbytes: int) -> torch.UntypedStorage:
    """Zeros in an unnamed file under `folder`, mapped; the file ends with the storage."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=nbytes)
    except OSError as error:
        if error.errno in system.FULL:
            raise system.full(nbytes, free_storage(folder), error.errno, folder) from error
        raise system.failed(f"creation of a file of {nbytes} bytes failed", error, folder) from error
    except RuntimeError as error:
        raise StorageError(errno.EIO, f"mapping of a file of {nbytes} bytes failed: {error}", str(folder)) from error
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether `map_file` or `_in_one_file` has made it."""
    return (storage.filename or "").startswith(("/dev/fd/", "/proc/"))


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


def mapped_rows(
    shape: Sequence[int],
    dtype: torch.dtype,
    folder: Path,
    read: Read,
    mesh: DeviceMesh | None,
    ranks: Ranks | None = None,
) -> Tensor:
    """As `mapped`, of this rank's rows; `read` is called for all elements, in the same order on all ranks.

    mesh: None, or no rows to share: as `mapped`. ranks: all of the mesh, which have the whole tensor if they can have
    it in one file, or if it is small.
    """
    if mesh is None or not shape:
        return mapped(shape, dtype, folder, read)
    bounds = [_bounds(shape[0], rank, mesh.size()) for rank in range(mesh.size())]
    mine, width, chunk = mesh.get_local_rank(), math.prod(shape[1:]), CHUNK_NBYTES // dtype.itemsize
    if shape[0] * width * dtype.itemsize < SMALL_NBYTES:
        everything = mapped(shape, dtype, folder, read)
        return _together(everything[slice(*bounds[mine])], mesh, shape, everything)
    whole, own = (None, None) if ranks is None else _in_one_file(shape, dtype, folder, bounds[mine], ranks)
    for rank, (first, last) in enumerate(bounds):
        start, stop = first * width, last * width
        if rank == mine and whole is not None:
            _fill(whole.view(-1)[start:stop], _from(start, read))
        elif rank == mine:
            own = mapped((last - first, *shape[1:]), dtype, folder, _from(start, read))
        else:
            for low in range(start, stop, chunk):
                read(low, min(low + chunk, stop))
    if whole is not None and ranks is not None:
        ranks.agree_on("the rows of a state dict")  # all are in the file
    assert own is not None
    return _together(own, mesh, shape, whole)


def _in_one_file(
    shape: Sequence[int], dtype: torch.dtype, folder: Path, rows: tuple[int, int], ranks: Ranks
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """A tensor in one file of all ranks, and these rows of it in memory of their own, which checkpoints do not copy.

    None: the ranks are on several machines, or there is no room, or a rank may not open what another has made.
    """
    row_nbytes = math.prod(shape[1:]) * dtype.itemsize
    start, stop = (row * row_nbytes for row in rows)
    with _opened_by_all(folder, shape[0] * row_nbytes, ranks) as file:
        if file is None:
            return None, None
        memory = torch.UntypedStorage.from_file(_path(file), shared=True, nbytes=shape[0] * row_nbytes)
        assert isinstance(memory, torch.UntypedStorage)
        whole = torch.empty(0, dtype=dtype, device="cpu").set_(memory).view(tuple(shape))
        if start == stop:
            return whole, whole[slice(*rows)]
        skipped = start % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(file.fileno(), stop - start + skipped, offset=start - skipped)
        return whole, torch.frombuffer(pages, dtype=torch.uint8, offset=skipped).view(dtype).view(-1, *shape[1:])


@contextmanager
def _opened_by_all(folder: Path, nbytes: int, ranks: Ranks) -> Iterator[BinaryIO | None]:
    """An unnamed file that the first rank makes, and all open; None: not all can."""
    with ExitStack() as opened:

        def make() -> tuple[str, tuple[int, int]] | None:
            with suppress(OSError):
                file = opened.enter_context(tempfile.TemporaryFile(dir=folder))
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return _path(file), _identity(file)
            return None

        made = ranks.from_first("the file of a state dict", make) if ranks.num_here == ranks.total else None
        found = None
        if made is not None:
            with suppress(OSError):
                found = opened.enter_context(Path(made[0]).open("r+b"))
            is_same = found is not None and _identity(found) == made[1]
            found = found if all(ranks.agree("opening the file of a state dict", is_same)) else None
        yield found


def _path(file: BinaryIO) -> str:
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


class _Shared(StandIn):
    """A tensor that other ranks have as well, which no function changes.

    own: the same as torch has it.
    """

    own: Tensor

    def taken(self, name: str = "") -> Tensor:
        return self.own

    def seen(self, result: Tensor, taken: Tensor) -> Tensor:
        return result.as_subclass(_View)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, kwargs or {}
        changed = tree_leaves([args[:1] if _CHANGES.fullmatch(name) else (), kwargs.get("out")])
        if found := [each for each in changed if isinstance(each, _Shared) and type(each.taken()) is not DTensor]:
            raise RankError(
                f"{name}: all ranks share this value of a state dict, of shape {tuple(found[0].shape)}, and none "
                "changes it in place: make another tensor of it, as value.clone()"
            )
        result = applied(_Shared, function, args, kwargs)
        return tree_map_only(DTensor, lambda each: RowShard.of(each) if type(each) is DTensor else each, result)


class RowShard(_Shared, DTensor):
    """Some rows of a tensor, of which other ranks have the others, and for all but DTensor's methods the whole tensor.

    Where that is not at hand, functions are those of DTensor, which all ranks call, and make such tensors; what would
    take the rows of one rank for a tensor, to save it, raises `RankError`.

    whole: with the changes of its memory, of which one is to the rows alone where these are in it.
    """

    own: DTensor
    whole: tuple[Tensor, int] | None

    @classmethod
    def of(cls, rows: DTensor, whole: Tensor | None = None) -> RowShard:
        placed = (rows.device_mesh, rows.placements)
        found: Any = DTensor.from_local(rows.to_local(), *placed, shape=rows.shape, stride=rows.stride())
        found.__class__ = cls
        found.own, found.whole = rows, None if whole is None else (whole, changes(whole))
        assert isinstance(found, RowShard)
        return found

    def taken(self, name: str = "") -> Tensor:
        is_whole = self.whole is not None and self.whole[1] == changes(self.whole[0])
        if self.whole is not None and is_whole and name != "__deepcopy__":  # as large as the rows
            return self.whole[0]
        if name in _OF_MEMORY:
            mesh, shape = self.own.device_mesh, tuple(self.own.shape)
            raise RankError(
                f"{name} would have the rows of rank {mesh.get_local_rank()} of {mesh.size()} of a value of shape "
                f"{shape} alone: save a state dict of several machines, of a model that was not called yet, a copy of "
                "one, or one that a checkpoint was loaded to, by torch.distributed.checkpoint, or take it by "
                "get_state_dict(..., options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on all ranks, "
                "and save it on the first"
            )
        return self.own


class _View(_Shared):
    """A view of a whole tensor."""

    @property
    def own(self) -> Tensor:  # type: ignore[override]
        return plain(self)


# What changes its first argument, as collectives do; and what asks for a tensor's own memory.
_CHANGES = re.compile(
    r"(?!__).*_|__setitem__|__set__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|[lr]shift)__|"
    r"all_(gather|reduce|to_all)(_\w+)?|reduce(_\w+)?|i?recv"
)
_OF_MEMORY = frozenset(
    "pickle numpy __array__ tolist data_ptr storage untyped_storage share_memory_ __dlpack__".split()
)


def shared(values: Tensor, folder: Path, mesh: DeviceMesh) -> DTensor:
    """Each rank's rows of the first rank's values, mapped from a file in `folder`."""
    trim()  # of what the tensor before has left
    own = distribute_tensor(values.detach(), mesh, [Shard(0)]).to_local()
    leave_memory(values.untyped_storage())
    return _together(copied(own, own.dtype, folder), mesh, values.shape)


def copied(values: Tensor, dtype: torch.dtype, folder: Path) -> Tensor:
    """A copy, mapped from a file in `folder`; where ranks have rows of it, each copies its own."""
    if isinstance(values, DTensor):
        return _together(copied(values.to_local(), dtype, folder), values.device_mesh, values.shape)
    flat = values.reshape(-1)
    return mapped(values.shape, dtype, folder, lambda start, stop: flat[start:stop].to(dtype))


def whole(values: Tensor) -> Tensor:
    """All of a tensor of which ranks have some rows each: all of them call this. Others are as they are."""
    if not isinstance(values, DTensor):
        return values
    trim()  # of what the tensor before has left
    return values.full_tensor()


def own_rows(values: Tensor) -> Tensor:
    """What `values` is on this rank; raises `RankError` for rows that a file has of another rank, or of one of another
    number of ranks.
    """
    if isinstance(values, DTensor) and (mesh := values.device_mesh).ndim == 1:
        saved, here = (*(mesh.get_coordinate() or ()), mesh.size()), (mesh.get_local_rank(), mesh.get_group().size())
        if saved != here:
            raise RankError(
                f"a file has the rows of rank {saved[0]} of {saved[-1]} of a value of shape {tuple(values.shape)}, and "
                f"this is rank {here[0]} of {here[-1]}: each rank loads the file that it has saved, on as many ranks; "
                "or save and load with torch.distributed.checkpoint"
            )
    return values.own if isinstance(values, _Shared) else values


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


def _together(own: Tensor, mesh: DeviceMesh, shape: Sequence[int], whole: Tensor | None = None) -> RowShard:
    like = torch.empty(tuple(shape), device="meta")
    return RowShard.of(DTensor.from_local(own, mesh, [Shard(0)], shape=like.shape, stride=like.stride()), whole)


def _from(start: int, read: Read) -> Read:
    return lambda low, high: read(start + low, start + high)


def _bounds(num_rows: int, rank: int, number: int) -> tuple[int, int]:
    """The rows that a rank has, as DTensor shares them."""
    step = -(-num_rows // number)
    return min(num_rows, rank * step), min(num_rows, (rank + 1) * step)
