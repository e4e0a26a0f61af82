"""vmap over single entries becomes broadcasting; what else is mapped stays."""

from __future__ import annotations

import pytest
import torch

from gs_compile.capture.vmapped import BEGIN, broadcast

ROWS, COLUMNS = 3, 5
TABLE = torch.arange(20.0).view(4, 5)


def of_entries(i, j):
    """As attention masks are made: a table by indices, compared and chosen."""
    row = torch.where(i < 2, i, i.new_ones(()))
    return (TABLE[row, j] > 6) & (j <= i + 2) | (i == j).logical_not()


def two(i, j):
    return mapped(of_entries)(i, j) & mapped(lambda a, b: a != b)(i, j)


def mapped(function):
    return torch.vmap(torch.vmap(function, in_dims=(None, 0)), in_dims=(0, None))


def traced(function, *given):
    """The graph that Dynamo hands over once it is changed, on the same inputs the same; whether a vmap is left."""
    found = []

    def backend(module, example_inputs):
        before = [each.clone() for each in module(*example_inputs)]
        broadcast(module)
        assert all(map(torch.equal, before, module(*example_inputs)))
        found.append((module.graph, bool(module.graph.find_nodes(op="call_function", target=BEGIN))))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*given)
    (result,) = found
    return result


@pytest.mark.parametrize("function", [mapped(of_entries), two], ids=["one", "two"])
def test_functions_of_entries_broadcast(function):
    graph, is_left = traced(function, torch.arange(ROWS), torch.arange(COLUMNS))
    assert not is_left
    (result,) = graph.output_node().all_input_nodes
    assert result.meta["example_value"].shape == (ROWS, COLUMNS)
    assert not any("_nesting" in str(node.target) or "lazy" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        torch.vmap(lambda row: row.sum()),
        torch.vmap(lambda row: row * 2),
        torch.vmap(lambda row: TABLE[row.long()[0] % 4].sum()),
        torch.vmap(lambda row: row[0], out_dims=0),
    ],
)
def test_functions_of_more_than_entries_stay(function):
    _, is_left = traced(function, torch.arange(6.0).view(3, 2))
    assert is_left


def test_results_elsewhere_than_in_front_stay():
    inner = torch.vmap(lambda i, j: i * j, in_dims=(None, 0))
    outer = torch.vmap(inner, in_dims=(0, None), out_dims=1)
    _, is_left = traced(outer, torch.arange(ROWS), torch.arange(COLUMNS))
    assert is_left
