"""What a training step does when something fails under it: it says what and where, ends, and leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import threading
import time
import weakref
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from tiered import adamw, files_in, gpt2, loss_of, options, our_threads, outcome, step, tokens, two_groups

from gs_compile.errors import GreedySnakeError, LaneError, MemoryBudgetError, StorageError
from gs_compile.runtime import coordinators, slab
from gs_compile.runtime.coordinators import Parameters
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.lanes import Lane
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.pages import Pages
from gs_compile.runtime.storage import ssd, system
from gs_compile.runtime.sums import Sums
from gs_compile.runtime.units import CompiledUnits

KEEPS_CAPTURES = True
CALLS = ("preadv", "pwritev")
SECONDS = 60  # an error surfaces at once; what is more is a loaded machine


class Counted:
    """Calls of the system, over all threads; the one that is armed fails, and those after it do not."""

    def __init__(self, monkeypatch, *names):
        self.number = 0
        self.armed = None
        self.failed_at = None
        self._lock = threading.Lock()
        for name in names:
            monkeypatch.setattr(system, name, partial(self._call, getattr(system, name)))

    def arm(self, index):
        self.number, self.armed = 0, index

    def _call(self, real, *arguments):
        with self._lock:
            index, self.number = self.number, self.number + 1
        if index == self.armed:
            self.failed_at = time.monotonic()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)


def whole_steps(model, optimizer, num_steps):
    """Steps and all that belongs to them."""
    for number in range(num_steps):
        step(model, optimizer, tokens(number))
    optimizer.synchronize()


def assert_over(model, optimizer, *directories):
    """Nothing is left of the run, and who goes on is told why that cannot be."""
    assert our_threads() == []
    assert files_in(*directories) == []
    for use in (lambda: step(model, optimizer, tokens(9)), optimizer.synchronize, optimizer.state_dict):
        with pytest.raises(GreedySnakeError):
            use()


def maker(chosen):
    """Where gradients are clipped, each step is: speculative updates are rolled back, and run again in the next."""
    return partial(adamw, max_grad_norm=0.01) if "clip" in chosen else adamw


def break_call(harness, monkeypatch, directory, index, **chosen):
    """Let the index-th call of the second step fail; returns the error."""
    with monkeypatch.context() as patched, harness.fresh(maker(chosen), options(directory, **chosen)) as optimizer:
        calls = Counted(patched, *CALLS)
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        calls.arm(index)
        with pytest.raises((LaneError, StorageError)) as caught:
            whole_steps(harness.model, optimizer, 1)
        assert calls.failed_at is not None
        assert time.monotonic() - calls.failed_at < SECONDS
        assert_over(harness.model, optimizer, directory)
    return caught.value


def num_calls(harness, monkeypatch, directory, **chosen):
    """The reads and writes of one step."""
    with monkeypatch.context() as patched, harness.fresh(maker(chosen), options(directory, **chosen)) as optimizer:
        calls = Counted(patched, *CALLS)
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        calls.arm(None)
        step(harness.model, optimizer, tokens(1))
        optimizer.synchronize()
        return calls.number


WAYS = (
    {"alpha": 0.5},
    {"alpha": 1.0, "separate_device": True},
    {"alpha": 0.3, "clip": "speculative", "ratios": {"optimizer": 0.3}},
)


@pytest.mark.parametrize(
    "stride", [29, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["some", "all"]
)
@pytest.mark.parametrize("chosen", WAYS, ids=str)
def test_a_failed_call_ends_the_run_and_says_where(harness, monkeypatch, tmp_path, chosen, stride):
    total = num_calls(harness, monkeypatch, tmp_path, **chosen)
    assert total > 30
    for index in range(0, total, stride):
        error = break_call(harness, monkeypatch, tmp_path, index, **chosen)
        assert re.search(r"(read|write) of (s?[ws]|x)[eht0-9].* failed, \d+ bytes at offset \d+", str(error)), error
        assert os.strerror(errno.EIO) in str(error)
        assert str(tmp_path) in str(error)
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        assert any(isinstance(cause, OSError) and cause.errno == errno.EIO for cause in causes)


@pytest.mark.parametrize("fault", ["short", "interrupted"])
def test_short_and_interrupted_calls_change_nothing(harness, reference, monkeypatch, tmp_path, fault):
    for name in CALLS:
        real, number = getattr(system, name), count()

        def call(fd, memory, offset, real=real, number=number):
            if fault == "interrupted" and next(number) % 3:
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            short = max(ssd.PAGE, memory.nbytes // 2 + 100) if fault == "short" else memory.nbytes
            return min(real(fd, memory, offset), short)

        monkeypatch.setattr(system, name, call)
    assert not harness.train(adamw, options(tmp_path), num_steps=3).differences(reference)


def broken(*_, **__):
    raise ZeroDivisionError("broken on purpose")


PLACES = {
    "an update": (OptimizerStep, "update", {}),
    "a late update": (OptimizerStep, "update", {"alpha": 1.0}),
    "a speculative update": (OptimizerStep, "update", {"alpha": 0.0, "clip": "speculative"}),
    "a commit": (Parameters, "commit", {"alpha": 0.0, "clip": "speculative", "ratios": {"parameter": 1.0}}),
    "a copy to the device": (Parameters, "send_piece", {"separate_device": True}),
    "a transfer": (coordinators, "transfer", {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_on_a_lane_ends_the_run(harness, monkeypatch, tmp_path, place):
    owner, name, chosen = PLACES[place]
    make = partial(adamw, max_grad_norm=1e6) if place == "a commit" else maker(chosen)
    with harness.fresh(make, options(tmp_path, **chosen)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(LaneError, match="broken on purpose") as caught:
            whole_steps(harness.model, optimizer, 1)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert_over(harness.model, optimizer, tmp_path)


@pytest.mark.parametrize("number", range(4))
def test_an_error_that_nobody_waited_for_ends_the_run_with_the_next_use(harness, tmp_path, number):
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        call = partial(harness.model, input_ids=(ids := tokens(1)), labels=ids)
        call().loss.backward()
        with pytest.raises(LaneError):
            optimizer.engine.tiers.lane("cpu").submit("failing", broken).wait()
        with pytest.raises(LaneError, match="failing: broken on purpose"):
            (optimizer.step, call, harness.model.state_dict, optimizer.synchronize)[number]()
        assert_over(harness.model, optimizer, tmp_path)


def none_left(*_, **__):
    raise torch.OutOfMemoryError("none left")


@pytest.mark.parametrize(
    ("name", "cause", "durability"),
    [
        pytest.param("update", broken, 0, marks=pytest.mark.slow),
        ("update", broken, 1),
        ("gradient", broken, 0),
        ("gradient", none_left, 0),
    ],
    ids=["a lane", "a lane, in a durable run", "the walker", "out of memory"],
)
def test_a_run_that_failed_gives_all_memory_back(monkeypatch, tmp_path, name, cause, durability):
    """At once, but for what the frames of an error hold that is the user's code's; and it is collected with its model."""
    mapped = weakref.WeakSet()
    monkeypatch.setattr(slab, "Pages", lambda *given: mapped.add(found := Pages(*given)) or found)
    model = gpt2()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path, durability=durability))
    step(model, optimizer, tokens(0))
    engine = weakref.ref(optimizer.engine)
    with monkeypatch.context() as patched:
        patched.setattr(OptimizerStep, name, cause)
        with pytest.raises((LaneError, ZeroDivisionError, MemoryBudgetError)) as caught:
            whole_steps(model, optimizer, 1)
    gc.collect()
    assert not mapped or (name, cause) == ("gradient", broken)
    del caught
    gc.collect()
    assert not mapped
    del model, optimizer
    gc.collect()
    assert engine() is None


def test_a_failure_of_the_walker_ends_the_run(harness, monkeypatch, tmp_path):
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        monkeypatch.setattr(OptimizerStep, "gradient", broken)
        with pytest.raises(ZeroDivisionError):
            step(harness.model, optimizer, tokens(1))
        with pytest.raises(LaneError, match=r"ended this run \(to train again, make the model and its optimizer anew"):
            step(harness.model, optimizer, tokens(1))
        assert_over(harness.model, optimizer, tmp_path)


def test_an_interrupt_in_a_wait_ends_the_run_or_costs_only_a_forward(harness, monkeypatch, tmp_path):
    real = system.preadv
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()

        def slow(*arguments):
            time.sleep(0.05)
            return real(*arguments)

        monkeypatch.setattr(system, "preadv", slow)
        interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the interrupt may come as soon as its time runs
            interrupt.start()
            whole_steps(harness.model, optimizer, 20)
        if optimizer.engine.tiers.closed:
            assert_over(harness.model, optimizer, tmp_path)
        else:  # it came in a forward
            monkeypatch.undo()
            whole_steps(harness.model, optimizer, 2)


@pytest.mark.parametrize(("verb", "again"), [("forward", False), ("forward", True), ("backward", False)])
def test_an_interrupt_in_the_computation(harness, monkeypatch, tmp_path, verb, again):
    """again: one more comes as the late updates of the step before are issued, in the place of the forward."""

    def interrupted(*_, **__):
        if again:
            patched.setattr(TieredExecutor, "_submit", interrupted)
        raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path, alpha=0.5)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        with monkeypatch.context() as patched:
            patched.setattr(CompiledUnits, verb, interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(harness.model, optimizer, tokens(1))
        if again or verb == "backward":  # some units are updated, some are not
            assert_over(harness.model, optimizer, tmp_path)
        else:
            whole_steps(harness.model, optimizer, 2)


def test_a_forward_that_fails_with_no_late_updates_issues_nothing_more(harness, monkeypatch, tmp_path):
    """Fault: all layers that were left were read from SSD, ahead of the error, and of the end by Ctrl-C."""
    real, issued = TieredExecutor._issue_at, []

    def issue(executor, at):
        issued.append(executor.program.ops[at].verb)
        real(executor, at)

    with harness.fresh(adamw, options(tmp_path, alpha=0.0)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        with monkeypatch.context() as patched:
            patched.setattr(TieredExecutor, "_issue_at", issue)
            patched.setattr(CompiledUnits, "embed", broken)
            for trains in (False, True):
                with torch.set_grad_enabled(trains), pytest.raises(ZeroDivisionError):
                    loss_of(harness.model, tokens(1))
                assert issued[-1] == "embed"
        whole_steps(harness.model, optimizer, 2)


def test_an_interrupt_ahead_of_the_backward_half_ends_the_run(harness, monkeypatch, tmp_path):
    """Where updates wait, `step()` would make them of sums that have no gradient yet."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        loss = harness.model(input_ids=(ids := tokens(1)), labels=ids).loss
        with monkeypatch.context() as patched:
            patched.setattr(TieredExecutor, "scale", interrupted)
            with pytest.raises(KeyboardInterrupt):
                (loss * 0.5).backward()
        assert_over(harness.model, optimizer, tmp_path)


def test_an_interrupt_while_a_gradient_from_outside_is_added_ends_the_run(harness, monkeypatch, tmp_path):
    """Fault: the sums had a part of it, and `step()` made updates of that."""
    real, number = Sums._write, count()

    def interrupted(*given):
        if next(number) == 1:
            raise KeyboardInterrupt
        real(*given)

    with harness.fresh(adamw, options(tmp_path, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        loss_of(harness.model, tokens(1)).backward()
        monkeypatch.setattr(Sums, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sum(each.square().sum() for each in harness.model.parameters()).backward()
        assert_over(harness.model, optimizer, tmp_path)


def test_a_step_whose_backward_failed_is_not_closed(harness, monkeypatch, tmp_path):
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        loss = harness.model(input_ids=(ids := tokens(1)), labels=ids).loss
        monkeypatch.setattr(OptimizerStep, "gradient", broken)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        for use in (optimizer.step, partial(harness.model, input_ids=ids, labels=ids), optimizer.synchronize):
            with pytest.raises(LaneError, match="broken on purpose"):
                use()


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_in_the_clean_up_does_not_stop_it(harness, monkeypatch, tmp_path, has_begun):
    real, number = Lane.close, count()

    def close(lane):
        is_first = next(number) == 0
        if has_begun or not is_first:
            real(lane)
        if is_first:
            raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        monkeypatch.setattr(Lane, "close", close)
        with pytest.raises(KeyboardInterrupt):
            optimizer.engine.tiers.close()
        assert our_threads() == []
        assert files_in(tmp_path) == []


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_fails_in_the_clean_up_hides_no_cause(harness, monkeypatch, tmp_path, caplog):
    """A drive that is gone refuses to remove files, too."""

    def gone(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        descriptors = num_descriptors()
        step(harness.model, optimizer, tokens(0))
        optimizer.synchronize()
        with monkeypatch.context() as patched:
            for owner, name in ((system, "preadv"), (system, "pwritev"), (system, "unlink")):
                patched.setattr(owner, name, gone)
            with pytest.raises(LaneError, match=r"(read|write) of .* failed"):
                whole_steps(harness.model, optimizer, 1)
        assert our_threads() == []
        assert num_descriptors() <= descriptors
    assert "cannot be removed: Input/output error; the next run here removes it" in caplog.text
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
    assert files_in(tmp_path) == []


# What users do --------------------------------------------------------------------------------------------------------


def test_an_error_of_the_user_between_forward_and_backward_costs_that_step_only(harness, reference, tmp_path):
    with harness.fresh(adamw, options(tmp_path, alpha=0.5)) as optimizer:
        losses, norms = [], []
        ids = tokens(7)
        for number in range(3):
            abandoned = harness.model(input_ids=ids, labels=ids).loss
            losses.append(step(harness.model, optimizer, tokens(number)))
            norms.append(optimizer.last_step.grad_norm)
            del abandoned
        assert not outcome(harness.model, optimizer, losses, norms).differences(reference)
