"""Of what a model returns a step trains some: what leads to the rest alone has no gradient, and is left as it is."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tiered import options
from torch import nn
from torch.nn import functional
from zoo import VOCAB, WIDTH, Block, batch, compile_model

import gs_compile
from gs_compile.errors import OptimizerError, UncapturedWarning

ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.5}
OURS = {"torch": torch.optim.AdamW, "tiers": gs_compile.AdamW}


class Heads(nn.Module):
    """Two losses, of a head each; a hidden state, and what has no finite derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(2))
        self.zero = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids, first, second, num_layers=3, both=True):
        states = [self.embedding(ids)]
        for block in self.blocks[:num_layers]:
            states.append(block(states[-1]))
        one, other = (functional.cross_entropy(head(states[-1]).flatten(0, 1), labels.flatten())
                      for head, labels in zip(self.heads, (first, second), strict=True))  # fmt: skip
        if not both:
            return one
        return one, other, states[1], (self.zero * states[-1]).square().mean(-1).sqrt()


def first_and_second(model, ids, labels):
    one, other, *_ = model(ids, labels, ids)
    return one + other


def first(model, ids, labels):
    return model(ids, labels, ids)[0]


def second_beside_nan(model, ids, labels):
    return model(ids, torch.full_like(labels, -100), labels)[1]


def hidden_state(model, ids, labels):
    return model(ids, labels, ids)[2].square().mean()


def without_the_second(model, ids, labels):
    return model(ids, labels, ids, both=False)


STEPS = [first_and_second, first, second_beside_nan, hidden_state, without_the_second, first_and_second]


def trained(model, optimizer, steps):
    for seed, loss_of in enumerate(steps):
        loss_of(model, *batch(4, seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps_taken = {number: float(state["step"]) for number, state in optimizer.state_dict()["state"].items()}
    return {name: value.clone() for name, value in model.state_dict().items()}, steps_taken


@pytest.mark.parametrize(
    ("name", "changes"),
    [("torch", {}), ("tiers", {}), ("tiers", {"alpha": 0.5}), ("tiers", {"accumulate": True})],
    ids=str,
)
def test_each_step_trains_what_a_gradient_comes_to(name, changes, tmp_path):
    model = Heads()
    plain = copy.deepcopy(model)
    optimizer = OURS[name](model.parameters(), **ADAMW)
    if name == "torch":
        compile_model(model, 2)
    else:
        model.compile(backend="greedysnake", options=options(tmp_path, outputs="all", **changes))
    values, taken = trained(model, optimizer, STEPS)
    expected, expected_taken = trained(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert {number: taken[number] for number in expected_taken} == expected_taken
    torch.testing.assert_close(values["zero"], torch.zeros(WIDTH), rtol=0, atol=0)
