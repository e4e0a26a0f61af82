"""vmapped: replaces functions of scalars that a model maps over dimensions by ``torch.vmap`` by broadcasting.

Dynamo records what vmap does to its inputs and results as operations, with tensors between them that hide the mapped
dimensions. If the function works on scalars, like that of an attention mask on the indices of a sample, a head, a query
and a key, its operations can broadcast instead: each input gets its own dimension. Any other vmap stays; a block may
have it, and it is refused where samples must be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch.fx.node import map_arg

from gs_compile.capture.operations import operation

BEGIN, END = predispatch._add_batch_dim, predispatch._remove_batch_dim
INNER, OUTER = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
LAZY = predispatch.lazy_load_decompositions
BRACKETS = LAZY, INNER, OUTER
ENTRY_BY_ENTRY = frozenset(
    "add sub mul floordiv floor_divide remainder mod neg abs minimum maximum clamp where "
    "eq ne lt le gt ge and or xor not invert bitwise_and bitwise_or bitwise_xor bitwise_not "
    "logical_and logical_or logical_xor logical_not to bool long int float new_ones new_zeros".split()
)


def broadcast(module: fx.GraphModule) -> None:
    """Make the functions of scalars that a graph maps over dimensions broadcast; others stay."""
    nests = _nests(module.graph)
    if not nests:
        return
    for nodes in nests:
        _broadcast(module.graph, nodes)
    if not module.graph.find_nodes(op="call_function", target=BEGIN):
        for node in module.graph.find_nodes(op="call_function", target=LAZY):
            module.graph.erase_node(node)
    module.recompile()


def _nests(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes from the beginning to the end of each outermost vmap, inclusive."""
    found, depth = list[list[fx.Node]](), 0
    for node in graph.nodes:
        is_begin, is_end = node.target is INNER, node.target is OUTER
        if is_begin and not depth:
            found.append([])
        depth += is_begin
        if depth:
            found[-1].append(node)
        depth -= is_end
    return found


def _broadcast(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    begins = [node for node in nodes if node.target is BEGIN]
    hidden = dict.fromkeys(begins)
    for node in nodes:
        if not hidden.keys().isdisjoint(node.all_input_nodes):
            hidden[node] = None
    levels = sorted({_level(node) for node in begins})
    ends = {_level(node): node for node in hidden if node.target is END}
    if sorted(ends) != levels or len(ends) != sum(node.target is END for node in hidden):
        return
    if not all(_is_of_scalars(node, is_last=node is ends.get(levels[0])) for node in hidden):
        return
    sizes = [ends[level].args[2] for level in levels]
    for node in begins:
        index = tuple(slice(None) if level == _level(node) else None for level in levels)
        _become(node, "__getitem__", (node.args[0], index))
    for level, node in ends.items():
        source: Any = node.args[0]
        if level == levels[0]:
            _become(node, "expand", (source, *sizes))
        else:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            del hidden[node]
    for node in hidden:
        node.meta["example_value"] = example_of(node)
    for node in reversed(nodes):
        if node.target in (INNER, OUTER):
            graph.erase_node(node)


def _level(node: fx.Node) -> int:
    """The nesting level of a vmap's beginning or end; the outermost is 1."""
    level: Any = node.args[2] if node.target is BEGIN else node.args[1]
    return int(level)


def _is_of_scalars(node: fx.Node, *, is_last: bool) -> bool:
    """Whether broadcasting gives the same result; also for a vmap's end, after which its dimension is visible again."""
    example, source = node.meta.get("example_value"), node.all_input_nodes[0]
    if not isinstance(example, torch.Tensor):
        return False
    if node.target is BEGIN:
        return bool(source.meta["example_value"].dim() == 1 and node.args[1] == 0)
    if node.target is END:
        return bool(node.args[3] == 0 and (is_last or [each.target for each in node.users] == [END]))
    name = operation(node).partition(".")[0].strip("_")
    return not example.dim() and (name in ENTRY_BY_ENTRY or (name in ("index", "getitem") and _takes_entries(node)))


def _takes_entries(node: fx.Node) -> bool:
    """Whether it indexes a table by one number for each dimension."""
    places: Any = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
    return all(isinstance(each, fx.Node) and each.meta["example_value"].dtype != torch.bool for each in places)


def _become(node: fx.Node, method: str, args: tuple[Any, ...]) -> None:
    node.op, node.target, node.args, node.kwargs = "call_method", method, args, {}


def example_of(node: fx.Node) -> Any:
    """The result of an operation on the example values of its inputs."""

    def example(each: fx.Node) -> Any:
        return each.meta["example_value"]

    args: tuple[Any, ...] = map_arg(node.args, example)
    kwargs: Mapping[str, Any] = map_arg(dict(node.kwargs), example)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
