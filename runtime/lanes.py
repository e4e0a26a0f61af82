"""lanes: lanes run operations, each lane one after the other, different lanes in parallel.

A lane is first-in-first-out. Its next operation starts when the `Ticket`s that it waits for are done. Lanes of
transfers and updates have threads; the thread that issues the program computes.

    issue      x2_0 = forward(x1_0, w1)      x2_1 = forward(x1_1, w1)         the thread that issues, and computes
    ssd_read       w3b.host = prefetch(...)        s1a.host = prefetch(...)   threads that wait for the drives
    cpu                      update(dw2a.host ...)                            a thread that computes a little

If the device has streams, the two directions of the link are streams as well: the lane's thread launches a copy on the
lane's stream, and the ticket carries an event for which other streams and threads wait. If a copy can be launched at
once, the submitting thread does so: to wake up another thread costs more than the launch.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gs_compile.errors import LaneError, RankError
from gs_compile.runtime.alarm import OF_US, in_words
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import Device, Event, Stream, settle, wait_for
from gs_compile.runtime.threads import limit_threads
from gs_compile.runtime.trace import Label, Trace

POLL_SECONDS = 0.2  # between two looks at what may have failed


class Ticket:
    """Tells when one operation is done, and raises its error."""

    def __init__(self, name: str = "", check: Callable[[], None] = lambda: None, *, is_in_order: bool = False) -> None:
        """check: raises if the operation may never be done.

        is_in_order: it is on the computation's stream, so later users of its memory wait for it anyway.
        """
        self.name = name
        self._check = check
        self.is_in_order = is_in_order
        self.error: BaseException | None = None
        self.event: Event | None = None  # where the operation was launched on a stream
        self.is_launched = False
        self._until_launched = threading.Lock()  # held until then; a threading.Event takes 2 us more to make
        self._until_launched.acquire()

    @property
    def done(self) -> bool:
        return self.is_launched and (self.event is None or self.event.query())

    def wait(self) -> None:
        """Return when the operation is done; raises `LaneError` from its error, `RankError` from another rank's."""
        self.join(None)

    def join(self, stream: Stream | None) -> None:
        """Let `stream`, or without one this thread, go on only after the operation; raises as `wait`.

        Where a stream runs the operation, the thread waits for its launch only.
        """
        self._wait_for_launch()
        if self.event is not None and stream is not None:
            stream.wait_event(self.event)
        elif self.event is not None:
            wait_for(self.event, self._check)

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is done or launched; called once."""
        self.error = error
        self.is_launched = True
        self._until_launched.release()

    def _wait_for_launch(self) -> None:
        while not self.is_launched:
            if self._until_launched.acquire(timeout=POLL_SECONDS):
                self._until_launched.release()  # for others who wait
            else:
                self._check()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the operation's error, if it has failed or is about to."""
        if not self.is_launched:
            with self._until_launched:
                pass
        if self.error is not None:
            kind = RankError if isinstance(self.error, RankError) else LaneError
            raise kind(f"{self.name}: {str(self.error) or type(self.error).__name__}") from self.error


def join_all(tickets: Sequence[Ticket], stream: Stream | None) -> None:
    """Let `stream` go on only after all of `tickets`; without a stream, this thread."""
    for ticket in tickets:
        ticket.join(stream)


def without_frames(error: BaseException) -> Exception:
    """An error's message without its frames, which hold the loss, by which autograd holds the model.

    Python's collector does not see through autograd, so a model whose run kept such frames would never be collected.
    """
    return RankError(error.message) if isinstance(error, RankError) else RuntimeError(in_words(error))


def clear_frames(error: BaseException | None) -> None:
    """Release the local variables in the frames of an error and of its causes; frames that still run keep theirs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Failure:
    """The first error on any lane of a run, or on another rank. After it nothing more runs.

    A program may be issued by autograd's thread of a device. The main thread then waits for it, and Python calls no
    signal handler: `interrupt` ends what is issued.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.first: Ticket | None = None
        self._ranks = ranks
        self._guard = threading.Lock()
        self._issuing: threading.Thread | None = None
        self._interruption: BaseException | None = None

    @contextmanager
    def issued(self) -> Iterator[None]:
        """This thread issues a program inside the block; at its end, too, this raises what it was interrupted with."""
        before, self._issuing = self._issuing, threading.current_thread()
        try:
            yield
        finally:
            with self._guard:
                self._issuing, late = before, self._interruption
                self._interruption = None
            if late is not None:  # also if another error is being raised: the interruption is told only once
                raise late

    @property
    def is_issuing(self) -> bool:
        """Whether this thread issues a program: then the caller is within a step, for example a signal's handler."""
        return self._issuing is threading.current_thread()

    def interrupt(self, error: BaseException) -> bool:
        """Have the issuing thread raise an error, unless that is the main thread. Returns whether it will."""
        with self._guard:
            if self._issuing in (None, threading.main_thread()):
                return False
            self._interruption = error
            return True

    def note(self, ticket: Ticket, error: BaseException) -> None:
        """An operation has failed, and its ticket is about to raise the error; tell the other ranks now."""
        with self._guard:
            self.first = self.first or ticket
        if self._ranks is not None:
            self._ranks.fail(error)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self._interruption is not None and threading.current_thread() is self._issuing:
            with self._guard:
                error, self._interruption = self._interruption, None
            raise error
        if self.first is not None:
            self.first.raise_error()
        if self._ranks is not None:
            self._ranks.check()


class _Task(NamedTuple):
    ticket: Ticket
    run: Callable[[], object]
    after: Sequence[Ticket]
    label: Label


class Lane:
    """A lane with a thread of its own, and a stream of the device if one is given.

    copies: its operations only launch on that stream, and do not wait.
    """

    def __init__(
        self,
        name: str,
        failure: Failure,
        trace: Trace,
        *,
        device: Device | None = None,
        stream: Stream | None = None,
        num_threads: int | None = None,
        copies: bool = False,
    ) -> None:
        self.name = name
        self._device = device
        self._stream = stream
        self._failure = failure
        self._trace = trace
        self._num_threads = num_threads
        self._launches = copies and stream is not None
        self._submitting = threading.Lock()
        self._num_queued = 0  # tasks that the thread has not carried out yet
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{OF_US} {name}", daemon=True)
        self._thread.start()

    def submit(self, name: str, run: Callable[[], object], after: Sequence[Ticket] = (), **moved: Any) -> Ticket:
        """Call `run` once everything before it on this lane and all of `after` are done; `moved`: fields of `Label`.

        If it is launched at once and fails, this raises the error as `Ticket.wait` does.
        """
        ticket = Ticket(name, self._failure.check)
        task = _Task(ticket, run, after, Label(self.name, name, **moved))
        with self._submitting:
            if self._launches and not self._num_queued and all(each.is_launched for each in after):
                self._launch(task)
            else:
                self._num_queued += 1
                self._tasks.put(task)
        return ticket

    def close(self) -> None:
        """Finish what was submitted, on the device too, and end the thread."""
        self._tasks.put(None)
        self._thread.join()
        if self._device is not None:
            settle(self._device, self._stream)

    def _work(self) -> None:
        try:
            self._enter()
        except BaseException as error:  # noqa: BLE001  of a system without threads, say: all that is submitted fails
            self._finish(Ticket(f"the start of lane {self.name}"), without_frames(error))
        while (task := self._tasks.get()) is not None:
            ticket, failed = task.ticket, None
            try:
                self._carry_out(task)
            except BaseException as error:  # noqa: BLE001  it is raised where the ticket is waited for
                failed = error
                clear_frames(error)
            del task  # holds the buffers of its operation, whose memory others may take once the ticket is done
            self._finish(ticket, failed)
            with self._submitting:
                self._num_queued -= 1

    def _enter(self) -> None:
        if self._num_threads:
            limit_threads(self._num_threads)
        if self._device is not None:
            self._device.enter()

    def _launch(self, task: _Task) -> None:
        """Run a task on the submitting thread, which raises its error at once.

        The ticket's error has no frames: these would hold this thread's, and so the run.
        """
        try:
            self._carry_out(task)
        except BaseException as error:
            self._finish(task.ticket, without_frames(error))
            if isinstance(error, Exception):  # and no interruption
                task.ticket.raise_error()
            raise
        self._finish(task.ticket, None)

    def _finish(self, ticket: Ticket, failed: BaseException | None) -> None:
        try:
            if failed is not None:
                self._failure.note(ticket, failed)  # before an operation that fails because of it
        finally:  # also if the user interrupts it: others wait for the ticket
            ticket.finish(failed)

    def _carry_out(self, task: _Task) -> None:
        join_all(task.after, self._stream)
        self._failure.check()
        if self._stream is None or self._device is None:
            start = time.perf_counter()
            task.run()
            self._trace.add(task.label, start, time.perf_counter())
            return
        with self._device.on(self._stream):
            start_event = self._device.record(self._stream)
            task.run()
            task.ticket.event = self._device.record(self._stream)
        self._trace.add_later(task.label, self._device.clock, start_event, task.ticket.event)
