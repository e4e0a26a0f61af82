"""Operators that may give other bits in another run on a GPU, found by running a graph and its backward."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.nn import functional

from gs_compile.capture import nondeterministic
from gs_compile.capture.nondeterministic import NondeterminismMode

IDS = torch.tensor([[0, 1, 1, 0]])


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


CASES = {  # by what they are: a function of a [1, 4]; what of it and of its backward is found, and of which node that is
    "a product": (lambda x: x @ x.T, []),
    "an embedding": (lambda x: functional.embedding(IDS, x.T), []),
    "the gradient of gather": (lambda x: x.gather(1, IDS), [("scatter_add", "replaced", "gather")]),
    "a gather without gradient": (lambda x: x * x.detach().gather(1, IDS), []),
    "the gradient of a look-up": (lambda x: x.T[IDS], [("index_put", "replaced", "getitem")]),
    "index_add": (lambda x: x.index_add(1, IDS[0], x), [("index_add", "replaced", "index_add")]),
    "a scatter of a number": (lambda x: x.scatter(1, IDS, 2.0), []),
    "a scatter of a tensor": (
        lambda x: x * x.detach().scatter(1, IDS, torch.ones(1, 4)),
        [("scatter", "replaced", "scatter")],
    ),
    "the largest": (lambda x: x * x.detach().scatter_reduce(1, IDS, torch.ones(1, 4), "amax"), []),
    "a sum": (
        lambda x: x.detach().scatter_reduce(1, IDS, x, "sum"),
        [("scatter_reduce", "replaced", "scatter_reduce")],
    ),
    "a product of some": (
        lambda x: x * x.detach().scatter_reduce(1, IDS, torch.ones(1, 4), "prod"),
        [("scatter_reduce", "refused", "scatter_reduce")],
    ),
    "a sum so far": (lambda x: x.cumsum(1), [("cumsum", "refused", "cumsum")]),
    "a number so far": (lambda x: x * IDS.cumsum(1), []),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        [("scaled_dot_product_attention backward", "replaced", "scaled_dot_product_attention")],
    ),
    "what is not torch's": (lambda x: x * twice(x.detach()), [("twice", "unknown", "twice_default")]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_torch_documents_is_found(case):
    function, expected = CASES[case]
    tracer, x = fx.Tracer(), torch.ones(1, 4, requires_grad=True)
    graph = tracer.trace(function)
    for node in graph.nodes:
        node.stack_trace = f'  File "model.py", line 1, in forward\n    {node.name}'
    with NondeterminismMode(fx.GraphModule(tracer.root, graph)) as watch:
        torch.autograd.grad(watch.run(x).sum(), x)
    found = [(each.operator, each.answer, each.where.removeprefix("model.py:1: ")) for each in watch.found]
    assert found == expected


def test_the_tables_name_operators_of_torch():
    for name in nondeterministic.REPLACED | nondeterministic.REFUSED:
        assert hasattr(torch.ops.aten, name)
