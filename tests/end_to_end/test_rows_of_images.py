"""Rows of all samples' images behind one another, and positions whose samples are along the second dimension, as language
models of Qwen2-VL and later are given them."""

from __future__ import annotations

import copy

import pytest
import torch
from learner import distance
from seeing import PLACE, WIDTH, Seeing
from tiered import options

import gs_compile
from gs_compile.errors import CheckError

pytestmark = pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")  # the first layers get features


def batch(*num_places: int, num_tokens: int = 6):
    """Samples with so many places of images each, positions, and rows that require a gradient."""
    ids = torch.randint(1, 9, (len(num_places), num_tokens))
    for row, number in zip(ids, num_places, strict=True):
        row[torch.randperm(num_tokens)[:number]] = PLACE
    positions = torch.randint(1, 5, (3, *ids.shape))
    return ids, positions, [torch.randn(sum(num_places), WIDTH, requires_grad=True) for _ in range(3)]


def learned(model, optimizer, batches):
    """What is learned, and the losses and the gradients of what was given."""
    found = {}
    for number, (ids, positions, rows) in enumerate(batches):
        own = [each.detach().requires_grad_(each.requires_grad) for each in rows]
        loss = model(ids, positions, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"loss {number}": loss.detach(), **{f"rows {number} {i}": each.grad for i, each in enumerate(own)}}
    return {**found, **{name: each.detach().clone() for name, each in model.state_dict().items()}}


@pytest.mark.parametrize(
    "numbers",
    [
        ((2, 0, 3, 1), (1, 1, 1, 2), (4, 3)),
        ((2, 0, 1), (1, 2, 0, 1)),  # as many samples as positions have rows
        pytest.param(((1, 0, 2, 1), (3, 0, 2, 2)), marks=pytest.mark.slow),  # as many samples as rows
        pytest.param(((1, 2, 0, 3, 1, 0), (3, 3, 3)), marks=pytest.mark.slow),  # as many as tokens
        ((3,), (1, 2, 2)),
    ],
)
def test_each_micro_batch_has_its_own_rows(tmp_path, numbers):
    torch.manual_seed(0)
    model, batches = Seeing(), [batch(*each) for each in numbers]
    plain = copy.deepcopy(model)
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    found = learned(model, optimizer, batches)
    assert distance(found, learned(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)) < 1e-5
    optimizer.engine.tiers.close()


def test_rows_for_other_places_than_there_are(tmp_path):
    """Of the whole batch, as in plain PyTorch, and nothing is learned of it."""
    torch.manual_seed(0)
    model = Seeing()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    learned(model, optimizer, [batch(2, 0, 3, 1)])
    before = copy.deepcopy(model.state_dict())
    ids, positions, _ = batch(2, 0, 2, 1)
    with pytest.raises(CheckError, match=r"for the batch, at .*seeing\.py:\d+: torch\._check"):
        model(ids, positions, batch(2, 0, 3, 1)[2])
    assert distance(dict(model.state_dict()), before) == 0
    optimizer.engine.tiers.close()
