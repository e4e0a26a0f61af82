"""rows: a tensor of which each rank has some rows, as state dicts have it, and values before there is an engine.

It is a DTensor, Shard(0) over all ranks. So torch.distributed.checkpoint saves and loads it, onto any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gs_compile.model.mapped import CHUNK_NBYTES, leave_memory, mapped, trim

Tensor = torch.Tensor
Read = Callable[[int, int], Tensor]  # the elements from one place to another


def mapped_rows(shape: Sequence[int], dtype: torch.dtype, folder: Path, read: Read, mesh: DeviceMesh | None) -> Tensor:
    """As `mapped`, of this rank's rows; `read` is called for all elements, in the same order on all ranks.

    mesh: None, or no rows to share: as `mapped`.
    """
    if mesh is None or not shape:
        return mapped(shape, dtype, folder, read)
    width, chunk = math.prod(shape[1:]), CHUNK_NBYTES // dtype.itemsize
    own = None
    for rank in range(mesh.size()):
        first, last = _bounds(shape[0], rank, mesh.size())
        start, stop = first * width, last * width
        if rank == mesh.get_local_rank():
            own = mapped((last - first, *shape[1:]), dtype, folder, _from(start, read))
        else:
            for low in range(start, stop, chunk):
                read(low, min(low + chunk, stop))
    assert own is not None
    return _together(own, mesh, shape)


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


def write(own: Tensor, values: Tensor) -> None:
    """Give `own` other values; where ranks have rows of it, all of them call this."""
    with torch.no_grad():
        if isinstance(own, DTensor):
            values = whole(values)
            first, last = _bounds(own.shape[0], own.device_mesh.get_local_rank(), own.device_mesh.size())
            own, values = own.to_local(), values[first:last]
        if own.data_ptr() == values.data_ptr():
            return
        own.copy_(whole(values))
    for each in (own, values):
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
