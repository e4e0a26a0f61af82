"""Buffers that a forward overwrites by what follows from its inputs, as longrope does with its frequencies."""

from __future__ import annotations

import copy

import pytest
import torch
from learner import distance
from tiered import options
from torch import nn

import gs_compile
from gs_compile.capture.graph_breaks import remedy
from gs_compile.errors import MutationError


class Block(nn.Linear):
    def forward(self, x, scale):
        return x + scale * super().forward(x).relu()


class Scaled(nn.Module):
    """By other numbers where a sequence is long."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(90, 8)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(2))
        self.register_buffer("scale", torch.rand(8), persistent=False)
        self.register_buffer("short", self.scale.clone(), persistent=False)

    def forward(self, ids, positions=None):
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        with torch.no_grad():
            long = torch.arange(8) / 3.0
            self.scale.copy_(torch.where(positions.max() >= 6, long, self.short))
            scale = self.scale.sin()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, scale)
        return x.square().mean()


class ReadFirst(Scaled):
    def forward(self, ids, positions=None):
        return super().forward(ids + (self.scale.sum() > 99), positions)


def ids(length):
    return torch.randint(90, (4, length))


@pytest.mark.parametrize("is_given", [False, True])
def test_a_call_computes_with_what_it_has_overwritten(tmp_path, is_given):
    """Also where an evaluation overwrites it before the backward, which computes layers again; refused before.

    is_given: positions of each sample, of which one alone is beyond the border.
    """
    torch.manual_seed(0)
    model = Scaled()
    plain = copy.deepcopy(model)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, accumulate=True))
    length, other = (7, 4) if is_given else (5, 9)
    batch, evaluated, losses = ids(length), ids(other), []
    positions = torch.arange(length).repeat(4, 1) + torch.tensor([[0], [0], [0], [3]]) if is_given else None
    for each, update in ((model, optimizer), (plain, theirs)):
        loss = each(batch, positions)
        with torch.no_grad():
            losses += [float(loss), float(each(evaluated))]
        assert torch.equal(each.scale, plain.short if other < 7 else torch.arange(8) / 3.0)
        loss.backward()
        update.step()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-6
    optimizer.engine.tiers.close()


def test_a_buffer_that_is_read_before_it_is_overwritten_is_refused(tmp_path):
    model = ReadFirst()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(MutationError, match=r"in place .*scale\.copy_"):
        model(ids(5))
    assert optimizer.engine is None


def test_a_break_at_a_rope_that_looks_at_the_length_says_what_computes_the_same():
    line = "lib/transformers/modeling_rope_utils.py:95: if seq_len > max_seq_len_cached:  # growth"
    assert 'rope_type "default" computes the same' in remedy("Data-dependent branching", line)
