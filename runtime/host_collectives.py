"""host_collectives: collectives on host memory that do less than gloo's own.

shares      an all-gather. gloo's goes through memory of its own; a broadcast from each rank arrives in place.
terms       a reduce-scatter. gloo's sums all parts on every rank, twice the bytes; here each gets the terms of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Begin = Callable[[], Any]  # begins a collective, and returns torch's Work


def shares(whole: Tensor, shard: Tensor, rank: int, group: dist.ProcessGroup) -> list[Begin]:
    """The collectives that bring every rank's `shard`, one after the other, into `whole`; this rank's is copied here.
    They move bytes, as gloo refuses int16 and floats of 8 bits.
    """
    whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
    parts = list(whole.view(-1, len(shard)))
    parts[rank].copy_(shard)
    return [partial(dist.broadcast, part, group=group, group_src=at, async_op=True) for at, part in enumerate(parts)]


def terms(rows: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> tuple[Begin, list[Tensor]]:
    """The collective that brings this rank's row of every rank's `rows`, and these rows, in the order of ranks. There
    are two ranks or more.
    """
    others = [row for at, row in enumerate(rows) if at != rank]
    sizes = [0 if at == rank else len(row) for at, row in enumerate(rows)]
    given = torch.cat(others) if len(others) > 1 else others[0]
    taken = torch.empty_like(given)
    found = list(taken.view(-1, len(rows[rank])))
    begin = partial(dist.all_to_all_single, taken, given, sizes, sizes, group=group, async_op=True)
    return begin, [*found[:rank], rows[rank], *found[rank:]]


def add(numbers: Sequence[Tensor], out: Tensor) -> None:
    """Their sum, in their order."""
    torch.add(numbers[0], numbers[1], out=out)
    for number in numbers[2:]:
        out.add_(number)
