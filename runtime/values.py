"""values: the contents of a placed unit's values, on each tier.

Tensor     in memory of the host or of the device: a part in one dimension, an activation in its own shape
dict       a unit's parameters (and buffers) by input index, as its code takes them
Region     a range of an extent on SSD
Gradient   a unit's gradient sums, one flat tensor with a view for each parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gs_compile.capture.gradients import Term, add_term, put_term
from gs_compile.runtime.store import Extent


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of an extent from `offset` on; `like`: of an activation the shape and strides, on the meta device."""

    extent: Extent
    offset: int
    nbytes: int
    like: torch.Tensor | None = None


class Gradient:
    """Sums of a unit's gradients over micro-batches, as `units.Accumulator`, in one flat tensor.

    added: the parameters that have sums; the rest of `flat` is undefined until `complete`.
    """

    def __init__(self, flat: torch.Tensor, views: Mapping[Any, torch.Tensor], added: Iterable[Any] = ()) -> None:
        self.flat = flat
        self.views = views
        self.added = set(added)

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def add(self, gradients: Mapping[Any, Term], among: Sequence[torch.Tensor]) -> None:
        for key, term in gradients.items():
            (add_term if key in self.added else put_term)(self.views[key], term)
        self.added |= gradients.keys()

    def scale(self, factor: torch.Tensor) -> None:
        for key in self.added:
            self.views[key].mul_(factor)

    def complete(self) -> None:
        """Make zero what was not added to, parameters and what is between them."""
        end = 0
        for view in sorted((self.views[key] for key in self.added), key=torch.Tensor.storage_offset):
            start = int(view.storage_offset() - self.flat.storage_offset())
            if end < start:
                self.flat[end:start].zero_()
            end = start + view.numel()
        if end < len(self.flat):
            self.flat[end:].zero_()


def flat_of(content: torch.Tensor | Gradient) -> torch.Tensor:
    """The memory of a content."""
    return content.flat if isinstance(content, Gradient) else content
