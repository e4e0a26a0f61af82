"""given: what state dicts were given of parameters on the tiers, to tell where somebody has changed it in place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from gs_compile.capture.internals import changes


@dataclass
class Given:
    """What a state dict was given of a tiered parameter: a copy, where torch gives the parameter's memory."""

    values: weakref.ref[Tensor]
    counter: Tensor  # has no elements, and the version of the values, also once these are gone
    version: int

    @classmethod
    def of(cls, values: Tensor) -> Given:
        counter = values.detach()
        counter.data = torch.empty(0, dtype=values.dtype)  # its version stays that of the values
        return cls(weakref.ref(values), counter, changes(counter))

    @property
    def is_changed(self) -> bool:
        return changes(self.counter) != self.version
