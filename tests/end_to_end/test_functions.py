"""Functions of torch applied to parameters in blocks on SSD learn the same bits as in memory."""

from __future__ import annotations

import pytest
import torch
from functions import Uses, every_use
from tiered import options
from torch import nn

import gs_compile

# Of many kinds: elementwise, reductions, views, copies by place in memory, linear algebra, indices, norms and losses.
SOME = "sin logsumexp unfold as_strided_scatter linalg.det index_add nn.functional.rms_norm nn.functional.huber_loss".split()
NAMES = (
    "sin add amax logsumexp cumsum as_strided as_strided_copy as_strided_scatter unfold cat einsum matmul linalg.det "
    "fft.rfft gather index_add where nn.functional.rms_norm nn.functional.layer_norm nn.functional.conv2d "
    "softmax nn.functional.huber_loss view_as_complex"
).split()


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Uses([every_use()[name]() for name in names]) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def learned(make, names, storage):
    """The loss of a step and the values after it, whose change is the gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(names)
    optimizer = make(model.parameters(), lr=1.0)
    model.compile(backend="greedysnake", options=options(storage))
    loss = model(torch.arange(12).reshape(4, 3) % 11)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    values = [loss.detach(), *(value.clone() for value in model.state_dict().values())]
    if isinstance(optimizer, gs_compile.SGD):
        optimizer.engine.tiers.close()
    return values


@pytest.mark.parametrize("names", [SOME, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["one of a kind", "all"])
def test_functions_of_parameters_on_storage_learn_as_in_memory(names, tmp_path):
    in_memory, on_storage = (learned(each.SGD, names, tmp_path) for each in (torch.optim, gs_compile))
    assert all(bool(torch.isfinite(value).all()) for value in in_memory)
    torch.testing.assert_close(on_storage, in_memory, rtol=0, atol=0)
