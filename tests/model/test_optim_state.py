"""The state of optimizers whose states are on the tiers goes out, comes back, and moves to torch's and from there."""

from __future__ import annotations

import copy
import math
import operator
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from learner import EVERY, distance, gpt2, learner, plain, same_tensors, values
from tiered import loss_of, step, tokens, two_groups
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import gs_compile
from gs_compile.errors import LaneError, MasterWarning, OptimizerError, ReleasedParameterError, StepOrderError

KEEPS_CAPTURES = True
EACH = [("Lion", "model"), ("AdamW", "bf16"), ("Muon", "bf16")]  # without masters, and with them
EACH += [pytest.param(name, "model", marks=pytest.mark.slow) for name in ("AdamW", "Muon")]


@pytest.mark.parametrize(("name", "precision"), EACH)
def test_the_state_goes_round(name, precision, tmp_path):
    make = partial(EVERY[name], lr=1e-3)
    with learner(tmp_path, make, alpha=0.5, precision=precision) as one:
        one.train(0, 1)
        state, model = copy.deepcopy(one.optimizer.state_dict()), copy.deepcopy(one.model.state_dict())
        one.train(2, 3)
        wanted = one.values()
    with learner(tmp_path, make, alpha=0.0, precision=precision) as one:  # before the first call, and after it
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(state)
        assert one.optimizer.num_steps == 2
        one.train(2)
        one.optimizer.load_state_dict(state)
        if precision == "bf16":
            with pytest.raises(OptimizerError, match="do not round to the parameters' values: also load the model's"):
                one.train(2)
        one.model.load_state_dict(model)
        one.train(2, 3)
        same_tensors(one.values(), wanted)


@contextmanager
def defaults():
    """A default dtype and device, as scripts have them; where the model is made, they are others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def test_defaults_are_for_what_the_user_makes(tmp_path):
    make = partial(gs_compile.AdamW, lr=1e-2, max_grad_norm=1.0, state_dtype="8bit")

    def learned(folder, mode):
        ids = [tokens(number) for number in range(2)]
        with learner(folder, make, precision="bf16", alpha=0.5) as one, mode():
            for each in ids:
                step(one.model, one.optimizer, each)
                one.optimizer.steps.become(1000)  # which a bfloat16 counts to, and not on from
            state = one.optimizer.state_dict()
            one.optimizer.load_state_dict(state)
            step(one.model, one.optimizer, ids[0])
            return one.values() | {f"{p} {name}": each for p, s in state["state"].items() for name, each in s.items()}

    same_tensors(learned(tmp_path, defaults), learned(tmp_path, nullcontext))


def test_a_state_that_waits_for_the_first_call_is_still_there():
    model = gpt2()
    reference = torch.optim.AdamW(model.parameters())
    step(model, reference, tokens(0))
    optimizer = gs_compile.AdamW(model.parameters())
    assert all(not values.any() for state in optimizer.state_dict()["state"].values() for values in state.values())
    optimizer.load_state_dict(reference.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    found = optimizer.state_dict()
    assert found["param_groups"][0]["lr"] == 0.5
    for number, state in reference.state_dict()["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (gs_compile.AdamW, torch.optim.AdamW, {"lr": 1e-3}),
        pytest.param(gs_compile.Adam, torch.optim.Adam, {"lr": 1e-3}, marks=pytest.mark.slow),
        (gs_compile.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_training_moves_from_torch_to_here_and_back(ours, theirs, chosen, tmp_path):
    _, _, wanted, _ = plain(6, theirs, **chosen)
    _, _, begun, optimizer = plain(2, theirs, **chosen)
    with learner(tmp_path, partial(ours, lr=0.9), alpha=0.5) as one:  # settings come with the state
        one.model.load_state_dict(begun.state_dict())
        one.optimizer.load_state_dict(optimizer.state_dict())
        one.train(2, 3)
        model = gpt2()
        model.load_state_dict(one.model.state_dict())
        last = theirs(two_groups(model))
        last.load_state_dict(one.optimizer.state_dict())
    for number in (4, 5):
        step(model, last, tokens(number))
    assert distance(values(model), values(wanted)) < 1e-6


def test_states_that_do_not_fit_are_refused(tmp_path):
    _, _, model, reference = plain(1, lr=1e-3)
    state = reference.state_dict()
    optimizer = gs_compile.AdamW(model.parameters())
    with pytest.raises(OptimizerError, match=r"groups of \[.*\] parameters, here \[.*named_parameters"):
        optimizer.load_state_dict(state)
    optimizer = gs_compile.AdamW(two_groups(model))
    other = copy.deepcopy(state)
    other["param_groups"][0]["amsgrad"] = True
    with pytest.raises(OptimizerError, match="amsgrad is not supported"):
        optimizer.load_state_dict(other)
    before = optimizer.state_dict()
    for damaged in (math.nan, torch.tensor(math.inf), -1, 2.5, None, torch.ones(2)):
        other = {**state, "state": {number: {**each, "step": damaged} for number, each in state["state"].items()}}
        with pytest.raises(OptimizerError, match=r"a state's step is .*, which is not a number of steps"):
            optimizer.load_state_dict(other)
    for broken in ({}, None, {"param_groups": []}, {**state, "param_groups": 3}, {**state, "state": {0: 5}}):
        with pytest.raises(OptimizerError, match=r"state dict (has|must)"):
            optimizer.load_state_dict(broken)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    other = copy.deepcopy(state)
    other["state"][0]["exp_avg"] = other["state"][0]["exp_avg"][:-1]
    with pytest.raises(
        OptimizerError, match=r"of shape \(70, 32\) has exp_avg of shape \(69, 32\): load the state dict"
    ):
        optimizer.load_state_dict(other)
    assert all(not values.any() for each in optimizer.state_dict()["state"].values() for values in each.values())
    del other["state"][0]["exp_avg"]
    with learner(tmp_path) as one:
        one.train(0)
        with pytest.raises(OptimizerError, match="has no exp_avg: load the state dict"):
            one.optimizer.load_state_dict(other)
        one.train(1)
    with learner(tmp_path) as one:
        one.optimizer.load_state_dict(other)
        for _ in range(2):  # nothing trains on without it
            with pytest.raises((OptimizerError, LaneError), match="has no exp_avg: load the state dict"):
                one.train(0)


def test_a_state_that_comes_between_forward_and_backward_gives_the_step_up(tmp_path):
    with learner(tmp_path) as one:
        one.train(0)
        state = copy.deepcopy(one.optimizer.state_dict())
        loss = one.loss(1)
        one.optimizer.load_state_dict(state)
        with pytest.raises(StepOrderError, match="a state of the optimizer was loaded"):
            loss.backward()
        one.train(1)


def test_a_state_that_comes_between_backward_and_step_counts_for_that_step(tmp_path):
    """Its number of steps too, by which AdamW corrects."""
    plain = gpt2()
    theirs = torch.optim.AdamW(two_groups(plain), lr=1e-2, fused=True)
    with learner(tmp_path, accumulate=True) as one:
        for model, optimizer in ((plain, theirs), (one.model, one.optimizer)):
            step(model, optimizer, tokens(0))
            state = copy.deepcopy(optimizer.state_dict())
            step(model, optimizer, tokens(1))
            loss_of(model, tokens(2)).backward()
            optimizer.load_state_dict(state)
            optimizer.step()
        assert distance(values(one.model), values(plain)) < 1e-4


def test_a_state_that_comes_into_a_step_is_refused_as_a_whole(tmp_path):
    with learner(tmp_path) as one:
        one.train(0)
        state = copy.deepcopy(one.optimizer.state_dict())
        state["param_groups"][0]["lr"] = 0.5
        one.train(1)
        one.loss(2).backward()
        with pytest.raises(StepOrderError, match=r"a backward has run and optimizer.step\(\) has not"):
            one.optimizer.load_state_dict(state)
        assert (one.optimizer.num_steps, one.optimizer.param_groups[0]["lr"]) == (2, 1e-2)
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.train(3)
        assert one.optimizer.num_steps == 4


def test_states_are_found_by_name():
    """In groups of other sizes, which keep their settings, and in another order."""
    model = gpt2()
    named = dict(model.named_parameters())
    reference = torch.optim.AdamW(reversed(list(named.items())), lr=1e-3)
    step(model, reference, tokens(0))
    wide = [item for item in named.items() if item[1].dim() > 1]
    narrow = [item for item in named.items() if item[1].dim() == 1]
    optimizer = gs_compile.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=0.5)
    optimizer.load_state_dict(reference.state_dict())
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.01), (0.5, 0.0)]
    found = optimizer.state_dict()["state"]
    for number, (_, parameter) in enumerate(wide + narrow):
        assert torch.equal(found[number]["exp_avg"], reference.state[parameter]["exp_avg"])


def test_hooks_of_state_dicts_run(tmp_path):
    calls = []
    with learner(tmp_path) as one:
        optimizer = one.optimizer
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_state_dict_post_hook(lambda _, found: calls.append(len(found["state"])))
        optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
        one.train(0)
        optimizer.load_state_dict(optimizer.state_dict())
    number = sum(len(group["params"]) for group in optimizer.param_groups)
    assert calls == ["before", number, "before load", "after load"]


def test_the_state_shows_without_memory_and_without_a_step(tmp_path):
    """As torch.distributed.checkpoint looks for it."""
    with learner(tmp_path, alpha=1.0) as one:
        for num_steps in range(2):
            assert len(one.optimizer.state) == len(list(one.model.parameters()))
            for parameter, state in one.optimizer.state.items():
                assert state["step"] == num_steps
                for name in ("exp_avg", "exp_avg_sq"):
                    assert (state[name].is_meta, state[name].shape) == (True, parameter.shape)
            one.train(num_steps)
        assert repr(one.optimizer).startswith("AdamW (\nParameter Group 0")
        before = one.values()
        found = get_optimizer_state_dict(one.model, one.optimizer)["state"]
        assert one.optimizer.num_steps == 2
        same_tensors(one.values(), before)
        assert torch.equal(found["transformer.wpe.weight"]["exp_avg"], before["transformer.wpe.weight.exp_avg"])


@pytest.mark.parametrize(
    "change",
    [
        lambda shown: shown.mul_(0),
        lambda shown: shown.data.zero_(),
        lambda shown: shown.detach().copy_(torch.zeros(shown.shape)),
        lambda shown: operator.setitem(shown, 0, 1.0),
        lambda shown: operator.imul(shown, 0.5),
    ],
)
def test_a_change_of_what_the_state_shows_is_refused(change):
    """The tiers would not learn of it."""
    optimizer = gs_compile.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ReleasedParameterError, match=r"optimizer\.load_state_dict\(\)"):
        change(next(iter(optimizer.state.values()))["exp_avg"])


def test_states_are_sent_where_they_are():
    """By the loop over states that many scripts, and Poutyne, have for a model that was moved."""
    optimizer = gs_compile.AdamW(torch.nn.Linear(2, 2).parameters())
    for state in optimizer.state.values():
        for each in state.values():
            each.data = each.data.to("cpu")
            assert each._grad is None
    assert all(state["exp_avg"].is_meta for state in optimizer.state.values())
    with pytest.raises(ReleasedParameterError, match="__set__: optimizer"):
        state["exp_avg"].data = torch.zeros(2)


@pytest.mark.parametrize(
    "read", [lambda shown: shown.norm().item(), lambda shown: float(shown.square().sum()), torch.Tensor.tolist]
)
def test_a_value_is_not_read_off_what_the_state_shows(read):
    optimizer = gs_compile.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ReleasedParameterError, match=r"read it in optimizer\.state_dict\(\)"):
        read(next(iter(optimizer.state.values()))["exp_avg"])


def test_a_state_that_is_replaced_is_refused(tmp_path):
    """As by scripts that begin moments anew. The remedy of the message works."""

    def given(parameter, state):
        return {parameter: {**state, "exp_avg": torch.zeros(parameter.shape)}}

    with learner(tmp_path) as one:
        one.train(0)
        shown, first = one.optimizer.state, next(iter(one.optimizer.state))
        for changed in ({}, {**shown, first: {}}, {**shown, **given(first, shown[first])}):
            one.optimizer.state = defaultdict(dict, changed)
            with pytest.raises(OptimizerError, match=r"optimizer\.load_state_dict\(\)"):
                one.optimizer.begin_step()
        one.optimizer.state = shown
        found = copy.deepcopy(one.optimizer.state_dict())
        for state in found["state"].values():
            state["exp_avg"].zero_()
        one.optimizer.load_state_dict(found)
        assert not any(state["exp_avg"].any() for state in one.optimizer.state_dict()["state"].values())
        one.train(1)


def test_a_change_of_a_state_dicts_tensor_is_refused_where_it_would_be_lost(tmp_path):
    """Fault: torch has changed the state by then; here it was lost, without a word."""
    with learner(tmp_path) as one:
        one.train(0)
        one.optimizer.state_dict()["state"][0]["exp_avg"].zero_()
        with pytest.raises(ReleasedParameterError, match=r"optimizer\.state_dict\(\) was changed in place.*clone\(\)"):
            one.train(1)
        one.train(1)  # told once
        held = one.optimizer.state_dict()
        held["state"][0]["exp_avg"].zero_()
        one.optimizer.load_state_dict(held)
        assert not one.optimizer.state_dict()["state"][0]["exp_avg"].any()
        one.train(2)
        held["state"][0]["exp_avg_sq"].mul_(2)  # also where steps have come since
        with pytest.raises(ReleasedParameterError, match="was changed in place"):
            one.train(3)


def test_what_a_state_dict_has_no_state_for_begins_anew(tmp_path):
    """As with torch, in whose state dicts it has none before its first gradient."""
    with learner(tmp_path) as one:
        one.train(0)
        model, found = (copy.deepcopy(each.state_dict()) for each in (one.model, one.optimizer))
        some = {**found, "state": {number: state for number, state in found["state"].items() if number % 2}}
        with pytest.raises(OptimizerError, match="before the model's first call"):
            one.optimizer.load_state_dict(some)
        one.optimizer.load_state_dict({**found, "state": {}})
        assert one.optimizer.num_steps == 0
        one.train(1)
        anew = one.values()
    with learner(tmp_path) as one:
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(found)
        one.optimizer.load_state_dict({**found, "state": {}})
        one.train(1)
        same_tensors(one.values(), anew)
    with learner(tmp_path) as one:
        one.optimizer.load_state_dict(some)
        one.train(1)
        assert [state["step"] for state in one.optimizer.state_dict()["state"].values()] == [1, 2] * (len(model) // 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.slow), "bf16"])
def test_a_distributed_checkpoint_is_read_into_a_fresh_run(precision, called, tmp_path):
    """In place: what its state dict does not have is not read. Masters are known from the first call on."""

    def state(one):
        model, optimizer = get_state_dict(one.model, one.optimizer)
        return {"model": model, "optimizer": optimizer}

    with learner(tmp_path, alpha=0.5, precision=precision) as one:
        one.train(0, 1)
        checkpoint.save(state(one), checkpoint_id=tmp_path / "saved", no_dist=True)
        one.train(2)
        wanted = one.values()
    with learner(tmp_path, alpha=0.0, precision=precision) as one:
        if called:
            torch.no_grad()(one.loss)(7)
        found = state(one)
        checkpoint.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
        set_state_dict(one.model, one.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        assert one.optimizer.num_steps == 2
        if called or precision == "model":
            one.train(2)
            same_tensors(one.values(), wanted)
        else:
            with pytest.warns(MasterWarning, match="call the model once"):
                one.train(2)
