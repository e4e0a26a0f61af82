"""token_wise: a unit as a chain of parts; the token-wise ones can run on some of the tokens at a time.

    head     masks, labels | norm, head, log-probabilities of the labels | their sum
    layer    masks | norm, queries, keys and values | attention | projection, norm, feed-forward | -

`codegen.token_forms` says which operations are token-wise. A slice along the tokens is applied to the inputs of such a
part, so that all of its values have the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import sympy
import torch
from torch import fx

from gs_compile.capture.graph import Length, Source, TensorSpec, UnitGraph, graph_module, output_values, packet_of
from gs_compile.capture.inductor import Generator
from gs_compile.capture.reached import made_of
from gs_compile.codegen.levels import spec_of, subgraph
from gs_compile.codegen.token_axes import Form, aten, rank_of
from gs_compile.codegen.token_forms import AHEAD, SHAPED, Forms, NotInPiecesError, is_slice
from gs_compile.codegen.token_rows import KEEPING

SYMBOL = sympy.Symbol("tokens", integer=True, positive=True)  # the number of tokens of a piece


@dataclass(frozen=True)
class Subgraph:
    """A part of a unit: its graph, and the names of its inputs and outputs."""

    graph: UnitGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def taken(self) -> tuple[tuple[str, TensorSpec], ...]:
        """Its inputs, by name."""
        return tuple(zip(self.inputs, self.graph.specs, strict=True))

    def taking(self, results: tuple[int, ...]) -> Subgraph:
        """The part whose backward takes the gradients of only these results, and gives those of what leads to them."""
        if results == self.graph.differentiated:
            return self
        values, nodes = output_values(self.graph.module), self.graph.module.graph.find_nodes(op="placeholder")
        found = made_of([values[index] for index in results])
        pairs = zip(nodes, self.graph.specs, strict=True)
        specs = tuple(replace(spec, requires_grad=spec.requires_grad and node in found) for node, spec in pairs)
        return replace(self, graph=replace(self.graph, specs=specs, taken=results))

    def taken_of(self, names: Set[str]) -> tuple[int, ...]:
        """Those of the named results whose gradients its backward may take."""
        return tuple(index for index in self.graph.differentiated if self.outputs[index] in names)


@dataclass(frozen=True)
class TokenPart:
    """A token-wise part.

    of: gives the part for a number of tokens; its inputs and outputs with tokens are [tokens, ...].
    forms: of these values in the unit.
    samples, start, length: its tokens are `length` ones from `start` on, of each sample.
    """

    of: Callable[[int], Subgraph]
    forms: Mapping[str, Form]
    samples: int
    start: int | None
    length: int

    @property
    def num_tokens(self) -> int:
        return self.samples * self.length

    def is_cut(self, name: str) -> bool:
        """Whether it reads only some of a value's tokens."""
        return name in self.forms and self.forms[name].length != self.length

    def rows(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A value with tokens as [samples, tokens, ...], or as [1, tokens, ...] if it has them along one axis."""
        axes, start, *_ = self.forms[name]
        if self.is_cut(name):
            value = value.narrow(axes[-1], self._offset(start), self.length)
        value = value.movedim(axes, tuple(range(len(axes))))
        return value if len(axes) == 2 else value[None]

    @staticmethod
    def piece(rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The tokens `begin` to `end` of [samples, tokens, ...], counted over all samples, as [tokens, ...]."""
        length = rows.shape[1]
        samples = range(begin // length, -(-end // length))
        found = [rows[i, max(begin - i * length, 0) : min(end - i * length, length)] for i in samples]
        return found[0] if len(found) == 1 else torch.cat(found)

    def shaped(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The value [tokens, ...] in the unit's shape, with zeros for tokens that the part does not read."""
        axes, start, length, *_ = self.forms[name]
        sizes = (self.samples, self.length) if len(axes) == 2 else (self.num_tokens,)
        found = flat.reshape(*sizes, *flat.shape[1:]).movedim(tuple(range(len(axes))), axes)
        if not self.is_cut(name):
            return found
        whole = found.new_zeros([length if axis == axes[-1] else size for axis, size in enumerate(found.shape)])
        whole.narrow(axes[-1], self._offset(start), self.length).copy_(found)
        return whole

    def _offset(self, start: int | None) -> int:
        assert start is not None
        assert self.start is not None
        return self.start - start


@dataclass(frozen=True)
class Chain:
    """The parts of a unit, in the order in which they run.

    given, made: the names of the unit's inputs and results; a result that is a constant is itself in `made`.
    x: the name of the input x. on_all: the names of the operations that act on all tokens.
    """

    parts: tuple[Subgraph | TokenPart, ...]
    given: tuple[str, ...]
    made: tuple[Any, ...]
    x: str
    on_all: tuple[str, ...]


def chain(unit: UnitGraph, last: int = 1) -> Chain:
    """The parts of a unit's forward. From the stage `last` on, an odd one, all is one part.

    Raises `NotInPiecesError` for a graph that cannot be cut so.
    """
    for node in unit.module.graph.find_nodes(op="get_attr"):  # such as of a function with its own backward
        if isinstance(getattr(unit.module, node.target, None), fx.GraphModule):
            raise NotInPiecesError(f"{node.target} is a graph inside it")
    eager = Generator("eager")
    module = eager.functional(eager.trace(unit.module, unit.specs), unit.specs)
    _leave_out_copies(module)
    whole = set[str]()
    while True:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        try:
            return _Cut(unit, fx.GraphModule(module, graph), last, whole).chain()
        except _LeavesError as error:
            whole.add(error.name)


def _leave_out_copies(module: fx.GraphModule) -> None:
    """Replace ``copy``, which torch does not differentiate, by its result: the source in the target's form."""
    for node in module.graph.find_nodes(op="call_function", target=aten.copy.default):
        value, made = node.meta["val"], node.args[1]
        steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (aten._to_copy.default, (), {"dtype": value.dtype}),
            (aten.expand.default, (list(value.shape),), {}),
            (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        ]
        for function, args, given in steps:
            with module.graph.inserting_before(node):
                source, made = made, module.graph.call_function(function, (made, *args), given)
            with value.fake_mode:
                made.meta = {**node.meta, "val": function(source.meta["val"], *args, **given)}
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)


class _LeavesError(Exception):
    """Sorted rows, or their places, would leave a part that runs in pieces.

    name: the operation that must act on all tokens for that reason.
    """

    def __init__(self, node: fx.Node, order: fx.Node | None, whole: Set[str]) -> None:
        self.name = node.name if order is None or order.name in whole else order.name
        assert self.name not in whole, node.format_node()
        super().__init__(self.name)


class _Part(NamedTuple):
    """The operations of a part, the values that it reads, and those of its own that others read."""

    nodes: list[fx.Node]
    entries: list[fx.Node]
    exits: list[fx.Node]


class _Cut:
    """Cuts a graph at its stages. whole: see `Forms`."""

    def __init__(self, unit: UnitGraph, module: fx.GraphModule, last: int, whole: Set[str]) -> None:
        self.unit, self.module, self.last = unit, module, last
        self.staged = Forms(unit, module, whole)
        self.places = self._places()

    def chain(self) -> Chain:
        results, mixing = output_values(self.module), self.staged.mixing
        names = [packet_of(node).__name__ for node in mixing if node in self.places and packet_of(node) not in KEEPING]
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return Chain(
            parts=tuple(self._part(place) for place in sorted(set(self.places.values()))),
            given=tuple(node.name for node in placeholders),
            made=tuple(each.name if isinstance(each, fx.Node) else each for each in results),
            x=self.staged.x.name,
            on_all=tuple(dict.fromkeys(names)),
        )

    def _places(self) -> dict[fx.Node, int]:
        """The part of each operation: usually its stage. What does not depend on x but has tokens, or is a view, is in
        the part that reads it, if this is the only one.
        """
        places: dict[fx.Node, int] = {}
        for node in reversed(self.module.graph.nodes):
            if node.op != "call_function":
                continue
            places[node] = min(self.staged.stage(node), self.last)
            readers = {places.get(user, self.last) for user in node.users}
            is_view = packet_of(node) in (aten.t, aten.permute, aten.transpose)
            has_tokens = node in self.staged.forms and not self.staged.is_part(node)
            if places[node] == AHEAD and (is_view or has_tokens) and len(readers) == 1 and max(readers) % 2 == 0:
                (places[node],) = readers
        return places

    def _part(self, place: int) -> Subgraph | TokenPart:
        nodes = [node for node in self.module.graph.nodes if self.places.get(node) == place]
        inside = set(nodes)
        entries = [
            node
            for node in self.module.graph.nodes
            if node not in inside and node.op != "get_attr" and not inside.isdisjoint(node.users)
        ]
        exits = [node for node in nodes if any(user not in inside for user in node.users)]
        part = _Part(nodes, entries, exits)
        if place % 2 == 0:
            return self._token_part(part)
        module = subgraph(self.module, entries, exits)
        for node in module.graph.nodes:  # a part's inputs may have another layout than in the unit
            node.target = SHAPED.get(packet_of(node), node.target)
        module.recompile()
        return self._named(module, part, self._spec)

    def _spec(self, node: fx.Node) -> TensorSpec:
        """The spec of a value between parts; one with tokens is laid out as [tokens, ...], as in the pieces."""
        spec, form = spec_of(node), self.staged.forms.get(node)
        if form is None or node.op == "placeholder" or any(user.op == "output" for user in node.users):
            return spec
        rest = [size for axis, size in enumerate(spec.shape) if axis not in form.axes]
        rows = torch.empty(*(spec.shape[axis] for axis in form.axes), *rest, device="meta")
        return replace(spec, stride=rows.movedim(tuple(range(len(form.axes))), form.axes).stride())

    def _token_part(self, part: _Part) -> TokenPart:
        staged = self.staged
        for node in (*part.entries, *part.exits):
            if (form := staged.forms.get(node)) and not form.is_of_tokens:
                raise _LeavesError(node, form.rows.order if form.groups is None else None, staged.whole)
        forms = {node: form for node in part.entries if (form := staged.forms.get(node, staged.read.get(node)))}
        forms |= {node: staged.forms[node] for node in part.exits}
        spans = {staged.forms[node].span for node in part.exits}
        if len(spans) > 1:
            raise NotInPiecesError("it reads all tokens, and some of them")
        ((start, length),) = spans
        cut = [form for form in forms.values() if form.length != length]
        if any(form.start is None or len(form.axes) == 1 < staged.samples for form in cut):
            raise NotInPiecesError("it reads some tokens of what has them in one row, or of some others")
        named = {node.name: form for node, form in forms.items()}
        return TokenPart(partial(self._piece, part, forms), named, staged.samples, start, length)

    def _piece(self, part: _Part, forms: Mapping[fx.Node, Form], size: int) -> Subgraph:
        """A part's graph for `size` tokens; the number is symbolic, so that other numbers can share the code."""
        number = Length.of(size, SYMBOL, {SYMBOL: size})
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in part.entries}
        for node in part.entries:
            if form := forms.get(node):
                copies[node] = _arranged(graph, copies[node], form.axes, rank_of(node))
        for node in part.nodes:
            for each in node.all_input_nodes:
                if each.op == "get_attr" and each not in copies:
                    copies[each] = graph.node_copy(each)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            self._resize(node, copies, number)
        graph.output(tuple(_collected(graph, copies[n], forms[n].axes, rank_of(n)) for n in part.exits))

        def spec(node: fx.Node) -> TensorSpec:
            whole = spec_of(node)
            if node not in forms:
                return whole
            rest = tuple(length for axis, length in enumerate(whole.shape) if axis not in forms[node].axes)
            return replace(whole, shape=(number, *rest), stride=torch.empty(1, *rest, device="meta").stride())

        return self._named(graph_module(self.module, graph), part, spec)

    def _resize(self, node: fx.Node, copies: dict[fx.Node, fx.Node], number: Length) -> None:
        """Give an operation the sizes of the piece; a slice of tokens is left out, as it is applied to the inputs."""
        forms = self.staged.forms
        if is_slice(node) and forms[node].span != forms[node.all_input_nodes[0]].span:
            copies[node] = copies[node.all_input_nodes[0]]
        elif packet_of(node) in SHAPED:
            shape, form = [*node.meta["val"].shape], forms[node]
            for axis, size in zip(form.axes[::-1], (Length.product(number, form.rows.each), 1), strict=False):
                shape[axis] = size
            copies[node].update_arg(1, shape)
            copies[node].target = SHAPED[packet_of(node)]

    def _named(self, module: fx.GraphModule, part: _Part, spec: Callable[[fx.Node], TensorSpec]) -> Subgraph:
        def of(node: fx.Node) -> TensorSpec:
            found = spec(node)
            return replace(found, requires_grad=node in self.staged.trained and found.dtype.is_floating_point)

        for node, value in zip(part.exits, output_values(module), strict=True):
            value.meta["spec"] = of(node)
        graph = UnitGraph(
            unit=self.unit.unit,
            module=module,
            sources=tuple(Source(self._kind(node), index) for index, node in enumerate(part.entries)),
            specs=tuple(map(of, part.entries)),
            results=("side",) * len(part.exits),
        )
        inputs, outputs = (tuple(node.name for node in nodes) for nodes in (part.entries, part.exits))
        return Subgraph(graph, inputs, outputs)

    def _kind(self, node: fx.Node) -> Literal["input", "side"]:
        """The kind of a part's input: "input" like a weight, whose gradient may be factors; "side" if it has tokens."""
        return "side" if node in self.staged.forms or node in self.staged.read else "input"


def _arranged(graph: fx.Graph, flat: fx.Node, axes: tuple[int, ...], rank: int) -> fx.Node:
    """A value [tokens, ...] with its tokens along `axes`; if these are two, as one sample."""
    node = graph.call_function(aten.unsqueeze.default, (flat, 0)) if len(axes) == 2 else flat
    order = list(range(len(axes), rank))
    for place, axis in enumerate(axes):
        order.insert(axis, place)
    return node if order == sorted(order) else graph.call_function(aten.permute.default, (node, order))


def _collected(graph: fx.Graph, node: fx.Node, axes: tuple[int, ...], rank: int) -> fx.Node:
    """The inverse of `_arranged`."""
    order = [*axes, *(axis for axis in range(rank) if axis not in axes)]
    if order != sorted(order):
        node = graph.call_function(aten.permute.default, (node, order))
    return graph.call_function(aten.squeeze.dim, (node, 0)) if len(axes) == 2 else node
