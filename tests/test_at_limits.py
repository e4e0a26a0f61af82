"""Lines of docs/limits.md that no other module tests."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from learner import distance
from setups import SetUp, ids, tiny
from tiered import adamw, options
from torch import nn

import gs_compile
from gs_compile.errors import GraphBreakError, OptimizerError, ReleasedParameterError
from gs_compile.model.residency import stash


@pytest.fixture
def setup(tmp_path):
    found = SetUp(tmp_path)
    yield found
    if found.optimizer is not None and found.optimizer.engine is not None:
        found.optimizer.engine.tiers.close()


def test_gradients_from_outside_before_the_first_call():
    weight = nn.Parameter(torch.ones(3))
    stash(weight)
    with pytest.raises(ReleasedParameterError, match=r"has not been called yet.*: call the model first"):
        weight.square().sum().backward()


def test_on_several_ranks(setup, monkeypatch):
    """What they refuse, they refuse before they ask each other anything."""
    setup.call().backward()
    setup.optimizer.step()
    monkeypatch.setattr(setup.optimizer.engine, "ranks", SimpleNamespace(fail=lambda *_: None))
    with pytest.raises(ReleasedParameterError, match="that several ranks share from a computation outside"):
        setup.model.head.square().sum().backward()
    for block in setup.model.blocks:
        block.weight.requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"settles what is trained on several ranks\. Save the model"):
        setup.model(ids())


class Experts(nn.Module):
    """Each is given the tokens that it is chosen for, by their indices, or in their order by expert."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) / 9)
        self.grouped = grouped

    def forward(self, x_BTD):
        x, chosen = x_BTD.flatten(0, 1), self.gate(x_BTD).softmax(-1).flatten(0, 1).max(-1)
        y = torch.zeros_like(x)
        if self.grouped:
            order = chosen.indices.argsort(stable=True)
            ends = torch.histc(chosen.indices.float(), 3, 0, 2).cumsum(0).int()
            y[order] = nn.functional.grouped_mm(x[order].bfloat16(), self.experts.bfloat16(), offs=ends).float()
        else:
            for number, expert in enumerate(self.experts):
                (token,) = torch.where(chosen.indices == number)
                y[token] += (x[token].bfloat16() @ expert.bfloat16()).float()
        return x_BTD + (y * chosen.values[:, None]).view_as(x_BTD)


def routed(grouped: bool) -> nn.Module:
    torch.manual_seed(0)
    model = tiny()
    model.blocks = nn.ModuleList(Experts(grouped) for _ in range(2))
    return model


def test_the_form_of_experts_that_errors_name(tmp_path):
    """It learns what tokens by index do in plain PyTorch."""
    model, plain = routed(grouped=True), routed(grouped=False)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=5))
    losses = {}
    for each, update in ((model, optimizer), (plain, theirs)):
        losses[each] = each(ids())
        losses[each].backward()
        update.step()
    assert float(losses[model].detach()) == pytest.approx(float(losses[plain].detach()), rel=1e-5)
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-3  # products in bfloat16
    optimizer.engine.tiers.close()


class Chooses(nn.Module):
    """Reads one of two tables, or an input that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ParameterList(torch.randn(11, 8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids, number=0, shift=None):
        x = nn.functional.embedding(ids, self.words[number])
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
    chooses(ids())
    with torch.no_grad():  # an evaluation may
        torch.testing.assert_close(chooses(ids(), 1), chooses.forward(ids(), 1))
    with pytest.raises(OptimizerError, match=r"in unit e that the first call did not: call the model the same way in"):
        chooses(ids(), 1)


def test_an_input_without_rows_that_requires_a_gradient(chooses):
    with pytest.raises(
        OptimizerError, match=r"shape \(8,\) requires a gradient, and has no row .*: detach it, or use a"
    ):
        chooses(ids(), shift=torch.ones(8, requires_grad=True))


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    @torch.compiler.disable
    def chunked(self, x):
        return x.chunk(2, dim=1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.chunked(x)


def test_a_disabled_function_in_the_forward():
    model = Disabled()
    model.compile(backend="greedysnake", options={"expert": {"compiler": "eager"}})
    with pytest.raises(GraphBreakError, match=re.escape("torch.compiler.disable")):
        model(torch.ones(2, 4))
