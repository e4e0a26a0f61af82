"""exchange: what a model's forward exchanges with other ranks, by collectives of torch.distributed.

Dynamo replaces them by functional ones, which return their results. If the model passed memory for a result, it is
copied there; as in plain PyTorch, no gradient passes through that memory.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.distributed.distributed_c10d import _resolve_process_group

from gs_compile.capture.in_place import in_memory_of
from gs_compile.capture.internals import TorchDispatchMode, tree_leaves, tree_map_only
from gs_compile.capture.operations import is_free, operation, tensor_spec
from gs_compile.capture.reached import made_of

NAMESPACE = "_c10d_functional"  # prefix of the namespaces of functional collectives


def leave_out_alone(module: fx.GraphModule) -> None:
    """Replace each collective in a group of one rank, as in Megatron, by a copy of its input.

    What it would have changed in place stays unchanged.
    """
    for graph in [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]:
        given: dict[Any, Any] = {}  # by original node
        for node in list(graph.nodes):
            source, result = (*node.args, None, None)[:2]
            if is_collective(node) and _is_alone(node):
                with graph.inserting_before(node):
                    own = source if "autograd" in str(node.target) else graph.call_function(torch.detach, (source,))
                    found = graph.call_function(torch.clone, (own,))
                own.meta, found.meta = own.meta or node.meta, node.meta
                given[found] = given.get(source, source)
            elif operation(node) == "copy" and result in given and given[result] is source:
                found = source
            else:
                continue
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _is_alone(node: fx.Node) -> bool:
    """Whether a collective has a group of one rank. A wait has no group: whether the collective that it waits for was
    left out before.
    """
    source, *others = node.args
    names = [each for each in (*others, *node.kwargs.values()) if isinstance(each, str)]
    if isinstance(source, fx.Node) and names:
        group: Any = names[-1]
        return bool(_resolve_process_group(group).size() == 1)
    return isinstance(source, fx.Node) and not is_collective(source)


def first_exchange(module: fx.GraphModule, known: Collection[str] = ()) -> fx.Node | None:
    """The first collective of a graph, or of the graphs inside it; None: there is none.

    known: names of inputs. A collective of values that depend only on these does not count.
    """
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    found = filter(is_collective, chain.from_iterable(graph.nodes for graph in graphs))
    return next((node for node in found if node.graph is not module.graph or not _is_made_of(node, known)), None)


def _is_made_of(node: fx.Node, known: Collection[str]) -> bool:
    inputs = [each for each in made_of([node]) if each.op == "placeholder"]
    return bool(inputs) and all(each.name in known for each in inputs)


def ends_exchange(node: fx.Node) -> bool:
    """Whether a node copies a collective's result, or a part of it, to memory that the model passed for it."""
    source = node.args[1] if operation(node) == "copy" else None
    while isinstance(source, fx.Node) and operation(source) == "getitem":
        source = source.args[0]
    return isinstance(source, fx.Node) and is_collective(source)


def read_results(graph: fx.Graph) -> None:
    """Make readers of the memory that the model passed for a result read the result instead.

    Only if nothing else is in that memory: with a view of it, the readers stay.
    """
    at = {node: number for number, node in enumerate(graph.nodes)}
    for copy in [node for node in graph.nodes if ends_exchange(node)]:
        memory, result = copy.args[:2]
        own, made = tensor_spec(memory), tensor_spec(result)
        if own and made and own.dtype == made.dtype and in_memory_of(memory) == {memory, copy} and not is_free(memory):
            memory.replace_all_uses_with(result, delete_user_cb=lambda user, start=at[copy]: at[user] > start)
            copy.replace_all_uses_with(result)
            graph.erase_node(copy)


class Alone(TorchDispatchMode):
    """In the block, collectives return zeros at once, because the other ranks do not run this code."""

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


def is_collective(node: fx.Node) -> bool:
    return str(node.target).startswith(NAMESPACE)
