"""partition: which values of a forward to save for its backward, chosen by torch's own partitioner.

The partitioner gets a joint graph of forward and backward, without what is available in the backward anyway: values of
parameters and side inputs alone, and random numbers, which are drawn again. It recomputes views. It solves a minimum
cut and, with a budget, before that a knapsack.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch.fx.node import map_aggregate
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils.checkpoint import CheckpointPolicy

from gs_compile.capture.flops import node_flops
from gs_compile.capture.graph import graph_module, is_sized, output_values

# From what saves the most operations per byte to all that the backward reads: whether all but products is recomputed,
# and the part of memory to stay within.
BUDGETS = ((True, 0.25), (True, 0.5), (True, 0.75), (True, 1.0), (False, 1.0))

# In the meta of a node that draws a mask and multiplies by it in one operation, as dropout on a GPU does: a node with
# its argument's shape. The mask needs only that; the product is cheap.
LIKE = "like"


class CannotSaveError(Exception):
    """The forward and backward of a layer cannot be cut into two; its message says why."""


def choices(
    module: fx.GraphModule, num_results: int, given: Sequence[fx.Node], free: Set[fx.Node]
) -> list[list[fx.Node]]:
    """For each of `BUDGETS`, the nodes to save in a functional ATen graph that returns results and then gradients.

    `given`: the placeholders of the results' gradients. `free`: nodes that are available in the backward anyway.
    Raises `CannotSaveError` if torch refuses the graph.
    """
    from networkx import NetworkXException  # late, as torch itself does

    found = []
    for again, budget in BUDGETS:
        copy = _cut_away(module, given, free)
        with config.patch(activation_memory_budget=budget, aggressive_recomputation=again, recompute_views=True):
            try:
                forward, _ = min_cut_rematerialization_partition(copy, None, num_fwd_outputs=num_results)
            except (RuntimeError, AssertionError, NetworkXException) as error:  # all that it raises
                raise CannotSaveError(f"torch's partitioner refuses it: {error}") from error
        chosen = [node.meta["origin"] for node in output_values(forward)[num_results:]]
        found.append([node for node in chosen if isinstance(node.meta.get("val"), torch.Tensor)])
    return found


def write_sizes(graph: fx.Graph) -> None:
    """Make symbolic sizes be computed from the graph's size inputs, which come first, and not be read from tensors."""
    sizes = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    known = {node.meta["val"].node.expr: fx.Proxy(node) for node in sizes}

    def written(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        found = sympy_interp(PythonReferenceAnalysis, known, value.node.expr)
        if isinstance(found, fx.Proxy):
            found.node.meta.setdefault("val", value)
        return found.node if isinstance(found, fx.Proxy) else found

    for node in list(graph.nodes):
        if node.op == "call_function" and known:
            with graph.inserting_before(node):
                if isinstance(node.meta.get("val"), torch.SymInt):
                    node.replace_all_uses_with(written(node.meta["val"]))
                    graph.erase_node(node)
                else:
                    node.args = map_aggregate(node.args, written)


def _cut_away(module: fx.GraphModule, given: Sequence[fx.Node], free: Set[fx.Node]) -> fx.GraphModule:
    """A copy with `free` nodes as constants, with names as the partitioner expects; each node keeps its origin."""
    graph, copies, constants, known = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any](), get_default_op_list()
    for node in module.graph.nodes:
        if node.op == "output" or LIKE in node.meta or (node in free and free >= node.users.keys()):
            continue
        masked = [draw.all_input_nodes[0] for draw in node.all_input_nodes if LIKE in draw.meta]
        if node in free:
            copies[node] = graph.get_attr(node.name)
            constants[node.name] = torch.empty(0)
        elif node.op == "placeholder":
            copies[node] = graph.placeholder(f"{'tangents' if node in given else 'primals'}_{node.name}")
        elif masked:
            copies[node] = graph.call_function(torch.ops.aten.mul.Tensor, (copies[masked[0]], 1.0))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {**node.meta, "origin": node}
        if not is_sized(node.meta.get("val")):
            copies[node].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            continue
        if node not in free and node_flops(node) and not known.is_compute_intensive(node):
            copies[node].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    results: list[Any] = [copies.get(value) if value not in free else None for value in output_values(module)]
    graph.output(tuple(results))
    return graph_module(constants, graph)
