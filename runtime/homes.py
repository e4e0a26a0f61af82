"""homes: the parameters and optimizer states of a model where they live, read and written between steps.

fill      a parameter's values, into its home on device, host or SSD, and into its master's
read      the values, from there
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import Owned, owned
from gs_compile.program.ir import Unit, Value
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage.store import Extent

Tensor = torch.Tensor


@dataclass(frozen=True)
class Slice:
    """Where a parameter is: a unit, and the offset in its flat space."""

    unit: Unit
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Homes:
    """The parts at home, of a run or of a commit.

    Whole parameters are read and written; where ranks share the units, all of them read the same ones.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.before_read: Callable[..., None] | None = None  # tells the other ranks what this one reads alone

    @property
    def placement(self) -> Placement:
        return self.setting.placement

    def at_home(self, value: Value) -> Any:
        """The content of a part, once nobody works on it any more."""
        raise NotImplementedError

    def to_change(self, value: Value) -> Any:
        """The same, to be changed in place; None where it is not to be changed."""
        raise NotImplementedError

    def fill(self, place: Slice, values: Tensor) -> None:
        """Bring a parameter's values home, to its master as well; waits until they are there."""
        self._write(place, None, values.to(self.dtype(place)))
        if self.has_master(place):
            self.write_state(place, 0, values)

    def has_master(self, place: Slice) -> bool:
        """Whether a parameter is a narrow copy of a master in its state; a frozen one is not."""
        unit = self.placement.by_unit[place.unit]
        return unit.has_master and place.offset < self.placement.world * unit.num_trained

    def dtype(self, place: Slice, *, master: bool = False) -> torch.dtype:
        """Of a parameter at home, or of its master if it has one."""
        wide = master and self.has_master(place)
        return self.setting.state_dtype(place.unit) if wide else self.setting.dtypes[place.unit]

    def read(self, place: Slice, *, master: bool = False) -> Tensor:
        """A parameter's values as they are at home, or its master's if it has one."""
        component = 0 if master and self.has_master(place) else None
        return self.read_any(place, component, self.dtype(place, master=master))

    def here(self, place: Slice) -> Tensor | None:
        """A parameter's values where they live, if that is memory in one piece; they change with the next update."""
        if self.setting.ranks:
            return None
        pieces = list(self._pieces(place, None, torch.empty(place.numel, device="meta")))
        content = self.at_home(pieces[0][0]) if len(pieces) == 1 else None
        if not isinstance(content, Tensor):
            return None
        _, start, _ = pieces[0]
        found: Tensor = content[start : start + place.numel].view(place.shape)
        return found

    def read_state(self, place: Slice, component: int) -> Tensor:
        """One component of a parameter's optimizer state; the master, where there is one, is the first."""
        return self.read_any(place, component, self.setting.state_dtype(place.unit))

    def write_state(self, place: Slice, component: int, values: Tensor) -> None:
        self._write(place, component, values.to(self.setting.state_dtype(place.unit)))

    def read_any(self, place: Slice, component: int | None, dtype: torch.dtype) -> Tensor:
        """Of a parameter: a component of its state, or None for itself; in the dtype that it is stored in."""
        if self.before_read is not None:
            self.before_read(place, component, dtype)
        flat = map_memory(place.numel * dtype.itemsize).view(dtype)  # the heap would keep it, in pieces
        for value, start, target in self._pieces(place, component, flat):
            content = self.at_home(value)
            if isinstance(content, Extent):
                content.read(target, start * dtype.itemsize).wait()
            else:
                target.copy_(content[start : start + len(target)])
        if ranks := self.setting.ranks:
            what = f"reading a parameter of unit {place.unit}"
            for rank in range(ranks.number):
                for each in self._owned(place, rank):
                    ranks.broadcast(flat[each.whole - place.offset :][: each.numel], rank, what)
        return flat.view(place.shape)

    def _write(self, place: Slice, component: int | None, values: Tensor) -> None:
        for value, start, source in self._pieces(place, component, values.reshape(-1)):
            content = self.to_change(value)
            if isinstance(content, Extent):
                content.write(source.contiguous(), start * values.dtype.itemsize).wait()
            elif content is not None:
                content[start : start + len(source)].copy_(source)

    def is_changed(self, place: Slice, component: int | None) -> bool:
        """Whether a write of it would change any part; what is not is there already."""
        pieces = self._pieces(place, component, torch.empty(place.numel, device="meta"))
        return any(self.to_change(value) is not None for value, _, _ in pieces)

    def _pieces(self, place: Slice, component: int | None, flat: Tensor) -> Iterator[tuple[Value, int, Tensor]]:
        """Each part that has some of a parameter, or of a component of its state: from where on, and its `flat`.

        Where ranks share the parameter, this rank's.
        """
        unit = self.placement.by_unit[place.unit]
        for group, mine in product(unit.groups, self._owned(place)):
            for each in unit.stretches(group, mine.local, mine.local + mine.numel):
                at = each.unit_start - mine.local + mine.whole - place.offset
                elements = flat[at : at + each.numel]
                if component is None:
                    yield unit.value("w", each.w), each.unit_start - each.w.start, elements
                elif each.s is not None:
                    start = component * each.s.numel + each.start - each.s.start
                    yield unit.value("s", each.s), start, elements

    def _owned(self, place: Slice, rank: int | None = None) -> list[Owned]:
        """The elements of a parameter that this rank, or another, has."""
        unit, ranks = self.placement.by_unit[place.unit], self.setting.ranks
        mine, number = (ranks.rank, ranks.number) if ranks else (0, 1)
        rank = mine if rank is None else rank
        return list(owned(unit.pieces, rank, number, place.offset, place.offset + place.numel))
