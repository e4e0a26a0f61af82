"""signals: a signal that ends a run ends it as an error does, so that it leaves no files.

Python calls a handler on the main thread, between two of its instructions. While that thread waits for autograd, which
runs a backward on a thread of the device, this is only after the backward. So Python's C code tells another thread of
the signal through a pipe (`signal.set_wakeup_fd`), and this thread interrupts the run: the backward then raises on the
main thread what the handler would have raised.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, Protocol

from gs_compile.runtime.forks import leave_in_children

ENDING = (signal.SIGTERM, signal.SIGHUP)
BACKWARD = "torch.autograd.graph"  # the module of the main thread's innermost function in a backward
SOON_SECONDS = 0.05  # until a signal comes once more
_FINALIZE = weakref.finalize.__call__.__code__


class Interruptible(Protocol):
    def interrupt(self, error: BaseException) -> bool:
        """Have the thread that runs something raise an error. Returns whether it will."""


def end_by_exit() -> None:
    """Have the signals of `ENDING` raise SystemExit on the main thread, with the exit code that a shell shows for them.

    A second one ends the process at once. Signals that other code handles or ignores are left to it. On another thread
    than the main one this does nothing, as Python allows no handlers there.
    """
    _handle(ENDING)


def watch(run: Interruptible) -> None:
    """Have signals during a backward of a run interrupt it, SIGINT too, which raises KeyboardInterrupt as usual."""
    if (ending := _handle((*ENDING, signal.SIGINT))) is not None:
        ending.runs.add(run)
        ending.listen()


def _handle(numbers: Iterable[signal.Signals]) -> Ending | None:
    """Install one handler in place of Python's own and of a parent process's; None: this thread cannot."""
    if threading.current_thread() is not threading.main_thread():
        return None
    known = (signal.getsignal(number) for number in (*ENDING, signal.SIGINT))
    ending = next((each for each in known if isinstance(each, Ending) and each.pid == os.getpid()), None) or Ending()
    if getattr(sys.unraisablehook, "func", None) != ending.send_again:
        sys.unraisablehook = partial(ending.send_again, sys.unraisablehook)
    for number in numbers:
        found = signal.getsignal(number)
        if found in (signal.SIG_DFL, signal.default_int_handler) or (isinstance(found, Ending) and found is not ending):
            signal.signal(number, ending)
    return ending


class Ending:
    """The handler of signals that end this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.runs: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._answered: set[int] = set()  # signals for which a run raises the error
        self._hears = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.pid and _is_in_finalizer(frame):
            _send_soon(number)
            return
        if number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self.pid:  # a forked child has nothing to remove: the default action
            signal.signal(number, signal.SIG_DFL if number in ENDING else signal.default_int_handler)
            signal.raise_signal(number)
        if number in self._answered:
            self._answered.discard(number)
            return
        raise _error(number)

    def send_again(self, before: Callable[[Any], object], ignored: Any) -> None:
        """Send a signal again whose exception Python has ignored, as in a weak reference's callback. before: the hook
        for other exceptions.
        """
        number = getattr(ignored.exc_value, "signal_number", None)
        if number is None or os.getpid() != self.pid:
            before(ignored)
            return
        signal.signal(number, self)
        _send_soon(number)

    def listen(self) -> None:
        """Start the thread that hears of signals at once, unless other code uses Python's wake-up file descriptor."""
        if self._hears:
            return
        self._hears = True
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        others = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            os.close(reading)
            os.close(writing)
            return
        leave_in_children(self)
        threading.Thread(target=self._hear, args=(reading,), name="signals of greedysnake", daemon=True).start()

    def leave(self) -> None:
        """The signals of a forked child are not its parent's."""
        signal.set_wakeup_fd(-1)

    def _hear(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                is_handled_here = signal.getsignal(number) is self
                if is_handled_here and _waits_for_backward():
                    self._interrupt(number)

    def _interrupt(self, number: int) -> None:
        self._answered.add(number)  # before a run raises, and the main thread goes on
        will_raise = [run.interrupt(_error(number)) for run in list(self.runs)]
        if not any(will_raise):
            self._answered.discard(number)


def _waits_for_backward() -> bool:
    """Whether the main thread is in autograd's engine."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__") == BACKWARD


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _FINALIZE or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _send_soon(number: int) -> None:
    again = threading.Timer(SOON_SECONDS, signal.pthread_kill, [threading.main_thread().ident, number])
    again.daemon = True
    again.start()


def _error(number: int) -> BaseException:
    error = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    error.signal_number = number  # type: ignore[union-attr]
    return error
