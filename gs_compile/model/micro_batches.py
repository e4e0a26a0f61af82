"""micro_batches: the batch of a call cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import CaptureError
from gs_compile.runtime.units import MicroBatch


def lengths_of(compilation: Compilation, batch_size: int) -> list[int]:
    """The samples of each micro-batch: `micro_batch_size`, and the rest in the last one."""
    size = compilation.options.micro_batch_size
    if batch_size <= size or compilation.halved:
        return [batch_size]
    if not compilation.captured.batch_symbols:
        raise CaptureError(
            f"the model's code fixes the batch size at {batch_size}, so it cannot run in micro-batches of {size}; "
            "take the size from the input's shape, or set micro_batch_size to the batch size"
        )
    rest = batch_size % size
    return [size] * (batch_size // size) + ([rest] if rest else [])


def cut_batch(args: Sequence[Any], batch: Sequence[int], models: Sequence[SpecializedModel]) -> Iterator[MicroBatch]:
    """The micro-batches, one a model: the inputs `batch` cut along dimension 0, views of the user's tensors."""
    total, start = sum(model.micro_batch_size for model in models), 0
    for model in models:
        length = model.micro_batch_size
        inputs = {index: args[index].narrow(0, start, length) for index in batch}
        fraction = torch.tensor(length / max(total, 1), dtype=torch.float32, device=args[batch[0]].device)
        counted = {index: args[index] for index in model.split.count.arguments} if model.split.count else {}
        yield MicroBatch(model.split, model.codes, inputs, fraction, counted)
        start += length
