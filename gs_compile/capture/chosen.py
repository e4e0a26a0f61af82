"""chosen: rows that a mask chooses are chosen later, as in ``head(x)[mask]`` for ``head(x[mask])``.

How many rows these are depends on values, so the parts of several micro-batches do not add up to those of the batch.
What computes each row by itself gives the same of all rows, and the mask then chooses among its results. What follows,
such as the loss of these rows, can run behind the model (`tail`). Only operations whose derivatives are finite are
applied to rows that the mask leaves out: the logarithm of such a row of zeros would make gradients NaN.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import Captured, block_of, graph_module, origin
from gs_compile.capture.in_place import mutated
from gs_compile.capture.operations import arguments_of, draws, operation
from gs_compile.capture.vmapped import example_of

_ELEMENTWISE = frozenset("add sub mul neg relu gelu silu tanh sigmoid".split())  # in any operand
_BY_ROW = frozenset("linear layer_norm rms_norm dropout to float double half bfloat16".split())  # in the first one


def chosen_later(captured: Captured) -> Captured:
    """The model whose masks choose rows as late as possible; itself, where none does outside of blocks."""
    if all(_mask_of(node) is None for node in captured.module.graph.nodes):
        return captured
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.module.graph, {}))
    found = [node for node in graph.nodes if _mask_of(node) is not None]
    while found:
        chosen = found.pop()
        if users := [user for user in chosen.users if _is_by_row(user, chosen)]:
            rows, mask = _flat(chosen)
            found += [_applied_to_all(user, chosen, rows, mask) for user in users]
        if not chosen.users:
            graph.erase_node(chosen)
    return replace(captured, module=graph_module(captured.module, graph))


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask by which ``x[mask]`` chooses rows, also as ``x[torch.where(mask)]``; None: of other operations."""
    if node.target is not operator.getitem or block_of(node) is not None or _tensor(node.args[0]) is None:
        return None
    places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    mask: Any = places[0] if len(places) == 1 else None
    makers = [each.args for each in places if isinstance(each, fx.Node) and each.target is operator.getitem]
    if makers and makers == [(makers[0][0], place) for place in range(len(places))]:
        maker: Any = makers[0][0]
        is_found = operation(maker) in ("where", "nonzero") and isinstance(maker.meta["example_value"], tuple)
        mask = maker.args[0] if is_found else mask
    found = _tensor(mask)
    return mask if found is not None and found.dtype is torch.bool and found.dim() else None


def _is_by_row(user: fx.Node, chosen: fx.Node) -> bool:
    """Whether an operation computes each of the chosen rows by itself, with what is the same for all of them."""
    name, made, given = operation(user), _tensor(user), _tensor(chosen)
    others = [_tensor(each) for each in user.all_input_nodes if each is not chosen]
    if made is None or given is None or mutated(user) or draws(user) or name not in _BY_ROW | _ELEMENTWISE:
        return False
    if name.endswith("_norm") and len(arguments_of(user)["normalized_shape"]) == given.dim():
        return False
    is_alike = all(each is not None and all(type(size) is int for size in each.shape) for each in others)
    is_alike &= name == "linear" or all(each is not None and each.dim() < given.dim() for each in others)
    is_of_rows = name in _ELEMENTWISE or user.args[0] is chosen
    return is_alike and is_of_rows and made.dim() == given.dim() > (name == "linear")


def _flat(chosen: fx.Node) -> tuple[fx.Node, fx.Node]:
    """All rows that a mask chooses from, one after another, and the mask in this order."""
    rows, mask = chosen.args[0], _mask_of(chosen)
    assert isinstance(rows, fx.Node)
    assert mask is not None
    if (rank := mask.meta["example_value"].dim()) == 1:
        return rows, mask
    with chosen.graph.inserting_before(chosen):
        rows, mask = (chosen.graph.call_method("flatten", (each, 0, rank - 1)) for each in (rows, mask))
    for each in (rows, mask):
        each.meta = {**origin(chosen), "example_value": example_of(each)}
    return rows, mask


def _applied_to_all(user: fx.Node, chosen: fx.Node, rows: fx.Node, mask: fx.Node) -> fx.Node:
    """Apply an operation to all rows; returns the rows that the mask chooses of its results."""
    graph = user.graph
    with graph.inserting_before(user):
        whole = graph.node_copy(user, lambda each: rows if each is chosen else each)
        later = graph.call_function(operator.getitem, (whole, mask))
    example = example_of(whole).to(user.meta["example_value"].dtype)  # that of autocast, where it is on
    whole.meta, later.meta = {**user.meta, "example_value": example}, dict(user.meta)
    user.replace_all_uses_with(later)
    graph.erase_node(user)
    return later


def _tensor(value: Any) -> torch.Tensor | None:
    """The example of a node's result, if that is one tensor."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return example if isinstance(example, torch.Tensor) else None
