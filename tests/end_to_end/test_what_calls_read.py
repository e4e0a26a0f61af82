"""Calls of a model that read other parameters than its first one, or inputs of another kind."""

from __future__ import annotations

import copy

import pytest
import torch
from learner import distance
from setups import ids
from tiered import adamw, options
from torch import nn

import gs_compile
from gs_compile.errors import OptimizerError
from gs_compile.model.tiered_optimizer import optimizers_of


class Chooses(nn.Module):
    """Reads one of two tables, or both, or an input that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ParameterList(torch.randn(11, 8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids, number=0, shift=None):
        x = sum(nn.functional.embedding(ids, each) for each in (self.words if number is None else [self.words[number]]))
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean() if shift is None else (x + shift).square().mean()


@pytest.fixture
def chooses(tmp_path):
    torch.manual_seed(0)
    model = Chooses()
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=options(tmp_path))
    yield model
    optimizer.engine.tiers.close()


def test_a_call_that_reads_other_parameters(chooses):
    _loss = chooses(ids())  # of a step that is under way
    with torch.no_grad():  # an evaluation may
        torch.testing.assert_close(chooses(ids(), 1), chooses.forward(ids(), 1))
    with pytest.raises(OptimizerError, match=r"in unit e that the first call did not: call the model the same way in"):
        chooses(ids(), 1)


def test_a_first_step_whose_loss_was_dropped_begins_again_behind_an_evaluation(chooses):
    plain = Chooses()
    plain.load_state_dict(chooses.state_dict())
    (optimizer,) = optimizers_of(chooses.words[:1])
    for model, update in ((chooses, optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))):
        model(ids())
        with torch.no_grad():
            model(ids(), 1)
        for _ in range(2):
            model(ids(), 1).backward()
            update.step()
            update.zero_grad()
    assert distance(dict(chooses.state_dict()), dict(plain.state_dict())) < 1e-5


@pytest.mark.parametrize(("evaluated", "trained"), [([None], [0, 0]), ([], [None, 0]), ([0], [1])])
def test_a_first_step_that_begins_again_and_reads_others(evaluated, trained, chooses):
    """Than an evaluation before it, or than its own first call; what it does not read keeps its value."""
    plain = Chooses()
    plain.load_state_dict(chooses.state_dict())
    (optimizer,) = optimizers_of(chooses.words[:1])
    losses, states = {}, {}
    for model, update in ((chooses, optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))):
        with torch.no_grad():
            losses[model] = [model(ids(), number) for number in evaluated]
        for number in trained:
            losses[model].append(loss := model(ids(), number))
            loss.backward()
        update.step()
        with torch.no_grad():
            losses[model].append(model(ids(), None))
        states[model] = update.state_dict()["state"]
    torch.testing.assert_close(losses[chooses], losses[plain])
    assert distance(dict(chooses.state_dict()), dict(plain.state_dict())) < 1e-5
    assert states[chooses].keys() == states[plain].keys()


def learn(model, update, numbers, *, evaluates=False):
    """Steps of two backwards each, that read one table; ahead of them an evaluation may read both."""
    if evaluates:
        with torch.no_grad():
            model(ids(), None)
    for number in numbers:
        for each in range(2):
            model((ids() + 2 * number + each) % 11, 0).backward()
        update.step()
        update.zero_grad()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_durable_run_that_begins_with_an_evaluation_is_resumed(is_trained, tmp_path):
    """Its commits have what steps read, whatever an evaluation ahead of them reads besides, in memory before and then.

    Fault: they had what the first call had read, or all but that, and a run that began otherwise was refused.
    """
    torch.manual_seed(0)
    plain = Chooses()
    theirs, initial = torch.optim.AdamW(plain.parameters(), lr=1e-2), copy.deepcopy(plain.state_dict())
    for numbers, evaluates in (((0, 1), True), ((2,), False), ((3,), True)):
        learn(plain, theirs, numbers)
        ours = Chooses()
        ours.words[1].requires_grad_(is_trained)
        if numbers[0] == 0 or not is_trained:  # what is frozen is the script's own
            ours.load_state_dict(initial)
        optimizer = adamw(list(ours.parameters()))
        ours.compile(backend="greedysnake", options=options(tmp_path, durability="step"))
        assert gs_compile.resume(ours, optimizer, storage=tmp_path).step == numbers[0]
        learn(ours, optimizer, numbers, evaluates=evaluates)
        optimizer.commit()
        assert distance(dict(ours.state_dict()), dict(plain.state_dict())) < 1e-6
        optimizer.engine.tiers.close()


def test_layers_are_unfrozen_where_an_evaluation_has_read_more(chooses):
    """Fault: a call with all parameters was asked for, which no step is."""
    plain = Chooses()
    plain.load_state_dict(chooses.state_dict())
    (optimizer,) = optimizers_of(chooses.words[:1])
    for model, update in ((chooses, optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))):
        model.blocks.requires_grad_(False)
        with torch.no_grad():
            model(ids(), None)
        for _ in range(2):
            model(ids(), 0).backward()
            update.step()
            update.zero_grad()
            model.blocks.requires_grad_(True)
    assert distance(dict(chooses.state_dict()), dict(plain.state_dict())) < 1e-6
    with torch.no_grad():
        torch.testing.assert_close(chooses(ids(), None), plain(ids(), None))


def test_an_input_without_rows_that_requires_a_gradient(chooses):
    with pytest.raises(
        OptimizerError, match=r"shape \(8,\) requires a gradient, and has no row .*: detach it, or use a"
    ):
        chooses(ids(), shift=torch.ones(8, requires_grad=True))
