"""movers: threads that move the blocks of a transfer, together with the thread that waits for it.

    waits      | block 0 |  block 3  | block 6 |     returns: no block is left, and none moves
    mover 0     | block 1 |   block 4   |
    mover 1      |   block 2   | block 5 |

Blocks stay with their transfer until a thread takes the next one: to hand over each block by itself would take a core
as much time as to move it. A transfer of one block, such as a small tensor, wakes no thread at all.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

Move: TypeAlias = Callable[[], None]


class Movers:
    """Up to `number` threads, which serve requests in their order."""

    def __init__(self, number: int, name: str) -> None:
        self._number, self._name = number, name
        self._threads: list[threading.Thread] = []
        self._asked = SimpleQueue[Move | None]()
        self._changing = threading.Lock()
        self._closed = False

    def ask(self, number: int, take_part: Move) -> None:
        """Have `take_part` called by `number` threads, or by all if there are fewer.

        Raises RuntimeError once `close` was called, also for `number` 0: the files are closed, and their descriptors
        may be those of other files.
        """
        number = min(number, self._number)
        with self._changing:
            if self._closed:
                raise RuntimeError(f"{self._name}: a transfer after the end of its run")
            while len(self._threads) < number:
                name = f"{self._name}_{len(self._threads)}"
                self._threads.append(thread := threading.Thread(target=self._work, name=name, daemon=True))
                try:
                    thread.start()
                except RuntimeError:  # the system has no more of them
                    self._threads.remove(thread)
                    raise
            for _ in range(number):
                self._asked.put(take_part)

    def close(self) -> None:
        """Finish what was asked for, and end the threads."""
        with self._changing:
            self._closed = True
            for _ in self._threads:
                self._asked.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (take_part := self._asked.get()) is not None:
            take_part()
            del take_part  # it has the memory of its transfer


class Transfer:
    """A transfer between memory and storage, which moves once it has begun; it owns the memory until `wait` returns."""

    def __init__(self, parts: Iterable[tuple[Movers, Iterable[Move]]]) -> None:
        """parts: the movers of a drive, and its blocks to move; parts of the same drive are moved together."""
        self.left = defaultdict[Movers, deque[Move]](deque)  # to begin
        for movers, moves in parts:
            self.left[movers].extend(moves)
        self._changed = threading.Condition(threading.Lock())
        self._num_moving = 0
        self._has_begun = False
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether no block moves, or will."""
        return not self._num_moving and not any(self.left.values())

    def begin(self) -> Transfer:
        """Let the threads move it while the caller does something else."""
        self._ask(all_but=0)
        return self

    def wait(self) -> None:
        """Return when every byte has arrived; raises the first error of a block.

        Nothing moves any more when it raises, also where the user has interrupted it. Only the main thread can be
        interrupted: it does not move blocks itself.
        """
        takes_part = threading.current_thread() is not threading.main_thread()
        try:
            if not self._has_begun:
                self._ask(all_but=int(takes_part))
            if takes_part:
                for moves in self.left.values():
                    self._take_part(moves)
            self._wait()
        except BaseException as error:
            with self._changed:
                if not self._has_begun:  # some drives may have been asked, and others not
                    self._end(error)
            self._wait()
            raise
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_over)

    def _ask(self, *, all_but: int) -> None:
        """all_but: so many of the first drive's blocks need no thread."""
        for movers, moves in self.left.items():
            movers.ask(len(moves) - all_but, partial(self._take_part, moves))
            all_but = 0
        self._has_begun = True

    def _take_part(self, moves: deque[Move]) -> None:
        """Move blocks until none is left to begin."""
        while (move := self._next(moves)) is not None:
            error: BaseException | None = None
            try:
                move()
            except BaseException as raised:  # noqa: BLE001  who waits gets it
                error = raised
            self._moved(error)

    def _next(self, moves: deque[Move]) -> Move | None:
        with self._changed:
            if not moves:
                return None
            self._num_moving += 1
            return moves.popleft()

    def _moved(self, error: BaseException | None) -> None:
        with self._changed:
            self._num_moving -= 1
            if error is not None:
                self._end(error)
            if self.is_over:
                self._changed.notify_all()

    def _end(self, error: BaseException) -> None:
        """Leave out what has not begun: a broken drive answers slowly."""
        self._error = self._error or error
        for moves in self.left.values():
            moves.clear()
