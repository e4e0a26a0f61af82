"""spans: where each parameter is in the flat space of its unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gs_compile.program.ir import Unit

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slice:
    """Where a parameter is: a unit, and the offset in its flat space.

    dtype: of the parameter; None: that of the unit. width: the elements of the unit that one of the parameter takes.
    """

    unit: Unit
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    width: int = 1

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Where its elements of the unit end."""
        return self.offset + self.numel * self.width

    @property
    def elements(self) -> Slice:
        """The elements of the unit."""
        return Slice(self.unit, self.offset, (self.stop - self.offset,))

    def within(self, start: int, stop: int) -> Slice:
        """Some elements of the parameter, as one of one dimension."""
        return replace(self, offset=self.offset + start * self.width, shape=(stop - start,))


@dataclass(frozen=True, slots=True)
class Binding:
    """A parameter in its unit's flat space, and its place among the inputs of a captured graph."""

    input: int
    place: Slice
    trained: bool

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """The parameter, in its unit's elements from `start` on."""
        elements = flat[self.place.offset - start : self.place.stop - start]
        return (elements.view(self.place.dtype) if self.place.dtype else elements).view(self.place.shape)

    def gradient(self, flat: Tensor) -> Tensor:
        """The parameter's gradient, in its unit's; where it is wide, of each two elements the first one."""
        elements = flat[self.place.offset : self.place.stop]
        return elements.view(*self.place.shape, self.place.width)[..., 0]
