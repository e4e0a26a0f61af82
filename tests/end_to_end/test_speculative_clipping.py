"""Speculative clipping learns what delayed clipping learns, bit for bit, whatever gradients do."""

from __future__ import annotations

import math
import warnings
from functools import partial

import pytest
import torch
from tiered import Harness, Outcome, adamw, gpt2, moved, options, outcome, step, tokens

from gs_compile.errors import NonFiniteWarning, OptionError
from gs_compile.runtime.optimizer import OptimizerStep

KEEPS_CAPTURES = True
NUM_STEPS = 6
BOUNDS = {"never": 1e6, "sometimes": 1.6, "always": 0.3}
CLASSES = ("parameter", "checkpoint", "optimizer")


@pytest.fixture(scope="module")
def harnesses():
    return {precision: Harness(gpt2, precision) for precision in ("model", "bf16")}


@pytest.fixture(scope="module")
def delayed(harnesses, storage):
    """What delayed clipping comes to, by everything that matters."""
    found: dict[object, tuple[Outcome, list[bool]]] = {}

    def of(precision, bound, bad=()):
        key = precision, bound, tuple(bad)
        if key not in found:
            found[key] = trained(harnesses[precision], options(storage, clip="delayed"), bound, bad)
        return found[key]

    return of


def given(storage, ratio, alpha, **others):
    return options(storage, alpha=alpha, clip="speculative", ratios=dict.fromkeys(CLASSES, ratio), **others)


def trained(harness, given, bound, bad=(), look=()):
    """Some steps, and whether each was rolled back; `bad`: steps, units and what an element of their gradient becomes.

    look: steps after which all values are read.
    """
    torch.manual_seed(1)
    losses, norms, rolled_back = [], [], []
    spoiled = {number: (unit, value) for number, unit, value in bad}
    with (
        pytest.MonkeyPatch.context() as patched,
        harness.fresh(partial(adamw, max_grad_norm=bound), given) as optimizer,
    ):
        norm = OptimizerStep.norm

        def spoil(self, op, gradient, sums, record):
            if spoiled.get(len(losses), (None, 0.0))[0] == op.reads[0].unit:
                gradient.flat[5] = spoiled[len(losses)][1]
            return norm(self, op, gradient, sums, record)

        patched.setattr(OptimizerStep, "norm", spoil)
        for number in range(NUM_STEPS):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", NonFiniteWarning)
                losses.append(step(harness.model, optimizer, tokens(number)))
            assert not any("updated" in str(warning.message) for warning in caught), "nothing is left half done"
            info = optimizer.last_step
            assert info.skipped == (number in spoiled) == any(w.category is NonFiniteWarning for w in caught)
            norms.append(info.grad_norm)
            rolled_back.append(info.rolled_back)
            if number in look:
                outcome(harness.model, optimizer, losses, norms)
        return outcome(harness.model, optimizer, losses, norms), rolled_back


PLACES = [
    pytest.param("model", 0.0, 0.0, False, id="fp32-ssd"),
    pytest.param("model", 0.5, 0.3, False, id="fp32-both"),
    pytest.param("model", 1.0, 0.0, True, id="fp32-host-separate", marks=pytest.mark.slow),
    pytest.param("model", 0.5, 0.0, True, id="fp32-both-separate"),
    pytest.param("model", 1.0, 0.3, False, id="fp32-host", marks=pytest.mark.slow),
    pytest.param("bf16", 0.0, 0.3, True, id="bf16-ssd-separate", marks=pytest.mark.slow),
    pytest.param("bf16", 0.5, 0.0, False, id="bf16-both"),
    pytest.param("bf16", 0.5, 0.3, True, id="bf16-both-separate"),
    pytest.param("bf16", 1.0, 0.0, False, id="bf16-host", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("precision", "ratio", "alpha", "separate"), PLACES)
def test_it_is_delayed_clipping_bit_for_bit(harnesses, storage, delayed, precision, ratio, alpha, separate, bound):
    expected, _ = delayed(precision, BOUNDS[bound])
    found, rolled_back = trained(
        harnesses[precision], given(storage, ratio, alpha, separate_device=separate), BOUNDS[bound], look=(1,)
    )
    assert found.differences(expected) == []
    assert rolled_back == [norm > BOUNDS[bound] for norm in found.norms]
    assert sum(rolled_back) in {"never": [0], "sometimes": [2, 3], "always": [NUM_STEPS]}[bound]


@pytest.mark.parametrize("schedule", ["horizontal", "lifetime", "single"])
def test_so_it_is_in_the_other_schedules(harnesses, storage, schedule):
    harness = Harness(gpt2) if schedule == "single" else harnesses["model"]  # half-blocks are captured for themselves
    common = {"schedule": schedule, "separate_device": schedule != "single"}
    expected, _ = trained(harness, options(storage, clip="delayed", **common), BOUNDS["sometimes"])
    found, rolled_back = trained(harness, given(storage, 0.5, 0.3, **common), BOUNDS["sometimes"])
    assert found.differences(expected) == []
    assert rolled_back == [norm > BOUNDS["sometimes"] for norm in found.norms]
    assert True in rolled_back
    assert False in rolled_back


BAD = ((0, "e", math.nan), (2, 1, math.inf), (3, "h", -math.inf), (5, 0, math.nan))


@pytest.mark.parametrize("bound", [BOUNDS["sometimes"], pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("precision", "ratio", "alpha", "separate"), PLACES)
def test_gradients_that_are_not_finite_leave_no_trace(
    harnesses, storage, delayed, precision, ratio, alpha, separate, bound
):
    expected, _ = delayed(precision, bound, BAD)
    found, rolled_back = trained(
        harnesses[precision], given(storage, ratio, alpha, separate_device=separate), bound, BAD
    )
    assert found.differences(expected) == []
    assert all(rolled_back[number] for number, *_ in BAD)
    assert bound < math.inf or sum(rolled_back) == len(BAD)


def test_a_bound_that_changes_from_step_to_step(harnesses, storage):
    def run(given):
        with harnesses["model"].fresh(partial(adamw, max_grad_norm=math.inf), given) as optimizer:
            losses = []
            for number, bound in enumerate((math.inf, 0.2, 5.0, None, 0.3)):
                optimizer.max_grad_norm = bound
                losses.append(step(harnesses["model"].model, optimizer, tokens(number)))
            return outcome(harnesses["model"].model, optimizer, losses, [])

    assert run(given(storage, 0.5, 0.3)).differences(run(options(storage, clip="delayed"))) == []


def test_what_holds_moves_what_early_updates_move(harnesses, storage):
    """As the program says: shadow copies cost no traffic."""

    def third_step(make, chosen):
        with harnesses["model"].fresh(make, chosen) as optimizer:
            for number in range(2):
                step(harnesses["model"].model, optimizer, tokens(number))
            return moved(harnesses["model"].model, optimizer, tokens(2))

    plain = third_step(adamw, options(storage, alpha=0.0))
    assert third_step(partial(adamw, max_grad_norm=1e6), given(storage, 0.0, 0.0)) == plain


def test_a_smaller_alpha_says_that_updates_are_speculative(harnesses, storage):
    make = partial(adamw, max_grad_norm=1.0)
    with harnesses["model"].fresh(make, options(storage, alpha=0.3)) as optimizer:
        step(harnesses["model"].model, optimizer, tokens(0))
        assert optimizer.engine.placement.speculative
    with (
        harnesses["model"].fresh(make, options(storage, alpha=0.3, clip="delayed")) as optimizer,
        pytest.raises(OptionError, match=r'expert\.alpha is 0\.3, but with expert\.clip="delayed" all updates wait'),
    ):
        step(harnesses["model"].model, optimizer, tokens(0))


def test_without_a_bound_nothing_is_speculative(harnesses, storage):
    with harnesses["model"].fresh(adamw, given(storage, 0.0, 0.0)) as optimizer:
        step(harnesses["model"].model, optimizer, tokens(0))
        assert not optimizer.engine.placement.speculative
        assert not optimizer.last_step.rolled_back
