"""given: the state of a tensor's memory, to find later changes in place: of a copy that a state dict has of a value or
a state on the tiers, of an input of a call, of a buffer.
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
    """What a state dict got of a tiered parameter, or of its state: a copy, where torch's shares their memory."""

    values: weakref.ref[Tensor]
    counter: Tensor  # without elements; it shares the version counter of the values, also once these are gone
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
    """Numbers that differ once a tensor was changed in place. torch does not count changes through `.data` or through a
    numpy array, so for an ordinary tensor there is a checksum, too.
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return changes(tensor), 0
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    return changes(tensor), xxh3_64_intdigest(flat.numpy().data)
