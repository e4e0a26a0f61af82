"""What comes between two parts of a step: what was done counts once, and what was dropped stays so."""

from __future__ import annotations

import signal
from functools import partial
from itertools import count

import pytest
import torch
from learner import same_tensors
from tiered import adamw, loss_of, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.errors import LaneError, StepOrderError, StorageFullError
from gs_compile.model import engine, idle, in_memory, residency
from gs_compile.model.engine import Engine
from gs_compile.model.residency import Residency, is_offloaded
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.tiers import Tiers

KEEPS_CAPTURES = True


def interrupted_behind(real):
    def interrupted(executor):
        real(executor)
        raise KeyboardInterrupt

    return interrupted


def interrupted_at(index, real):
    """`real`, whose call of that number, from 0 on, is interrupted ahead of it."""
    calls = count()

    def call(*arguments, **keywords):
        if next(calls) == index:
            raise KeyboardInterrupt
        return real(*arguments, **keywords)

    return call


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


@pytest.mark.parametrize(("at", "error"), [(1, KeyboardInterrupt), (2, SystemExit), (3, RuntimeError)])
def test_an_interrupt_within_a_write_leaves_no_half_of_a_value(monkeypatch, tmp_path, at, error):
    """Fault: a parameter that is in several parts, or has a master, was new in some of them, and commits had that.

    RuntimeError: of a DataLoader's handler, as one of its workers was killed.
    """
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


def test_an_interrupt_as_a_parameter_gets_other_memory_loses_nothing_of_its_own(harness, monkeypatch, tmp_path):
    """Fault: what `p.data` was showed the new values, so weights that a script gave back behind it were gone."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        parameter = harness.model.transformer.wte.weight
        values, backup = parameter.detach().clone(), parameter.data
        with monkeypatch.context() as patched:
            patched.setattr(Tiers, "to_change", interrupted_at(0, Tiers.to_change))
            with pytest.raises(KeyboardInterrupt):
                parameter.data = torch.full_like(values, 0.5)
        assert bool((parameter == 0.5).all())
        parameter.data = backup
        assert torch.equal(parameter, values)


def test_an_interrupt_as_values_leave_memory_leaves_each_parameter_its_own(harness, monkeypatch, tmp_path):
    """As of whoever presses Ctrl-C twice. Fault: a parameter had zeros then, in state dicts as well."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), gs_compile.materialize(harness.model):
            patched.setattr(residency, "placeholder", interrupted_at(0, residency.placeholder))
        assert all(map(is_offloaded, harness.model.parameters()))
        same_tensors(harness.model.state_dict(), before)


def test_an_interrupt_as_the_changes_of_a_block_are_stored_stores_all_of_them(harness, monkeypatch, tmp_path):
    """Fault: the first parameters were changed, and the others were not."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        with monkeypatch.context() as patched:
            patched.setattr(Residency, "write", interrupted_at(3, Residency.write))
            with pytest.raises(KeyboardInterrupt), gs_compile.materialize(harness.model, write=True):
                torch._foreach_mul_([each.data for each in harness.model.parameters()], 2)
        same_tensors(harness.model.state_dict(), {name: 2 * value for name, value in before.items()})


@pytest.mark.parametrize("at", [0, 5])
def test_an_interrupt_as_a_state_is_loaded_loads_all_of_it(harness, monkeypatch, tmp_path, at):
    """Fault: settings and some of the moments were those that were loaded, and the others were not."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        saved, wanted = optimizer.state_dict(), outcome(harness.model, optimizer, [], [])
        values = {name: value.clone() for name, value in harness.model.state_dict().items()}
        optimizer.param_groups[1]["lr"] = 0.5
        step(harness.model, optimizer, tokens(1))
        harness.model.load_state_dict(values)
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "load_state", interrupted_at(at, Engine.load_state))
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(saved)
        assert (optimizer.num_steps, optimizer.param_groups[1]["lr"]) == (1, 1e-2)
        assert not outcome(harness.model, optimizer, [], []).differences(wanted)
        step(harness.model, optimizer, tokens(2))


def test_an_interrupt_as_a_first_step_makes_way_does_not_lose_a_state_that_was_loaded(harness, monkeypatch, tmp_path):
    """Fault: the next call began with moments of zeros, and a state dict before it was an AssertionError."""
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        saved, found = optimizer.state_dict(), []
    for is_interrupted in (False, True):
        with harness.fresh(adamw, options(tmp_path)) as optimizer:
            optimizer.load_state_dict(saved)
            if is_interrupted:
                loss_of(harness.model, tokens(1)).backward()
                with monkeypatch.context() as patched:
                    patched.setattr(Tiers, "close", interrupted_behind(Tiers.close))
                    with pytest.raises(KeyboardInterrupt):
                        loss_of(harness.model, tokens(2))
                assert all(each["exp_avg"].any() for each in optimizer.state_dict()["state"].values())
                optimizer.zero_grad()
            step(harness.model, optimizer, tokens(1))
            found.append(outcome(harness.model, optimizer, [], []))
    assert not found[0].differences(found[1])


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_handler_that_saves_while_late_updates_run_is_told_so(harness, monkeypatch, tmp_path, accumulate):
    """Fault: they were made once more where sums stay, without a word; else it was a KeyError."""
    given, real, saved = options(tmp_path, accumulate=accumulate, alpha=1.0), TieredExecutor._compute, []

    def signalled(executor, op):
        real(executor, op)
        signal.raise_signal(signal.SIGUSR1)

    def handle(*_):
        saved.append(harness.model.state_dict())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with harness.fresh(adamw, given) as optimizer:
            with monkeypatch.context() as patched:
                patched.setattr(TieredExecutor, "_compute", signalled)
                loss_of(harness.model, tokens(0))
            assert saved, "where no updates are to come, it is saved"
            step(harness.model, optimizer, tokens(0))
            with monkeypatch.context() as patched:
                patched.setattr(TieredExecutor, "_compute", signalled)
                with pytest.raises(StepOrderError, match="let the handler note the signal"):
                    loss_of(harness.model, tokens(1))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_saves_while_a_step_is_closed_is_told_so(harness, monkeypatch, tmp_path):
    """Fault: values were those behind the step, and the number of steps that ahead of it, in a commit as well."""
    real, saved = in_memory.update, []

    def signalled(*given):
        signal.raise_signal(signal.SIGUSR1)
        real(*given)

    before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(optimizer.state_dict()))
    try:
        with harness.fresh(adamw, options(tmp_path)) as optimizer:
            loss_of(harness.model, tokens(0)).backward()
            monkeypatch.setattr(in_memory, "update", signalled)
            with pytest.raises(StepOrderError, match="let the handler note the signal"):
                optimizer.step()
            assert not saved
    finally:
        signal.signal(signal.SIGUSR1, before)


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
            patched.setattr(idle, "have_zeros", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped) == (1, 1)
        assert not outcome(harness.model, optimizer, [], []).differences(before)


def test_a_first_step_that_cannot_begin_again_costs_no_values(harness, monkeypatch, tmp_path):
    """As where a disk is full for a while. Fault: the optimizer's state dict was an AssertionError, and `step()` passed
    over the backward that there had been, without a word.
    """

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
        with pytest.raises(StepOrderError, match=r"are lost: .* Call optimizer.zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
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
