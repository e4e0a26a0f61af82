"""What comes between two parts of a step: what was done counts once, and what was dropped stays so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from learner import same_tensors
from tiered import adamw, loss_of, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.errors import LaneError, StorageFullError
from gs_compile.model import engine
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.tiers import Tiers

KEEPS_CAPTURES = True


def interrupted_behind(real):
    def interrupted(executor):
        real(executor)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("half", ["forward", "backward"])  # "backward": late updates alone, as reading has them made
def test_an_interrupt_behind_late_updates_does_not_have_them_made_again(harness, monkeypatch, tmp_path, half):
    """Fault: where sums stay, as those of several backwards do, the next call made them once more."""
    given = options(tmp_path, accumulate=True)
    with harness.fresh(adamw, given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        use = partial(loss_of, harness.model, tokens(1)) if half == "forward" else optimizer.synchronize
        with monkeypatch.context() as patched:
            patched.setattr(TieredExecutor, half, interrupted_behind(getattr(TieredExecutor, half)))
            with pytest.raises(KeyboardInterrupt):
                use()
        found = outcome(harness.model, optimizer, [], [])
    with harness.fresh(adamw, given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        assert not found.differences(outcome(harness.model, optimizer, [], []))


def test_an_interrupt_as_a_forward_has_ended_gives_its_memory_back(harness, monkeypatch, tmp_path):
    """Fault: no later call had it, so the next one took as much once more."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        step(harness.model, optimizer, tokens(1))
        before = optimizer.engine.tiers.slab.nbytes
        with monkeypatch.context() as patched:
            patched.setattr(TieredExecutor, "forward", interrupted_behind(TieredExecutor.forward))
            with pytest.raises(KeyboardInterrupt):
                loss_of(harness.model, tokens(2))
        step(harness.model, optimizer, tokens(2))
        assert optimizer.engine.tiers.slab.nbytes == before


@pytest.mark.parametrize(("at", "error"), [(1, KeyboardInterrupt), (2, SystemExit), (3, KeyboardInterrupt)])
def test_an_interrupt_within_a_write_leaves_no_half_of_a_value(monkeypatch, tmp_path, at, error):
    """Fault: a parameter that is in several parts, or has a master, was new in some of them, and commits had that."""
    model, real, calls = shared("bf16").model, Tiers.to_change, []

    def interrupted(tiers, value):
        calls.append(value)
        if len(calls) == at:
            raise error
        return real(tiers, value)

    with shared("bf16").fresh(adamw, options(tmp_path, alpha=0.5, ratios={"optimizer": 0.5})) as optimizer:
        step(model, optimizer, tokens(0))
        parameter = model.transformer.wte.weight
        seen, new = parameter.detach(), torch.full_like(parameter, 0.5)
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(Tiers, "to_change", interrupted)
            with pytest.raises(error):
                parameter.copy_(new)
        assert len(calls) > 3
        assert bool((parameter == 0.5).all())
        with gs_compile.materialize(model, master=True):
            assert bool((model.transformer.wte.weight == 0.5).all())
        assert bool((seen == 0.5).all()), "a view from before shows it"


def test_an_interrupt_as_a_first_step_begins_again_does_not_lose_its_gradients(harness, monkeypatch, tmp_path):
    """Fault: `step()` found none of the backward that was to be repeated, and did nothing without a word."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        loss_of(harness.model, tokens(0)).backward()
        with monkeypatch.context() as patched:
            patched.setattr(TieredExecutor, "_compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss_of(harness.model, tokens(1))
        with pytest.raises(LaneError, match="KeyboardInterrupt"):
            optimizer.step()
        optimizer.zero_grad()
        step(harness.model, optimizer, tokens(0))
        assert optimizer.num_steps == 1


def test_an_interrupt_ahead_of_a_backward_does_not_bring_back_what_was_dropped(harness, monkeypatch, tmp_path):
    """Fault: `step()` made updates of the gradients of the backward before."""

    def interrupted(_):
        raise KeyboardInterrupt

    with harness.fresh(adamw, options(tmp_path, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = outcome(harness.model, optimizer, [], [])
        loss_of(harness.model, tokens(1)).backward()
        optimizer.zero_grad()
        loss = loss_of(harness.model, tokens(2))
        with monkeypatch.context() as patched:
            patched.setattr(engine, "have_zeros", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
        assert not outcome(harness.model, optimizer, [], []).differences(before)


def test_a_first_step_that_cannot_begin_again_costs_no_values(harness, monkeypatch, tmp_path):
    """As where a disk is full for a while. Fault: the optimizer's state dict was an AssertionError."""

    def full(*_):
        raise StorageFullError("full")

    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        loss_of(harness.model, tokens(0)).backward()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "open_tiers", full)
            with pytest.raises(StorageFullError):
                loss_of(harness.model, tokens(1))
        same_tensors(harness.model.state_dict(), before)
        assert not any(each["exp_avg"].any() for each in optimizer.state_dict()["state"].values())
        for number in range(2):
            loss_of(harness.model, tokens(number)).backward()
        optimizer.step()
        assert optimizer.num_steps == 1


def test_parameters_that_are_stale_behind_a_step_are_there_until_its_backward(tmp_path):
    """Fault: the last layer's went in the forward, so a loss that was dropped, or an evaluation, ended the run."""
    given = options(tmp_path, separate_device=True, clip="delayed", masters="whole", ratios={"parameter": 1.0})
    harness, found = shared("bf16"), {}
    for between in ("nothing", "a loss that is dropped", "an evaluation"):
        with harness.fresh(partial(adamw, max_grad_norm=1e3), given) as optimizer:
            step(harness.model, optimizer, tokens(0))
            loss = loss_of(harness.model, tokens(1))
            if between == "a loss that is dropped":
                loss = loss_of(harness.model, tokens(1))
            if between == "an evaluation":
                with torch.no_grad():
                    loss_of(harness.model, tokens(2))
            loss.backward()
            optimizer.step()
            found[between] = outcome(harness.model, optimizer, [], [])
    assert not any(each.differences(found["nothing"]) for each in found.values())
