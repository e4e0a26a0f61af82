"""A signal that ends a run does so wherever it comes."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import pytest

from gs_compile.runtime.signals import end_by_exit, watch


class Held:
    pass


class Ended:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def finalized() -> None:
    weakref.finalize(Held(), signal.raise_signal, signal.SIGTERM)


def called_back() -> None:
    held = Held()
    reference = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGTERM))
    del held
    assert reference() is None


@pytest.mark.parametrize("collect", [finalized, Ended, called_back])
def test_one_that_comes_into_a_finalizer_is_answered_after_it(collect):
    """Python prints what a finalizer, or a weak reference's callback, raises, and goes on: the process would not end."""
    hook = sys.unraisablehook
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        end_by_exit()
        collect()
        with pytest.raises(SystemExit) as ended:
            time.sleep(10)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook


class Run:
    def interrupt(self, error: BaseException) -> bool:
        return False


def code_of_a_fork(act) -> int:
    """The exit code of a child that does it."""
    if not (child := os.fork()):
        code = 99
        try:
            code = act()
        finally:  # nothing of it is to be pytest's once more
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interrupted() -> int:
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        return 7
    return 1


def watched() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run()
    watch(run)
    return code_of_a_fork(interrupted)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ctrl_c_reaches_a_worker_as_it_would_without_a_run():
    """A DataLoader's workers end quietly then. Fault: it killed them, so the loader raised beside KeyboardInterrupt."""
    assert code_of_a_fork(watched) == 7
