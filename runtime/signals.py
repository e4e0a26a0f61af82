"""signals: a run that is asked to end does so as after an error, so that it leaves no files."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGINT raises KeyboardInterrupt anyway


def end_by_exit() -> None:
    """From now on such a signal raises SystemExit on the main thread, with the exit code that a shell shows for it.

    A second one ends the process at once. Signals that somebody else handles or ignores stay with them, and all do
    where another thread than the main one calls this, which Python does not allow to handle any.
    """
    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            found = signal.getsignal(number)
            is_of_parent = isinstance(found, partial) and found.func is _end and found.args != (os.getpid(),)
            if found is signal.SIG_DFL or is_of_parent:
                signal.signal(number, partial(_end, os.getpid()))


def _end(pid: int, number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if os.getpid() != pid:  # a forked child, which has nothing to remove
        signal.raise_signal(number)
    raise SystemExit(128 + number)
