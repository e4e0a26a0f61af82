"""homes: the parameters and optimizer states of a model where they live, read and written between steps.

fill      a parameter's values, into its home on device, host or SSD, and into its master's
read      the values, from there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import QUANTUM, Owned, owned
from gs_compile.program.ir import Value
from gs_compile.runtime.codecs import CODECS, Encoded, dense
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.formats import EIGHT_BITS, firsts, joined, narrow, narrowed, pair, shown, with_firsts
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.storage.store import Extent


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

    def fill(self, place: Slice, values: Tensor | Encoded) -> None:
        """Bring a parameter's values home, to its master as well; waits until they are there. What is encoded as it is
        stored here is not decoded.
        """
        if place.codec and isinstance(values, Encoded) and values.codec.name == place.codec:
            self._write(place.elements, None, values.stored)
            return
        values = dense(values)
        if place.codec:
            self._write(place.elements, None, CODECS[place.codec].encode(values.reshape(place.shape)))
            return
        if not self.has_master(place):
            self._write(place, None, values.to(self.dtype(place)))
            if self._has_copy(place):
                self._write(place, 0, with_firsts(values.to(self.dtype(place))))
            return
        if not self.is_pair(place, 0):
            self._write(place, None, narrow(values.to(self.setting.wide(place.unit)), self.dtype(place)))
        self.write_state(place, 0, values)

    def has_master(self, place: Slice) -> bool:
        """Whether a parameter is narrow and has a master, the first component of its state; a frozen one has none."""
        return self.setting.types[place.unit].has_master and place.dtype is None and self._is_trained(place)

    def _has_copy(self, place: Slice) -> bool:
        """Whether a parameter is wide among narrow ones whose masters are whole: it has what they have."""
        types = self.setting.types[place.unit]
        return types.has_master and not types.is_pair and place.dtype is not None and self._is_trained(place)

    def is_pair(self, place: Slice, component: int | None) -> bool:
        """Whether a component is a master that a parameter is half of."""
        return component == 0 and place.dtype is None and self.setting.types[place.unit].is_pair

    def _is_trained(self, place: Slice) -> bool:
        return place.offset < self.placement.world * self.placement.by_unit[place.unit].num_trained

    def dtype(self, place: Slice, *, master: bool = False) -> torch.dtype:
        """Of a parameter at home, or of its master if it has one."""
        wide = master and self.has_master(place)
        return self.setting.wide(place.unit) if wide else place.dtype or self.setting.dtype(place.unit)

    def read(self, place: Slice, *, master: bool = False) -> Tensor:
        """A parameter's values as they are at home, or its master's if it has one."""
        return dense(self.stored(place, master=master))

    def stored(self, place: Slice, *, master: bool = False) -> Tensor | Encoded:
        """The same, not decoded."""
        if place.codec:
            return place.view(self.read_any(place.elements, None))
        if master and self.has_master(place):
            return self.read_state(place, 0)
        if master and self._has_copy(place):
            return firsts(self.read_any(place.elements, 0)).reshape(place.shape)
        return self.read_any(place, None)

    def here(self, place: Slice) -> Tensor | None:
        """A parameter's values where they live, if that is memory in one piece; they change with the next update."""
        if self.setting.ranks or place.codec:
            return None
        pieces = list(self._pieces(place, None))
        content = self.at_home(pieces[0][0]) if len(pieces) == 1 else None
        if not isinstance(content, Tensor):
            return None
        start = pieces[0][1] // content.itemsize
        found: Tensor = content[start : start + place.stop - place.offset]
        return found.view(self.dtype(place)).view(place.shape)

    def read_state(self, place: Slice, component: int) -> Tensor:
        """One component of a parameter's optimizer state; the master, where there is one, is the first."""
        place, component = self._moment(place, component)
        own, first = self._number(place, component), 0
        if self.setting.types[place.unit].state[own] in EIGHT_BITS:
            first = place.offset % QUANTUM
            quanta = Slice(place.unit, place.offset - first, (place.stop - place.offset + first,))
            found = shown(self.read_any(quanta, own))[first:]
        else:
            found = self.read_any(place.elements, own)
        if self.is_pair(place, component):
            master = torch.empty(place.shape, dtype=self.setting.wide(place.unit))
            return joined(self.read_any(place, None), found.view(place.shape), master, torch.empty_like(master))
        found = found[: place.stop - place.offset]
        found = firsts(found).contiguous() if place.dtype else found
        return found.to(self.setting.wide(place.unit)).view(place.shape)

    def write_state(self, place: Slice, component: int, values: Tensor) -> None:
        """The inverse; a master in a pair brings the parameter with it."""
        place, component = self._moment(place, component)
        values, own = values.to(self.setting.wide(place.unit)), self._number(place, component)
        if self.is_pair(place, component):
            parameter, values = pair(values)
            self._write(place, None, parameter)
        values = with_firsts(values) if place.dtype else values
        self._write(place, own, narrowed(values, self.setting.types[place.unit].state[own]))

    def read_any(self, place: Slice, number: int | None) -> Tensor:
        """A parameter (None), or the elements of a component of its unit's state, as they are stored: 8 bits by whole
        quanta.
        """
        if self.before_read is not None:
            self.before_read(place, number)
        types, dtype = self.setting.types[place.unit], self._stored_dtype(place, number)
        flat = map_memory(types.nbytes(number, place.numel * place.width))  # the heap would keep it, in pieces
        for value, start, target in self._pieces(place, number, flat):
            content = self.at_home(value)
            if isinstance(content, Extent):
                content.read(target, start).wait()
            else:
                target.copy_(_bytes(content, start, target))
        if ranks := self.setting.ranks:
            kind = "a parameter" if number is None else f"a state ({number})"
            what = f"reading {kind} of unit {place.unit} at {place.offset}"
            for rank in range(ranks.number):
                for each in self._owned(place, rank):
                    start = each.whole - place.offset
                    first, last = (types.nbytes(number, at) for at in (start, start + each.numel))
                    ranks.broadcast(flat[first:last], rank, what)
        found = flat.view(dtype)
        return found if dtype in EIGHT_BITS else found.view(place.shape)

    def _write(self, place: Slice, number: int | None, values: Tensor) -> None:
        for value, start, source in self._pieces(place, number, values.contiguous().view(-1).view(torch.uint8)):
            content = self.to_change(value)
            if isinstance(content, Extent):
                content.write(source, start).wait()
            elif content is not None:
                _bytes(content, start, source).copy_(source)

    def parts_of(self, place: Slice, component: int | None) -> Iterator[Value]:
        """The parts that have some of a parameter (None), or of a component of its state."""
        if component is not None:
            place, component = self._moment(place, component)
        own = None if component is None else self._number(place, component)
        numbers = (None, own) if self.is_pair(place, component) else (own,)
        return (value for number in numbers for value, _, _ in self._pieces(place, number))

    def _moment(self, place: Slice, component: int) -> tuple[Slice, int]:
        """Where a component of a parameter's state is: in which elements, and as which component of these."""
        first = self.has_master(place)
        if component < first:
            return place, component
        place, number = place.moment(component - first)
        return place, number + first

    def _number(self, place: Slice, component: int) -> int:
        """Of a component of a parameter's state: its number in its unit's, which may have masters that it has not."""
        return component + bool(self.setting.types[place.unit].has_master and place.dtype)

    def _stored_dtype(self, place: Slice, number: int | None) -> torch.dtype:
        return self.dtype(place) if number is None else self.setting.types[place.unit].state[number]

    def _pieces(
        self, place: Slice, number: int | None, flat: Tensor | None = None
    ) -> Iterator[tuple[Value, int, Tensor]]:
        """Each part that has some of a parameter, or of its elements of a component of its unit's state: from which
        byte on, and its bytes of `flat`, which is all of it as it is stored; None: of no memory.

        Where ranks share the parameter, this rank's.
        """
        unit, types = self.placement.by_unit[place.unit], self.setting.types[place.unit]
        if flat is None:
            flat = torch.empty(types.nbytes(number, place.numel * place.width), dtype=torch.uint8, device="meta")
        for group, mine in product(unit.groups, self._owned(place)):
            for each in unit.stretches(group, mine.local, mine.local + mine.numel):
                at = each.unit_start - mine.local + mine.whole - place.offset
                found = flat[types.nbytes(number, at) : types.nbytes(number, at + each.numel)]
                if number is None:
                    yield unit.value("w", each.w), types.nbytes(None, each.unit_start - each.w.start), found
                elif each.s is not None:
                    start = types.offset(number, each.s.numel, each.start - each.s.start)
                    yield unit.value("s", each.s), start, found

    def _owned(self, place: Slice, rank: int | None = None) -> list[Owned]:
        """The elements of the unit that are a parameter's, and that this rank, or another, has."""
        unit, ranks = self.placement.by_unit[place.unit], self.setting.ranks
        mine, number = (ranks.rank, ranks.number) if ranks else (0, 1)
        rank = mine if rank is None else rank
        return list(owned(unit.pieces, rank, number, place.offset, place.stop))


def _bytes(content: Tensor, start: int, like: Tensor) -> Tensor:
    """Those of a part in memory, as many as `like` has."""
    return content.view(torch.uint8)[start : start + len(like)]
