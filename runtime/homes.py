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

    Whole parameters are read and written. If ranks share the units, all of them make the same reads.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.before_read: Callable[[Slice, int | None], None] | None = None  # lets other ranks take part in a read

    @property
    def placement(self) -> Placement:
        return self.setting.placement

    def at_home(self, value: Value) -> Any:
        """The content of a part, once no operation uses it any more."""
        raise NotImplementedError

    def to_change(self, value: Value) -> Any:
        """The same, to be changed in place; None if it must not be changed."""
        raise NotImplementedError

    def fill(self, span: Slice, values: Tensor | Encoded) -> None:
        """Write a parameter's values to its home and to its master; returns when they are there. Values that are
        encoded as they are stored here are not decoded.
        """
        if span.codec and isinstance(values, Encoded) and values.codec.name == span.codec:
            self._write(span.elements, None, values.stored)
            return
        values = dense(values)
        if span.codec:
            self._write(span.elements, None, CODECS[span.codec].encode(values.reshape(span.shape)))
            return
        if not self.has_master(span):
            self._write(span, None, values.to(self.dtype(span)))
            if self._has_copy(span):
                self._write(span, 0, with_firsts(values.to(self.dtype(span))))
            return
        if not self.is_pair(span, 0):
            self._write(span, None, narrow(values.to(self.setting.wide(span.unit)), self.dtype(span)))
        self.write_state(span, 0, values)

    def has_master(self, span: Slice) -> bool:
        """Whether a parameter is narrow and has a master, the first component of its state; a frozen one has none."""
        return self.setting.types[span.unit].has_master and span.dtype is None and self._is_trained(span)

    def _has_copy(self, span: Slice) -> bool:
        """Whether a wide parameter is in a unit of narrow ones with whole masters: then it has a copy where these have
        their master.
        """
        types = self.setting.types[span.unit]
        return types.has_master and not types.is_pair and span.dtype is not None and self._is_trained(span)

    def is_pair(self, span: Slice, component: int | None) -> bool:
        """Whether a component is a master that a parameter is half of."""
        return component == 0 and span.dtype is None and self.setting.types[span.unit].is_pair

    def _is_trained(self, span: Slice) -> bool:
        return span.offset < self.placement.world * self.placement.by_unit[span.unit].num_trained

    def dtype(self, span: Slice, *, master: bool = False) -> torch.dtype:
        """The dtype of a parameter at home, or of its master if it has one."""
        wide = master and self.has_master(span)
        return self.setting.wide(span.unit) if wide else span.dtype or self.setting.dtype(span.unit)

    def read(self, span: Slice, *, master: bool = False) -> Tensor:
        """A parameter's values as they are at home, or its master's if it has one."""
        return dense(self.stored(span, master=master))

    def stored(self, span: Slice, *, master: bool = False) -> Tensor | Encoded:
        """The same, not decoded."""
        if span.codec:
            return span.view(self.read_any(span.elements, None))
        if master and self.has_master(span):
            return self.read_state(span, 0)
        if master and self._has_copy(span):
            return firsts(self.read_any(span.elements, 0)).reshape(span.shape)
        return self.read_any(span, None)

    def here(self, span: Slice) -> Tensor | None:
        """A parameter's values where they live, if that is memory in one piece; they change with the next update.

        None also for halves of masters: a change in place would leave the other halves as they are.
        """
        if self.setting.ranks or span.codec or (self.has_master(span) and self.is_pair(span, 0)):
            return None
        pieces = list(self._pieces(span, None))
        content = self.at_home(pieces[0][0]) if len(pieces) == 1 else None
        if not isinstance(content, Tensor):
            return None
        start = pieces[0][1] // content.itemsize
        found: Tensor = content[start : start + span.stop - span.offset]
        return found.view(self.dtype(span)).view(span.shape)

    def read_state(self, span: Slice, component: int) -> Tensor:
        """One component of a parameter's optimizer state; the master, if there is one, is the first."""
        span, component = self._moment(span, component)
        own, first = self._number(span, component), 0
        if self.setting.types[span.unit].state[own] in EIGHT_BITS:
            first = span.offset % QUANTUM
            quanta = Slice(span.unit, span.offset - first, (span.stop - span.offset + first,))
            elements = shown(self.read_any(quanta, own))[first:]
        else:
            elements = self.read_any(span.elements, own)
        if self.is_pair(span, component):
            master = torch.empty(span.shape, dtype=self.setting.wide(span.unit))
            return joined(self.read_any(span, None), elements.view(span.shape), master, torch.empty_like(master))
        elements = elements[: span.stop - span.offset]
        elements = firsts(elements).contiguous() if span.dtype else elements
        return elements.to(self.setting.wide(span.unit)).view(span.shape)

    def write_state(self, span: Slice, component: int, values: Tensor) -> None:
        """The inverse; for a master that is a pair, the parameter is written as well."""
        span, component = self._moment(span, component)
        values, own = values.to(self.setting.wide(span.unit)), self._number(span, component)
        if self.is_pair(span, component):
            parameter, values = pair(values)
            self._write(span, None, parameter)
        values = with_firsts(values) if span.dtype else values
        self._write(span, own, narrowed(values, self.setting.types[span.unit].state[own]))

    def read_any(self, span: Slice, number: int | None) -> Tensor:
        """A parameter (`number` None), or the elements of a component of its unit's state, as they are stored: of 8
        bits whole quanta.
        """
        if self.before_read is not None:
            self.before_read(span, number)
        types = self.setting.types[span.unit]
        dtype = self.dtype(span) if number is None else types.state[number]
        flat = map_memory(types.nbytes(number, span.numel * span.width))  # the heap would keep it, fragmented
        for value, start, target in self._pieces(span, number, flat):
            content = self.at_home(value)
            if isinstance(content, Extent):
                content.read(target, start).wait()
            else:
                target.copy_(_bytes(content, start, target))
        if ranks := self.setting.ranks:
            kind = "a parameter" if number is None else f"a state ({number})"
            what = f"reading {kind} of unit {span.unit} at {span.offset}"
            for rank in range(ranks.number):
                for each in self._owned(span, rank):
                    start = each.whole - span.offset
                    first, last = (types.nbytes(number, at) for at in (start, start + each.numel))
                    ranks.broadcast(flat[first:last], rank, what)
        found = flat.view(dtype)
        return found if dtype in EIGHT_BITS else found.view(span.shape)

    def _write(self, span: Slice, number: int | None, values: Tensor) -> None:
        for value, start, source in self._pieces(span, number, bytes_of(values)):
            content = self.to_change(value)
            if isinstance(content, Extent):
                content.write(source, start).wait()
            elif content is not None:
                _bytes(content, start, source).copy_(source)

    def parts_of(self, span: Slice, component: int | None) -> Iterator[Value]:
        """The parts that hold some of a parameter (`component` None), or of a component of its state."""
        if component is not None:
            span, component = self._moment(span, component)
        own = None if component is None else self._number(span, component)
        numbers = (None, own) if self.is_pair(span, component) else (own,)
        return (value for number in numbers for value, _, _ in self._pieces(span, number))

    def _moment(self, span: Slice, component: int) -> tuple[Slice, int]:
        """The elements of the unit that hold a component of a parameter's state, and as which of their components."""
        first = self.has_master(span)
        if component < first:
            return span, component
        span, number = span.moment(component - first)
        return span, number + first

    def _number(self, span: Slice, component: int) -> int:
        """A component's number in the state of its unit, which has masters also if this parameter has none."""
        return component + bool(self.setting.types[span.unit].has_master and span.dtype)

    def _pieces(
        self, span: Slice, number: int | None, flat: Tensor | None = None
    ) -> Iterator[tuple[Value, int, Tensor]]:
        """Each part that holds some of a parameter, or of its elements of a component of its unit's state: the part,
        the offset in its bytes, and the same bytes in `flat`, which is all of it as it is stored (None: on the meta
        device). If ranks share the parameter, these are this rank's parts.
        """
        unit, types = self.placement.by_unit[span.unit], self.setting.types[span.unit]
        if flat is None:
            flat = torch.empty(types.nbytes(number, span.numel * span.width), dtype=torch.uint8, device="meta")
        for group, mine in product(unit.groups, self._owned(span)):
            for each in unit.stretches(group, mine.local, mine.local + mine.numel):
                at = each.unit_start - mine.local + mine.whole - span.offset
                found = flat[types.nbytes(number, at) : types.nbytes(number, at + each.numel)]
                if number is None:
                    yield unit.value("w", each.w), types.nbytes(None, each.unit_start - each.w.start), found
                elif each.s is not None:
                    start = types.offset(number, each.s.numel, each.start - each.s.start)
                    yield unit.value("s", each.s), start, found

    def _owned(self, span: Slice, rank: int | None = None) -> list[Owned]:
        """The elements of a parameter that this rank, or another one, has."""
        unit, ranks = self.placement.by_unit[span.unit], self.setting.ranks
        mine, number = (ranks.rank, ranks.number) if ranks else (0, 1)
        rank = mine if rank is None else rank
        return list(owned(unit.pieces, rank, number, span.offset, span.stop))


def _bytes(content: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of a part in memory, as many as `like` has."""
    return content.view(torch.uint8)[start : start + len(like)]


def bytes_of(values: Tensor) -> Tensor:
    """The bytes of values in their order. (A single element that is expanded has a stride of 0.)"""
    whole = values.contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
