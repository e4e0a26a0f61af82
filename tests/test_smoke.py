"""A minute's answer to "does it still train?": one small model, three placements, the same bits; and plain PyTorch's."""

from __future__ import annotations

import pytest
import torch
from tiered import Harness, adamw, gpt2, options, step, tokens, two_groups

PLACEMENTS = {
    "all in host memory": {"ratios": {"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}, "alpha": 0.0},
    "all on SSD": {"alpha": 0.5},
    "a device of its own": {"alpha": 0.3, "separate_device": True, "ratios": {"parameter": 0.3, "optimizer": 0.5}},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    torch._dynamo.reset()
    harness = Harness(gpt2)
    folder = tmp_path_factory.mktemp("storage")
    return {name: harness.train(adamw, options(folder, **changes), 3) for name, changes in PLACEMENTS.items()}


def test_any_placement_learns_the_same(outcomes):
    first, *others = outcomes.values()
    assert [first.differences(other) for other in others] == [[], []]


def test_it_learns_what_plain_pytorch_learns(outcomes):
    model = gpt2()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    losses = [step(model, optimizer, tokens(number)) for number in range(3)]
    assert outcomes["all on SSD"].losses == pytest.approx(losses, rel=1e-5)  # sums in another order
