"""What is asked of a device, on stand-ins: clocks that drift, errors that stay, numbers on their way."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from tiered import adamw, options, shared

from gs_compile.placement.shards import QUANTUM
from gs_compile.runtime import stream, updates
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.stream import Accelerator, Cuda, _Arrival

KEEPS_CAPTURES = True
DRIFT = 1.25  # of a device's clock: its seconds by the host's


class Drifting:
    """An event by a clock that is faster than the host's."""

    def __init__(self, host):
        self.at = DRIFT * host.seconds

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)

    def synchronize(self):
        pass


def test_a_new_clock_forgets_the_drift_of_the_one_before(monkeypatch):
    """Of events after it; those before are told by the clock they were recorded under."""
    host = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(stream.time, "perf_counter", lambda: host.seconds)
    monkeypatch.setattr(Accelerator, "new_stream", lambda _: None)
    monkeypatch.setattr(Accelerator, "record", lambda *_: Drifting(host))
    device = Accelerator(torch.device("cuda", 0))
    first = device.clock
    host.seconds = 100.0
    late = Drifting(host)
    assert first.seconds(late, late) == (125.0, 125.0)
    device.set_clock()
    begin, host.seconds = Drifting(host), 100.1
    assert device.clock.seconds(begin, Drifting(host)) == pytest.approx((100.0, 100.125))
    assert first.seconds(late, late) == (125.0, 125.0)


class Runtime:
    """CUDA's, whose last error is reported by the next launch of a kernel, whose ever it is."""

    def __init__(self, answer):
        self.answer, self.last = answer, 0

    def cudaHostRegister(self, *_):  # noqa: N802  its name there
        self.last = self.answer
        return self.answer

    def launch(self, *_, **__):
        last, self.last = self.last, 0
        if last:
            raise RuntimeError(f"CUDA error {last}")


def refuse(code):
    if code:
        raise RuntimeError(f"refused with {code}")


@pytest.mark.parametrize("answer", [0, 2])
def test_a_refused_registration_leaves_no_error_behind(monkeypatch, answer):
    runtime = Runtime(answer)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
    monkeypatch.setattr(torch, "ones", runtime.launch)
    with pytest.raises(RuntimeError, match="refused with 2") if answer else nullcontext():
        Cuda(torch.device("cuda", 0)).pin(4096, 4096)
    runtime.launch()


def test_memory_is_let_go_of_on_its_own_device_whatever_thread_does_it(monkeypatch):
    current = [0]

    @contextmanager
    def on(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", on)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda _: current[-1] != 1))
    Cuda(torch.device("cuda", 1)).unpin(4096)


def test_a_number_that_has_arrived_is_asked_for_no_more():
    asked = []

    class Event:
        def query(self):
            asked.append(self)
            return True

    arrival = _Arrival(torch.tensor(3.0, dtype=torch.float64), Event(), lambda: None)
    assert [arrival(), arrival()] == [3.0, 3.0]
    assert len(asked) == 1


def test_an_update_asks_once_whether_its_step_is_skipped(tmp_path, monkeypatch):
    """However many pieces it is made in: a question waits for the norms of all gradients so far."""
    asked, pieces, pieces_of = [], [], []
    skipped, elements, run = StepRecord.skipped.fget, updates.Update._elements, updates.Update.run

    def counted(update, *given):
        num_asked, num_pieces = asked.count(get_ident()), len(pieces)
        run(update, *given)
        assert asked.count(get_ident()) == num_asked + 1  # the thread that issues asks for itself
        pieces_of.append(len(pieces) - num_pieces)

    monkeypatch.setattr(updates, "CHUNK", QUANTUM)
    monkeypatch.setattr(StepRecord, "skipped", property(lambda self: asked.append(get_ident()) or skipped(self)))
    monkeypatch.setattr(updates.Update, "_elements", lambda *given: pieces.append(given) or elements(*given))
    monkeypatch.setattr(updates.Update, "run", counted)
    ratios = {"parameter": 1.0, "optimizer": 1.0}
    given = options(tmp_path, alpha=0.3, clip="speculative", ratios=ratios)
    shared().train(partial(adamw, max_grad_norm=0.5), given, 2)
    assert max(pieces_of) > 3
