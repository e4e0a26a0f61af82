"""tail: what a model computes from its results of all samples at once, such as a contrastive loss.

    model  --images, texts (a row for each sample)-->  tail  --logits of all pairs, their loss-->

No micro-batch has a share of it, and it reads what the head makes, so it cannot be part of the step. It runs after the
model, as plain PyTorch, on the results of all micro-batches, like the same code outside the model would. Its backward
gives the gradients of these results.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gs_compile.capture.exchange import is_collective
from gs_compile.capture.graph import Captured, block_of, output_values
from gs_compile.capture.in_place import mutated
from gs_compile.capture.loss import refused
from gs_compile.capture.shares import State
from gs_compile.capture.specialize import (
    CAPTURED,
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    GRAD_MODE,
    SYMBOLIC,
    storage_number,
)
from gs_compile.capture.vmapped import BEGIN, END
from gs_compile.capture.whole_batch import is_of_samples
from gs_compile.machine import format_bytes

log = logging.getLogger(__name__)

_REGIONS = (GRAD_MODE, ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE, EXIT_INFERENCE)  # their beginnings and ends


@dataclass(eq=False)
class Tail:
    """The part that runs after the model.

    module: takes arguments of the model, by index, and then the model's results from `num_outputs` on; returns the
        outputs at `places` of the user's model.
    """

    module: fx.GraphModule
    arguments: Sequence[int]
    places: Sequence[int]
    num_outputs: int
    is_told: bool = False

    def run(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of the user's model. results: those of the model without the tail."""
        outputs, read = list(results[: self.num_outputs]), results[self.num_outputs :]
        if not self.is_told:
            self.is_told, nbytes = True, sum(each.nbytes for each in read if isinstance(each, torch.Tensor))
            log.warning(
                "an output of the model, such as its loss, needs all samples of the batch at once, so it is computed "
                "behind the model: it reads %s of the model's results, which stay in memory until the backward, beside "
                "the plan. On several ranks it is refused",
                format_bytes(nbytes),
            )
        made = self.module(*(args[index] for index in self.arguments), *read)
        for place, value in zip(self.places, made, strict=True):
            outputs[place] = value
        return outputs


def cut_tail(captured: Captured, module: fx.GraphModule, kept: Sequence[bool]) -> tuple[Captured, Tail] | None:
    """The model without its tail, with additional results for the tail to read, and the tail; None: there is none.

    module: the model at one micro-batch size; it is modified. kept: for each output, whether it is requested.
    """
    outputs, states = refused(module, captured, kept)
    classes = {node.meta[CAPTURED]: state for node, state in states.items() if CAPTURED in node.meta}
    samples = {node.meta[CAPTURED] for node in states if CAPTURED in node.meta and is_of_samples(node)}
    wanted = {each.meta[CAPTURED] for each in outputs if CAPTURED in each.meta}
    graph, given = captured.module.graph, output_values(captured.module)
    found = _nodes(wanted, classes, samples) if wanted and len(wanted) == len(outputs) else None
    if found is None or not _runs_alone(graph, *found):
        return None
    nodes, others = found
    places = [place for place, value in enumerate(given) if kept[place] and value in wanted]
    own = [value if kept[place] and place not in places else None for place, value in enumerate(given)]
    read = [node for node in graph.nodes if node in others]
    entries = list(zip(captured.inputs, graph.find_nodes(op="placeholder"), strict=True))
    taken = [node for _, node in entries if not nodes.isdisjoint(node.users)]
    trained = [node for entry, node in entries if entry.role == "parameter" and node in taken]
    if any(node.meta["example_value"].dim() > 1 for node in trained):  # perhaps logits, which no plan counts
        return None
    arguments = [at for at, (entry, node) in enumerate(entries) if entry.role != "parameter" and node in taken]
    given_first = [*(entries[at][1] for at in arguments), *read, *trained]
    tail = graph_of(captured.module, nodes | regions(graph), given_first, [given[place] for place in places])
    ahead = graph_of(captured.module, set(graph.nodes), [], [*own, *read, *trained])
    return replace(captured, module=ahead), Tail(tail, arguments, places, len(given))


def _nodes(
    wanted: Set[fx.Node], classes: Mapping[fx.Node, State], samples: Set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """The nodes that compute some values from all samples, and the micro-batches' results that they read; None: they
    read other values, too, or are part of a block.
    """
    nodes, read, ahead = set[fx.Node](), set[fx.Node](), list(wanted)
    while ahead:
        node = ahead.pop()
        if node in nodes or node.op in ("placeholder", "get_attr"):
            continue
        state = classes.get(node)
        is_result = state is not None and state.kind != "mixed" and not state.from_inputs and node not in wanted
        if not _is_number(node) and (state is None or (block_of(node) is not None and not is_result)):
            return None
        if is_result and state is not None and state.kind == "local" and node not in samples:
            return None
        if is_result:
            read.add(node)
        else:
            nodes.add(node)
            ahead += node.all_input_nodes
    return nodes, read


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, torch.Size, *SYMBOLIC))


def _runs_alone(graph: fx.Graph, nodes: Set[fx.Node], read: Set[fx.Node]) -> bool:
    """Whether some nodes can run after all others: neither group changes the other's memory in place, and the others do
    not later change a result that these read.
    """
    if any(is_collective(node) or node.target in (BEGIN, END) for node in nodes):
        return False
    memory = {memory_of(node) for node in nodes} - {None}
    changes = [(node, each) for node in graph.nodes for each in mutated(node)]
    checks = (node for node in graph.nodes if node.target is torch._assert_async)
    is_apart = all((node in nodes) == (memory_of(each) in memory and each in nodes) for node, each in changes)
    later = ((result, each) for node, each in changes for result in read if result < node)
    is_left = all(memory_of(result) != memory_of(each) for result, each in later)
    return is_apart and is_left and all(nodes.isdisjoint(check.all_input_nodes) for check in checks)


def regions(graph: fx.Graph) -> set[fx.Node]:
    """The nodes at which regions of another mode begin and end, which any graph of a part needs."""
    return {node for node in graph.nodes if node.target in _REGIONS}


def memory_of(node: fx.Node) -> int | None:
    """A number for the memory of a value of a captured graph."""
    return storage_number(node.meta.get("example_value"))


def graph_of(
    module: fx.GraphModule, nodes: Set[fx.Node], given: Sequence[fx.Node], made: Sequence[Any]
) -> fx.GraphModule:
    """The graph of some nodes of a module, which takes some values and returns others."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in given}
    for node in module.graph.nodes:
        is_read = node.op == "get_attr" and not nodes.isdisjoint(node.users)
        if node.op != "output" and (node in nodes or is_read):
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(_made(known[each]) if isinstance(each, fx.Node) else each for each in made))
    return fx.GraphModule(module, graph)


def _made(value: fx.Node) -> fx.Node:
    """A value for a graph to return; of a parameter a copy, so that its gradient passes through the graph."""
    if not isinstance(value.meta.get("example_value"), torch.nn.Parameter):
        return value
    copied = value.graph.call_function(torch.clone, (value,))
    with value.meta["example_value"].fake_mode:
        copied.meta["example_value"] = value.meta["example_value"].clone()
    return copied
