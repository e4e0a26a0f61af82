"""rows: a tensor of which each rank has some rows, as state dicts have it.

It is a DTensor, Shard(0) over all ranks. So torch.distributed.checkpoint saves and loads it, onto any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gs_compile.model.mapped import CHUNK_NBYTES, mapped

Tensor = torch.Tensor


def mapped_rows(
    shape: Sequence[int], dtype: torch.dtype, folder: Path, read: Callable[[int, int], Tensor], mesh: DeviceMesh
) -> DTensor:
    """As `mapped`, of this rank's rows; `read` is called for all elements, in the same order on all ranks."""
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
    like = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(own, mesh, [Shard(0)], shape=like.shape, stride=like.stride())


def whole(values: Tensor) -> Tensor:
    """All of a tensor of which ranks have some rows each: all of them call this. Others are as they are."""
    return values.full_tensor() if isinstance(values, DTensor) else values


def _from(start: int, read: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    return lambda low, high: read(start + low, start + high)


def _bounds(num_rows: int, rank: int, number: int) -> tuple[int, int]:
    """The rows that a rank has, as DTensor shares them."""
    step = -(-num_rows // number)
    return min(num_rows, rank * step), min(num_rows, (rank + 1) * step)
