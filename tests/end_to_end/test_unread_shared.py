"""A training call that reads none of what layers share is refused; with several backwards it learned the wrong values."""

from __future__ import annotations

import pytest
import torch
from tiered import options
from torch import nn

import gs_compile
from gs_compile.errors import OptimizerError


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x, reads):
        x = x + self.own(x).relu()
        return x + self.shared(x) if reads else x


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(2))

    def forward(self, x, reads):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, reads)
        return self.head(x).square().mean()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_call_that_reads_none_of_what_layers_share(tmp_path, accumulate):
    model, x = Shares(), torch.ones(4, 8)
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1, max_grad_norm=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path, accumulate=accumulate))
    model(x, True).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match="reads none of the parameters that several layers share"):
        model(x, False)
    with torch.no_grad():
        assert model(x, False).isfinite()  # an evaluation may do this
    optimizer.engine.tiers.close()
