"""Threads that use one model take turns, and none loses its step to another."""

from __future__ import annotations

import threading

import pytest
from tiered import adamw, options, outcome, step, tokens

from gs_compile.errors import StepOrderError
from gs_compile.model import in_memory
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True


def test_a_thread_that_comes_into_a_step_is_refused(harness, reference, tmp_path):
    """Fault 5: both ended with a KeyError. Between a forward and its backward, and after it; a read waits its turn."""

    def train():
        with pytest.raises(StepOrderError) as caught:
            harness.model(input_ids=(ids := tokens(9)), labels=ids).loss.backward()
        refused.append(str(caught.value))

    def in_another_thread(use):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    refused, losses, norms = [], [], []
    with harness.fresh(adamw, options(tmp_path, alpha=0.5)) as optimizer:
        for number in range(3):
            loss = harness.model(input_ids=(ids := tokens(number)), labels=ids).loss
            in_another_thread(train)
            in_another_thread(harness.model.state_dict)
            loss.backward()
            in_another_thread(train)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            norms.append(optimizer.last_step.grad_norm)
        assert [("is between the forward" in each, "has not: some" in each) for each in refused] == 3 * [
            (True, False),
            (False, True),
        ]
        assert not outcome(harness.model, optimizer, losses, norms).differences(reference)


def test_threads_that_train_at_once_break_nothing(harness, tmp_path):
    def train():
        for number in range(8):
            try:
                step(harness.model, optimizer, tokens(number))
                done.append(number)
            except StepOrderError:
                refused.append(number)

    done, refused = [], []
    with harness.fresh(adamw, options(tmp_path, alpha=0.5)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        threads = [threading.Thread(target=train) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) + len(refused) == 16
        assert len(done) >= 1
        step(harness.model, optimizer, tokens(8))


def test_a_thread_that_commits_as_a_step_is_closed_has_all_of_it(harness, tmp_path, monkeypatch):
    """It came between the end of the updates and the number of steps: the commit was of one step less."""

    def update(*_):
        other.start()
        other.join(0.2)

    with harness.fresh(adamw, options(tmp_path, durability="step")) as optimizer:
        other = threading.Thread(target=optimizer.commit)
        monkeypatch.setattr(in_memory, "update", update)
        step(harness.model, optimizer, tokens(0))
        other.join()
        assert read(tmp_path / FOLDER).step == 1
