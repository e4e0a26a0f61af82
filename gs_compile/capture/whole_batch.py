"""whole_batch: what a loss computes from all samples at once, cut out of the head.

A loss that balances experts is a product of means over all tokens, so no micro-batch has a share of it. But it reads
only values that exist for all micro-batches before the head runs: routers' logits, which layers make besides their
hidden states. `loss` puts `of_whole_batch` after such a value; what computes it runs once, on all samples, and the head
of every micro-batch reads the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from gs_compile.capture.arrange import needed_by
from gs_compile.capture.extract import extract
from gs_compile.capture.graph import Source, UnitGraph
from gs_compile.capture.in_place import storage_of
from gs_compile.capture.operations import is_free, tensor_spec
from gs_compile.program.ir import EPILOGUE


def of_whole_batch(value: torch.Tensor) -> torch.Tensor:
    """Marks a value in a graph that is computed from all samples together."""
    return value


@dataclass(frozen=True)
class Whole:
    """Values of the whole batch and their sources, by names of nodes; the same for all batch sizes.

    taps: the layers' values among the sources, with their indices in `Split.taps`.
    """

    values: tuple[str, ...]
    taps: Mapping[str, int]

    def graph(self, module: fx.GraphModule) -> UnitGraph:
        """The graph that computes the values from taps and inputs of all samples. A tap is that of all micro-batches,
        joined along its samples. `module`: the model at the size of the whole batch; it is modified.
        """
        graph, named = module.graph, {node.name: node for node in module.graph.nodes}
        for name, index in self.taps.items():
            tap = named[name]
            placeholder(graph, f"tap_{index}", Source("tap", index), tap)
        values = [named[name] for name in self.values]
        nodes = [node for node in needed_by(values, graph) if not is_free(node)]
        return extract(EPILOGUE, nodes, [("y", value) for value in values], lambda node: node.meta["source"])


def placeholder(graph: fx.Graph, name: str, source: Source, value: fx.Node) -> fx.Node:
    """A new input of a graph that replaces `value`."""
    with graph.inserting_before(next(iter(graph.nodes))):
        found = graph.placeholder(name)
    found.meta = {"spec": value.meta["spec"], "storage": storage_of(value), "source": source}
    value.replace_all_uses_with(found)
    return found


def makers(value: fx.Node, at: Mapping[fx.Node, int], layers: Collection[int]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The sources of a value: nodes of layers, and inputs of the model. `at`: the unit of each node."""
    readers = needed_by([value], value.graph)
    beside, taps, inputs = {value}, list[fx.Node](), list[fx.Node]()
    for node in reversed([*readers]):
        if node not in beside and beside.isdisjoint(readers[node]):
            continue
        if node.op == "placeholder":
            inputs.append(node)
        elif not is_free(node) and at.get(node) in layers:
            taps.append(node)
        else:
            beside.add(node)
    return taps[::-1], inputs


def is_of_samples(node: fx.Node) -> bool:
    """Whether a value is a tensor with one dimension of samples, along which micro-batches can be joined."""
    spec, runs = tensor_spec(node), node.meta.get("runs")
    return spec is not None and spec.is_sized and len(spec.batch_dims) == 1 and (runs is None or len(runs) == 1)
