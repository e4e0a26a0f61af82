"""micro_batches: the batch of a call cut into micro-batches, each with the model at its size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import CaptureError
from gs_compile.runtime.units import MicroBatch


def cut_batch(compilation: Compilation, args: Sequence[Any]) -> tuple[list[SpecializedModel], list[MicroBatch]]:
    """The micro-batches: inputs with a batch dimension cut along dimension 0, views of the user's tensors."""
    inputs = compilation.captured.inputs
    batch = {index: args[index] for index, entry in enumerate(inputs) if entry.role == "batch"}
    first = next(iter(batch.values()))
    sizes = {entry.name: int(arg) for entry, arg in zip(inputs, args, strict=True) if entry.role == "size"}
    lengths = _lengths(compilation, first.shape[0])
    models = [compilation.specialized(length, sizes, alone=len(lengths) == 1) for length in lengths]
    parts, start = [], 0
    for length, model in zip(lengths, models, strict=True):
        own = {index: arg.narrow(0, start, length) for index, arg in batch.items()}
        fraction = torch.tensor(length / max(sum(lengths), 1), dtype=torch.float32, device=first.device)
        counted = {index: args[index] for index in model.split.count.arguments} if model.split.count else {}
        parts.append(MicroBatch(model.split, model.codes, own, fraction, counted))
        start += length
    return models, parts


def _lengths(compilation: Compilation, batch_size: int) -> list[int]:
    """The samples of each micro-batch: `micro_batch_size`, and the rest in the last one; some schedules have
    the whole batch as one.
    """
    size = compilation.options.micro_batch_size
    if batch_size <= size or compilation.schedule.whole_batch:
        return [batch_size]
    if not compilation.captured.batch_symbols:
        raise CaptureError(
            f"the model's code fixes the batch size at {batch_size}, so it cannot run in micro-batches of {size}; "
            "take the size from the input's shape, or set micro_batch_size to the batch size"
        )
    rest = batch_size % size
    return [size] * (batch_size // size) + ([rest] if rest else [])
