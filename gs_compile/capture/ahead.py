"""ahead: the part of a model that depends on inputs only but needs all samples; it runs before the model.

    inputs --ahead--> rows of images, each at its place: (samples, tokens, ...) --> model, in micro-batches

``x.masked_scatter(mask, rows)`` writes the rows of one tensor to the places of all samples, one after another, so a
micro-batch cannot know where its own rows begin. If mask and rows depend on inputs only, such as images encoded before
the call, the rows are scattered for all samples before the model runs, and the model gets the result as one more batch
input. This part runs as plain PyTorch, in memory; its gradients come from that input. Checks of inputs alone run here
too, on the whole batch, as the user has written them. So do changes of buffers that the model overwrites by what
follows from inputs, such as the frequencies of longrope, which depend on the length: the model gets a copy, as later
calls may overwrite the buffer before this one's backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from gs_compile.capture.checks import require, words_of
from gs_compile.capture.dealing import operands
from gs_compile.capture.exchange import is_collective
from gs_compile.capture.graph import Captured, Input, graph_module
from gs_compile.capture.in_place import mutated
from gs_compile.capture.operations import draws, operation
from gs_compile.capture.reached import made_of
from gs_compile.capture.tail import graph_of, memory_of, regions
from gs_compile.capture.vmapped import BEGIN

_WIDENING = ("expand", "expand_as", "to")  # operations on a mask that masked_scatter does itself


@dataclass(frozen=True, eq=False)
class Ahead:
    """The part that runs before the model.

    module: takes arguments of the model, by index, and returns the model's additional ones.
    used: the arguments that only this part reads.
    """

    module: fx.GraphModule
    arguments: Sequence[int]
    used: frozenset[int]

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the remaining model, given those of a call.

        What it does not read may change before the backward: autograd checks no version of `.data`.
        """
        made = self.module(*(args[index] for index in self.arguments))
        return [*(arg.data if index in self.used else arg for index, arg in enumerate(args)), *made]


def cut_ahead(captured: Captured) -> tuple[Captured, Ahead | None]:
    """The model without the part that runs before it, and that part; None: there is none."""
    if not any(map(_may_be_ahead, captured.module.graph.nodes)):
        return captured, None
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.module.graph, {}))
    alone = _made_of_inputs(graph, captured)
    dealt = {found: node for node in list(graph.nodes) if (found := _deal(node, alone)) is not None}
    copies = {_copied(change): change for change in list(_overwriting(graph, captured))}
    asserts = graph.find_nodes(op="call_function", target=torch._assert_async)
    checks = [_require(node) for node in asserts if node.args[0] in alone]
    if not dealt and not checks and not copies:
        return captured, None
    entries, nodes = graph.find_nodes(op="placeholder"), made_of([*dealt, *checks, *copies])
    arguments = [index for index, entry in enumerate(entries) if entry in nodes]
    own, module = nodes.difference(entries), graph_module(captured.module, graph)
    ahead = graph_of(module, own | regions(graph), [entries[index] for index in arguments], [*dealt, *copies])
    made = [_put_in(scatter, found) for found, scatter in dealt.items()]
    values = [_put_in_place_of(change, found) for found, change in copies.items()]
    for node in reversed([node for node in graph.nodes if node in own]):
        if not node.users:
            graph.erase_node(node)
    read = [bool(entry.users) or given.role == "size" for entry, given in zip(entries, captured.inputs, strict=True)]
    used = frozenset(index for index in arguments if not read[index])
    inputs = [replace(each, role="constant") if index in used else each for index, each in enumerate(captured.inputs)]
    inputs += [Input(node.name, "batch", node.name, is_made=True) for node in made]
    inputs += [Input(node.name, "constant", node.name, is_made=True) for node in values]
    left = replace(captured, module=graph_module(module, graph), inputs=tuple(inputs))
    return left, Ahead(ahead, arguments, used)


def dealt_out(mask: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The entries of `rows` at the places of the mask, expanded to these sizes, and zeros elsewhere."""
    places = mask.expand(sizes)
    return rows.new_zeros(places.shape).masked_scatter(places, rows)


def _may_be_ahead(node: fx.Node) -> bool:
    return node.target is torch._assert_async or operation(node) in ("masked_scatter", "copy")


def _made_of_inputs(graph: fx.Graph, captured: Captured, *, and_constants: bool = False) -> set[fx.Node]:
    """The inputs other than parameters and buffers, and what is computed from them alone, without random numbers.

    and_constants: also of constants and of buffers, and these themselves.
    """
    inputs, found = captured.names("batch", "constant", "size"), set[fx.Node]()
    if and_constants:
        inputs |= captured.names("buffer")
    changed = {memory_of(each) for node in graph.nodes for each in mutated(node)} - {None}
    for node in graph.nodes:
        read, is_call = node.all_input_nodes, node.op in ("call_function", "call_method")
        is_call &= bool(read) or and_constants
        is_made = is_call and found.issuperset(read) and not draws(node) and not is_collective(node)
        is_made &= node.target is not BEGIN  # a region's beginning, without its end
        is_made |= and_constants and node.op == "get_attr"
        if (is_made or (node.op == "placeholder" and node.name in inputs)) and memory_of(node) not in changed:
            found.add(node)
    return found


def _deal(scatter: fx.Node, alone: Set[fx.Node]) -> fx.Node | None:
    """The rows that a ``masked_scatter`` deals out, before the model; None: of other operations, or of other values."""
    if operation(scatter) != "masked_scatter" or mutated(scatter):
        return None
    target, mask, source = operands(scatter)
    while operation(mask) in _WIDENING and mask.all_input_nodes[0].meta["example_value"].dtype is torch.bool:
        mask = mask.all_input_nodes[0]
    sizes = _sizes(mask.meta["example_value"].shape, target.meta["example_value"].shape)
    if sizes is None or mask not in alone or source not in alone:
        return None
    with scatter.graph.inserting_before(scatter):
        return scatter.graph.call_function(dealt_out, (mask, source, sizes))


def _sizes(mask: Sequence[Any], wanted: Sequence[Any]) -> list[int] | None:
    """The sizes to expand a mask to, -1 to keep one; None: only the tensor that it masks has them."""
    given: list[Any] = [1] * (len(wanted) - len(mask)) + list(mask)
    pairs = zip(map(_expression, given), map(_expression, wanted), strict=False)
    sizes: list[Any] = [
        -1 if size == own else own if size == 1 and isinstance(own, int) else None for size, own in pairs
    ]
    return sizes if len(given) == len(wanted) and None not in sizes else None


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _put_in(scatter: fx.Node, dealt: fx.Node) -> fx.Node:
    """Replace the operation that deals out by a new input of the graph; returns the input."""
    graph, (target, *_), (mask, rows) = scatter.graph, operands(scatter), dealt.all_input_nodes
    example = target.meta["example_value"]
    with example.fake_mode:
        found = torch.empty_like(example, memory_format=torch.contiguous_format)
        found.requires_grad_(rows.meta["example_value"].requires_grad)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        entry = graph.placeholder(f"{scatter.name}_dealt")
    entry.meta = {"example_value": found}
    with graph.inserting_before(scatter):
        chosen = graph.call_function(torch.where, (mask, entry, target))
    chosen.meta = dict(scatter.meta)
    scatter.replace_all_uses_with(chosen)
    graph.erase_node(scatter)
    return entry


def _overwriting(graph: fx.Graph, captured: Captured) -> Iterator[fx.Node]:
    """The operations that overwrite a buffer as a whole, before it is read, by what needs no parameter."""
    entries, buffers = graph.find_nodes(op="placeholder"), captured.names("buffer")
    changes = [(node, each) for node in graph.nodes for each in mutated(node)]
    found = [node for node, each in changes if operation(node) == "copy" and each in entries and each.name in buffers]
    alone = _made_of_inputs(graph, captured, and_constants=True) if found else set()
    memory = [memory_of(each) for each in (*entries, *(each for _, each in changes))]
    for change in found:
        buffer, *_ = change.all_input_nodes
        is_only = memory.count(memory_of(buffer)) == 2  # of the buffer and of this change
        is_first = all(user is change or change < user for user in buffer.users)
        if is_only and is_first and alone.issuperset(change.all_input_nodes[1:]):
            yield change


def _copied(change: fx.Node) -> fx.Node:
    """A copy of what an operation has changed."""
    with change.graph.inserting_after(change):
        return change.graph.call_function(torch.clone, (change,))


def _put_in_place_of(change: fx.Node, copied: fx.Node) -> fx.Node:
    """Have those that read an overwritten buffer read a new input of the graph instead; returns the input."""
    graph, (buffer, *_) = change.graph, change.all_input_nodes
    example = buffer.meta["example_value"]
    with example.fake_mode:
        found = torch.empty_like(example)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        entry = graph.placeholder(f"{buffer.name}_overwritten")
    entry.meta = {"example_value": found}
    for each in (buffer, change):
        each.replace_all_uses_with(entry, delete_user_cb=lambda user: user not in (change, copied))
    return entry


def _require(check: fx.Node) -> fx.Node:
    """The check of the whole batch that replaces one of the graph."""
    with check.graph.inserting_before(check):
        found = check.graph.call_function(require, (check.args[0], 1.0, words_of(check)))
    check.graph.erase_node(check)
    return found
