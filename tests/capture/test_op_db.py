"""op_db: PyTorch's own samples of operators that pick and write, with the samples of a batch along their first dimension.

Whatever such an operator does to them, a model that has it in its blocks gives what it does in plain PyTorch, or is
refused by name. `index_add`, `index_reduce` and `select_scatter` are left out: they end in torch's own error where a
constant has as many rows as the batch.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn

from gs_compile.errors import GreedySnakeError
from gs_compile.model.backend import greedysnake

WIDTH = 6
MOST_SAMPLES = 3  # of an operator, of different shapes
NAMES = (
    "gather index_copy index_fill index_put index_select masked_fill masked_scatter scatter scatter_add take "
    "take_along_dim where"
).split()


class Block(nn.Module):
    """Its hidden states in an operator's shape, and the result back."""

    def __init__(self, function, shape):
        super().__init__()
        self.function, self.shape = function, shape
        self.mix = nn.Linear(WIDTH, shape.numel())

    def forward(self, x_BD):
        found = self.function(self.mix(x_BD).view(-1, *self.shape))
        is_batch = found.dim() > 0 and found.shape[0] == x_BD.shape[0]
        return x_BD + (found.flatten(1).mean(1, keepdim=True) if is_batch and found.dim() > 1 else found.mean()).tanh()


class Model(nn.Module):
    def __init__(self, function, shape):
        super().__init__()
        self.blocks = nn.ModuleList(Block(function, shape) for _ in range(2))

    def forward(self, x_BD):
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


def samples_of(operator):
    """Samples of different shapes with a batch of several, and few numbers."""
    of_shapes = {}
    for sample in islice(operator.sample_inputs("cpu", torch.float64, requires_grad=False), 60):
        value, shapes = sample.input, [getattr(each, "shape", each) for each in sample.args]
        if "reduce" in sample.kwargs:  # without a derivative
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 1 and 3 <= value.shape[0] <= 12 and value.numel() < 600:
            of_shapes.setdefault(str([value.shape, shapes, *sample.kwargs]), sample)
    return list(of_shapes.values())[:MOST_SAMPLES]


def trained(model, x_BD, micro_batch_size=None):
    """Outputs and gradients."""
    torch._dynamo.reset()
    options = {"micro_batch_size": micro_batch_size, "expert": {"compiler": "eager"}}
    run = torch.compile(model, backend=greedysnake, options=options) if micro_batch_size else model
    found = run(x_BD)
    weights = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    return [found, *torch.autograd.grad((found * weights).sum(), list(model.parameters()))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_right_or_refused(name):
    common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    num_tried = 0
    for operator in (each for each in common.op_db if each.name == name):
        for sample in samples_of(operator):

            def function(value, operator=operator, sample=sample):
                return operator.get_op()(value, *sample.args, **sample.kwargs)

            torch.manual_seed(0)
            model = Model(function, sample.input.shape[1:]).double()
            x_BD = torch.randn(sample.input.shape[0], WIDTH, dtype=torch.float64)
            wanted = trained(model, x_BD)
            num_tried += 1
            try:
                found = trained(model, x_BD, 2)
            except GreedySnakeError:
                continue
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert num_tried
