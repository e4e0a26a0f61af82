"""extract: a part of a graph as a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import Source, TensorSpec
from gs_compile.capture.operations import is_mutation, mutated
from gs_compile.capture.specialize import ENTER_AUTOCAST, EXIT_AUTOCAST


def extract(
    nodes: Sequence[fx.Node], results: Sequence[fx.Node], source: Callable[[fx.Node], Source]
) -> tuple[fx.GraphModule, tuple[Source, ...], tuple[TensorSpec, ...]]:
    """A graph module of `nodes` that returns `results`; what they read from elsewhere becomes placeholders.

    `source` tells where each placeholder comes from; they are in order of first use, so that layers of equal code have
    equal graphs. What a unit reads and changes in place is copied first, and autocast regions are opened and closed
    again around their nodes.
    """
    graph = fx.Graph()
    own, known = set(nodes), dict[fx.Node, fx.Node]()
    read = dict.fromkeys(chain(chain.from_iterable(node.all_input_nodes for node in nodes), results))
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    changed = {mutated(node).meta.get("storage") for node in nodes if is_mutation(node)} - {None}
    sources, specs = [], []
    owner = nodes[0].graph.owning_module if nodes else results[0].graph.owning_module
    root = torch.nn.Module()
    for node in inputs:
        known[node] = graph.placeholder(node.name)
        sources.append(source(node))
        is_checkpoint = sources[-1].kind == "x"  # whose gradient always passes on, even where nothing below needs it
        specs.append(replace(node.meta["spec"], requires_grad=is_checkpoint or node.meta["spec"].requires_grad))
        known[node].meta = {"spec": specs[-1]}
    for node in inputs:
        if node.meta.get("storage") in changed:
            known[node] = graph.call_method("clone", (known[node],))
    for node in read:
        if node.op == "get_attr" and node not in own:
            known[node] = _attribute(graph, root, owner, node)
    _copy(graph, nodes, known)
    graph.output(tuple(known[node] for node in results))
    module = fx.GraphModule(root, graph)
    return module, tuple(sources), tuple(specs)


def _copy(graph: fx.Graph, nodes: Sequence[fx.Node], known: dict[fx.Node, fx.Node]) -> None:
    """Copy `nodes` into `graph`, autocast regions around them; `known`: copies so far."""
    opened: list[fx.Node] = []
    regions: tuple[Any, ...] = ()
    for node in nodes:
        wanted = node.meta.get("autocast", ())
        if wanted != regions:
            _close(graph, opened)
            opened = [graph.call_function(ENTER_AUTOCAST, tuple(args)) for args in wanted]
            regions = wanted
        known[node] = graph.node_copy(node, known.__getitem__)
    _close(graph, opened)


def _close(graph: fx.Graph, opened: list[fx.Node]) -> None:
    for entered in reversed(opened):
        graph.call_function(EXIT_AUTOCAST, (entered,))


def _attribute(graph: fx.Graph, root: torch.nn.Module, owner: Any, node: fx.Node) -> fx.Node:
    setattr(root, str(node.target), getattr(owner, str(node.target)))
    copied = graph.get_attr(str(node.target))
    copied.meta = dict(node.meta)
    return copied
