"""A signal that ends a run does so wherever it comes."""

from __future__ import annotations

import signal
import sys
import time
import weakref

import pytest

from gs_compile.runtime.signals import end_by_exit


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
