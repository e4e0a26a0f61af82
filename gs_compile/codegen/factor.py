"""factor: a unit's code returns a parameter's gradient as two factors, if these are smaller.

    before      dw = mm(left, right)                                   return dx, dw
    after                                                              return dx, left, right

    before      dw = embedding_dense_backward(rows, ids, 50257)        return dw
    after                                                              return ids, rows

The code that adds the gradient to a sum then multiplies and adds in one call (`capture.gradients`). For every
micro-batch this saves writing the gradient to memory once and reading it once. A weight's factors are smaller than the
weight if the micro-batch has few tokens: always if these are fewer than half of its smaller side. That is just when
the addition would take long compared with the product. The unit's code never has more bytes alive than before: up to
the place of the product the same, and from there on the factors instead of the product.

This is done only in the dtype in which gradients are summed: bf16 factors would have to be added in fp32, for which the
CPU's matrix library has no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from gs_compile.capture.gradients import Factors, Product, SparseRows, Term
from gs_compile.capture.graph import graph_module, hint, output_values

aten = torch.ops.aten
Form = Callable[[Tensor, Tensor], Factors]  # makes one gradient of two results


def factor(module: fx.GraphModule, chosen: Sequence[bool]) -> tuple[fx.GraphModule, tuple[Form | None, ...]]:
    """A copy of an ATen graph that returns its `chosen` results as factors, where that is possible.

    A result's form is None if it is a tensor as before; else the graph returns two tensors, of which the form makes it.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    results: list[Any] = []
    forms: list[Form | None] = []
    for result, is_chosen in zip(output_values(module), chosen, strict=True):
        copy = copies.get(result, result)
        found = _factors(copy) if is_chosen and isinstance(copy, fx.Node) else None
        form, parts = found or (None, (copy,))
        forms.append(form)
        results += parts
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    return graph_module(module, graph), tuple(forms)


def assemble(results: Sequence[Tensor], forms: Sequence[Form | None]) -> tuple[Term, ...]:
    """The results of code whose results have these forms, one entry for each form."""
    rest = iter(results)
    return tuple(next(rest) if form is None else form(next(rest), next(rest)) for form in forms)


def _factors(result: fx.Node) -> tuple[Form, tuple[fx.Node, fx.Node]] | None:
    """The form and the two factors of a gradient, if it is larger than both together and nothing else needs it."""
    node, user, is_flipped = result, None, False
    while not node.users.keys() - {user}:
        if node.target is aten.mm.default:
            left, right = _nodes(node, 2)
            dtype = node.meta["val"].dtype
            is_summed = dtype == torch.promote_types(dtype, torch.float32)  # in its own dtype
            if not is_summed or _numel(left, right) >= _numel(node):
                return None
            return Product, ((_transposed(right), _transposed(left)) if is_flipped else (left, right))
        if node.target is aten.embedding_dense_backward.default and not is_flipped:
            return _rows(node)
        if not _is_transpose(node):
            return None
        (node,), user, is_flipped = _nodes(node, 1), node, not is_flipped
    return None


def _rows(node: fx.Node) -> tuple[Form, tuple[fx.Node, fx.Node]] | None:
    """As `_factors`, of an embedding's gradient that is not scaled by how often a row is used."""
    rows, ids = _nodes(node, 2)
    num_rows, padding, is_scaled = node.args[2:]
    assert isinstance(num_rows, int)
    if is_scaled or _numel(rows, ids) >= _numel(node):
        return None
    if padding != -1:  # the padding row has no gradient
        new = node.graph.call_function
        with node.graph.inserting_before(node):
            keeps = new(aten.unsqueeze.default, (new(aten.ne.Scalar, (ids, padding)), -1))
            rows = new(aten.where.ScalarOther, (keeps, rows, 0.0))
    return partial(SparseRows, num_rows=num_rows), (ids, rows)


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.t.default:
        return True
    return node.target is aten.permute.default and node.args[1] in ([1, 0], [-1, 0], [1, -2], [-1, -2])


def _transposed(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.call_function(aten.t.default, (node,))


def _nodes(node: fx.Node, count: int) -> list[fx.Node]:
    """The first arguments."""
    found = [each for each in node.args[:count] if isinstance(each, fx.Node)]
    assert len(found) == count, node.format_node()
    return found


def _numel(*nodes: fx.Node) -> int:
    """Symbolic lengths count as at the first call: a form for each length would make different code."""
    return sum(hint(node.meta["val"].numel()) for node in nodes)
