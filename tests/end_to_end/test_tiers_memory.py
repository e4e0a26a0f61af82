"""A step runs in exactly the memory that was planned for it, whatever is placed where."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lines import without
from saving import saving
from tiered import adamw, loss_of, options, shared, step, tokens

from gs_compile.errors import MemoryBudgetError, StepOrderError, StorageFullError
from gs_compile.placement.levels import Share
from gs_compile.placement.slab import PAGE_NBYTES
from gs_compile.planner.builder import planned_peak
from gs_compile.runtime import slab
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.stored import OURS
from gs_compile.runtime.tiers import Tiers

KEEPS_CAPTURES = True
NUM_LAYERS, NUM_MICRO_BATCHES = 3, 3


def harness_of(precision="model"):
    return shared(precision, num_layers=NUM_LAYERS)


ratios = st.sampled_from((0.0, 0.3, 0.7, 1.0))


@settings(deadline=None, max_examples=4)
@example("bf16", None, 0.5, False, {"parameter": 0.0, "checkpoint": 0.7, "optimizer": 1.0}, 0.0, None)  # the first step
@given(
    precision=st.sampled_from(("model", "bf16")),
    clip=st.sampled_from((None, "delayed", "speculative")),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    separate_device=st.booleans(),
    ratios=st.fixed_dictionaries({"parameter": ratios, "checkpoint": ratios, "optimizer": ratios}),
    on_device=st.sampled_from((0.0, 0.6)),
    gradient=st.sampled_from((None, 0.0, 0.4, 1.0)),
)
def test_the_planned_memory_is_enough(storage, precision, clip, alpha, separate_device, ratios, on_device, gradient):
    """In the horizontal order too, with a ratio of gradient sums."""
    harness, make = harness_of(precision), partial(adamw, max_grad_norm=0.5) if clip else adamw
    classes = (["checkpoint"] if separate_device else []) + (["parameter"] if precision == "bf16" else [])
    if separate_device:
        ratios = ratios | {f"device_{name}": on_device * (1 - ratios[name]) for name in classes}
    chosen = {
        "alpha": 1.0 if clip == "delayed" else alpha,
        "clip": clip,
        "separate_device": separate_device,
        "ratios": ratios,
    }
    if gradient is not None:
        chosen |= {"schedule": "horizontal", "ratios": ratios | {"gradient": gradient}}
    with harness.fresh(make, options(storage, **chosen)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        step(harness.model, optimizer, tokens(1))  # with the late updates of the first
        planned = planned_peak(optimizer.engine.snapshots[-1], "host")
    with harness.fresh(make, options(storage, host_memory=planned, **chosen)) as optimizer:
        for number in range(3):
            step(harness.model, optimizer, tokens(number))
        optimizer.synchronize()
        assert optimizer.engine.tiers.slab.nbytes <= planned
        assert optimizer.engine.tiers.slab.has_segment(optimizer.engine.snapshots[-1])  # the steps have left nothing


def files_of(optimizer):
    """The bytes of each file of a run on one drive."""
    (drive,) = optimizer.engine.tiers.setting.store.drives
    return [path.stat().st_size for path in drive.folder.iterdir() if OURS.fullmatch(path.name)]


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        ((), {"alpha": 0.5, "ratios": {"parameter": 0.4, "checkpoint": 0.3}}),
        ((Share(1, "ssd", 0.5),), {"separate_device": True, "alpha": 0.0}),
        ((), {"schedule": "horizontal", "ratios": {"gradient": 0.0}}),
        ((), {"schedule": "horizontal", "separate_device": True, "ratios": {"gradient": 0.4}}),
        ((), {"alpha": 0.3, "clip": "speculative", "durability": "step", "ratios": {"optimizer": 0.5}}),
        ((), {"accumulate": True, "ratios": {"gradient": 0.0}}),
    ],
)
def test_the_files_of_a_run_are_those_that_were_planned(tmp_path, shares, chosen):
    """Not what a step has on SSD at a time: a checkpoint's file is there before it, and stays."""
    make = partial(adamw, max_grad_norm=0.5) if "clip" in chosen else adamw
    harness = harness_of()
    with saving(*shares) if shares else nullcontext(), harness.fresh(make, options(tmp_path, **chosen)) as optimizer:
        loss = loss_of(harness.model, tokens(0, 5))
        before = files_of(optimizer)
        loss.backward()
        optimizer.step()
        optimizer.synchronize()
        engine, found = optimizer.engine, files_of(optimizer)
        planned = planned_peak(engine.snapshots[-1], "ssd")
        assert found == before
        assert engine.planning.ssd_nbytes == planned
        assert len(engine.planning.files) == len(found)
        assert 0 <= sum(found) - planned < PAGE_NBYTES * len(found)


def test_files_of_calls_that_wait_together_are_reserved(storage):
    harness = harness_of()
    with harness.fresh(adamw, options(storage)) as optimizer:
        first, second = (loss_of(harness.model, tokens(number)) for number in range(2))
        (first + second).backward()
        optimizer.step()
        found = files_of(optimizer)
        assert optimizer.engine.num_calls == 2
        assert 0 <= sum(found) - optimizer.engine.planning.ssd_nbytes < PAGE_NBYTES * len(found)


@pytest.mark.parametrize("device_memory", ["600KiB", "500KiB"])
def test_calls_that_wait_share_the_device(storage, device_memory):
    """Faults: each had all of it for itself, and a second step refused what the first had repeated."""
    harness, place = harness_of(), {"separate_device": True, "accumulate": True, "ratios": {"device_checkpoint": 1.0}}
    words = "device_memory 500.0 KiB for 2 calls .* wait for .* for each, device_memory is"
    refusal = pytest.raises(MemoryBudgetError, match=words) if device_memory == "500KiB" else nullcontext()
    with harness.fresh(adamw, options(storage, device_memory=device_memory, **place)) as optimizer:
        with refusal:
            sum(loss_of(harness.model, tokens(number)) for number in range(2)).backward()
        optimizer.zero_grad()
        step(harness.model, optimizer, tokens(2))
        assert optimizer.num_steps == 1


def test_a_step_that_storage_has_no_room_for_is_refused_before_it_begins(storage, monkeypatch):
    """And the run goes on without it."""

    def fallocate(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    harness, losses = harness_of(), []
    for is_refused in (False, True):
        with harness.fresh(adamw, options(storage, alpha=0.5)) as optimizer:
            losses.append(step(harness.model, optimizer, tokens(0, 2)))
            if is_refused:
                full = pytest.raises(StorageFullError, match=r"are needed and .* are free .*: make room")
                with monkeypatch.context() as patched, full:
                    patched.setattr(system, "fallocate", fallocate)
                    loss_of(harness.model, tokens(1, 4))
            losses.append(step(harness.model, optimizer, tokens(2, 2)))
    assert losses[:2] == losses[2:]


def test_a_call_without_room_beside_one_that_waits_has_its_files(storage, monkeypatch):
    """Fault: it was refused, also where the loss of the one that waits was kept for nothing but to be told."""

    def fallocate(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    harness = harness_of()
    with harness.fresh(adamw, options(storage, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        first = loss_of(harness.model, tokens(1))
        with monkeypatch.context() as patched:
            patched.setattr(system, "fallocate", fallocate)
            second = loss_of(harness.model, tokens(1))
        with pytest.raises(StepOrderError, match=r"no room for both .* are needed and .* are free"):
            first.backward()
        second.backward()
        optimizer.step()
        assert first == second


@pytest.mark.parametrize("line", ["", "self.synchronize()"], ids=["", "without it"])
def test_what_lanes_work_on_is_over_before_a_larger_step_is_mapped(storage, monkeypatch, line):
    """Else they would have its memory beside that of the step."""
    harness, under_way, is_waited_for = harness_of(), [], threading.Event()
    if line:
        monkeypatch.setattr(Tiers, "segment", without(Tiers, "segment", line))

    def synchronize(tiers):
        is_waited_for.set()
        return synchronize_tiers(tiers)

    def mapped(nbytes, device):
        under_way.append(not ticket.done)
        is_waited_for.set()
        return map_memory(nbytes, device)

    synchronize_tiers = Tiers.synchronize
    with harness.fresh(adamw, options(storage, alpha=0.0, ratios={"checkpoint": 1.0})) as optimizer:
        step(harness.model, optimizer, tokens(0, 2))
        monkeypatch.setattr(Tiers, "synchronize", synchronize)
        monkeypatch.setattr(slab, "map_memory", mapped)
        ticket = optimizer.engine.tiers.lane("d2h").submit("a late copy", is_waited_for.wait)
        step(harness.model, optimizer, tokens(1, 99))
    assert under_way == [bool(line)]


@pytest.mark.parametrize(
    ("alpha", "clip"),
    [
        (0.0, None),
        (0.5, "speculative"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.5, None), (0.0, "speculative"))),
    ],
)
def test_nothing_is_mapped_or_pinned_after_the_first_step(storage, monkeypatch, alpha, clip):
    """Whether there are late updates, in an evaluation, and when all updates are brought to an end."""
    harness, made = harness_of(), []
    monkeypatch.setattr(slab, "map_memory", lambda nbytes, device: made.append(nbytes) or map_memory(nbytes, device))
    make = partial(adamw, max_grad_norm=0.5) if clip else adamw
    with harness.fresh(make, options(storage, alpha=alpha, clip=clip, separate_device=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert made
        made.clear()
        for number in range(3):
            step(harness.model, optimizer, tokens(number))
            with torch.no_grad():
                loss_of(harness.model, tokens(number))
            loss_of(harness.model, tokens(number))  # given up
        optimizer.synchronize()
        assert not made


def test_an_evaluation_between_forward_and_backward_has_memory_of_its_own(storage):
    harness, losses, needed = harness_of(), [], 0
    for evaluates in (False, True):
        with harness.fresh(adamw, options(storage, alpha=0.5)) as optimizer:
            for number in range(3):
                loss = loss_of(harness.model, tokens(number))
                if evaluates:
                    with torch.no_grad():
                        loss_of(harness.model, tokens(7))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            needed = needed or planned_peak(optimizer.engine.snapshots[-1], "host")
    assert losses[:3] == losses[3:]
    refused = pytest.raises(MemoryBudgetError, match="between a forward and its backward")
    with harness.fresh(adamw, options(storage, alpha=0.5, host_memory=needed)) as optimizer:
        loss = loss_of(harness.model, tokens(0))
        with refused, torch.no_grad():
            loss_of(harness.model, tokens(7))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(harness.model, tokens(1))  # dropped. Fault: an evaluation was told to call its backward first
        with torch.no_grad():
            loss_of(harness.model, tokens(7))


@settings(deadline=None, max_examples=3)
@given(st.sampled_from((3, 7, 11)), st.sampled_from((0.0, 1.0)), st.booleans())
def test_the_memory_that_a_refusal_names_is_enough(storage, batch_size, alpha, separate_device):
    """Checkpoints and their gradients are of odd sizes, and there are many micro-batches."""
    harness, chosen = harness_of(), {"alpha": alpha, "separate_device": separate_device, "micro_batch_size": 1}
    with (
        pytest.raises(MemoryBudgetError) as refusal,
        harness.fresh(adamw, options(storage, host_memory=1, **chosen)) as optimizer,
    ):
        step(harness.model, optimizer, tokens(0, batch_size))
    (needed,) = re.findall(r"\((\d+) bytes\) of it at least", str(refusal.value))
    assert not re.search("lower ratios|smaller micro_batch_size", str(refusal.value))  # than the least there is
    with harness.fresh(adamw, options(storage, host_memory=int(needed), **chosen)) as optimizer:
        for number in range(3):
            step(harness.model, optimizer, tokens(number, batch_size))
        optimizer.synchronize()
        assert optimizer.engine.tiers.slab.nbytes <= int(needed)
