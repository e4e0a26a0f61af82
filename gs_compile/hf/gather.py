"""gather: the batches of a step, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from gs_compile.errors import OptionError

Tensor = torch.Tensor
_IGNORED = -100  # a label that no loss counts


def gathered(batches: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """One batch of all samples; shorter sequences are padded at their end, as collators pad them.

    Padding needs an attention mask, which then ends them; labels there are ignored. Raises OptionError where batches
    have other entries than the first, or would need padding and have no mask.
    """
    first = batches[0]
    if any(batch.keys() != first.keys() for batch in batches):
        raise OptionError(f"the batches of a step have different entries: {sorted({*map(tuple, batches)})}")
    if len(batches) == 1:
        return dict(first)
    padding = {"input_ids": pad_token_id, "labels": _IGNORED, "shift_labels": _IGNORED}
    return {name: _joined(name, [batch[name] for batch in batches], padding.get(name, 0), first) for name in first}


def _joined(name: str, values: Sequence[Any], padding: int, first: Mapping[str, Any]) -> Any:
    if not all(isinstance(value, Tensor) and value.dim() for value in values):
        if any(value is not values[0] and value != values[0] for value in values):
            raise OptionError(f"{name!r} is no tensor of samples, and differs between the batches of a step")
        return values[0]
    shapes = [value.shape[1:] for value in values]
    if len(set(shapes)) == 1:
        return torch.cat(list(values))
    if "attention_mask" not in first:
        raise OptionError(
            f"{name!r} has sequences of different lengths in the batches of a step, and there is no attention_mask to "
            "pad them with: pad all batches to one length, or have the collator make a mask"
        )
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return torch.cat([_padded(value, whole, padding) for value in values])


def _padded(value: Tensor, whole: Sequence[int], padding: int) -> Tensor:
    missing = [size - own for size, own in zip(whole, value.shape[1:], strict=True)]
    return functional.pad(value, [n for size in reversed(missing) for n in (0, size)], value=padding)
