"""Loops as people have them: several backwards before `step()`, several forwards before a backward.

Each learns what plain PyTorch does, and the same bits wherever data is stored, also where the first step begins again.
"""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext

import pytest
import torch
from happens_before import on_host, on_twin
from learner import distance, same_tensors
from lines import JOIN, without
from tiered import Harness, adamw, gpt2, options, sgd, tokens, two_groups
from torch.nn import functional

import gs_compile
from gs_compile.errors import (
    MemoryBudgetError,
    NonFiniteWarning,
    OptimizerError,
    ReleasedParameterError,
    StepOrderError,
)
from gs_compile.model.residency import residency_of
from gs_compile.runtime.tiers import Tiers

KEEPS_CAPTURES = True
TOLERANCE = 2e-6  # of a gradient: sums of micro-batches in fp32 in another order; two steps of it
NUM_STEPS = 3


def loss_of(model, number):
    ids = tokens(number)
    return model(input_ids=ids, labels=ids).loss


def accumulated(model, number, scale=lambda loss: loss):
    """As nanoGPT does."""
    for each in range(4):
        loss = loss_of(model, 4 * number + each) / 4
        scale(loss).backward()
        yield loss


def in_another_thread(model, number):
    """As autograd runs backwards of what a GPU has computed."""
    for each in range(2):
        loss = loss_of(model, 2 * number + each)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        yield loss


def a_sum(model, number):
    one, other = loss_of(model, 2 * number), loss_of(model, 2 * number + 1)
    (0.7 * one + 0.3 * other).backward()
    yield from (one, other)


def one_after_the_other(model, number):
    one, other = loss_of(model, 2 * number), loss_of(model, 2 * number + 1)
    one.backward()
    other.backward()
    yield from (one, other)


def three_forwards(model, number):
    first, *rest = (loss_of(model, 3 * number + each) for each in range(3))
    (first * rest[0]).backward()
    rest[1].backward()
    yield from (first, *rest)


def evaluations_between(model, number):
    loss = loss_of(model, number)
    with torch.no_grad():
        before = loss_of(model, number + 1)
    loss.backward()
    with torch.no_grad():
        after = loss_of(model, number + 1)
    assert torch.equal(before, after)
    yield from (loss, before)


def zeroed_between(model, number):
    """What a backward has left is dropped, in both ways that there are. What comes then is added to, be it a penalty's."""
    loss_of(model, 2 * number).backward()
    model.zero_grad(set_to_none=number % 2 == 0)
    loss = loss_of(model, 2 * number + 1)
    if number == 1:
        (0.002 * penalty(model)).backward()
    if number == 2:
        put(model)
    loss.backward()
    yield loss


def put(model):
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.002)


def given_up(model, number):
    """A loss that nobody differentiates, and that is there while the next one is made; what is in `.grad` is added to."""
    loss = loss_of(model, 7)
    loss = loss_of(model, number)
    if number == 0:
        put(model)
    loss.backward()
    yield loss


def r_drop(model, number):
    ids = tokens(number)
    one, other = model(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
    apart = functional.kl_div(
        one.logits.log_softmax(-1), other.logits.log_softmax(-1), log_target=True, reduction="sum"
    )
    loss = one.loss + other.loss + 0.01 * apart
    loss.backward()
    yield loss


def penalty(model):
    return sum((parameter - 0.1).square().sum() for parameter in model.parameters())


def penalized(model, number):
    """In one sum, of which the penalty's backward comes first, or last, or is a backward of its own."""
    before = penalty(model) if number % 3 == 1 else 0  # not before the first call
    loss = loss_of(model, 2 * number)
    after = penalty(model)
    total = loss + 0.003 * (before if number % 3 == 1 else after)
    total.backward()
    if number % 3 == 2:
        (0.002 * penalty(model)).backward()
    yield from (loss, after)


LOOPS = (
    accumulated,
    in_another_thread,
    a_sum,
    one_after_the_other,
    three_forwards,
    evaluations_between,
    zeroed_between,
    given_up,
    penalized,
)
PLACES = {
    "on SSD": {},
    "in host memory": {"ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}, "alpha": 0.5},
    "on a device, mixed": {
        "separate_device": True,
        "accumulate": True,
        "ratios": {"parameter": 0.5, "checkpoint": 0.3, "optimizer": 0.7, "gradient": 0.5},
    },
    "gradients on SSD": {"accumulate": True, "ratios": {"gradient": 0.0}},
}


def learned(harness, make, loop, given, num_steps=NUM_STEPS):
    """Losses, values and the optimizer's report after some steps."""
    torch.manual_seed(1)
    losses = []
    with harness.fresh(make, given) as optimizer:
        for number in range(num_steps):
            losses += [float(loss.detach()) for loss in loop(harness.model, number)]
            optimizer.step()
            optimizer.zero_grad()
        norm = optimizer.last_step.grad_norm
        assert optimizer.num_steps == num_steps
        optimizer.synchronize()
        named = harness.model.named_parameters()
        return losses, {name: residency_of(each).value(each, master=True).clone() for name, each in named}, norm


def plainly_learned(make, loop, clip=None):
    model = gpt2()
    optimizer = make(two_groups(model))
    losses = []
    for number in range(NUM_STEPS):
        losses += [float(loss.detach()) for loss in loop(model, number)]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: each.detach() for name, each in model.named_parameters()}, float(norm)


def assert_alike(found, wanted, tolerance=TOLERANCE):
    losses, values, norm = found
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert norm == pytest.approx(wanted[2], rel=1e-5)
    assert distance(values, wanted[1]) < tolerance


def assert_same(found, wanted):
    assert (found[0], found[2]) == (wanted[0], wanted[2])
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def plain_sgd(groups):
    return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=1.0)


@pytest.fixture(scope="module")
def harness():
    return Harness(gpt2)


@pytest.fixture(scope="module")
def all_outputs():
    return Harness(gpt2)


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=[pytest.mark.slow] * (loop in (a_sum, one_after_the_other))) for loop in LOOPS]
)
@pytest.mark.parametrize(  # all of them fast: `test_r_drop`, and `test_a_penalty_is_in_the_norm_that_is_clipped_by`
    "places", [("on SSD", "on a device, mixed"), pytest.param((*PLACES,), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_a_loop_learns_what_plain_pytorch_does_wherever_data_is(loop, places, harness, tmp_path):
    wanted = plainly_learned(plain_sgd, loop)
    found = [learned(harness, sgd, loop, options(tmp_path / place, **PLACES[place])) for place in places]
    assert_alike(found[0], wanted)
    for each in found[1:]:
        assert_same(each, found[0])


def test_r_drop(all_outputs, tmp_path):
    """Gradients come for logits, too, and the first step is not of the loss alone."""
    found = [learned(all_outputs, sgd, r_drop, options(tmp_path, outputs="all", **place)) for place in PLACES.values()]
    assert_alike(found[0], plainly_learned(plain_sgd, r_drop))
    for each in found[1:]:
        assert_same(each, found[0])


@pytest.mark.parametrize("loop", [pytest.param(accumulated, marks=pytest.mark.slow), three_forwards])
def test_on_a_device_every_access_is_ordered(loop, harness, tmp_path):
    """On the twin that runs late; it sums the squares of a norm in another order."""
    given = PLACES["on a device, mixed"]
    losses, values, norm = learned(harness, sgd, loop, options(tmp_path / "cpu", **given), 2)
    with on_twin():
        found = learned(harness, sgd, loop, options(tmp_path / "twin", **{**given, "separate_device": False}), 2)
    assert_same(found, (losses, values, pytest.approx(norm, rel=1e-6)))


@pytest.mark.parametrize("waits", [True, False])
def test_a_gradient_from_outside_waits_for_the_models_own(harness, tmp_path, monkeypatch, waits):
    """Which may be on its way to its sum."""
    if not waits:
        monkeypatch.setattr(Tiers, "at_home", without(Tiers, "at_home", JOIN))
    with nullcontext() if waits else pytest.raises(AssertionError, match=r"nothing orders .*dw"), on_host():
        learned(harness, sgd, penalized, options(tmp_path, **PLACES["gradients on SSD"]))


@pytest.mark.parametrize("loop", [pytest.param(accumulated, marks=pytest.mark.slow), a_sum])
def test_dropout_masks_are_the_same_where_the_first_step_begins_again(loop, tmp_path):
    harness = Harness(lambda: gpt2(dropout=0.2))
    found = [learned(harness, adamw, loop, options(tmp_path, accumulate=given)) for given in (False, True)]
    assert_same(*found)


@pytest.mark.parametrize("clip", ["delayed", "speculative"])
def test_the_norm_of_what_was_accumulated_is_clipped_by(clip, harness, tmp_path):
    """With a loss scale, which every backward has."""

    def scaled(model, number):
        yield from accumulated(model, number, scaler.scale)

    def make(groups):
        optimizer = gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0, max_grad_norm=0.05)
        scaler.serve(optimizer)
        return optimizer

    scaler = gs_compile.LossScaler(init_scale=8.0)
    found = learned(harness, make, scaled, options(tmp_path, clip=clip))
    assert_alike(found, plainly_learned(plain_sgd, accumulated, clip=0.05))


def test_a_penalty_is_in_the_norm_that_is_clipped_by(harness, tmp_path):
    def make(groups):
        return gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0, max_grad_norm=0.05)

    for number, place in enumerate(PLACES.values()):
        found = learned(harness, make, penalized, options(tmp_path / f"{number}", **{"alpha": 1.0, **place}))
        assert_alike(found, plainly_learned(plain_sgd, penalized, clip=0.05))


def test_a_gradient_from_before_the_first_call_is_refused(tmp_path):
    torch._dynamo.reset()
    model = gpt2()
    optimizer = sgd(two_groups(model))
    model.compile(backend="greedysnake", options=options(tmp_path))
    penalty(model).backward()
    with pytest.raises(OptimizerError, match=r"has a gradient from before .* first call, which would be lost"):
        loss_of(model, 0)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()


def test_a_penalty_that_comes_later_is_refused(harness, tmp_path):
    with harness.fresh(sgd, options(tmp_path)) as optimizer:
        loss_of(harness.model, 0).backward()
        optimizer.step()
        with pytest.raises(ReleasedParameterError, match=r"a computation outside of the compiled model, .*accumulate"):
            penalty(harness.model).backward()


def test_a_step_of_a_penalty_alone_is_refused(harness, tmp_path):
    with harness.fresh(sgd, options(tmp_path, accumulate=True)) as optimizer:
        loss_of(harness.model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        penalty(harness.model).backward()
        with pytest.raises(StepOrderError, match="only from outside of the compiled model"):
            optimizer.step()
        loss_of(harness.model, 1).backward()
        optimizer.step()
        assert optimizer.num_steps == 2


def test_gradients_that_are_not_finite_skip_the_whole_step(harness, tmp_path):
    """Also those of a backward that is not the last."""
    with harness.fresh(sgd, options(tmp_path)) as optimizer:
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        (loss_of(harness.model, 0) * math.inf).backward()
        loss_of(harness.model, 1).backward()
        with pytest.warns(NonFiniteWarning, match="step 1 was skipped"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in harness.model.state_dict().items())


def test_a_state_that_was_loaded_is_there_where_the_first_step_begins_again(harness, tmp_path):
    with harness.fresh(adamw, options(tmp_path, accumulate=True)) as optimizer:
        list(accumulated(harness.model, 0))
        optimizer.step()
        optimizer.zero_grad()
        model, state = copied(harness.model.state_dict()), copied(optimizer.state_dict())
        list(accumulated(harness.model, 1))
        optimizer.step()
        optimizer.zero_grad()
        wanted = copied(harness.model.state_dict())
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        harness.model.load_state_dict(model)
        optimizer.load_state_dict(state)
        optimizer.add_param_group({"params": [beside := torch.nn.Parameter(torch.zeros(1))]})
        torch.no_grad()(loss_of)(harness.model, 0)
        beside.grad = torch.ones(1)
        optimizer.step(), optimizer.zero_grad()  # of that alone: the model's first one is to come
        list(accumulated(harness.model, 1))
        optimizer.step()
        assert optimizer.num_steps == 2
        same_tensors(copied(harness.model.state_dict()), wanted)


def copied(state):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, state)


def test_what_is_read_between_two_backwards_has_not_changed(harness, tmp_path):
    with harness.fresh(sgd, options(tmp_path, accumulate=True)) as optimizer:
        before = copied(harness.model.state_dict())
        for number in range(2):
            loss_of(harness.model, number).backward()
            same_tensors(copied(harness.model.state_dict()), before)
        optimizer.step()
        assert not torch.equal(harness.model.state_dict()["lm_head.weight"], before["lm_head.weight"])


# Memory ---------------------------------------------------------------------------------------------------------------


def test_calls_that_wait_share_the_budget(harness, tmp_path):
    """What each takes beside the parameters is planned for as many as the first step has."""
    given = {"ratios": {"parameter": 1.0, "optimizer": 1.0, "checkpoint": None}, "alpha": None}
    with harness.fresh(sgd, options(tmp_path, host_memory="900KiB", **given)) as optimizer:
        for number in range(2):
            list(three_forwards(harness.model, number))
            optimizer.step()
            optimizer.zero_grad()
        slab = optimizer.engine.tiers.slab
        assert optimizer.engine.num_calls == 3
        assert slab.fixed.nbytes < slab.nbytes <= 900 << 10


def test_calls_that_do_not_fit_are_refused_with_what_they_need(harness, tmp_path):
    """Nothing is lost: the run goes on with what fits."""
    with harness.fresh(sgd, options(tmp_path, host_memory="700KiB")) as optimizer:
        with pytest.raises(
            MemoryBudgetError, match=r"700.0 KiB for 3 calls .* wait for .* this step needs .* at least"
        ):
            list(three_forwards(harness.model, 0))
        loss_of(harness.model, 0).backward()
        optimizer.step()
        assert (optimizer.num_steps, optimizer.loop.accumulates) == (1, False)


def test_more_calls_than_the_first_step_has_had_are_given_up_where_there_is_no_room(harness, tmp_path):
    with harness.fresh(sgd, options(tmp_path, host_memory="700KiB", accumulate=True)) as optimizer:
        list(accumulated(harness.model, 0))
        optimizer.step()
        with pytest.raises(StepOrderError, match=r"there is no room for both .* takes .* bytes"):
            list(three_forwards(harness.model, 1))


# What cannot be done again --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_of", [lambda ids: ids, lambda ids: ids.data, lambda ids: ids.numpy()])
def test_inputs_that_have_changed_cannot_be_done_again(memory_of, harness, tmp_path):
    """Fault: those that a loader had filled by `.data` or by numpy, of which torch counts no change, were."""
    with harness.fresh(sgd, options(tmp_path)):
        harness.model(input_ids=(ids := tokens(0)), labels=ids).loss.backward()
        memory_of(ids)[:] = tokens(1)
        with pytest.raises(StepOrderError, match=r'changed in place since then.*"accumulate": True'):
            harness.model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("accumulate", [True, False])  # False: the first step, which begins again
def test_a_step_ends_what_waits(accumulate, harness, tmp_path):
    with harness.fresh(sgd, options(tmp_path, accumulate=accumulate)) as optimizer:
        old = loss_of(harness.model, 0)
        list(accumulated(harness.model, 1))
        optimizer.step(), optimizer.zero_grad()
        with pytest.raises(StepOrderError, match=r"dropped when optimizer\.step\(\) was called"):
            old.backward()
