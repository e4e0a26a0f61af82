"""extract: the graph of one unit, from that of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby

import torch
from torch import fx

from gs_compile.capture.graph import Source, UnitGraph, graph_module
from gs_compile.capture.in_place import changed, storage_of
from gs_compile.capture.operations import IN_MEMORY, operation
from gs_compile.capture.specialize import ENTER_AUTOCAST, EXIT_AUTOCAST
from gs_compile.program.ir import Unit


def extract(
    unit: Unit, nodes: Sequence[fx.Node], results: Sequence[tuple[str, fx.Node]], source: Callable[[fx.Node], Source]
) -> UnitGraph:
    """The graph of `nodes` that returns `results`, by kind; what they read from elsewhere becomes placeholders.

    `source` gives the source of each placeholder. They are in order of first use, so that layers of equal code have
    equal graphs. What a unit reads and then changes in place, or accesses as memory, is copied first. Autocast regions
    are opened and closed around their nodes.
    """
    graph, own, known = fx.Graph(), set(nodes), dict[fx.Node, fx.Node]()
    returned = [node for _, node in results]
    read = dict.fromkeys(chain(chain.from_iterable(node.all_input_nodes for node in nodes), returned))
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    sources = tuple(map(source, inputs))
    for node, found in zip(inputs, sources, strict=True):
        known[node] = graph.placeholder(node.name)
        is_checkpoint = found.kind == "x"  # its gradient is always computed, even if nothing below needs it
        spec = node.meta["spec"]
        known[node].meta = {"spec": replace(spec, requires_grad=is_checkpoint or spec.requires_grad)}
    specs = tuple(known[node].meta["spec"] for node in inputs)
    seen = {storage_of(node.all_input_nodes[0]) for node in nodes if operation(node) in IN_MEMORY} - {None}
    own_memory = changed(nodes) | seen
    for node in inputs:
        if storage_of(node) in own_memory:
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
    graph.output(tuple(known[node] for node in returned))
    owner = (*nodes, *returned)[0].graph.owning_module
    module = graph_module(owner if owner is not None else torch.nn.Module(), graph)
    return UnitGraph(unit, module, sources, specs, tuple(kind for kind, _ in results))
