"""slab: the host memory of a run: two segments, mapped before a step, with values at their planned offsets.

    | what lives on, the same in all programs of a run | what else a step needs, by its own program |
    0                                            fixed.nbytes                            program.slab_nbytes

Nothing is allocated or freed while a step runs. The first writer of a range waits for the users of what was there
before, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.kinds import Slot
from gs_compile.placement.placement import Placement
from gs_compile.placement.ranges import Range, Ranges, range_of
from gs_compile.placement.slab import fixed_offsets
from gs_compile.program.ir import Program
from gs_compile.progress import stage
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.pages import Pages
from gs_compile.runtime.stream import Device, pinned_block


class Allocation(NamedTuple):
    """Where a value stands: its slot's range in a segment, and the bytes from the value's start to the slot's end."""

    segment: Segment
    where: Range
    memory: torch.Tensor

    def end(self, users: Sequence[Ticket]) -> None:
        """The value has ended; `users` may still use it."""
        self.segment.ranges.end(self.where, users)


class Segment:
    """Memory for the slab's offsets from `start` on."""

    def __init__(self, start: int, nbytes: int, device: Device) -> None:
        self.nbytes = nbytes
        self._start = start
        self._memory = map_memory(nbytes, device)
        self.ranges: Ranges[Ticket] = Ranges()
        self.waits = False  # for the backward of a step, also if no value is in it meanwhile

    @property
    def is_in_use(self) -> bool:
        """Whether a value in it is alive, or will be before its step ends."""
        return bool(self.ranges) or self.waits

    @property
    def is_done(self) -> bool:
        """Whether nothing in it is in use, and no operation still works on it."""
        return not self.is_in_use and all(ticket.done for ticket in self.ranges.users)

    def begin(self, where: Range, offset: int = 0) -> tuple[Allocation, list[Ticket]]:
        """The allocation of a value at an offset in its slot, and the tickets to wait for before it is written."""
        first = where.offset - self._start
        allocation = Allocation(self, where, self._memory[first + offset : first + where.nbytes])
        return allocation, [ticket for ticket in dict.fromkeys(self.ranges.begin(where)) if not ticket.done]


class Slab:
    """The segments of one run, empty until they are mapped; `budget_nbytes` None: without a bound.

    num_calls: the number of segments that are kept mapped, one for each open call of the model.
    """

    def __init__(self, placement: Placement, device: Device, budget_nbytes: int | None, num_calls: int) -> None:
        self.budget_nbytes, self._num_calls = budget_nbytes, num_calls
        self._device = device
        fixed = fixed_offsets(placement)
        self._offsets = {**fixed.always, **fixed.shared}
        self._fixed_nbytes = fixed.nbytes
        self.empty = Segment(0, 0, device)  # made now: a closed slab may be garbage, collected where a model is traced
        self.close()

    def map(self) -> None:
        """Map the segment of what lives on."""
        self.fixed = Segment(0, self._fixed_nbytes, self._device)

    def close(self) -> None:
        """Let go of all memory."""
        self.fixed, self._steps = self.empty, list[Segment]()

    @property
    def nbytes(self) -> int:
        """The bytes that are mapped."""
        return self.fixed.nbytes + sum(segment.nbytes for segment in self._steps)

    def home(self, slot: Slot) -> Allocation | None:
        """The allocation of a value that lives on, if it is in host memory; its memory has no former users."""
        where = range_of(slot, self._offsets)
        return self.fixed.begin(where, slot.offset)[0] if where else None

    def has_segment(self, program: Program) -> bool:
        """Whether a step of `program` runs in what is mapped."""
        return self._idle(program) is not None

    def segment(self, program: Program) -> Segment:
        """A segment for a step of `program`, in addition to the fixed one; mapped if none is idle and large enough.

        Steps and evaluations that are under way at the same time have their own segments. Raises `MemoryBudgetError` if
        the budget has no room for another.
        """
        if (found := self._idle(program)) is not None:
            idle = [segment for segment in self._steps if segment.is_done and segment is not found]
            for segment in idle[: max(0, len(self._steps) - self._num_calls)]:
                self._steps.remove(segment)
            return found
        self._steps = [segment for segment in self._steps if segment.is_in_use]  # what is mapped goes before more is
        nbytes = max(program.slab_nbytes - self.fixed.nbytes, 0)
        needed = self.nbytes + nbytes
        if self.budget_nbytes is not None and needed > self.budget_nbytes:
            is_open = bool(self._steps)
            what = "a call between a forward and its backward takes" if is_open else "this step needs"
            remedy = "together with that step: call backward first" if is_open else "of it: raise it"
            raise MemoryBudgetError(
                f"host_memory is {format_bytes(self.budget_nbytes)}; {what} {format_bytes(needed)} ({needed} bytes) "
                f"{remedy}"
            )
        self._steps.append(Segment(self.fixed.nbytes, nbytes, self._device))
        return self._steps[-1]

    def _idle(self, program: Program) -> Segment | None:
        """A segment that is large enough and not in use. A program that does not train may also take one that waits for
        a backward: it ends before that.
        """
        segments = (each for each in self._steps if not (each.is_in_use if program.trains else each.ranges))
        return next((each for each in segments if program.slab_nbytes <= self.fixed.nbytes + each.nbytes), None)


def map_memory(nbytes: int, device: Device | None = None) -> torch.Tensor:
    """`nbytes` of host memory, zero, as uint8 at the start of a page; unmapped when no tensor refers to it any more.

    device: if it has memory of its own, the memory is pinned for as long as it is mapped. If it cannot register memory,
    torch allocates it, which may take up to twice as much.
    Raises `MemoryBudgetError` if the system refuses the memory, or to pin it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return _mapped(nbytes, device)
    except (OSError, RuntimeError) as error:
        raise MemoryBudgetError(
            f"the system refuses {format_bytes(nbytes)} of host memory: {error}. Raise what limits this process "
            "(ulimit -v, ulimit -l, its control group), or give a smaller host_memory="
        ) from error


def _mapped(nbytes: int, device: Device | None) -> torch.Tensor:
    if device is not None and not device.registers:
        return pinned_block(nbytes, device.device.index).zero_()
    pages = Pages(nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device is not None and device.has_own_memory:
        address = memory.data_ptr()
        with stage(f"pinning {format_bytes(nbytes)} of host memory"):
            memory.zero_()  # all threads of torch touch the pages; pinning would touch them one by one
            device.pin(address, nbytes)
        pages.unpin = lambda: device.unpin(address)
    return memory
