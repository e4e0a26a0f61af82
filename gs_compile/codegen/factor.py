"""factor: parameters' gradients leave a unit's code as their factors where these are smaller.

    before      dw = mm(left, right)                                   return dx, dw
    after                                                              return dx, left, right

    before      dw = embedding_dense_backward(rows, ids, 50257)        return dw
    after                                                              return ids, rows

Whoever adds a gradient to a sum then adds the product in one go (`capture.gradients`), for every micro-batch one
pass over memory less to write it and one less to read it. The factors of a weight are smaller than it as long as a
micro-batch has few tokens, fewer than half of its smaller side at any rate; just then the addition would take long
beside the product. What is alive in the unit's code is never more than before: until where the product would have been
made the same, from there on the factors in its place.

A product is only left open in the dtype in which gradients are summed: bf16 factors would have to be added in fp32,
for which the matrix library of the CPU has no call.
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
Form = Callable[[Tensor, Tensor], Factors]  # what two results of the code are together


def factor(module: fx.GraphModule, chosen: Sequence[bool]) -> tuple[fx.GraphModule, tuple[Form | None, ...]]:
    """A copy of an ATen graph with those of its `chosen` results that can be as factors.

    The form of each result is None where it is a tensor as before; else it is two tensors, which the form makes one of.
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
    """The results of the code with those forms, one entry for each form."""
    rest = iter(results)
    return tuple(next(rest) if form is None else form(next(rest), next(rest)) for form in forms)


def _factors(result: fx.Node) -> tuple[Form, tuple[fx.Node, fx.Node]] | None:
    """The form and the two nodes of a gradient that nothing else needs and that is larger than they are together."""
    node, user, is_flipped = result, None, False
    while not node.users.keys() - {user}:
        if node.target is aten.mm.default:
            left, right = _nodes(node, 2)
            dtype = node.meta["val"].dtype
            is_summed = dtype == torch.promote_types(dtype, torch.float32)  # in the dtype that it has
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
    """The rows of an embedding whose gradient is not scaled by how often a row is used."""
    rows, ids = _nodes(node, 2)
    num_rows, padding, is_scaled = node.args[2:]
    assert isinstance(num_rows, int)
    if is_scaled or _numel(rows, ids) >= _numel(node):
        return None
    if padding != -1:  # the row that stays as it is
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
    """Where lengths are symbolic, that of the first: a form for each would be another code."""
    return sum(hint(node.meta["val"].numel()) for node in nodes)
