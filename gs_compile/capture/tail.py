"""tail: what a model makes of all samples at once from its results, such as a contrastive loss.

    model  --images, texts (a row for each sample)-->  tail  --logits of all pairs, their loss-->

No micro-batch has a share of it, and it reads what the head makes, so no part of the step can make it. It runs behind
the model as it is written, on the results of all micro-batches, as the same code outside of the model does. Its
gradients are those of these results.
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
    """module: takes arguments of the model, by index, then its results from `num_outputs` on; gives the outputs at
    `places` among those of the user's model.
    """

    module: fx.GraphModule
    arguments: Sequence[int]
    places: Sequence[int]
    num_outputs: int
    is_told: bool = False

    def run(self, results: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """What the user's model returns; results: what the model without the tail does."""
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
    """The model without a tail, whose further results the tail reads, and the tail; None: it has none.

    module: the model at the size of a micro-batch, which changes. kept: the outputs that are asked for.
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
    if any(node.meta["example_value"].dim() > 1 for node in trained):  # with logits, perhaps: no plan has these
        return None
    arguments = [at for at, (entry, node) in enumerate(entries) if entry.role != "parameter" and node in taken]
    given_first = [*(entries[at][1] for at in arguments), *read, *trained]
    tail = graph_of(captured.module, nodes | regions(graph), given_first, [given[place] for place in places])
    ahead = graph_of(captured.module, set(graph.nodes), [], [*own, *read, *trained])
    return replace(captured, module=ahead), Tail(tail, arguments, places, len(given))


def _nodes(
    wanted: Set[fx.Node], classes: Mapping[fx.Node, State], samples: Set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """What makes some values of all samples, and the results of micro-batches that it reads; None: it has to read
    others, or is a part of a block.
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
    """Whether some nodes run as they are written behind all others: neither changes what is the other's in place, and
    what they read of the others is what these leave there.
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
    """Where regions of another mode begin and end: what is made in one of them is so in another graph, too."""
    return {node for node in graph.nodes if node.target in _REGIONS}


def memory_of(node: fx.Node) -> int | None:
    """Which memory a value of a captured graph lives in."""
    return storage_number(node.meta.get("example_value"))


def graph_of(
    module: fx.GraphModule, nodes: Set[fx.Node], given: Sequence[fx.Node], made: Sequence[Any]
) -> fx.GraphModule:
    """The graph of some nodes of a module, which takes values and gives others."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in given}
    for node in module.graph.nodes:
        is_read = node.op == "get_attr" and not nodes.isdisjoint(node.users)
        if node.op != "output" and (node in nodes or is_read):
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(_made(known[each]) if isinstance(each, fx.Node) else each for each in made))
    return fx.GraphModule(module, graph)


def _made(value: fx.Node) -> fx.Node:
    """A value that a graph gives; a parameter as a copy, which the graph makes: its gradient comes to the graph."""
    if not isinstance(value.meta.get("example_value"), torch.nn.Parameter):
        return value
    copied = value.graph.call_function(torch.clone, (value,))
    with value.meta["example_value"].fake_mode:
        copied.meta["example_value"] = value.meta["example_value"].clone()
    return copied
