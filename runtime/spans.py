"""spans: where each parameter is in the flat space of its unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gs_compile.placement.shards import QUANTUM
from gs_compile.program.ir import Unit
from gs_compile.runtime.codecs import CODECS, Encoded


@dataclass(frozen=True)
class Slice:
    """Where a parameter is: a unit, and the offset in its flat space.

    dtype: of the parameter; None: that of the unit. width: the elements of the unit that one of the parameter takes.
    codec: the one of `CODECS` in which it is stored; "": none. num_stored: the elements of the unit that it then takes.
    components: names of the tensors of its state, without the master; (): those that the optimizer's parameters have in
        general.
    second: the distance from its elements to those whose first moments are its second ones; 0: there are none such.
    """

    unit: Unit
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    width: int = 1
    codec: str = ""
    num_stored: int = 0
    components: tuple[str, ...] = ()
    second: int = 0

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """The stride of the parameter, in elements of its own type."""
        sizes = [max(size, 1) for size in self.shape]
        return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))

    @cached_property
    def stop(self) -> int:
        """Where its elements of the unit end."""
        return self.offset + (self.num_stored or self.numel * self.width)

    @property
    def padded(self) -> int:
        """The elements of the unit that are its own, including those for its second moments."""
        return -(-(self.stop - self.offset) // QUANTUM) * QUANTUM * (1 + bool(self.second))

    @property
    def elements(self) -> Slice:
        """Its elements of the unit, as a parameter of the unit's dtype."""
        return Slice(self.unit, self.offset, (self.stop - self.offset,))

    def view(self, elements: Tensor) -> Tensor | Encoded:
        """The parameter as a view of its elements of the unit."""
        if self.codec:
            assert self.dtype is not None
            return Encoded(CODECS[self.codec], elements.view(torch.uint8), self.shape, self.dtype)
        return (elements.view(self.dtype) if self.dtype else elements).view(self.shape)

    def moment(self, number: int) -> tuple[Slice, int]:
        """The elements of the unit that hold one of its moments, and as which of their moments."""
        return (replace(self, offset=self.offset + self.second), 0) if self.second and number else (self, number)

    def within(self, start: int, stop: int) -> Slice:
        """Some elements of the parameter, as a parameter of one dimension."""
        assert not self.codec, "a part of an encoded matrix has no place of its own"
        return replace(self, offset=self.offset + start * self.width, shape=(stop - start,))


def encoded_slice(
    unit: Unit, offset: int, shape: tuple[int, ...], dtype: torch.dtype, codec: str, itemsize: int
) -> Slice:
    """Where a matrix of that shape and dtype is stored in a codec; itemsize: of the unit's elements."""
    return Slice(unit, offset, shape, dtype, codec=codec, num_stored=CODECS[codec].nbytes(shape) // itemsize)


@dataclass(frozen=True, slots=True)
class Binding:
    """A parameter in its unit's flat space, and its place among the inputs of a captured graph."""

    input: int
    span: Slice
    trained: bool

    def view(self, flat: Tensor, start: int = 0) -> Tensor | Encoded:
        """The parameter, in its unit's elements from `start` on."""
        span = self.span
        if span.codec or span.dtype:
            return span.view(flat[span.offset - start : span.stop - start])
        return flat.as_strided(span.shape, span.stride, flat.storage_offset() + span.offset - start)

    def gradient(self, flat: Tensor) -> Tensor:
        """The parameter's gradient in the unit's; of a wide parameter it is every second element, from the first on."""
        span = self.span
        stride = [number * span.width for number in span.stride]
        return flat.as_strided(span.shape, stride, flat.storage_offset() + span.offset)
