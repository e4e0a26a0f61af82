"""open_calls: the training calls of one model between their forward and the end of their backward."""

from __future__ import annotations

import threading
import weakref
from itertools import count

from gs_compile.capture.internals import comes_to
from gs_compile.errors import MemoryBudgetError, StepOrderError
from gs_compile.machine import format_bytes
from gs_compile.model.call import Call
from gs_compile.planner.builder import planned_peak
from gs_compile.program.ir import Program
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.issue import TieredExecutor


class OpenCalls:
    """The executors of open calls, by call.

    A call lives as long as its autograd node, and so as long as its loss: to drop the loss is to give up the call.
    """

    def __init__(self) -> None:
        self._calls: dict[TieredExecutor, weakref.ref[Call]] = {}
        self._undone: weakref.WeakSet[Call] = weakref.WeakSet()  # those without a backward, also if they were given up
        self.most_undone = 0  # at a time
        self.refusal = ""  # says when the latest given-up calls were given up
        self._opened_by = threading.current_thread()  # the latest call
        self.may_be_repeated = True  # only calls have come since the step began

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, executor: Executor) -> bool:
        return executor in self._calls

    def begin(self, executor: TieredExecutor, call: Call) -> None:
        """Run the forward of a call; one that trains is open afterwards. If the forward is ended early, also by the
        user, it leaves no memory in use.
        """
        try:
            executor.forward()
            if call.training:
                self._add(executor, call)
        except BaseException:
            executor.close()
            raise

    def _add(self, executor: TieredExecutor, call: Call) -> None:
        self._calls[executor] = weakref.ref(call)
        self._undone.add(call)
        self.most_undone = max(self.most_undone, len(self._undone))
        self._opened_by = threading.current_thread()

    def end(self, executor: TieredExecutor, call: Call) -> None:
        """Note that the backward of a call has run."""
        del self._calls[executor]
        self._undone.discard(call)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether this thread has begun the current step; autograd may run backwards in others."""
        return self._opened_by is threading.current_thread()

    def refuse_other_threads(self, *, has_gradients: bool) -> None:
        """Raise `StepOrderError` if the open step is that of another thread, which would lose it."""
        if (self or has_gradients) and not self.is_of_this_thread and self._opened_by.is_alive():
            raise StepOrderError(
                f"the thread {self._opened_by.name} is between the forward and the backward of a step of this model, "
                "which has one step at a time: train it from one thread, or hold a lock until optimizer.step()"
            )

    @property
    def undone(self) -> list[Call]:
        """The calls whose loss is alive and has not had its backward, also if they were given up."""
        return list(self._undone)

    @property
    def number_in_backward(self) -> int:
        """The number of calls that the current backward reaches and that have not had theirs."""
        nodes = (call.node and call.node() for call in self._undone)
        return sum(node is not None and comes_to(node) for node in nodes)

    @property
    def free_number(self) -> int:
        """The least number that no open call has."""
        taken = {executor.number for executor in self._calls}
        return next(number for number in count() if number not in taken)

    def refuse_full_device(self, program: Program, nbytes: int | None) -> None:
        """Raise `MemoryBudgetError` if the device has no room for one more call. nbytes: for all; None: unbounded."""
        calls = [(each, each.device) for each in (*(executor.program for executor in self._calls), program)]
        known = [(planned_peak(each, "device"), bound.waiting_nbytes) for each, bound in calls if bound is not None]
        if nbytes is None or not (self._calls and known):
            return
        needed = sum(waiting for _, waiting in known) + max(most - waiting for most, waiting in known)
        if needed > nbytes:
            raise MemoryBudgetError(
                f"device_memory is {format_bytes(nbytes)}; a call between a forward and its backward takes "
                f"{format_bytes(needed)} ({needed} bytes) together with that step: call backward first"
            )

    def let_lost_go(self) -> None:
        """Close the calls whose loss is gone."""
        for executor in [executor for executor, call in self._calls.items() if call() is None]:
            self.give_up(executor)

    def abandon(self, refusal: str, *, by_call: bool = False) -> None:
        """Give up all open calls. refusal: for the errors of their backwards; by_call: because of another call."""
        self.refusal, self.may_be_repeated = refusal, by_call
        for executor in list(self._calls):
            self.give_up(executor)

    def give_up(self, executor: TieredExecutor) -> None:
        """Close one."""
        executor.close()
        del self._calls[executor]
