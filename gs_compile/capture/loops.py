"""loops: which values a fusing compiler keeps out of memory, and which it computes together.

    logits = mm(x, w)                            in memory, like all that a library's operation makes or reads
    shifted = logits - amax(logits)              not in memory: computed in the loops that read it
    gradient = exp(shifted) * y - chosen         in memory, because mm reads it; logits are needed until it is made

inductor fuses elementwise operations into the loops of their readers. A value with several readers is put into memory
if that saves more than it costs, by inductor's heuristic, which is repeated here. If no library operation runs between
its readers, their loops are fused instead, and the value exists for one row at a time. Loops that read the same values
are fused, too, so what they make is in memory at the same time. inductor may also reuse memory that it has just read;
this is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from gs_compile.capture.graph import hint, output_values, packet_of, tensors_in
from gs_compile.capture.inductor import changes_memory, memories_of

aten = torch.ops.aten
REDUCING = {aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.prod, aten.argmax, aten.argmin}
REDUCING |= {aten.var_mean, aten.var}
MAKING = {aten.full, aten.zeros, aten.ones, aten.scalar_tensor, aten.arange, aten.full_like, aten.zeros_like}
READING = {aten.gather, aten.index, aten.embedding, aten.clone, aten._to_copy, aten.slice_scatter, aten.constant_pad_nd}
HEAVY = {aten.exp, aten.log, aten.log1p, aten.log2, aten.log10, aten.sigmoid, aten.tanh}  # not twice on a CPU
MOST_READS, MOST_READS_OF_ONE, MOST_OPERATIONS = 4, 8, 30  # of a value with several readers; of any; of either


class Loops(NamedTuple):
    """out: the values that are not in memory, with those that are read instead. first: of values made together."""

    out: dict[fx.Node, frozenset[fx.Node]]
    first: dict[fx.Node, fx.Node]


@dataclass
class _Body:
    """The loop that computes a value: the values that it reads, by their operations, and its own operations.

    sources: the values in memory that these are, or are computed from.
    """

    reads: set[fx.Node] = field(default_factory=set)
    sources: set[fx.Node] = field(default_factory=set)
    operations: int = 1
    is_heavy: bool = False


def loops(module: fx.GraphModule) -> Loops:
    return _Graph(module).found


class _Graph:
    """A value is identified by the operation that makes its memory; others are views of it."""

    def __init__(self, module: fx.GraphModule) -> None:
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        first: dict[object, fx.Node] = {}
        self.root: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            memory: list[object] = [*memories_of(node)] or [node]
            self.root[node] = first.setdefault(memory[0], node)
            first |= dict.fromkeys(memory, self.root[node])
        self.readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in nodes}
        for node in nodes:
            for maker, _ in self._inputs(node):
                self.readers[maker].add(node)
        self.results = {self.root[each] for each in output_values(module) if isinstance(each, fx.Node)}
        changed = {self.root[each] for node in nodes if changes_memory(node) for each in node.all_input_nodes}
        self.is_loop = {node: _is_loop(node) and self.root[node] not in changed for node in nodes}
        self.depth: dict[fx.Node, int] = {}  # the length of the chain of library operations before it
        for node in nodes:
            made = [maker for maker, _ in self._inputs(node)]
            ahead = (self.depth[each] + (each.op == "call_function" and not self.is_loop[each]) for each in made)
            self.depth[node] = max(ahead, default=0)
        self.bodies: dict[fx.Node, _Body] = {}
        self.found = Loops({}, {})
        self.together: dict[tuple[int, fx.Node], fx.Node] = {}
        for node in nodes:
            if self.root[node] is node and self.is_loop[node]:
                self._visit(node)

    def _inputs(self, node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The values that a node reads, each with the operation that makes its memory."""
        makers = ((self.root[each], each) for each in node.all_input_nodes)
        return ((maker, each) for maker, each in makers if maker is not self.root[node])

    def _visit(self, node: fx.Node) -> None:
        is_cpu = any(each.device.type == "cpu" for each in tensors_in(node))
        body = _Body(is_heavy=is_cpu and packet_of(node) in HEAVY)
        for maker, each in self._inputs(node):
            inner = self.bodies.get(maker)
            body.reads |= inner.reads if inner else {maker}
            body.sources |= self.found.out.get(maker, {each})
            body.operations += inner.operations if inner else 0
            body.is_heavy |= inner is not None and inner.is_heavy
        readers = self.readers[node]
        is_read_in_loops = node not in self.results and all(self.is_loop[each] for each in readers)
        is_large = body.is_heavy or len(body.reads) > MOST_READS or body.operations > MOST_OPERATIONS
        is_put = (len(readers) > 1 and is_large) or len(body.reads) > MOST_READS_OF_ONE
        if packet_of(node) in REDUCING or not is_read_in_loops:
            self._join(node, body.sources)
            return
        if not is_put:
            self.bodies[node] = body
        if not is_put or all(self.depth[each] == self.depth[node] for each in readers):
            self.found.out[node] = frozenset(body.sources)
        else:
            self._join(node, body.sources)

    def _join(self, node: fx.Node, sources: set[fx.Node]) -> None:
        """Note which other value is made in the same loop: one of equal depth that reads a source of this size."""
        keys = [(self.depth[node], self.root[each]) for each in sources if _numel(each) >= _numel(node)]
        first = next((self.together[key] for key in keys if key in self.together), node)
        self.found.first[node] = first
        self.together |= {key: self.together.get(key, first) for key in keys}


def _is_loop(node: fx.Node) -> bool:
    """Whether the compiler generates the operation's code, instead of calling a library."""
    if node.op != "call_function" or not tensors_in(node):
        return False
    packet, tags = packet_of(node), getattr(node.target, "tags", ())
    if node.target is aten.scatter.value:  # of a number into a tensor of one number: a comparison
        return packet_of(node.all_input_nodes[0]) in MAKING and len(node.all_input_nodes[0].users) == 1
    is_view = not set(memories_of(node)).isdisjoint(key for each in node.all_input_nodes for key in memories_of(each))
    return packet in REDUCING | MAKING | READING or torch.Tag.pointwise in tags or is_view


def _numel(node: fx.Node) -> int:
    return sum(hint(each.numel()) for each in tensors_in(node))
