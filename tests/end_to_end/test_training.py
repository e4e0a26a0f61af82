"""Twenty steps on the tiers are twenty steps of plain PyTorch, for models of many families.

Both compute the same gradients to rounding, 1e-7 or so of each tensor's norm. Adam divides each gradient by its own
size, so where a gradient is nearly zero its rounding counts in full: such an element may move by the learning rate one
way or the other. Therefore the error is that of all parameters together, and the learning rate a usual one. The bias of
attention's keys is left out where it stands alone: attention does not depend on it, so its gradient is rounding and
nothing else, and so is its update.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiered import options, two_groups
from torch import nn
from torch.nn import functional
from zoo import HUGGINGFACE, VOCAB, WIDTH, batch, build, loss_of, small

import gs_compile

NUM_STEPS = 20
# What is particular to these, test_models.py has in one step.
MORE = ["positional", "bert", "llama", "plain", "mixtral", "qwen3", "gpt_neox", "opt", "gemma2"]


def train(model, optimizer):
    """The losses, with a schedule and a batch of its own for every step."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses = []
    for number in range(NUM_STEPS):
        loss = loss_of(model, *batch(seed=number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


class Dense(nn.Module):
    """Of few operations, so that a compiler is soon done."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, labels):
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = x_BTD + torch.tanh(block(x_BTD))
        return functional.cross_entropy(self.head(x_BTD).flatten(0, 1), labels.flatten())


def assert_learns_the_same(name, tmp_path, **changes):
    torch.manual_seed(0)
    model = Dense() if name == "dense" else small(name) if name in HUGGINGFACE else build(name)
    reference = copy.deepcopy(model)
    wanted = train(reference, torch.optim.AdamW(two_groups(reference), lr=3e-4))
    optimizer = gs_compile.AdamW(two_groups(model), lr=3e-4)
    model.compile(backend="greedysnake", options=options(tmp_path, **changes))
    try:
        found = train(model, optimizer)
        state = model.state_dict()
    finally:
        if optimizer.engine is not None:
            optimizer.engine.tiers.close()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert wanted[-1] != wanted[0]
    theirs = {name: parameter.detach().double() for name, parameter in reference.named_parameters()}
    differences = {name: state[name].double() - value for name, value in theirs.items()}
    for name, difference in differences.items():
        if name.endswith("qkv.bias"):
            difference.unflatten(0, (4, 3, -1))[:, 1] = 0  # keys, by head
    assert together(differences) / together(theirs) < 1e-6


def together(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).norm()


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_training_is_that_of_plain_pytorch(name, tmp_path):
    assert_learns_the_same(name, tmp_path, alpha=0.3)


@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "positional", "llama"))]
)
def test_compiled_layers_learn_the_same(name, tmp_path):
    assert_learns_the_same(name, tmp_path, compiler="inductor", alpha=0.3)


@pytest.mark.slow
def test_with_a_device_of_its_own(tmp_path):
    """Of the usual model test_same_bits.py has it."""
    assert_learns_the_same(
        "llama", tmp_path, separate_device=True, alpha=1.0, ratios={"parameter": 0.5, "optimizer": 0.5}
    )
