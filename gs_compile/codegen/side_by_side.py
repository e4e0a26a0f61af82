"""side_by_side: functions of units compiled at the same time, on a CPU.

Most of that time a process waits for a C++ compiler. So if the first function is not in inductor's cache, forks of this
process share the others, compile them into the cache and end; then this process loads all from there. A fork that fails
or takes too long only costs time: this process compiles what it does not find.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gs_compile.capture.dynamo import compile_lock
from gs_compile.capture.inductor import in_this_process, num_cache_misses
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.machine import available_memory, num_ranks, usable_cores
from gs_compile.progress import stage

NBYTES = 1 << 30  # of memory that a fork with its C++ compiler may take
PR_SET_PDEATHSIG = 1  # of Linux's prctl
ENDS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 60.0, 3.0  # seconds that a fork may take at least, and as a multiple of this process's own share


class Wanted(NamedTuple):
    """A function of a unit's code, given by the arguments of `Differentiated.function`."""

    code: Differentiated
    name: str
    level: int

    def compile(self) -> None:
        self.code.function(self.name, self.level)


def compile_all(wanted: Sequence[Wanted]) -> None:
    """Compile those that are not compiled yet; a bar on the terminal shows the progress."""
    with compile_lock:  # a fork has only this thread, with the locks that it holds
        missing = dict.fromkeys(each for each in wanted if not each.code.has_function(each.name, each.level))
        if missing:
            _compile(*missing)


def _compile(first: Wanted, *others: Wanted) -> None:
    with stage("compiling the layers' code", 1 + len(others)) as advance:

        def own(share: Sequence[Wanted]) -> None:
            for each in share:
                each.compile()
                advance()

        known = num_cache_misses()
        own([first])
        may_fork = num_cache_misses() > known and all(each.code.compiles_in_forks for each in others)
        number = max(1, min(len(others), _most_processes())) if may_fork else 1
        mine, *shares = (others[place::number] for place in range(number))
        with _forked(shares) as wait:
            own(mine)
            wait()
        for share in shares:
            own(share)


def _most_processes() -> int:
    if sys.platform != "linux":
        return 1
    cores, memory = usable_cores(), available_memory() // NBYTES
    return max(1, min(cores, memory) // num_ranks())


@contextmanager
def _forked(shares: Sequence[Sequence[Wanted]]) -> Iterator[Callable[[], None]]:
    """A process for each share; yields a function that waits for them. At the end none is left, also after an error."""
    start, running = time.monotonic(), set[int]()

    def wait() -> None:
        least, times = PATIENCE
        end = time.monotonic() + max(least, times * (time.monotonic() - start))
        while running and time.monotonic() < end:
            running.difference_update([pid for pid in running if _has_ended(pid)])
            time.sleep(0.01)

    try:
        with suppress(OSError):  # no memory, or too many processes: go on with fewer
            for share in shares:
                running.add(_fork(share))
        yield wait
    finally:
        for pid in running:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # somebody else has waited for it
        return True


def _fork(share: Sequence[Wanted]) -> int:
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # with its handlers a fork would go on as this process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of other threads' locks, and the fork takes none of them
            pid = os.fork()
        if pid == 0:
            try:
                _end_with(parent)
                _compile_quietly(share, before)
            finally:
                os._exit(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _end_with(parent: int) -> None:
    """Have the kernel end this fork with its parent: the fork also holds the parent's locks on the storage."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that
        os._exit(0)


def _compile_quietly(share: Sequence[Wanted], blocked: Iterable[int]) -> None:
    """In a fork: prints nothing, ends at Ctrl-C, and does not use the parent's inductor processes.

    blocked: the signals to block, as its parent does.
    """
    for number in ENDS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with in_this_process():
        for each in share:
            each.compile()
