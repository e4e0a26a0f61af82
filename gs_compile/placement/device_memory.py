"""device_memory: how far a step may run ahead in the device's memory, which has no planned offsets.

A value takes its memory when the operation that defines it is issued. The memory is free again when the value has been
freed and all who use it are done: if lanes lag behind the issue loop, that is later than the program's order says. For
example, gradients that wait for room in host memory would pile up on the device. So an operation is issued once what it
takes fits beside what is alive and what is still in use. What is alive fits by the plan, and the users of the rest have
been issued, so the wait always ends. The runtime and the simulator use the same class, `DeviceMemory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from gs_compile.placement.liveness import BEFORE, LiveRange, nbytes_alive, peak
from gs_compile.program.ir import DeviceBound, Program

User = TypeVar("User")


def bounded(ranges: Sequence[LiveRange], program: Program, nbytes: int) -> DeviceBound:
    """What a program takes and gives back on a device of `nbytes`, or of its planned peak if that is more."""
    most, waiting = peak(ranges, "device", len(program.ops)), waiting_nbytes(ranges, program)
    takes: Counter[int] = Counter()
    gives: dict[int, tuple[object, int]] = {}
    for live in ranges:
        if live.slot.tier == "device" and live.slot.nbytes:
            takes[live.first] += live.slot.nbytes
            gives |= {at: (live.slot.key, live.slot.nbytes if at == live.last else 0) for at in live.frees}
    return DeviceBound(max(nbytes, most), takes.pop(BEFORE, 0), waiting, takes, gives)


def waiting_nbytes(ranges: Sequence[LiveRange], program: Program) -> int:
    """The bytes that a call keeps on the device between its forward and its backward, and shares with no other call."""
    of_call = (live for live in ranges if live.first != BEFORE)
    return int(nbytes_alive(of_call, "device", len(program.ops))[program.forward_end - 1]) if program.ops else 0


class DeviceMemory(Generic[User]):
    """The device memory that one step has in use.

    is_done: whether a user no longer needs its memory.
    ended: the bytes of values that have ended, and who may still use them; consecutive steps share this list.
    """

    def __init__(
        self, bound: DeviceBound, is_done: Callable[[User], bool], ended: list[tuple[int, Sequence[User]]]
    ) -> None:
        self.bound = bound
        self._is_done = is_done
        self._ended = ended
        self._alive_nbytes = bound.present_nbytes
        self._users: dict[object, list[User]] = {}  # of values that have ended, in slots that are alive

    def awaited(self, at: int) -> Sequence[User]:
        """Who has to be done before there is room for what an operation takes; empty if there is room."""
        wanted = self.bound.takes.get(at)
        if not wanted:
            return ()
        self._ended[:] = [each for each in self._ended if not all(map(self._is_done, each[1]))]
        in_use = sum(nbytes for nbytes, _ in self._ended)
        is_full = self._alive_nbytes + in_use + wanted > self.bound.nbytes
        return self._ended[0][1] if is_full and self._ended else ()

    def take(self, at: int) -> None:
        """An operation is issued."""
        self._alive_nbytes += self.bound.takes.get(at, 0)

    def give(self, at: int, users: Sequence[User]) -> None:
        """A `free` is issued; `users` may still use its value."""
        if at in self.bound.gives:
            key, nbytes = self.bound.gives[at]
            self._users.setdefault(key, []).extend(users)
            if nbytes:
                self._alive_nbytes -= nbytes
                self._ended.append((nbytes, self._users.pop(key)))
