"""Accelerate's own loop, prepared by Accelerate: `accumulate` makes a step of several backwards."""

from __future__ import annotations

import accelerate
import pytest
import torch
from learner import distance, values
from tiered import gpt2, options, tokens

import gs_compile

GAS, NUM_BATCHES = 3, 7  # the last step has one batch


def trained(make, storage=None):
    """Losses and values after an epoch of the loop of Accelerate's guides."""
    torch._dynamo.reset()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=GAS)
    model = gpt2()
    optimizer = make(model.parameters(), lr=1.0)
    if storage is not None:
        model.compile(backend="greedysnake", options=options(storage))
    loader = torch.utils.data.DataLoader([tokens(number) for number in range(NUM_BATCHES)], batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model), optimizer


def test_accumulate_learns_what_it_does_with_an_optimizer_of_torch(tmp_path):
    losses, wanted, _ = trained(torch.optim.SGD)
    found, mine, optimizer = trained(gs_compile.SGD, tmp_path)
    assert optimizer.optimizer.num_steps == 3
    assert found == pytest.approx(losses, rel=1e-6)
    assert distance(mine, wanted) < 2e-6
