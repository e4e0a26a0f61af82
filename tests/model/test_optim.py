"""Optimizers whose parameters and states are on the tiers are torch optimizers, in what they do and in what they say."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import sys
import weakref
from functools import partial

import pytest
import torch
from learner import distance, gpt2, inside, learner, plain, same_tensors, values
from setups import ids, tiny
from tiered import adamw, loss_of, options, our_threads, step, tokens, two_groups
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import gs_compile
from gs_compile.errors import OPTIMIZERS, OptimizerError, ReleasedParameterError, StepOrderError
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.tiered_optimizer import TieredOptimizer

KEEPS_CAPTURES = True


def test_errors_name_all_optimizers():
    public = ((name, getattr(gs_compile, name)) for name in gs_compile.__all__)
    ours = [name for name, each in public if isinstance(each, type) and issubclass(each, TieredOptimizer)]
    assert sorted(re.findall(r"[A-Z]\w+", OPTIMIZERS)) == sorted(ours)


# A torch optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (gs_compile.AdamW, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.95)}),
        pytest.param(gs_compile.Adam, torch.optim.Adam, {"lr": 1e-3}, marks=pytest.mark.slow),
        (gs_compile.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ],
    ids=str,
)
def test_it_learns_as_torchs_does(ours, theirs, settings, tmp_path):
    """With two param groups in every unit."""
    losses, norms, reference, _ = plain(4, theirs, **settings)
    with learner(tmp_path, partial(ours, **settings), alpha=0.5) as one:
        found = []
        for number in range(4):
            torch.testing.assert_close(one.train(number), losses[number : number + 1], rtol=1e-5, atol=0)
            found.append(one.optimizer.last_step.grad_norm)
        torch.testing.assert_close(found, norms, rtol=1e-6, atol=0)
        assert distance(values(one.model), values(reference)) < 1e-6


def test_hooks_closures_and_zero_grad(tmp_path):
    calls = []
    with learner(tmp_path) as one:
        one.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        one.optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def closure():
            one.optimizer.zero_grad()
            loss = one.loss(0)
            loss.backward()
            calls.append("closure")
            return loss

        loss = one.optimizer.step(closure)
        assert calls == ["before", "closure", "after"]
        assert loss.item() > 0
        assert one.optimizer.num_steps == 1
        assert not any(parameter.grad is None for parameter in one.model.parameters())


def test_what_the_last_step_did(tmp_path):
    with learner(tmp_path, alpha=0.5) as one:
        one.optimizer.step()  # without a backward it does nothing
        assert one.optimizer.last_step is None
        assert gs_compile.metrics(one.model) == {}
        one.train(0)
        assert "seconds" not in gs_compile.metrics(one.model)
        loss = one.loss(1)
        whole = loss.item()
        loss /= 4  # as loops that accumulate do
        loss.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert gs_compile.metrics(one.model)["loss"] == whole
        assert gs_compile.metrics(one.model)["seconds"] > 0
        before, info = one.values(), one.optimizer.last_step
        assert (info.number, info.skipped, info.num_skipped) == (2, False, 0)
        assert {"compute", "cpu", "ssd_read", "ssd_write"} <= info.lanes.keys()
        assert all(total.seconds > 0 for total in info.lanes.values())
        found = gs_compile.metrics(one.model)
        assert found["step"] == 2
        assert found["ssd_read_bytes"] == info.lanes["ssd_read"].nbytes > 0
        assert all(type(value) is float for value in found.values())
        one.optimizer.step()
        assert one.optimizer.last_step is info
        same_tensors(one.values(), before)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(LambdaLR, lr_lambda=lambda number: 1 / (1 + number)),
        partial(OneCycleLR, max_lr=1e-3, total_steps=6),  # betas as well
    ],
    ids=["lambda", "one cycle"],
)
def test_a_late_update_has_the_settings_of_its_own_step(scheduler, tmp_path):
    """A scheduler changes them between the backward and the update in the next forward."""
    model = gpt2()
    reference = torch.optim.AdamW(two_groups(model), lr=1e-3)
    schedule = scheduler(reference)
    for number in range(4):
        step(model, reference, tokens(number))
        schedule.step()

    def trained(alpha):
        with learner(tmp_path, partial(gs_compile.AdamW, lr=1e-3), alpha=alpha) as one:
            schedule = scheduler(one.optimizer)
            for number in range(4):
                one.train(number)
                schedule.step()
            assert one.optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
            return one.values()

    found = trained(1.0)
    assert distance({name: found[name] for name in values(model)}, values(model)) < 1e-6
    same_tensors(found, trained(0.0))


def test_a_list_of_settings_that_is_changed_in_place_counts_for_the_next_step(tmp_path):
    """As betas are a list where a file of settings has them. Fault: updates that were still to come had the new ones."""

    def trained(*, in_place):
        make = partial(gs_compile.AdamW, lr=1e-3, betas=[0.9, 0.99])
        with learner(tmp_path, make, alpha=1.0) as one:
            for number in range(3):
                one.train(number)
                for group in one.optimizer.param_groups:
                    betas = group["betas"] if in_place else group["betas"].copy()
                    betas[0] = 0.7 - number / 10
                    group["betas"] = betas
            assert not one.optimizer.loop.accumulates, "the first step has one backward"
            return one.values()

    same_tensors(trained(in_place=True), trained(in_place=False))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(gs_compile.AdamW, lr=torch.tensor(0.1)), "AdamW: lr must be a number, not Tensor"),
        (partial(gs_compile.AdamW, lr=-1.0), "AdamW: lr must not be negative"),
        (partial(gs_compile.AdamW, lr=math.nan), "AdamW: lr must not be negative, and finite"),
        (partial(gs_compile.AdamW, betas=(0.9, 1.0)), "AdamW: betas must be in"),
        (partial(gs_compile.Adam, eps=0.0), "Adam: eps must be more than 0"),
        (partial(gs_compile.Adam, weight_decay=-0.1), "Adam: weight_decay must not be negative"),
        (partial(gs_compile.SGD, nesterov=True), "SGD: nesterov needs momentum"),
        (partial(gs_compile.Lion, lr="1e-3"), "Lion: lr must be a number, not str"),
        (partial(gs_compile.AdamW, max_grad_norm=0), "max_grad_norm must be more than 0"),
    ],
)
def test_settings_out_of_range_are_refused(make, complaint):
    with pytest.raises(OptimizerError, match=complaint):
        make(gpt2().parameters())


def test_settings_of_torch_that_change_nothing_are_passed_over():
    """As scripts give them: nanoGPT's, to torch.optim.AdamW, on CUDA."""
    for make in (gs_compile.AdamW, gs_compile.Adam, gs_compile.SGD):
        optimizer = make(gpt2().parameters(), lr=0.1, fused=True, foreach=None, capturable=False, differentiable=False)
        assert not {"fused", "foreach"} & optimizer.param_groups[0].keys()
    groups = torch.optim.AdamW(gpt2().parameters(), lr=0.1).param_groups
    assert gs_compile.AdamW(groups).param_groups[0]["lr"] == 0.1
    with pytest.raises(OptimizerError, match="AdamW: amsgrad is not supported"):
        gs_compile.AdamW(gpt2().parameters(), amsgrad=True)
    with pytest.raises(OptimizerError, match="Adam: decoupled_weight_decay is not supported"):
        gs_compile.Adam(gpt2().parameters(), decoupled_weight_decay=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        gs_compile.AdamW(gpt2().parameters(), beta=0.9)


@pytest.mark.parametrize(
    ("changes", "complaint"), [({"lr": -1.0}, "lr must not be"), ({"amsgrad": True}, "amsgrad is")]
)
def test_settings_of_one_group_are_checked_too(changes, complaint):
    with pytest.raises(OptimizerError, match=f"AdamW: {complaint}"):
        gs_compile.AdamW([{"params": list(gpt2().parameters()), **changes}])


def test_a_setting_is_checked_again_when_it_is_used(tmp_path):
    with learner(tmp_path, partial(gs_compile.SGD, lr=0.1)) as one:
        one.train(0)
        one.optimizer.param_groups[0]["momentum"] = 0.9
        loss = one.loss(1)
        with pytest.raises(OptimizerError, match="so it has no state"):
            loss.backward()


def test_all_that_is_trained_needs_an_optimizer_before_the_first_step(tmp_path):
    with learner(tmp_path, lambda groups: gs_compile.AdamW(groups[:1])) as one:
        with pytest.raises(OptimizerError, match="is trained, but the gs_compile optimizer does not have it"):
            one.train(0)
        one.optimizer.add_param_group(two_groups(one.model)[1])
        one.train(0)
        with pytest.raises(OptimizerError, match="cannot be added after the first call"):
            one.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_an_optimizer_of_two_compiled_models(tmp_path):
    models = tiny(), tiny()
    optimizer = adamw([parameter for each in models for parameter in each.parameters()])
    for each in models:
        each.compile(backend="greedysnake", options=options(tmp_path))
    models[0](ids())
    with pytest.raises(OptimizerError, match=r"trains another compiled model, .*: make an optimizer for each of them"):
        models[1](ids())
    optimizer.engine.tiers.close()


# The order of calls ---------------------------------------------------------------------------------------------------


def test_a_run_that_began_with_one_backward_a_step_has_one_in_each(tmp_path):
    with learner(tmp_path) as one:
        one.train(0, 1)
        one.loss(0).backward()
        calls = [lambda: one.loss(1), torch.no_grad()(lambda: one.loss(1)), lambda: inside(one)]
        for call in (*calls, one.model.state_dict, one.optimizer.state_dict):
            with pytest.raises(StepOrderError, match=r"optimizer.step\(\) has not"):
                call()
        assert all(is_offloaded(parameter) for parameter in one.model.parameters())
        one.optimizer.step()
        one.optimizer.zero_grad()
        old, new = one.loss(1), one.loss(2)
        with pytest.raises(
            StepOrderError, match=r"dropped when the model was called again: .* or pass both batches in one call"
        ):
            old.backward()
        new.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        with pytest.raises(StepOrderError, match=r"comes to 2 calls of the model\. .* Nothing was updated"):
            (one.loss(1) + one.loss(2)).backward()
        assert one.optimizer.num_steps == 4


def test_a_loss_that_is_dropped_leaves_nothing(tmp_path):
    with learner(tmp_path, alpha=1.0) as one:
        one.train(0, 1)
        wanted = one.values()
    with learner(tmp_path, alpha=1.0) as one:
        one.train(0)
        one.values()
        one.loss(7)
        slab = one.optimizer.engine.tiers.slab
        mapped = slab.nbytes
        for _ in range(8):
            one.loss(7)
        assert slab.nbytes == mapped
        one.train(1)
        same_tensors(one.values(), wanted)


def test_a_grad_scaler_is_refused_before_anything_is_updated(tmp_path):
    """Fault 5: early updates took gradients that were 65536 times too large."""
    with learner(tmp_path, alpha=0.0) as one:
        one.train(0)
        before = one.values()
        scaler = torch.amp.GradScaler("cpu")
        for factor in (1.0, 0.25):
            with pytest.raises(OptimizerError, match=r"GradScaler multiplies the loss.*Nothing was updated"):
                (scaler.scale(one.loss(1)) * factor).backward()
        same_tensors(one.values(), before)
        del scaler
        (2 * one.loss(1)).backward()
        with pytest.raises(ReleasedParameterError, match="max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
        one.optimizer.step()
        assert one.optimizer.num_steps == 2
        with pytest.raises(ReleasedParameterError, match=r"read optimizer\.grad_norm"):  # in a log, for example
            next(one.model.parameters()).grad.norm()


def test_a_parameter_takes_no_more_work_where_there_are_more_of_them():
    """As of experts that are not fused; Muon asks for each one's param group."""

    def num_calls(number):
        parameters, count = [torch.nn.Parameter(torch.empty(2, 2)) for _ in range(number)], 0

        def profiler(frame, event, arg):
            nonlocal count
            count += event == "call"  # of a generator once for each item

        sys.setprofile(profiler)
        try:
            gs_compile.Muon(parameters)
        finally:
            sys.setprofile(None)
        return count

    few, many = num_calls(100), num_calls(200)
    assert many < 2.2 * few


def test_a_parameter_without_a_shape_is_refused():
    with pytest.raises(OptimizerError, match=r"its module is lazy.*call the model once on a batch"):
        gs_compile.AdamW(torch.nn.LazyLinear(4).parameters())


def test_gradients_from_elsewhere_are_refused():
    model = gpt2()
    optimizer = gs_compile.AdamW(model.parameters())
    loss_of(model, tokens(0)).backward()
    with pytest.raises(OptimizerError, match="did not run with the greedysnake backend"):
        optimizer.step()


def test_with_a_torch_optimizer_parameters_stay_in_memory(tmp_path):
    torch._dynamo.reset()
    model = gpt2()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-3)
    model.compile(backend="greedysnake", options=options(tmp_path / "storage"))
    losses, _, reference, _ = plain(3, lr=1e-3)
    torch.testing.assert_close([step(model, optimizer, tokens(n)) for n in range(3)], losses, rtol=1e-5, atol=0)
    assert distance(values(model), values(reference)) < 1e-6
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize("copies", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_is_not_copied(copies):
    with pytest.raises(ReleasedParameterError, match="cannot be copied or pickled"):
        copies(gs_compile.AdamW(gpt2().parameters()))


@pytest.mark.usefixtures("as_for_users")
def test_values_live_as_long_as_their_model(tmp_path):
    def train():
        model = gpt2()
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(tmp_path))
        step(model, optimizer, tokens(0))
        return model, weakref.ref(optimizer)

    torch._dynamo.reset()
    model, optimizer = train()
    assert optimizer() is None
    assert not model.state_dict()["lm_head.weight"].isnan().any()
    with torch.no_grad():
        assert loss_of(model, tokens(0)).isfinite()
    with pytest.raises(OptimizerError, match="optimizer of this model is gone"):
        loss_of(model, tokens(0)).backward()
    del model
    torch._dynamo.reset()
    gc.collect()
    assert our_threads() == []


# Models of their own: last, as a capture of one ends those of the usual model ------------------------------------------


@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.slow), "bf16"])
def test_frozen_parameters_stay(precision, tmp_path):
    def build():
        model = gpt2()
        for frozen in [model.transformer.wpe.weight, *(block.ln_1.weight for block in model.transformer.h)]:
            frozen.requires_grad_(False)
        return model

    with learner(tmp_path, build=build, precision=precision, alpha=0.5) as one:
        one.train(0, 1)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        wanted = gpt2().transformer.wpe.weight.to(dtype)
        frozen = one.model.transformer.wpe.weight
        assert torch.equal(one.model.state_dict()["transformer.wpe.weight"], wanted)
        assert torch.equal(residency_of(frozen).value(frozen, master=True), wanted)
        assert frozen not in one.optimizer.state
