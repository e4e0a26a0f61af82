"""A run that cannot begin says why, costs no values, and begins when it can."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from learner import same_tensors
from test_step import Counted
from tiered import (
    Harness,
    adamw,
    another_run,
    files_in,
    gpt2,
    loss_of,
    options,
    our_threads,
    outcome,
    step,
    tokens,
    two_groups,
)

import gs_compile
from gs_compile.errors import (
    LaneError,
    MemoryBudgetError,
    ReleasedParameterError,
    SlowStorageWarning,
    StorageError,
    StorageFullError,
    StorageLockedError,
)
from gs_compile.model.engine import Engine
from gs_compile.model.residency import residency_of
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.storage import system
from gs_compile.runtime.units import CompiledUnits

KEEPS_CAPTURES = True


def assert_goes_on(harness, optimizer, reference):
    """The run that could not begin begins now, with the values the model had."""
    losses, norms = [], []
    for number in range(3):
        losses.append(step(harness.model, optimizer, tokens(number)))
        norms.append(optimizer.last_step.grad_norm)
    assert not outcome(harness.model, optimizer, losses, norms).differences(reference)


def full(patched, directory, num_files=1, error=None):
    """A disk that has room for as many files."""
    calls = count()

    def fallocate(fd, nbytes):
        if next(calls) >= num_files:
            raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)

    patched.setattr(system, "fallocate", fallocate)
    return contextlib.nullcontext()


def small(patched, directory):
    patched.setattr("gs_compile.runtime.storage.drive.free_storage", lambda folder: 10_000)
    return contextlib.nullcontext()


def failing(patched, directory, index):
    """A drive that fails while values move home."""
    Counted(patched, "pwritev").arm(index)
    return contextlib.nullcontext()


def interrupted(patched, directory, at="report_on"):
    """By the user: by default when all values have moved."""
    patched.setattr(f"gs_compile.model.engine.{at}", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    return contextlib.nullcontext()


OBSTACLES = {
    "a full disk": (full, StorageFullError, r"\d \w*B are needed and [\d.]+ \w*B are free"),
    "no room at all": (partial(full, num_files=0), StorageFullError, r"\d \w*B are needed and [\d.]+ \w*B are free"),
    "a small disk": (small, StorageFullError, r"\d \w*B are needed and 9\.8 KiB are free"),
    "a failing drive": (partial(failing, index=2), StorageError, r"write of [wts]"),
    "a drive that fails late": (partial(failing, index=12), StorageError, r"write of [wts]"),
    "the user": (interrupted, KeyboardInterrupt, "^$"),
    "the user, ahead of any value": (partial(interrupted, at="Sums"), KeyboardInterrupt, "^$"),
    "the user, as room is reserved": (partial(full, error=KeyboardInterrupt()), KeyboardInterrupt, "^$"),
    "another run": (lambda _, directory: another_run(directory), StorageLockedError, "pid 1, started"),
}


@pytest.mark.parametrize(  # of two alike one
    "obstacle",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each in ("no room at all", "a failing drive")))
        for each in OBSTACLES
    ],
)
def test_a_run_that_cannot_begin_costs_no_values(harness, reference, tmp_path, obstacle):
    hinder, error, message = OBSTACLES[obstacle]
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        with (
            pytest.MonkeyPatch.context() as patched,
            hinder(patched, tmp_path),
            pytest.raises(error, match=message) as raised,
        ):
            step(harness.model, optimizer, tokens(0))
        assert raised.tb is not None, "whoever has the error keeps nothing of the run"
        assert our_threads() == []
        assert files_in(tmp_path) == []
        assert_goes_on(harness, optimizer, reference)


class Broken:
    """A call that fails on purpose, the index-th time it is made, and works otherwise."""

    def __init__(self, patched, owner, name, index):
        real, calls = getattr(owner, name), count()

        def call(*arguments, **keywords):
            if next(calls) == index:
                raise OSError(errno.EIO, "broken on purpose")
            return real(*arguments, **keywords)

        patched.setattr(owner, name, call)


def test_a_first_call_that_is_interrupted_goes_on_with_no_part_of_the_states(harness, monkeypatch, tmp_path):
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        before = {key: value.clone() for key, value in harness.model.state_dict().items()}
        optimizer.load_state_dict(optimizer.state_dict())
        real, calls = Engine.load_state, count()

        def load_state(engine, *given):
            if next(calls) == 1:
                raise KeyboardInterrupt
            real(engine, *given)

        with monkeypatch.context() as patched:
            patched.setattr(Engine, "load_state", load_state)
            with pytest.raises(KeyboardInterrupt):
                step(harness.model, optimizer, tokens(0))
        assert optimizer.engine.closed
        assert our_threads() == []
        same_tensors(harness.model.state_dict(), before)


def test_planning_that_is_interrupted_as_the_first_step_begins_again_changes_nothing(harness, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        loss_of(harness.model, tokens(0)).backward()
        with monkeypatch.context() as patched:
            patched.setattr("gs_compile.model.first_step.plan_tiers", interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(harness.model, tokens(1))
        assert not optimizer.loop.accumulates
        loss_of(harness.model, tokens(1)).backward()
        optimizer.step()
        assert optimizer.loop.accumulates


PLACES = {
    "the forward": (CompiledUnits, "forward", 1, {}),
    "the backward": (CompiledUnits, "backward", 4, {"alpha": 0.5}),
    "a read for the forward": (system, "preadv", 0, {}),
    "a read for an update": (system, "preadv", 12, {"alpha": 0.0}),
    "the first update": (OptimizerStep, "update", 0, {"separate_device": True}),
    "an update": (OptimizerStep, "update", 3, {"alpha": 0.0}),
    "a write": (system, "pwritev", 8, {"alpha": 0.0}),
    "a gradient": (OptimizerStep, "gradient", 2, {"alpha": 1.0}),
}


SLOW = ("a read for the forward", "a read for an update", "the first update", "a gradient")  # as others are


@pytest.mark.parametrize("place", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in PLACES])
def test_a_first_step_that_fails_costs_no_values(harness, reference, tmp_path, place):
    """Also one that has updated some units. The same model and optimizer begin again."""
    owner, name, index, chosen = PLACES[place]
    with harness.fresh(adamw, options(tmp_path, **chosen)) as optimizer:
        before = {key: value.clone() for key, value in harness.model.state_dict().items()}
        with pytest.MonkeyPatch.context() as patched:
            if place == "an update":  # first values go to files
                patched.setattr("gs_compile.model.moving.available_memory", lambda: 0)
            with torch.no_grad():
                harness.model(input_ids=(ids := tokens(0)), labels=ids)
            Broken(patched, owner, name, index)
            with pytest.raises((OSError, LaneError), match="broken on purpose"):
                trained(harness.model, optimizer, num_steps=1)
        same_tensors(harness.model.state_dict(), before)
        if optimizer.num_steps:  # an error of a write arrives when the step is over
            optimizer = adamw(two_groups(harness.model))
        elif place != "the forward":
            assert optimizer.engine.closed
            assert our_threads() == []
            assert not [file for file in files_in(tmp_path) if "greedysnake" in file]
        assert_goes_on(harness, optimizer, reference)
        assert all(residency_of(parameter).stash is None for parameter in harness.model.parameters())
        optimizer.engine.tiers.close()


def trained(model, optimizer, num_steps):
    for number in range(num_steps):
        step(model, optimizer, tokens(number))
        optimizer.synchronize()


def test_a_model_on_storage_survives_a_first_step_that_fails(monkeypatch, tmp_path):
    """Also one that has updated some units. Once a step has ended, the first values are gone, and the error says so."""
    model = gs_compile.init_on_storage(partial(gpt2, width=128), storage=tmp_path / "built")
    assert residency_of(model.lm_head.weight).folder == tmp_path / "built"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.compile(backend="greedysnake", options=options(tmp_path / "run"))
    for index in (0, 3, 30):
        optimizer = adamw(two_groups(model))
        with monkeypatch.context() as patched:
            Broken(patched, OptimizerStep, "update", index)
            with pytest.raises(LaneError, match="broken on purpose"):
                trained(model, optimizer, num_steps=50)
        if index < 30:
            same_tensors(model.state_dict(), before)
    with pytest.raises(ReleasedParameterError, match=r"broken on purpose ended the run .* load that state dict"):
        model.state_dict()


def refused(harness, directory, **chosen):
    """The message of a budget that is too small."""
    with (
        harness.fresh(adamw, options(directory, **chosen)) as optimizer,
        pytest.raises(MemoryBudgetError) as caught,
    ):
        step(harness.model, optimizer, tokens(0))
    return caught.value.message


def test_a_budget_too_small_says_what_is_enough(harness, reference, tmp_path):
    message = refused(harness, tmp_path, host_memory="100KiB")
    assert "host_memory is 100.0 KiB; this step needs" in message
    enough = int(re.search(r"needs .* \((\d+) bytes\) of it", message)[1])
    assert not harness.train(adamw, options(tmp_path, host_memory=enough), num_steps=3).differences(reference)


def test_too_large_an_alpha_is_told_the_largest(tmp_path):
    harness = Harness(
        partial(gpt2, num_layers=8)
    )  # whose late gradients are more than what early updates have in memory
    reference = harness.train(adamw, options(tmp_path), num_steps=2)
    messages = [refused(harness, tmp_path, host_memory="100KiB", alpha=alpha) for alpha in (0.0, 1.0)]
    budget = sum(int(re.search(r"needs .* \((\d+) bytes\) of it", message)[1]) for message in messages) // 2
    message = refused(harness, tmp_path, host_memory=budget, alpha=1.0)
    largest = float(re.search(r"the largest alpha possible here is (0\.\d\d), not 1", message)[1])
    found = harness.train(adamw, options(tmp_path, host_memory=budget, alpha=largest), num_steps=2)
    assert not found.differences(reference)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs here")
def test_storage_in_memory_works(harness, reference):
    directory = Path("/dev/shm") / f"greedysnake-test-{os.getpid()}"
    with pytest.warns(SlowStorageWarning, match=r"is in memory \(tmpfs\)") as found:
        assert not harness.train(adamw, options(directory), num_steps=3).differences(reference)
    assert len(found) == 1
    directory.rmdir()
