"""sums: the gradient sums of a step's backwards, at home, to which gradients from outside of the model are added."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

from gs_compile.placement.units import UnitPlacement
from gs_compile.program.ir import Unit, Value
from gs_compile.runtime.formats import with_firsts
from gs_compile.runtime.kernels import sum_of_squares
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.tiers import Tiers


class Sums:
    """The gradient sums of a model whose parameters no other ranks share, between two operations of its programs.

    has_outside: the sums of the current step have gradients from outside, which no backward would make again.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.has_outside = False
        self._uncounted: set[Unit] = set()  # a gradient from outside has come since their norm was taken

    def counted(self) -> None:
        """The norms of all units have been taken now."""
        self._uncounted.clear()

    def end_step(self, record: StepRecord) -> None:
        """Take the norms of `_uncounted` units again, while their sums are there."""
        for unit in self._uncounted:
            record.squares[unit]()
        self._uncounted.clear()
        self.has_outside = False

    def clear(self) -> None:
        """Set all of them to zero."""
        self._uncounted.clear()
        for unit in self.tiers.placement.units:
            for value in self.tiers.placement.sums(unit):
                zeros = torch.zeros(unit.dw[value.part].numel, dtype=self.tiers.setting.wide(unit.unit))
                self._write(value, 0, zeros)

    def add(self, span: Slice, gradient: Tensor, record: StepRecord) -> None:
        """Add a parameter's gradient to its sum; the norm of its unit is taken again when it is read."""
        unit = self.tiers.placement.by_unit[span.unit]
        flat = gradient.detach().reshape(-1).cpu().to(self.tiers.setting.wide(span.unit))
        flat = with_firsts(flat) if span.dtype else flat
        for value, start, first, numel in self._stretches(unit, span):
            self._write(value, start, self._read(value, start, numel).add_(flat[first : first + numel]))
        self.has_outside = True
        record.idle -= {span}
        self._uncounted.add(span.unit)
        record.squares[span.unit] = cache(partial(self.square, span.unit))

    def square(self, unit: Unit) -> float:
        """The sum of squares of a unit's sums, as its norm is computed; infinite if an element is not finite."""
        placed = self.tiers.placement.by_unit[unit]
        flat = torch.zeros(placed.num_trained, dtype=self.tiers.setting.wide(unit))
        for value, start, first, numel in self._stretches(placed, Slice(unit, 0, (placed.num_trained,))):
            flat[first : first + numel] = self._read(value, start, numel)
        return sum_of_squares(flat)

    def _stretches(self, unit: UnitPlacement, span: Slice) -> Iterator[tuple[Value, int, int, int]]:
        """The sums that hold elements of a parameter: the first element of each, its place in the parameter, and how
        many there are.
        """
        for value in self.tiers.placement.sums(unit):
            for each in unit.stretches(unit.dw[value.part], span.offset, span.stop):
                yield value, each.start, each.unit_start - span.offset, each.numel

    def _read(self, value: Value, start: int, numel: int) -> Tensor:
        """Elements of a sum: a view in memory, or a copy from SSD."""
        content, wide = self.tiers.at_home(value), self.tiers.setting.wide(value.unit or 0)
        if not isinstance(content, Extent):
            found: Tensor = content[start : start + numel]
            return found
        copy = torch.empty(numel, dtype=wide)
        content.read(copy.view(torch.uint8), start * wide.itemsize).wait()
        return copy

    def _write(self, value: Value, start: int, elements: Tensor) -> None:
        content = self.tiers.at_home(value)
        if isinstance(content, Extent):
            content.write(elements.view(torch.uint8), start * elements.itemsize).wait()
        else:
            content[start : start + len(elements)].copy_(elements)
