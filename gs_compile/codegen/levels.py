"""levels: what the forward of a class of units may save for its backward.

    level 0     nothing: the backward runs the forward again from the unit's inputs
    level 1     what saves the most operations per byte: results of matrix products and of attention
    level 2     all that the backward reads

Forward and backward are traced as one graph, the joint graph. torch's partitioner chooses values in it
(`capture.partition`). Here each choice becomes a forward that returns these values after its results, and a backward
that takes them and recomputes whatever else it needs from the unit's inputs:

    forward(inputs)                                   -> results, saved
    backward(inputs without x, saved, gradients)      -> gradients          (with x where the level reads it)

Only whole memory is saved: the base of a view, not the view. Random numbers are never saved: each backward draws all
that the forward draws, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from gs_compile.capture.flops import count_flops
from gs_compile.capture.graph import TensorSpec, graph_module, hint, is_sized, output_values, packet_of
from gs_compile.capture.inductor import changes_memory, draws_random, memory_of
from gs_compile.capture.partition import LIKE, CannotSaveError, choices, write_sizes
from gs_compile.placement.levels import aligned

Size = Callable[[Any], int]  # gives the number of a size, which may be symbolic
aten = torch.ops.aten
# These read only the shape and layout of their first argument.
SHAPES = {aten.empty_like, aten.rand_like, aten.randn_like, aten.zeros_like, aten.ones_like, aten.full_like}
SHAPES |= {aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty_strided}


@dataclass(frozen=True, slots=True)
class SavedLevel:
    """What one level saves for one micro-batch, and what its code costs."""

    specs: tuple[TensorSpec, ...]
    reads_input: bool  # whether its backward reads the unit's input x
    forward_flops: float
    backward_flops: float

    @property
    def nbytes(self) -> int:
        return sum(aligned(spec.nbytes) for spec in self.specs)


@dataclass(frozen=True)
class Cut:
    """The code of one level: its two graphs."""

    level: SavedLevel
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_again: int  # operations of the forward that the backward repeats

    def graph(self, name: str) -> fx.GraphModule:
        return self.forward if name == "forward" else self.backward

    def at(self, number: Size) -> Cut:
        """The cut at other lengths. number: gives the number of a symbolic size. The graphs keep their symbols."""
        saved = output_values(self.forward)[-len(self.level.specs) :]
        level = replace(
            self.level,
            specs=tuple(spec_of(node, number) for node in saved),
            forward_flops=count_flops(self.forward, number),
            backward_flops=count_flops(self.backward, number),
        )
        return replace(self, level=level)


@dataclass(frozen=True)
class JointGraph:
    """The functional ATen graph of a unit's results and gradients."""

    module: fx.GraphModule
    num_gradients: int  # the last placeholders
    x: int  # the placeholder of the unit's input
    num_results: int
    num_draws: int  # of the forward, whose draws come first

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def given(self) -> list[fx.Node]:
        """The placeholders of the results' gradients."""
        return self.placeholders[len(self.placeholders) - self.num_gradients :]

    @property
    def inputs(self) -> list[fx.Node]:
        """All other placeholders, symbolic sizes first."""
        return self.placeholders[: len(self.placeholders) - self.num_gradients]

    @cached_property
    def draws(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function" and draws_random(node)]

    @cached_property
    def free(self) -> set[fx.Node]:
        """What every backward has anyway: all inputs but x, the random numbers, and what follows from these alone."""
        apart, nodes = {self.inputs[self.x], *self.given}, set[fx.Node]()
        for node in self.module.graph.nodes:
            is_mask = any(LIKE in each.meta for each in node.all_input_nodes) and node.args[1] == 1
            if node.op != "output" and node not in apart and (is_mask or nodes.issuperset(node.all_input_nodes)):
                nodes.add(node)
        return nodes

    @cached_property
    def bases(self) -> dict[StorageWeakRef | None, fx.Node]:
        """The node that allocated each memory."""
        found: dict[StorageWeakRef | None, fx.Node] = {}
        for node in self.module.graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor):
                found.setdefault(memory_of(node), node)
        return found


def cuts(joint: JointGraph) -> list[Cut]:
    """The levels above 0 that are worth their bytes, at most two, the smaller first.

    Raises `CannotSaveError` if the unit cannot be cut.
    """
    _forget_values(joint.module.graph)
    write_sizes(joint.module.graph)
    _refuse(joint.module)
    whole = _cut(joint, [])  # level 0
    by_saved = {}
    for chosen in choices(joint.module, joint.num_results, joint.given, joint.free):
        if (saved := tuple(_bases(joint, chosen))) and saved not in by_saved:
            by_saved[saved] = _cut(joint, saved)
    if not by_saved:
        return []
    *others, last = sorted(by_saved.values(), key=lambda cut: (cut.level.nbytes, -cut.level.backward_flops))
    per_byte = (whole.level.backward_flops - last.level.backward_flops) / last.level.nbytes

    def gain(cut: Cut) -> float:
        """The operations saved, beyond what `last` saves for as many bytes if only some units have it."""
        return whole.level.backward_flops - cut.level.backward_flops - per_byte * cut.level.nbytes

    best = max(others, key=gain, default=whole)
    levels = [best] if gain(best) > 0 else []
    if last.num_again < (levels[-1] if levels else whole).num_again:
        levels.append(last)
    return levels


def _refuse(module: fx.GraphModule) -> None:
    """Raise for what cannot be cut: operations that change memory, draws of unknown size, and nested graphs."""
    for node in module.graph.find_nodes(op="get_attr"):
        if not isinstance(getattr(module, node.target, None), torch.Tensor):
            raise CannotSaveError(f"{node.target} is a graph inside the layer's")
    for node in module.graph.nodes:
        if changes_memory(node):
            raise CannotSaveError(f"{node.target} changes memory")
        if draws_random(node) and not is_sized(node.meta["val"]):
            raise CannotSaveError(f"how many random numbers {node.target} draws depends on values")


def _forget_values(graph: fx.Graph) -> None:
    """Make operations that read only a shape read an empty tensor, so that nothing need be computed for them.

    A draw that is one operation with a product keeps its operand: a kernel may draw in another order if memory starts
    elsewhere.
    """
    for node in graph.nodes:
        is_fused = node.target is aten.native_dropout.default
        if not is_fused and packet_of(node) not in SHAPES:
            continue
        value = node.args[0].meta["val"]
        if not is_sized(value) or (is_fused and value.storage_offset() != 0):
            continue
        with graph.inserting_before(node):
            kind = {"dtype": value.dtype, "device": value.device}
            empty = graph.call_function(aten.empty_strided.default, ([], []), kind)
        # Sizes are symbols until `write_sizes`: no node is made for them.
        empty.args = (list(value.shape), list(value.stride()))
        empty.meta["val"] = value.new_empty_strided(value.shape, value.stride())
        if is_fused:
            node.meta[LIKE] = empty
        else:
            node.update_arg(0, empty)


def _bases(joint: JointGraph, chosen: Iterable[fx.Node]) -> list[fx.Node]:
    """What to save so that the backward has `chosen`: the tensors that these are views of, in the graph's order."""
    wanted = {joint.bases[memory_of(node)] for node in chosen} - joint.free
    whole = [node for node in joint.draws if LIKE not in node.meta]  # the backward has all of these anyway
    drawn = {*joint.draws, *(user for node in whole for user in node.users if user.target is operator.getitem)}
    saved = [node for node in wanted if node.op == "call_function" and node not in drawn]
    saved.sort(key=list(joint.module.graph.nodes).index)
    for node in saved:
        value = node.meta["val"]
        if hint(value.untyped_storage().nbytes()) != hint(value.numel()) * value.itemsize:
            raise CannotSaveError(f"{node} has gaps in its memory")
    return saved


def _cut(joint: JointGraph, saved: Sequence[fx.Node]) -> Cut:
    """Forward and backward of the level that saves these nodes."""
    values = output_values(joint.module)
    results, gradients = values[: joint.num_results], values[joint.num_results :]
    first = joint.draws[: joint.num_draws]
    forward = subgraph(joint.module, joint.inputs, (*results, *saved), first)
    _part(forward, joint.num_results)
    x = joint.inputs[joint.x]
    needed = _needed(joint.module, {*joint.placeholders, *saved}, [*gradients, *joint.draws])
    inputs = [node for node in joint.inputs if node is not x or x in needed]
    backward = subgraph(joint.module, [*inputs, *saved, *joint.given], gradients, joint.draws)
    ahead = _needed(joint.module, set(joint.placeholders), [*results, *first])
    again = [node for node in needed & ahead if node not in joint.free and joint.bases.get(memory_of(node)) is node]
    level = SavedLevel(
        tuple(map(spec_of, saved)),
        reads_input=x in needed,
        forward_flops=count_flops(forward),
        backward_flops=count_flops(backward),
    )
    return Cut(level, forward, backward, len(again))


def _needed(module: fx.GraphModule, given: Collection[fx.Node], wanted: Iterable[Any]) -> set[fx.Node]:
    """All nodes needed to compute `wanted` if `given` are known; those of both that are needed are among them."""
    needed = {node for node in wanted if isinstance(node, fx.Node)}
    for node in reversed(module.graph.nodes):
        if node in needed and node not in given:
            needed.update(_read(node, needed, given))
    return needed


def _read(node: fx.Node, needed: Collection[fx.Node], given: Collection[fx.Node] = ()) -> list[fx.Node]:
    """What a node reads. A draw of a mask reads only a shape, unless it computes a product that is needed."""
    if LIKE in node.meta and not any(user.args[1] == 0 and user in needed and user not in given for user in node.users):
        return [node.meta[LIKE]]
    return node.all_input_nodes


def subgraph(
    module: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[Any], draws: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """The graph that computes `wanted` from `given`, and draws these random numbers."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    computed = _needed(module, copies.keys(), [*wanted, *draws]) - copies.keys()
    for node in module.graph.nodes:
        if node in computed:
            read = dict(zip(node.all_input_nodes, map(copies.__getitem__, _read(node, computed)), strict=True))
            copies[node] = graph.node_copy(node, read.__getitem__)
            copies[node].meta.pop(LIKE, None)
    graph.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in wanted))
    return graph_module(module, graph)


def _part(forward: fx.GraphModule, num_results: int) -> None:
    """Copy whatever is saved and shares memory with a result."""
    values = list(output_values(forward))
    results = {memory_of(value) for value in values[:num_results] if isinstance(value, fx.Node)}
    output = forward.graph.output_node()
    for index, node in enumerate(values[num_results:], num_results):
        if memory_of(node) in results:
            with forward.graph.inserting_before(output):
                values[index] = forward.graph.call_function(aten.clone.default, (node,))
            values[index].meta["val"] = torch.empty_like(node.meta["val"])
    output.args = (tuple(values),)
    forward.recompile()


def spec_of(node: fx.Node, number: Size = hint) -> TensorSpec:
    value = node.meta["val"]
    shape, stride = (tuple(map(number, each)) for each in (value.shape, value.stride()))
    return TensorSpec(shape, stride, value.dtype, value.device, False, ())
