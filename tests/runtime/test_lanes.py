"""Lanes: first in, first out; what waits for what; and what an error on one of them does to all."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from gs_compile.errors import LaneError
from gs_compile.runtime import lanes as lanes_module
from gs_compile.runtime.lanes import Failure, Lane, Ticket
from gs_compile.runtime.trace import Trace


class Lanes:
    """Lanes of one run, by name."""

    def __init__(self):
        self.failure, self.trace = Failure(), Trace(events=True)
        self.lanes = {}

    def submit(self, lane, name, run, *after, nbytes=0, kind=""):
        if lane not in self.lanes:
            self.lanes[lane] = Lane(lane, self.failure, self.trace)
        return self.lanes[lane].submit(name, run, after, nbytes=nbytes, kind=kind, stage="forward 0")

    def close(self):
        for lane in self.lanes.values():
            lane.close()


@pytest.fixture
def lanes():
    before = set(threading.enumerate())
    found = Lanes()
    yield found
    found.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("greedysnake")]


def fail():
    raise OSError(5, "the drive is gone")


def test_a_lane_is_first_in_first_out_and_lanes_run_side_by_side(lanes):
    order, gate = [], threading.Event()
    blocked = lanes.submit("ssd_read", "a", gate.wait)
    behind = lanes.submit("ssd_read", "b", lambda: order.append("b"))
    lanes.submit("cpu", "c", lambda: order.append("c")).wait()
    assert not blocked.done
    assert not behind.done
    gate.set()
    behind.wait()
    assert order == ["c", "b"]


def test_what_was_done_is_recorded_before_it_is_told(lanes):
    lanes.submit("ssd_read", "prefetch w3b", lambda: None, nbytes=100, kind="w").wait()
    assert lanes.trace.totals()["ssd_read"].nbytes_by_kind == {"w": 100}
    (event,) = lanes.trace.events()
    assert (event.label.name, event.label.stage) == ("prefetch w3b", "forward 0")


def test_memory_is_let_go_before_the_operation_is_done(lanes):
    memory = torch.zeros(8)
    alive = weakref.ref(memory)
    ticket = lanes.submit("cpu", "update", memory.add_(1).zero_)
    del memory
    ticket.wait()
    gc.collect()
    assert alive() is None


def test_an_error_says_of_which_operation_it_is(lanes):
    ticket = lanes.submit("ssd_read", "prefetch w3b", fail)
    with pytest.raises(LaneError, match=r"prefetch w3b: .*the drive is gone") as caught:
        ticket.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert ticket.done


def test_a_stream_waits_for_a_copy_and_the_thread_does_not():
    """Fault 14: the thread waited until the copy had ended."""
    copying, waited = SimpleNamespace(query=lambda: False, synchronize=lambda: pytest.fail("waits")), []
    ticket = Ticket("h2d w1")
    ticket.event = copying
    ticket.finish()
    ticket.join(SimpleNamespace(wait_event=waited.append))
    assert waited == [copying]
    assert not ticket.done


def test_after_an_error_nothing_is_carried_out_on_any_lane(lanes):
    done = []
    first = lanes.submit("ssd_read", "prefetch w3b", fail)
    needs = lanes.submit("cpu", "update w3", lambda: done.append(1), first)
    behind = lanes.submit("cpu", "update w2", lambda: done.append(2))
    for ticket in (needs, behind):
        with pytest.raises(LaneError, match="the drive is gone"):
            ticket.wait()
    assert done == []
    assert lanes.failure.first is first
    with pytest.raises(LaneError, match=r"^prefetch w3b: \[Errno 5\] the drive is gone \[lane\]$"):
        lanes.failure.check()


def test_an_error_without_words_is_named(lanes):
    ticket = Ticket("the step")
    ticket.finish(KeyboardInterrupt())
    with pytest.raises(LaneError, match=r"^the step: KeyboardInterrupt \[lane\]$"):
        ticket.wait()


def test_a_lane_that_cannot_start_fails_what_is_submitted(monkeypatch):
    """Its thread ended without a word, and who waited for it waited for ever."""

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lanes_module, "limit_threads", refused)
    lane, done = Lane("cpu", Failure(), Trace(), num_threads=1), []
    ticket = lane.submit("update w3", lambda: done.append(1))
    lane.close()
    assert ticket.done
    with pytest.raises(LaneError, match="the start of lane cpu: RuntimeError: can't start new thread"):
        ticket.wait()
    assert done == []


def test_a_ticket_is_finished_also_where_its_error_cannot_be_told(monkeypatch):
    """Others wait for it without end otherwise."""

    def interrupted(*_):
        raise KeyboardInterrupt

    failure = Failure()
    monkeypatch.setattr(failure, "note", interrupted)
    lane, ticket = Lane("h2d", failure, Trace()), Ticket("h2d w1")
    with pytest.raises(KeyboardInterrupt):
        lane._finish(ticket, OSError(5, "gone"))
    assert ticket.done
    lane.close()


def test_closing_finishes_what_was_submitted(lanes):
    done = []
    for number in range(100):
        lanes.submit("cpu", str(number), lambda number=number: done.append(number))
    lanes.close()
    assert done == list(range(100))
    lanes.lanes.clear()


def test_an_interruption_is_heard_where_another_error_is_on_its_way():
    failure, is_interrupted, heard = Failure(), threading.Event(), []

    def issue():
        try:
            with failure.issued():
                is_issued.set()
                is_interrupted.wait()
                raise ValueError
        except (ValueError, KeyboardInterrupt) as error:
            heard.append(type(error))

    is_issued, thread = threading.Event(), threading.Thread(target=issue)
    thread.start()
    is_issued.wait()
    assert failure.interrupt(KeyboardInterrupt())
    is_interrupted.set()
    thread.join()
    assert heard == [KeyboardInterrupt]
