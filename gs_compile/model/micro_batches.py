"""micro_batches: the batch of a call, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from gs_compile.capture.graph import at_line
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import CaptureError, SeparationError
from gs_compile.model.outputs import LOSS_ALONE
from gs_compile.runtime.units import MicroBatch


def cut_batch(compilation: Compilation, args: Sequence[Any]) -> tuple[list[SpecializedModel], list[MicroBatch]]:
    """The micro-batches: views of the user's tensors, cut along their batch dimensions."""
    inputs = compilation.captured.inputs
    batch = {index: (args[index], entry.dim) for index, entry in enumerate(inputs) if entry.role == "batch"}
    first, dim = next(iter(batch.values()))
    _refuse_other_numbers({inputs[index].path: arg.shape[own] for index, (arg, own) in batch.items()})
    lengths = _lengths(compilation, first.shape[dim])
    models = _models(compilation, lengths, sizes_of(compilation, args))
    parts, start = [], 0
    for length, model in zip(lengths, models, strict=True):
        own = {index: arg.narrow(dim, start, length) for index, (arg, dim) in batch.items()}
        fraction = torch.full((), length / max(sum(lengths), 1), dtype=torch.float64, device=first.device)
        counted = {index: args[index] for index in model.split.count.arguments} if model.split.count else {}
        parts.append(MicroBatch(model.split, model.codes, own, fraction, counted))
        start += length
        model.note_inputs(own)
    return models, parts


def _refuse_other_numbers(rows: Mapping[str, int]) -> None:
    """Raise `CaptureError` if an input has another number of rows than the first one."""
    first, *others = rows
    for other in others:
        if rows[other] != rows[first]:
            raise CaptureError(
                f"{first} has {rows[first]} rows and {other} has {rows[other]}, but as many in the call that this "
                f"model was captured in, so both are taken for the batch: let the first call have another number of "
                f"samples than {other} has rows"
            )


def sizes_of(compilation: Compilation, args: Sequence[Any]) -> dict[str, int]:
    """The sizes among the arguments of a call, by name."""
    pairs = zip(compilation.captured.inputs, args, strict=True)
    return {entry.name: int(arg) for entry, arg in pairs if entry.role == "size"}


def _models(compilation: Compilation, lengths: Sequence[int], sizes: Mapping[str, int]) -> list[SpecializedModel]:
    """The models of micro-batches of these lengths. For a single one, a count over ranks is also made before the head
    if possible, because other ranks, which may have several micro-batches, make it there.
    """
    specialized = partial(compilation.specialized, sizes=sizes, loss_alone=LOSS_ALONE.get())
    if len(lengths) == 1 and compilation.counts_over_ranks:
        with suppress(SeparationError):
            return [specialized(*lengths, alone=False)]
    return [specialized(length, alone=len(lengths) == 1) for length in lengths]


def _lengths(compilation: Compilation, batch_size: int) -> list[int]:
    """The samples of each micro-batch: `micro_batch_size`, and the rest in the last one; some schedules have
    the whole batch as one.
    """
    size = compilation.options.micro_batch_size
    path, number = compilation.listed
    most = max(number, batch_size) if number else 0
    if most > size and not compilation.schedule.whole_batch:
        raise CaptureError(
            f"the samples of the batch are the {number} tensors of {path}, and micro-batches are cut from dimension 0 "
            f"of tensors, so none can be of {size}: give the model one tensor that has all samples along dimension 0, "
            f"as torch.stack or pad_sequence makes it, or set micro_batch_size to {most}"
        )
    if batch_size <= size or compilation.schedule.whole_batch:
        return [batch_size]
    if not compilation.captured.batch_symbols:
        raise CaptureError(
            f"the model's code fixes the batch size at {batch_size}{compilation.captured.fixed_at}, so it cannot run "
            f"in micro-batches of {size}; take the size from the input's shape, or set micro_batch_size to the batch "
            "size"
        )
    if (found := compilation.exchange) is not None:
        raise CaptureError(
            f"the model's forward exchanges values with other ranks ({found.name}{at_line(found)}), which would be "
            f"those of each micro-batch of {size}: do it outside of the model, or set micro_batch_size to the batch "
            "size"
        )
    rest = batch_size % size
    return [size] * (batch_size // size) + ([rest] if rest else [])
