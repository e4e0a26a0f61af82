"""What a script does between the last backward and `step()` is of this step, as where nanochat sets the learning rate."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from learner import distance, learner, same_tensors
from tiered import Harness, gpt2, loss_of, options, sgd, step, tokens

import gs_compile
from gs_compile.errors import NonFiniteWarning, OptimizerError, StepOrderError
from gs_compile.model.residency import residency_of

KEEPS_CAPTURES = True
CLIP = 0.05


def clipped(groups):
    return gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0, max_grad_norm=CLIP)


def slowed(optimizer, number):
    """In the first step it is set to the value that it has; entries that are no settings are nobody's concern."""
    for group in optimizer.param_groups:
        group["lr"], group["mine"] = 1.0 / (1 + number), torch.full((2,), torch.nan)


def train(model, optimizer, num_calls, clip=None):
    """clip: by hand, and what it is by falls, also of an optimizer that clips itself."""
    for number in range(3):
        for each in range(num_calls):
            ids = tokens(num_calls * number + each)
            model(input_ids=ids, labels=ids).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip / (1 + number))
        elif getattr(optimizer, "max_grad_norm", None) is not None:
            optimizer.max_grad_norm = CLIP / (1 + number)
        slowed(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def harness():
    return Harness(gpt2)


@pytest.mark.parametrize(
    ("make", "num_calls"),
    [(sgd, 1), (clipped, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((sgd, 2), (clipped, 1)))],
)
def test_what_is_set_before_the_step_is_of_this_step(make, num_calls, harness, tmp_path):
    """Speculative updates too, that are rolled back; and where updates beside the backward have the run begin again."""
    places = [{"alpha": 0.5}, {"accumulate": True}] + [{"alpha": 0.5, "clip": "speculative"}] * (make is clipped)
    plain = gpt2()
    train(plain, torch.optim.SGD(plain.parameters(), lr=1.0), num_calls, CLIP if make is clipped else None)
    for number, place in enumerate(places):
        with harness.fresh(make, options(tmp_path / f"{number}", **place)) as optimizer:
            train(harness.model, optimizer, num_calls)
            optimizer.synchronize()
            named = harness.model.named_parameters()
            values = {name: residency_of(each).value(each, master=True).clone() for name, each in named}
        assert distance(values, {name: each.detach() for name, each in plain.named_parameters()}) < 2e-6


def change_norm(optimizer, number):
    optimizer.max_grad_norm = 2.0


def drop(optimizer, number):
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (sgd, slowed, '"lr" of param group 0 was set to 0.5 after the backward'),
        (clipped, change_norm, "max_grad_norm was set to 2.0 after"),
        (sgd, drop, "the gradients were dropped after"),
    ],
)
def test_what_comes_too_late_is_refused(make, change, words, harness, tmp_path):
    """The first step has had nothing between, so that updates have run beside the backward."""
    given = {"clip": "speculative"} if make is clipped else {}
    with harness.fresh(make, options(tmp_path, alpha=0.5, **given)) as optimizer:
        optimizer.max_grad_norm = 1e3 if make is clipped else None
        step(harness.model, optimizer, tokens(0))
        loss_of(harness.model, tokens(1)).backward()
        change(optimizer, 1)
        with pytest.raises(StepOrderError, match=rf'{words}.* updates have already run .*"accumulate": True'):
            optimizer.step()


def test_a_first_step_that_begins_again_trains_what_its_forward_did(harness, tmp_path):
    """Who freezes a layer between the backward and the step is told, and may take it back."""
    last = harness.model.transformer.h[1].mix.weight
    with harness.fresh(sgd, options(tmp_path)) as optimizer:
        loss_of(harness.model, tokens(0)).backward()
        slowed(optimizer, 0)
        last.requires_grad_(False)
        with pytest.raises(StepOrderError, match=r"requires_grad .* was changed .* first step has to begin again"):
            optimizer.step()
        last.requires_grad_(True)
        optimizer.step()
        assert optimizer.num_steps == 1


# Gradients that are dropped, put there and left -----------------------------------------------------------------------


@pytest.mark.parametrize("place", [{"alpha": 0.5}, {"accumulate": True}, {"clip": "delayed"}, {"clip": "speculative"}])
def test_a_step_whose_gradients_are_dropped_changes_nothing(place, harness, tmp_path):
    """Also the first one, which begins again where updates have run beside its backward; what is rolled back stays so."""
    plain = gpt2()
    make = clipped if "clip" in place else sgd
    with harness.fresh(make, options(tmp_path, **place)) as optimizer:
        for model, each in ((plain, torch.optim.SGD(plain.parameters(), lr=1.0)), (harness.model, optimizer)):
            for number in range(4):
                loss_of(model, tokens(number)).backward()
                if make is clipped and model is plain:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                if number % 2 == 0:
                    each.zero_grad()
                each.step()
                if number % 2:
                    each.zero_grad()
        assert (optimizer.num_steps, optimizer.num_skipped) == (2, 2)
        assert distance(dict(harness.model.state_dict()), dict(plain.state_dict())) < 2e-6


def ahead_of_a_call_that_waits(model, optimizer):
    one, other = loss_of(model, tokens(0)), loss_of(model, tokens(1))
    other.backward()
    optimizer.zero_grad()
    one.backward()


def ahead_of_a_larger_call(model, optimizer, number=0):
    """Which has no room as the step is planned. number: of calls whose gradients stay."""
    for each in range(1 + number):
        loss_of(model, tokens(each, 2)).backward()
        if each == 0:
            optimizer.zero_grad()
    loss_of(model, tokens(3, 64)).backward()


def ahead_of_two(model, optimizer):
    ahead_of_a_larger_call(model, optimizer, 1)


ROOM = {"ratios": {"parameter": 1.0, "optimizer": 1.0, "checkpoint": None}, "alpha": None, "host_memory": "750KiB"}


@pytest.mark.parametrize(
    ("drop", "place"),
    [
        (ahead_of_a_call_that_waits, {}),
        (ahead_of_a_larger_call, {**ROOM, "accumulate": True}),
        (ahead_of_two, {**ROOM, "accumulate": True}),
    ],
)
def test_what_was_dropped_is_not_there_again_where_the_first_step_begins_again(drop, place, harness, tmp_path):
    """Fault: those backwards were done once more with the others, and their gradients added."""
    plain = gpt2()
    drop(plain, theirs := torch.optim.SGD(plain.parameters(), lr=1.0))
    theirs.step()
    with harness.fresh(sgd, options(tmp_path, **place)) as optimizer:
        drop(harness.model, optimizer)
        optimizer.step()
        assert distance(dict(harness.model.state_dict()), dict(plain.state_dict())) < 2e-6


def test_a_loss_that_is_not_finite_and_no_step(harness, tmp_path):
    """As where a script passes over it. Fault: the next call was refused, in words that told of updates."""
    plain = gpt2()
    with harness.fresh(sgd, options(tmp_path, alpha=0.5)) as optimizer:
        for model, each in ((plain, torch.optim.SGD(plain.parameters(), lr=1.0)), (harness.model, optimizer)):
            for number in range(3):
                loss = loss_of(model, tokens(number))
                (loss * (math.nan if number == 1 else 1.0)).backward()
                if number == 1 and each is optimizer:
                    with pytest.raises(StepOrderError, match=r"step\(\) has not: nothing is updated yet"):
                        model.state_dict()
                if number != 1:
                    each.step()
                    each.zero_grad()
                    continue
                each.zero_grad()
                warned = pytest.warns(NonFiniteWarning, match=r"step 2 was skipped \[")
                with warned if each is optimizer else nullcontext():
                    model.state_dict()
        assert (optimizer.num_steps, optimizer.num_skipped) == (2, 1)
        assert distance(dict(harness.model.state_dict()), dict(plain.state_dict())) < 2e-6


def put(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)


HABITS = {
    "some are dropped": (
        lambda model: setattr(model.lm_head.weight, "grad", None),
        StepOrderError,
        r"those of others were not: .* freeze them",
    ),
    "they are set to zero": (
        lambda model: model.zero_grad(set_to_none=False),
        StepOrderError,
        r"set to zero in place, .* To skip the step, drop all gradients: optimizer\.zero_grad\(\)",
    ),
    "others are put there": (lambda model: put(model.transformer.h), StepOrderError, r"were set to zero or replaced"),
}


def test_what_a_step_cannot_do_is_refused(harness, tmp_path):
    """Before anything is updated, so that the run goes on."""
    with harness.fresh(sgd, options(tmp_path, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        for habit, kind, words in HABITS.values():
            loss_of(harness.model, tokens(1)).backward()
            habit(harness.model)
            with pytest.raises(kind, match=words):
                optimizer.step()
            optimizer.zero_grad()
        same_tensors(dict(harness.model.state_dict()), before)
        loss_of(harness.model, tokens(1)).backward()
        put(harness.model)  # in the place of all
        optimizer.step()
        same_tensors(dict(harness.model.state_dict()), {name: value - 1.0 for name, value in before.items()})
        put(harness.model)
        with pytest.raises(StepOrderError, match="a step needs a backward of the model"):
            optimizer.step()


def test_gradients_are_zeroed_all_together(harness, tmp_path):
    """Before another backward of the step, too."""
    with harness.fresh(sgd, options(tmp_path, accumulate=True)):
        loss_of(harness.model, tokens(0)).backward()
        harness.model.lm_head.weight.grad = None
        with pytest.raises(StepOrderError, match=r"those of others were not: .* call optimizer\.zero_grad"):
            loss_of(harness.model, tokens(1)).backward()


def test_gradients_that_are_left_are_refused(harness, tmp_path):
    """torch adds to them. Where updates wait a loop may still drop them, as one of two models that learn in turn does."""
    for number, place in enumerate([{"alpha": 0.5}, {"accumulate": True}]):
        with harness.fresh(sgd, options(tmp_path / f"{number}", **place)) as optimizer:
            loss_of(harness.model, tokens(0)).backward()
            optimizer.step()
            with pytest.raises(StepOrderError, match="gradients of the last step were not set to zero"):
                optimizer.step()
            loss = loss_of(harness.model, tokens(1))
            if not optimizer.engine.accumulates:
                with pytest.raises(StepOrderError, match="gradients of the last step were not set to zero"):
                    loss.backward()
                continue
            loss.backward()
            with pytest.raises(StepOrderError, match="gradients of the last step were not set to zero"):
                optimizer.step()
            optimizer.zero_grad()
            step(harness.model, optimizer, tokens(1))
            assert optimizer.num_steps == 2


def test_groups_that_have_changed_are_refused(tmp_path):
    with learner(tmp_path) as one:
        one.train(0)
        first, second = one.optimizer.param_groups
        moved = first["params"].pop()
        with pytest.raises(
            OptimizerError, match=r"was in param group 0 .* and is now in none, .* Make another optimizer"
        ):
            one.train(1)
        second["params"].append(moved)
        with pytest.raises(OptimizerError, match=r"was in param group 0 .* and is now in param group 1"):
            one.train(1)
        first["params"].append(second["params"].pop())
        one.train(1)
        loss = one.loss(2)
        loss.backward()
        one.optimizer.param_groups.pop()
        with pytest.raises(OptimizerError, match=r"was in param group 1 .* and is now in none"):
            one.optimizer.step()


def test_a_value_that_is_written_where_the_first_step_has_begun_again(harness, tmp_path):
    """A call that waits would run once more, by other values than it began with."""
    with harness.fresh(sgd, options(tmp_path)) as optimizer:
        losses = [loss_of(harness.model, tokens(number)) for number in range(3)]
        (losses[0] * losses[1]).backward()
        assert optimizer.loop.accumulates, "it has begun again"
        with torch.no_grad():
            next(harness.model.parameters()).mul_(2.0)
        with pytest.raises(StepOrderError, match="dropped when a parameter was given another value"):
            losses[2].backward()
