"""averaged: gradients in memory are the mean of all ranks', as those of DistributedDataParallel are."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch.nn.parallel import DistributedDataParallel

from gs_compile.model.residency import residency_of
from gs_compile.options import Options
from gs_compile.runtime.ranks import Ranks, ranks_of

Tensor = torch.Tensor
BUCKET_NBYTES = 25 << 20  # that are exchanged at once, as DistributedDataParallel does


def ranks_that_average(parameters: Sequence[Tensor], buffers: Mapping[str, Tensor], options: Options) -> Ranks | None:
    """The ranks of a model that none of our optimizers trains; None: there are no others, or others average already.

    In its first step all get the first rank's values, of buffers by name too. The model may be in a
    DistributedDataParallel, which does both.
    """
    residency = residency_of(parameters[0])
    if residency.ranks is None:
        ranks = None if _is_wrapped(parameters[0]) else ranks_of(options)
        if ranks is not None:
            begin_alike(ranks, parameters, buffers)
        residency.ranks = (ranks,)
    return residency.ranks[0]


def averaged(ranks: Ranks, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The mean over all ranks of each; they have the same shapes on all."""
    ranks.agree_on(f"the mean of {len(gradients)} gradients, {sum(each.numel() for each in gradients)} elements")
    found = []
    for bucket in _buckets(gradients):
        flat = torch.cat([each.reshape(-1) for each in bucket])
        ranks.sum(flat, "the mean of gradients")
        parts = (flat / ranks.total).split([each.numel() for each in bucket])
        found += [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]
    return found


def begin_alike(ranks: Ranks, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Give parameters in memory, and buffers by name, the first rank's values.

    No forward changes a buffer (capture/split.py), so once is as often as DistributedDataParallel needs to.
    """
    named = [("a parameter", parameter) for parameter in parameters]
    named += [(f"the buffer {name}", buffer) for name, buffer in buffers.items()]
    for name, tensor in named:
        values = tensor.detach().cpu().contiguous()
        ranks.broadcast(values, what=f"the first values of {name}")
        tensor.data.copy_(values)


def _is_wrapped(parameter: Tensor) -> bool:
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(each is parameter for model in found for each in model.parameters())


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type and device; a large one is alone."""
    for _, alike in groupby(gradients, lambda each: (each.dtype, each.device)):
        bucket: list[Tensor] = []
        for each in alike:
            if bucket and sum(other.nbytes for other in bucket) + each.nbytes > BUCKET_NBYTES:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket
