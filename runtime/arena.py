"""arena: every buffer of host memory, under one budget that is never exceeded.

Buffers are large and few in size, so a released one is kept and handed out again: the first touch of fresh memory
costs more than a copy does. What is kept counts against the budget as what is in use does.

Memory is unmapped by dropping the last reference to it, never by an address. Every tensor over it holds such a
reference, so no tensor is ever left over memory that is gone; the ledger counts the memory until it is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.runtime.memory import PAGE_NBYTES, Memory, host_memory

FREE = "free"  # kept for reuse
GONE = "released, but a tensor still refers to it"
MOST_SECONDS_GONE = 0.5  # a thread that is done lets go within microseconds; a tensor that someone keeps never does
PADDING = "padding"  # what is mapped beyond the buffers: torch's blocks are of powers of two


class Ticket(Protocol):
    """Somebody's use of a buffer, such as a transfer under way."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Ledger:
    """The bytes that are mapped, by purpose and in total, now and at their peaks; also without what is free."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = 0
        self.peak_total = 0
        self.peak_in_use = 0

    def add(self, purpose: str, nbytes: int) -> None:
        """Counts bytes in, or out if negative."""
        self.now[purpose] += nbytes
        assert self.now[purpose] >= 0, f"{purpose}: less than nothing"
        self.total += nbytes
        self.peak[purpose] = max(self.peak[purpose], self.now[purpose])
        self.peak_total = max(self.peak_total, self.total)
        self.peak_in_use = max(self.peak_in_use, self.total - self.now[FREE])

    def move(self, source: str, target: str, nbytes: int) -> None:
        self.add(source, -nbytes)
        self.add(target, nbytes)

    def restart(self) -> None:
        """Peaks are from now on."""
        self.peak, self.peak_total = Counter(self.now), self.total
        self.peak_in_use = self.total - self.now[FREE]

    def __str__(self) -> str:
        parts = [f"{purpose} {format_bytes(nbytes)}" for purpose, nbytes in self.now.most_common() if nbytes]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, eq=False)
class _Piece:
    """One buffer's memory, in use or free; `padding_nbytes` of what is mapped for it are more than was asked for."""

    owner: Any
    nbytes: int
    padding_nbytes: int
    after: tuple[Ticket, ...] = ()

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.after)


class Buffer:
    """Memory that is the caller's until it releases it; its size is a multiple of 4 KiB, as its address is."""

    def __init__(self, arena: Arena, piece: _Piece, purpose: str) -> None:
        self._arena = arena
        self._piece: _Piece | None = piece
        self.purpose = purpose
        self.nbytes = piece.nbytes
        self._tensor: torch.Tensor | None = torch.frombuffer(piece.owner, dtype=torch.uint8, count=piece.nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, as a one-dimensional tensor of uint8."""
        assert self._tensor is not None, f"buffer of {self.purpose} used after its release"
        return self._tensor

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements of `dtype`."""
        assert numel * dtype.itemsize <= self.nbytes, f"{numel} of {dtype} do not fit in {self.nbytes} bytes"
        return self.tensor[: numel * dtype.itemsize].view(dtype)

    def release(self, after: Sequence[Ticket] = ()) -> None:
        """Gives the memory back; nobody else gets it before all of `after` are done."""
        piece, self._piece, self._tensor = self._piece, None, None  # a released buffer holds no memory
        assert piece is not None, f"buffer of {self.purpose} released twice"
        self._arena._give_back(piece, self.purpose, tuple(after))


class Charge:
    """Memory of someone else's that counts against the budget until it is released."""

    def __init__(self, arena: Arena, nbytes: int, purpose: str) -> None:
        self._arena: Arena | None = arena
        self.purpose = purpose
        self.nbytes = nbytes

    def release(self, after: Iterable[Ticket] = ()) -> None:
        """Counts it out; `after` is as a buffer has it, but who owns the memory keeps it as long as it is used."""
        arena, self._arena = self._arena, None
        assert arena is not None, f"charge for {self.purpose} released twice"
        arena._count(self.purpose, -self.nbytes)


class Arena:
    """Hands out buffers of host memory within `budget_nbytes`; None: without a bound.

    `take` is called by one thread; `release` by any.
    """

    def __init__(self, budget_nbytes: int | None, *, name: str = "host", memory: Memory | None = None) -> None:
        self.budget_nbytes = budget_nbytes
        self.name = name
        self._memory = memory or host_memory()
        self._ledger = Ledger()
        self._free: list[_Piece] = []  # in the order of their release
        self._users_left: deque[tuple[Ticket, ...]] = deque()  # of those among them that may still be in use
        self._in_use: set[_Piece] = set()  # a buffer that is lost and not released stays mapped, and on the ledger
        self._unmapped: deque[tuple[int, int]] = deque()  # told by destructors, at any time: so without the lock
        self._lock = threading.Lock()
        self._closed = False

    @property
    def ledger(self) -> Ledger:
        with self._lock:
            self._settle()
            return self._ledger

    def take(self, nbytes: int, purpose: str) -> Buffer:
        """A buffer of at least `nbytes`, its content undefined; raises `MemoryBudgetError` if it cannot fit.

        [1] a free buffer of this size whose users are done; [2] new memory, if the budget allows it, after unmapping
        free buffers of other sizes if need be; [3] the same again when the oldest released buffer's users are done.
        """
        nbytes, deadline = _rounded(nbytes), _Deadline()
        while True:
            with self._lock:
                users = self._users(deadline)
                piece = self._reusable(nbytes)  # [1]
                if piece is None and self._map(nbytes):  # [2]
                    piece = self._reusable(nbytes)
                if piece is not None:
                    return self._hand_out(piece, purpose)
                users = users or self._users(deadline)
                if not users:
                    raise self._too_small(nbytes, purpose)
            _wait(users)  # [3]

    def charge(self, nbytes: int, purpose: str) -> Charge:
        """Counts memory that is not the arena's, such as a tensor of torch's, as its own is counted.

        Raises `MemoryBudgetError` if it cannot fit.
        """
        deadline = _Deadline()
        while True:
            with self._lock:
                users = self._users(deadline)
                if self._make_room(nbytes, spared=0):
                    self._ledger.add(purpose, nbytes)
                    return Charge(self, nbytes, purpose)
                users = users or self._users(deadline)
                if not users:
                    raise self._too_small(nbytes, purpose)
            _wait(users)

    def trim(self) -> None:
        """Unmaps all free buffers, once their users are done."""
        with self._lock:
            pending = [ticket for piece in self._free for ticket in piece.after]
        with ExitStack() as stack:  # unmaps also when a wait raises
            stack.callback(self._unmap_free)
            stack.callback(_wait, pending)

    def close(self) -> None:
        """Unmaps everything: what is free now, what is in use when it is released."""
        self._closed = True
        self.trim()

    def _reusable(self, nbytes: int) -> _Piece | None:
        return next((piece for piece in self._free if piece.nbytes == nbytes and piece.done), None)

    def _users(self, deadline: _Deadline) -> Sequence[Ticket]:
        """Who is to be waited for: the oldest users; without any, the tensors over memory that is gone already.

        Not the memory, so that this thread holds none while it waits. Asked before memory is looked for as well: who
        ends while it is looked for is not found afterwards, and what he used was not found either.
        """
        while self._users_left and all(ticket.done for ticket in self._users_left[0]):
            self._users_left.popleft()
        if self._users_left:
            return self._users_left[0]
        return [deadline] if self._ledger.now[GONE] and not deadline.done else ()

    def _count(self, purpose: str, nbytes: int) -> None:
        with self._lock:
            self._ledger.add(purpose, nbytes)

    def _hand_out(self, piece: _Piece, purpose: str) -> Buffer:
        self._free.remove(piece)
        self._in_use.add(piece)
        self._ledger.move(FREE, purpose, piece.nbytes)
        return Buffer(self, piece, purpose)

    def _give_back(self, piece: _Piece, purpose: str, after: tuple[Ticket, ...]) -> None:
        with self._lock:
            self._in_use.remove(piece)
            self._ledger.move(purpose, FREE, piece.nbytes)
            self._free.append(replace(piece, after=after))
            if after:
                self._users_left.append(after)
        if self._closed:
            self._unmap_free()

    def _map(self, nbytes: int) -> bool:
        """Maps one free buffer, if the budget allows it."""
        assert not self._closed, f"{self.name} arena is closed"
        whole = self._memory.block_nbytes(nbytes)
        if not self._make_room(whole, nbytes):
            return False
        piece = _Piece(self._memory.map(whole), nbytes, whole - nbytes)
        self._ledger.add(FREE, nbytes)
        self._ledger.add(PADDING, piece.padding_nbytes)
        gone = weakref.finalize(piece.owner, self._unmapped.append, (nbytes, piece.padding_nbytes))
        gone.atexit = False  # at exit there is nobody left to count
        self._free.append(piece)
        assert self.budget_nbytes is None or self._ledger.total <= self.budget_nbytes, f"{self.name}: over the budget"
        return True

    def _make_room(self, nbytes: int, spared: int) -> bool:
        """Unmaps free buffers of sizes other than `spared`, oldest first, until `nbytes` more fit."""
        while True:
            self._settle()
            if self.budget_nbytes is None or self._ledger.total + nbytes <= self.budget_nbytes:
                return True
            if nbytes > self.budget_nbytes or not self._unmap_one(spared):
                return False

    def _unmap_one(self, spared: int | None = None) -> bool:
        """Unmaps the oldest free buffer of a size other than `spared` whose users are done."""
        for oldest in self._free:
            if oldest.nbytes != spared and oldest.done:
                self._free.remove(oldest)
                self._ledger.move(FREE, GONE, oldest.nbytes)
                return True  # the last reference goes with this frame
        return False

    def _unmap_free(self) -> None:
        with self._lock:
            while self._unmap_one():
                pass

    def _settle(self) -> None:
        """Counts out what destructors have unmapped."""
        while self._unmapped:
            nbytes, padding = self._unmapped.popleft()
            self._ledger.add(GONE, -nbytes)
            self._ledger.add(PADDING, -padding)

    def _too_small(self, nbytes: int, purpose: str) -> MemoryBudgetError:
        assert self.budget_nbytes is not None
        ledger = self._ledger
        needed = ledger.total - ledger.now[FREE] + nbytes
        return MemoryBudgetError(
            f"{self.name} memory is too small: {format_bytes(nbytes)} for {purpose} would make it "
            f"{format_bytes(needed)} ({needed} bytes), and the budget is {format_bytes(self.budget_nbytes)} "
            f"({self.budget_nbytes} bytes); mapped now: {ledger}"
        )


class _Deadline:
    """How long memory may take to go: a thread that is just done with it holds it a moment longer."""

    def __init__(self) -> None:
        self._end = time.monotonic() + MOST_SECONDS_GONE

    @property
    def done(self) -> bool:
        return time.monotonic() > self._end

    def wait(self) -> None:
        time.sleep(0.001)


def _rounded(nbytes: int) -> int:
    assert nbytes > 0, f"a buffer of {nbytes} bytes"
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _wait(tickets: Iterable[Ticket]) -> None:
    """Waits for all tickets, also when the wait for one raises."""
    with ExitStack() as stack:
        for ticket in reversed(list(tickets)):
            stack.callback(ticket.wait)
