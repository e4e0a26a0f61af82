"""exchange: what a model's forward exchanges with other ranks, by collectives of torch.distributed.

In their place Dynamo has functional ones, which return their results. Where the model has given memory for a result, it
is copied there; plain PyTorch passes no gradient from that memory on, as under `torch.no_grad()`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from gs_compile.capture.internals import tree_leaves, tree_map_only
from gs_compile.capture.operations import operation

NAMESPACE = "_c10d_functional"  # how that of the functional ones begins


def first_exchange(module: fx.GraphModule) -> fx.Node | None:
    """The first collective of a graph, or of those that it runs; None: there is none."""
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    return next(filter(_is_collective, chain.from_iterable(graph.nodes for graph in graphs)), None)


def ends_exchange(node: fx.Node) -> bool:
    """Whether a node copies the result of a collective, or a part of it, to memory that the model has given."""
    source = node.args[1] if operation(node) == "copy" else None
    while isinstance(source, fx.Node) and operation(source) == "getitem":
        source = source.args[0]
    return isinstance(source, fx.Node) and _is_collective(source)


class Alone(TorchDispatchMode):
    """Inside, collectives return zeros at once: the other ranks do not run this code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not str(func).startswith(NAMESPACE):
            return func(*args, **named)
        if func._schema.is_mutable:
            return named.get("out", args[0])
        device = next(each.device for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        shapes, others = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (args, named))
        made = func(*shapes, **others)
        return tree_map_only(torch.Tensor, lambda each: torch.zeros_like(each, device=device), made)


def _is_collective(node: fx.Node) -> bool:
    return str(node.target).startswith(NAMESPACE)
