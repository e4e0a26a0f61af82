"""extract: a part of a graph as a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby

import torch
from torch import fx

from gs_compile.capture.arrange import storage_of
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
    graph, own, known = fx.Graph(), set(nodes), dict[fx.Node, fx.Node]()
    read = dict.fromkeys(chain(chain.from_iterable(node.all_input_nodes for node in nodes), results))
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    sources = tuple(map(source, inputs))
    for node, found in zip(inputs, sources, strict=True):
        known[node] = graph.placeholder(node.name)
        is_checkpoint = found.kind == "x"  # whose gradient always passes on, even where nothing below needs it
        spec = node.meta["spec"]
        known[node].meta = {"spec": replace(spec, requires_grad=is_checkpoint or spec.requires_grad)}
    specs = tuple(known[node].meta["spec"] for node in inputs)
    changed = {storage_of(mutated(node)) for node in nodes if is_mutation(node)} - {None}
    for node in inputs:
        if storage_of(node) in changed:
            known[node] = graph.call_method("clone", (known[node],))
    for node in read:
        if node.op == "get_attr":
            known[node] = graph.node_copy(node)
    for regions, group in groupby(nodes, key=lambda node: node.meta.get("autocast", ())):
        opened = [graph.call_function(ENTER_AUTOCAST, tuple(region)) for region in regions]
        for node in group:
            known[node] = graph.node_copy(node, known.__getitem__)
        for region in reversed(opened):
            graph.call_function(EXIT_AUTOCAST, (region,))
    graph.output(tuple(known[node] for node in results))
    owner = (*nodes, *results)[0].graph.owning_module
    return fx.GraphModule(owner if owner is not None else torch.nn.Module(), graph), sources, specs
