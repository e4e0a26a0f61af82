"""How far computations are launched ahead: by what they took when they ran last, and by one where that is not known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gs_compile.runtime import ahead
from gs_compile.runtime.ahead import Ahead


class Computing:
    """A device that begins a computation when somebody waits for that, and is over with those before it."""

    def __init__(self):
        self.ahead, self.events, self.clock = (
            Ahead(),
            [],
            SimpleNamespace(seconds=lambda begin, end: (begin.at, end.at)),
        )

    def launch(self, what, seconds):
        """How many computations are waiting when one may be launched."""
        self.ahead.wait(lambda: None)
        number = sum(not begin.happened for begin, _ in self.events)
        begin, end = (SimpleNamespace(at=at, happened=False) for at in (0.0, seconds))
        begin.query, end.query = lambda: begin.happened, lambda: end.happened
        self.events.append((begin, end))
        self.ahead.add(what, self.clock, begin, end)
        return number

    def begin(self, event, check):
        check()
        for begin, end in self.events:
            begin.happened = True
            if begin is event:
                return
            end.happened = True


@pytest.fixture
def device(monkeypatch):
    found = Computing()
    monkeypatch.setattr(ahead, "wait_for", found.begin)
    return found


def test_what_was_never_timed_is_waited_for(device):
    assert [device.launch(number, 1e-3) for number in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(("seconds", "most"), [(1e-3, 5), (4e-3, 1), (6e-3, 0), (1.0, 0)])
def test_as_many_wait_as_fill_five_milliseconds(device, seconds, most):
    device.launch("forward", seconds)
    device.launch("other", 1.0)  # that `forward` is over shows with it
    found = [device.launch("forward", seconds) for _ in range(20)]
    assert max(found) == most
    assert found[-1] == most


def test_a_failure_ends_the_wait(device):
    device.launch("forward", 1.0)

    def failed():
        raise RuntimeError("a lane has failed")

    with pytest.raises(RuntimeError, match="a lane has failed"):
        device.ahead.wait(failed)
