"""given: what a tensor had in it, to tell where somebody has changed it in place: one that a state dict was given of a
value or a state on the tiers, an input of a call, a buffer.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from gs_compile.capture.internals import changes


@dataclass
class Given:
    """What a state dict was given of a tiered parameter, or of its state: a copy, where torch gives their memory."""

    values: weakref.ref[Tensor]
    counter: Tensor  # has no elements, and the version of the values, also once these are gone
    version: int

    @classmethod
    def of(cls, values: Tensor) -> Given:
        counter = values.detach()
        counter.data = torch.empty(0, dtype=values.dtype, device=values.device)  # its version stays that of the values
        return cls(weakref.ref(values), counter, changes(counter))

    @property
    def is_changed(self) -> bool:
        return changes(self.counter) != self.version


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Another one whenever a tensor has changed in place. torch counts no changes by `.data` or by a numpy array that
    has its memory, so of an ordinary tensor there is a checksum, too.
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return changes(tensor), 0
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    return changes(tensor), xxh3_64_intdigest(flat.numpy().data)
