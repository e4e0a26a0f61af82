"""Parameters of the optimizer that the compiled model does not read: they are trained in memory, with the others."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from learner import distance, same_tensors, values
from tiered import gpt2, options, shared, tokens
from torch import nn
from torch.nn import functional

import gs_compile
from gs_compile.errors import GreedySnakeError, NonFiniteWarning, OptimizerError, StepOrderError
from gs_compile.model import in_memory
from gs_compile.runtime.units import CompiledUnits

KEEPS_CAPTURES = True


class WithHead(nn.Module):
    """A body, and a head of its own that runs eagerly, as in reward models and fused losses."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.lm_head.out_features, 3)

    def loss(self, number):
        hidden = self.body(input_ids=tokens(number)).logits
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens(number).flatten() % 3)


def trained(model, optimizer, numbers, clip=None):
    losses = []
    for number in numbers:
        loss = model.loss(number)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(body=None):
    """body: another than one of its own, which begins from the same values."""
    body = gpt2() if body is None else body
    torch.manual_seed(5)
    return WithHead(body)


@contextmanager
def tiered(folder, make, **changes):
    """With the usual model, captured once, as its body."""
    model = made(shared().model)
    given = options(folder, outputs="all", **changes)
    with shared().fresh(lambda _: make(model.parameters()), given) as optimizer:
        yield model, optimizer


@pytest.mark.parametrize(
    ("clip", "changes"),
    [(None, {"alpha": 0.5}), (0.05, {"clip": "delayed"}), (0.05, {"clip": "speculative"})],
    ids=["no clip", "clip", "speculative"],
)
def test_a_head_outside_of_the_compiled_model_is_trained(clip, changes, tmp_path):
    plain = made()
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), range(4), clip)
    make = partial(gs_compile.AdamW, lr=1e-2, max_grad_norm=clip)
    with tiered(tmp_path, make, **changes) as (model, optimizer):
        found = trained(model, optimizer, range(4))
        assert found == pytest.approx(wanted, rel=1e-5)
        assert not torch.equal(model.head.weight, made().head.weight)
        assert distance(values(model), values(plain)) < 1e-5
        state, theirs = optimizer.state_dict(), torch.optim.AdamW(plain.parameters()).state_dict()
        assert len(state["state"]) == len(theirs["param_groups"][0]["params"])
        assert {key: value.shape for key, value in state["state"][len(state["state"]) - 1].items() if key != "step"} == {
            "exp_avg": (3,), "exp_avg_sq": (3,)
        }  # fmt: skip


def test_its_gradient_is_zeroed_with_those_of_the_others(tmp_path):
    """Fault: where one call of torch's zeroed all of them, that of the head stayed."""
    plain = made()
    with tiered(tmp_path, partial(gs_compile.SGD, lr=0.1)) as (model, optimizer):
        for each, update in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (model, optimizer)):
            for number in range(3):
                each.loss(number).backward()
                update.step()
                torch._foreach_zero_([parameter.grad for parameter in each.parameters() if parameter.grad is not None])
        assert distance(values(model), values(plain)) < 1e-5


def test_a_parameter_that_nobody_reads_has_no_state(tmp_path):
    """As with torch; on the meta device it would be moved or saved by those who take it for a value."""
    with tiered(tmp_path, partial(gs_compile.AdamW, lr=1e-2)) as (model, optimizer):
        unread = model.head.bias
        (model.body(input_ids=tokens(0)).logits.sum() + 0 * model.head.weight.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.state.get(unread, {}) == {}
        assert model.head.weight.shape == optimizer.state[model.head.weight]["exp_avg"].shape
        numbers = {number for group in optimizer.state_dict()["param_groups"] for number in group["params"]}
        assert optimizer.state_dict()["state"].keys() == numbers - {max(numbers)}
        for state in optimizer.state.values():
            assert not any(value.is_meta for value in state.values() if type(value) is torch.Tensor)
        trained(model, optimizer, [0])
        assert not optimizer.state[unread]["exp_avg"].is_meta


def test_its_state_is_saved_and_loaded(tmp_path):
    make = partial(gs_compile.AdamW, lr=1e-2)
    with tiered(tmp_path / "one", make, alpha=0.5) as (model, optimizer):
        trained(model, optimizer, range(2))
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        wanted = trained(model, optimizer, range(2, 4))
    with tiered(tmp_path / "two", make, alpha=0.5) as (model, optimizer):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert trained(model, optimizer, range(2, 4)) == wanted


@pytest.mark.parametrize("form", [torch.Tensor.double, lambda x: x.t().contiguous().t()], ids=["dtype", "strides"])
def test_a_state_is_loaded_whatever_its_form(form, tmp_path):
    """As by torch's optimizers. Fault: the next step() ended the run with a RuntimeError."""
    make = partial(gs_compile.AdamW, lr=1e-2)
    with tiered(tmp_path / "one", make) as (model, optimizer):
        trained(model, optimizer, range(2))
        saved, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        wanted = trained(model, optimizer, range(2, 4))
    for state in states["state"].values():
        state |= {name: form(each) for name, each in state.items() if name != "step"}
    with tiered(tmp_path / "two", make) as (model, optimizer):
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
        assert trained(model, optimizer, range(2, 4)) == wanted


def test_each_has_steps_of_its_own(tmp_path):
    """As with torch: steps of the body alone are none of the head, and the other way round."""

    def trained_in_turn(model, optimizer):
        for number, kind in enumerate(["body", "body", "both", "head", "both"]):
            if kind == "both":
                trained(model, optimizer, [number])
                continue
            hidden = (
                model.body(input_ids=tokens(number)).logits
                if kind == "body"
                else model.head(torch.ones(2, model.head.in_features))
            )
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = made()
    trained_in_turn(plain, theirs := torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    with tiered(tmp_path, partial(gs_compile.AdamW, lr=1e-2)) as (model, optimizer):
        trained_in_turn(model, optimizer)
        assert distance(values(model), values(plain)) < 1e-5
        steps = [each["step"].item() for each in optimizer.state_dict()["state"].values()]
        assert steps == [each["step"].item() for each in theirs.state_dict()["state"].values()]
        assert (steps[0], steps[-1]) == (4, 3)
        theirs.load_state_dict(optimizer.state_dict())


def test_a_head_of_low_precision_is_refused(tmp_path):
    with tiered(tmp_path, gs_compile.AdamW) as (model, optimizer):
        model.head.bfloat16()
        loss = model.head(model.body(input_ids=tokens(0)).logits.bfloat16()).float().sum()
        loss.backward()
        with pytest.raises(OptimizerError, match="convert it to float32"):
            optimizer.step()


def late(model, number):
    """A loss of which a part has a backward of its own, behind that of the body, as an encoder ahead of it has."""
    model.loss(number).backward()
    (0.1 * model.head.weight.square().sum()).backward()


@pytest.mark.parametrize("changes", [{"clip": "delayed"}, {"clip": "speculative"}], ids=["delayed", "speculative"])
def test_gradients_that_come_behind_the_models_are_clipped_with_them(changes, tmp_path):
    """Fault: they were refused. Where updates ran early, the first step begins again, and they wait from then on."""
    plain = made()
    theirs, norms = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), []
    with tiered(tmp_path, partial(gs_compile.AdamW, lr=1e-2, max_grad_norm=0.5), **changes) as (model, optimizer):
        for number in range(4):
            late(plain, number)
            norms += [nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()]
            late(model, number)
            assert optimizer.grad_norm == pytest.approx(norms[-1], rel=1e-5)
            for each in (theirs, optimizer):
                each.step()
                each.zero_grad()
            assert gs_compile.metrics(model.body)["grad_norm"] == pytest.approx(norms[-1], rel=1e-5)
        assert min(norms) > 0.5
        assert distance(values(model), values(plain)) < 1e-5


def test_a_late_gradient_that_is_not_finite_skips_the_step(tmp_path):
    with tiered(tmp_path, partial(gs_compile.AdamW, max_grad_norm=1.0), clip="delayed") as (model, optimizer):
        trained(model, optimizer, [0])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.loss(1).backward()
        (torch.inf * model.head.weight.sum()).backward()
        with pytest.warns(NonFiniteWarning, match="step 2 was skipped"):
            optimizer.step()
        optimizer.zero_grad()
        same_tensors(model.state_dict(), before)
        trained(model, optimizer, [1])
        assert {each["step"].item() for each in optimizer.state_dict()["state"].values()} == {2.0}


@pytest.mark.parametrize("factor", [0.1, torch.inf])
def test_late_gradients_that_the_first_step_did_not_have(factor, tmp_path):
    """Updates have run by the norm without them: a step that clips more is refused, and ends the run's steps."""
    make = partial(gs_compile.AdamW, lr=1e-2, max_grad_norm=100.0)
    with tiered(tmp_path, make, clip="speculative") as (model, optimizer):
        trained(model, optimizer, [0])
        model.loss(1).backward()
        (factor * model.head.weight.sum()).backward()
        with pytest.raises(
            StepOrderError, match=r"came behind the model's backward.* Give options=.\"accumulate\": True"
        ):
            optimizer.step()


def test_an_interrupt_in_a_step_ends_the_run(tmp_path, monkeypatch):
    """The body is updated and the head is not: nobody goes on with that, or saves it."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with tiered(tmp_path, gs_compile.AdamW, alpha=0.5) as (model, optimizer):
        trained(model, optimizer, [0])
        with monkeypatch.context() as patched:
            patched.setattr(in_memory, "update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trained(model, optimizer, [1])
        for use in (model.state_dict, optimizer.state_dict, partial(trained, model, optimizer, [2])):
            with pytest.raises(GreedySnakeError, match="KeyboardInterrupt"):
                use()


def test_a_step_of_the_head_alone(tmp_path):
    plain = made()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    make = partial(gs_compile.SGD, lr=0.1, max_grad_norm=0.5)
    with tiered(tmp_path, make, clip="delayed") as (model, optimizer):
        trained(model, optimizer, [0])
        trained(plain, other, [0], 0.5)
        for head, step in ((model.head, optimizer.step), (plain.head, other.step)):
            head.weight.square().sum().backward()
            nn.utils.clip_grad_norm_(plain.head.parameters(), 0.5)
            step()
        assert optimizer.last_step.number == 1  # of those that the compiled model has taken
        assert torch.allclose(model.head.weight, plain.head.weight, rtol=1e-5)


@pytest.mark.parametrize("make", [torch.optim.AdamW, gs_compile.AdamW])
def test_a_first_step_that_fails_changes_nothing_in_memory(make, tmp_path, monkeypatch):
    """The body's backward fails: neither its parameters nor the head's have moved, and the same step then works."""
    found = []
    for breaks in (False, True):
        torch._dynamo.reset()
        model = made()
        optimizer = make(model.parameters(), lr=1e-3)
        model.body.compile(backend="greedysnake", options=options(tmp_path / str(breaks), outputs="all"))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if breaks:
            with monkeypatch.context() as patched:
                patched.setattr(CompiledUnits, "backward", lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    trained(model, optimizer, [0])
            same_tensors(model.state_dict(), before)
            optimizer.zero_grad()
        trained(model, optimizer, [0, 1])
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        if isinstance(optimizer, gs_compile.AdamW):
            optimizer.engine.tiers.close()
    same_tensors(*found)
