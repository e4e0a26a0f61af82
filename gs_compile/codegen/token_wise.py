"""token_wise: which part of a unit's graph acts on tokens one by one, so that it can run on some of them at a time.

A value has a *form* where it holds something of each token: the axes along which its tokens are. Forms follow from the
operations, from the unit's input x [samples, tokens, ...] on: an operation keeps the form where what it gives of one
token follows from what it reads of the same token alone, and of what has no tokens, such as a weight. Norms, products
with weights, softmax over the vocabulary and all that works on elements do; attention, and sums over tokens, do not.

    before    what needs nothing of x: masks, labels moved by one, weights in another dtype
    tokens    what acts on tokens one by one
    after     the rest: sums over tokens, what the loss makes of them

A loss summed over tokens becomes the loss of each token, in `tokens`, and its sum, in `after`. A slice along the tokens
cuts the region's inputs instead, so all values of the region have the same tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from gs_compile.capture.graph import Length, Source, TensorSpec, UnitGraph, output_values
from gs_compile.capture.inductor import Generator, changes_memory, draws_random
from gs_compile.errors import GreedySnakeError
from gs_compile.program.ir import Unit

aten = torch.ops.aten
SYMBOL = sympy.Symbol("tokens", integer=True, positive=True)  # of a piece

VIEWS = {aten.view, aten._unsafe_view, aten.reshape}
SAME = {
    aten._to_copy,
    aten.clone,
    aten.detach,
    aten.alias,
    aten.where,
    aten.masked_fill,
}  # beside those tagged pointwise
# These work along their `dim`, and keep it, or not, as they say.
ALONG = {aten.sum, aten.mean, aten.amax, aten.amin, aten.logsumexp, aten.any, aten.all, aten.prod, aten.max, aten.min}
ALONG |= {aten.argmax, aten.argmin, aten.var, aten.var_mean, aten.std, aten.norm, aten.linalg_vector_norm}
ALONG |= {aten._softmax, aten._log_softmax, aten.cumsum, aten.sort, aten.topk, aten.flip, aten.gather, aten.cat}
ALONG |= {aten.split, aten.split_with_sizes, aten.slice, aten._safe_softmax}
LAST = {aten.native_layer_norm, aten._fused_rms_norm}  # these work along the last dimensions
NONE, MEAN, SUM = 0, 1, 2  # reductions of a loss


class NotInPiecesError(GreedySnakeError):
    """Why a unit's graph cannot run on some of the tokens at a time."""


class _MixesTokensError(Exception):
    """An operation does not act on tokens one by one."""


class Form(NamedTuple):
    """Where a value has its tokens: along (samples, tokens) or along one axis; of each sample those from `start` on."""

    axes: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class Part:
    """A part of a unit: its graph, and the names of the values that it takes and gives."""

    graph: UnitGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """A unit in three parts.

    forms: of the values that `tokens` takes and gives with tokens; it takes and gives them as [tokens, ...].
    samples, start, length: the tokens of the region: of each sample `length` from `start` on.
    given, made: the names of the unit's inputs and results; of a result that is no value, the value itself. x: of x.
    """

    before: Part
    tokens: Callable[[int], Part]  # for a number of tokens
    after: Part
    forms: Mapping[str, Form]
    samples: int
    start: int
    length: int
    given: tuple[str, ...]
    made: tuple[Any, ...]
    x: str

    @property
    def num_tokens(self) -> int:
        return self.samples * self.length

    def is_cut(self, name: str) -> bool:
        """Whether the region has not all tokens of a value."""
        return name in self.forms and self.forms[name].length != self.length

    def flat(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The region's tokens of a value, as [tokens, ...]."""
        axes, start, _ = self.forms[name]
        if self.is_cut(name):
            value = value.narrow(axes[-1], self.start - start, self.length)
        value = value.movedim(axes, tuple(range(len(axes))))
        return value.reshape(self.num_tokens, *value.shape[len(axes) :])

    def shaped(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """The contrary, with zeros for tokens that are not the region's."""
        axes, start, length = self.forms[name]
        sizes = (self.samples, self.length) if len(axes) == 2 else (self.num_tokens,)
        found = flat.reshape(*sizes, *flat.shape[1:]).movedim(tuple(range(len(axes))), axes)
        if not self.is_cut(name):
            return found
        whole = found.new_zeros([length if axis == axes[-1] else size for axis, size in enumerate(found.shape)])
        whole.narrow(axes[-1], self.start - start, self.length).copy_(found)
        return whole


def region(unit: UnitGraph) -> Region:
    """The part of a unit's forward that acts on tokens one by one; raises `NotInPiecesError` where it has none."""
    _refuse(unit)
    eager = Generator("eager")
    module = eager.functional(eager.trace(unit.module, unit.specs), unit.specs)
    return _Cut(unit, module).region()


def _refuse(unit: UnitGraph) -> None:
    """Raise for what a graph of operations without autograd does not show."""
    for node in unit.module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(unit.module, node.target, None), fx.GraphModule):
            raise NotInPiecesError(f"{node.target} is a graph inside it")
        if node.target is torch._C._set_grad_enabled:
            raise NotInPiecesError("it turns gradients off in a part of it")


class _Cut:
    """The forms of a graph's values, and the parts that follow from them."""

    def __init__(self, unit: UnitGraph, module: fx.GraphModule) -> None:
        self.unit, self.module, self.graph = unit, module, module.graph
        self.placeholders = self.graph.find_nodes(op="placeholder")
        kinds = [source.kind for source in unit.sources]
        if "x" not in kinds or len(shape := unit.specs[kinds.index("x")].shape) < 2 or 0 in shape or -1 in shape:
            raise NotInPiecesError("it has no input of tokens")
        self.x = self.placeholders[kinds.index("x")]
        self.leading = tuple(shape[:2] if len(shape) > 2 else shape[:1])  # of what holds something of each token
        *samples, length = self.leading
        self.samples = prod(samples)
        self.whole = Form((0, 1) if self.samples > 1 else (len(samples),), 0, length)
        self.forms: dict[fx.Node, Form] = {}
        self.read: dict[fx.Node, Form] = {}  # what has no form by itself, and is read as if it had
        self.of_x: set[fx.Node] = set()  # what follows from x
        self.trained: set[fx.Node] = set()  # what has a gradient

    def region(self) -> Region:
        for node, spec in zip(self.placeholders, self.unit.specs, strict=True):
            if spec.requires_grad:
                self.trained.add(node)
            if node is self.x or (spec.batch_dims and tuple(spec.shape[: len(self.leading)]) == self.leading):
                self.forms[node] = self.whole
        self.of_x.add(self.x)
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        return self._parts()

    def _sizes(self, form: Form) -> tuple[int, ...]:
        return (self.samples, form.length) if len(form.axes) == 2 else (self.samples * form.length,)

    # Forms -----------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        if changes_memory(node) or draws_random(node):
            raise NotInPiecesError(f"{node.target} {'changes memory' if changes_memory(node) else 'draws at random'}")
        if not self.of_x.isdisjoint(node.all_input_nodes):
            self.of_x.add(node)
        is_cut = _packet(node) is aten.detach
        if not self.trained.isdisjoint(node.all_input_nodes) and not is_cut:
            self.trained.add(node)
        if self.forms.keys().isdisjoint(node.all_input_nodes):
            return
        if any(each in self.of_x and each not in self.forms for each in node.all_input_nodes):
            return  # it comes after what mixes tokens
        try:
            self.forms[node] = self._form(node)
        except _MixesTokensError:
            self._open(node)

    def _form(self, node: fx.Node) -> Form:
        """The form of what an operation gives; raises `_MixesTokensError` where it has none."""
        packet = _packet(node)
        if node.target is operator.getitem:
            return self.forms[node.args[0]]
        if packet in VIEWS:
            return self._viewed(node)
        if packet in MOVING:
            return MOVING[packet](self.forms[node.args[0]], _rank(node.args[0]), **_arguments(node))
        if packet in (aten.mm, aten.addmm):
            return self._product(node)
        if packet is aten.embedding:
            return self.forms[node.args[1]] if node.args[1] in self.forms else _mix()
        if packet is aten.nll_loss_forward:
            return self._loss(node)
        if packet is aten.expand:
            return self._expanded(node)
        if packet in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._aligned(node, node.all_input_nodes, _rank(node))
        if packet in LAST:
            return self._along(node, range(-len(node.args[1]), 0))
        if packet in ALONG:
            dims = _arguments(node).get("dim")
            return self._along(node, dims if isinstance(dims, (list, tuple)) else [dims])
        return _mix()

    def _aligned(self, node: fx.Node, operands: Sequence[fx.Node], rank: int) -> Form:
        """Of values that are aligned at their last dimensions; those without a form are read as if they had it."""
        formed = [each for each in operands if each in self.forms]
        found = {_shifted(self.forms[each], rank - _rank(each)) for each in formed}
        if len(found) != 1:
            return _mix()
        (form,) = found
        for each in operands:
            if each not in self.forms and isinstance(each.meta["val"], torch.Tensor):
                self._align(node, each, form, rank)
        return form

    def _align(self, node: fx.Node, operand: fx.Node, form: Form, rank: int) -> None:
        """Let an operand without a form have that of the others, if its sizes are not all 1 where the tokens are."""
        shape = [1] * (rank - _rank(operand)) + list(operand.meta["val"].shape)
        sizes = [shape[axis] for axis in form.axes]
        if set(sizes) == {1}:
            return
        if sizes != list(self._sizes(form)) or rank > _rank(operand):
            for axis, size in zip(form.axes, self._sizes(form), strict=True):
                shape[axis] = size
            operand = self._expand(node, operand, shape)
        if self.read.setdefault(operand, form) != form:
            _mix()

    def _expand(self, node: fx.Node, operand: fx.Node, shape: list[int]) -> fx.Node:
        with self.graph.inserting_before(node):
            expanded = self._new(aten.expand.default, operand, shape)
        node.replace_input_with(operand, expanded)
        return expanded

    def _along(self, node: fx.Node, dims: Iterable[int | None]) -> Form:
        """Of an operation along dimensions, none of which may be the tokens'."""
        first = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        rank, arguments = _rank(first), _arguments(node)
        along = [dim % rank for dim in dims if dim is not None]
        form = self._aligned(node, [each for each in node.all_input_nodes if _rank(each) == rank], rank)
        if _packet(node) is aten.slice and tuple(along) == form.axes[-1:]:
            return self._sliced(node, form, **arguments)
        if not along or set(along) & set(form.axes):
            return _mix()
        goes = "keepdim" in arguments and not arguments["keepdim"]
        return _without(form, along) if goes else form

    def _sliced(self, node: fx.Node, form: Form, start: int | None, end: int | None, step: int, **_: Any) -> Form:
        """Of a part of the tokens of each sample; what does not follow from x is what stands beside the first ones."""
        if step != 1 or (len(form.axes) == 1 and self.samples > 1):
            return _mix()
        first, last, _ = slice(start, end).indices(form.length)
        return Form(form.axes, form.start + (first if node in self.of_x else 0), last - first)

    def _viewed(self, node: fx.Node) -> Form:
        """Of the same elements in another shape: the tokens' sizes stand behind as many elements as before."""
        form = self.forms[node.args[0]]
        before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
        sizes = (self.samples, form.length)
        if len(form.axes) == 1 or self.samples == 1:
            found = _axis(before, form.axes[-1], after, self.samples * form.length)
            if found is not None:
                return replace_axes(form, (found,))
            found = _axis(before, form.axes[-1], after, self.samples)
            fits = found is not None and found + 1 < len(after) and after[found + 1] == form.length
            return replace_axes(form, (found, found + 1)) if found is not None and fits else _mix()
        kept = [_axis(before, axis, after, size) for axis, size in zip(form.axes, sizes, strict=True)]
        if None not in kept:
            return replace_axes(form, tuple(axis for axis in kept if axis is not None))
        is_row = prod(before[form.axes[0] + 1 : form.axes[1]]) == 1 and form.axes[0] < form.axes[1]
        flat = _axis(before, form.axes[0], after, prod(sizes)) if is_row else None
        return replace_axes(form, (flat,)) if flat is not None else _mix()

    def _expanded(self, node: fx.Node) -> Form:
        if node.args[0] not in self.forms:
            return _mix()
        return _shifted(self.forms[node.args[0]], _rank(node) - _rank(node.args[0]))

    def _product(self, node: fx.Node) -> Form:
        """Of the product of rows, each of a token, with a matrix."""
        left, right = node.args[-2:]
        form = self.forms.get(left)
        if form is None or form.axes != (0,) or right in self.forms:
            return _mix()
        if len(node.args) == 3 and node.args[0] not in self.forms:
            self._align(node, node.args[0], form, 2)
        return form

    def _loss(self, node: fx.Node) -> Form:
        log_p, target, weight, reduction = node.args[:4]
        form = self.forms.get(log_p)
        if form is None or form.axes != (0,) or reduction != NONE or weight in self.forms:
            return _mix()
        if self.forms.get(target, form) != form or self.read.setdefault(target, form) != form:
            _mix()
        return form

    # Sums over tokens --------------------------------------------------------------------------------------------------

    def _open(self, node: fx.Node) -> None:
        """Let what reduces over tokens and more reduce over the rest alone first, for each token."""
        packet, source = _packet(node), node.args[0]
        form = self.forms.get(source) if isinstance(source, fx.Node) else None
        if form is None:
            return
        if packet is aten.nll_loss2d_forward:
            self._flatten_loss(node)
        elif packet is aten.nll_loss_forward and node.args[3] != NONE and form.axes == (0,):
            self._open_loss(node)
        elif node.target in (aten.sum.default, aten.mean.default) and not node.kwargs:
            rest = [axis for axis in range(_rank(source)) if axis not in form.axes]
            if rest:
                by_dim = aten.sum.dim_IntList if packet is aten.sum else aten.mean.dim
                with self.graph.inserting_before(node):
                    of_tokens = self._new(by_dim, source, rest)
                self._visit(of_tokens)
                node.update_arg(0, of_tokens)

    def _flatten_loss(self, node: fx.Node) -> None:
        """The loss of [samples, classes, ..., tokens] as that of [tokens, classes]."""
        log_p, target, *rest = node.args
        num_classes = log_p.meta["val"].shape[1]
        with self.graph.inserting_before(node):
            last = self._new(aten.permute.default, log_p, [0, *range(2, _rank(log_p)), 1])
            rows = self._new(aten.reshape.default, last, [-1, num_classes])
            labels = self._new(aten.reshape.default, target, [-1])
            pair = self._new(aten.nll_loss_forward.default, rows, labels, *rest)
            made = [last, rows, labels, pair]
            if rest[1] == NONE:
                made.append(self._new(operator.getitem, pair, 0))
                made.append(self._new(aten.reshape.default, made[-1], list(target.meta["val"].shape)))
        if rest[1] == NONE:
            for user in list(node.users):
                user.replace_all_uses_with(made[-1])
                self.graph.erase_node(user)
        else:
            node.replace_all_uses_with(pair)
        self.graph.erase_node(node)
        for each in made:
            self._visit(each)

    def _open_loss(self, node: fx.Node) -> None:
        """The loss of each token, and its sum, or its mean over the labels' weights."""
        log_p, target, weight, reduction, ignored = node.args
        user = next((each for each in node.users if each.args[1] == 0), None)
        if user is None or len(node.users) > 1:
            return
        with self.graph.inserting_before(user):
            pair = self._new(aten.nll_loss_forward.default, log_p, target, weight, NONE, ignored)
            losses = self._new(operator.getitem, pair, 0)
            total = self._new(aten.sum.default, losses)
            if reduction == MEAN:
                counted = self._new(aten.ne.Scalar, target, ignored)
                if weight is not None:
                    label = self._new(aten.clamp.default, target, 0, log_p.meta["val"].shape[1] - 1)
                    counted = self._new(aten.mul.Tensor, self._new(aten.take.default, weight, label), counted)
                total = self._new(aten.div.Tensor, total, self._new(aten.sum.default, counted))
        user.replace_all_uses_with(total)
        self.graph.erase_node(user)
        self.graph.erase_node(node)
        for made in (pair, losses, total):
            self._visit(made)

    def _new(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda each: each.meta["val"])
        first = next(each.meta["val"] for each in node.all_input_nodes)
        with getattr(first[0] if isinstance(first, tuple) else first, "fake_mode", torch.no_grad()), torch.no_grad():
            node.meta["val"] = target(*values)
        if not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        if not self.of_x.isdisjoint(node.all_input_nodes):
            self.of_x.add(node)
        return node

    # Parts -------------------------------------------------------------------------------------------------------------

    def _parts(self) -> Region:
        inside = self._inside()
        made = output_values(self.module)
        made_here = [node for node in inside if node.op == "call_function"]
        exits = [node for node in made_here if any(user not in inside for user in node.users)]
        entries = [e for e in self.graph.nodes if e not in inside and any(user in inside for user in e.users)]
        if not exits or self.x not in entries:
            raise NotInPiecesError("it does nothing to tokens one by one")
        forms = {node: form for node in entries if (form := self.forms.get(node, self.read.get(node)))}
        forms |= {node: self.forms[node] for node in exits}
        spans = {(self.forms[node].start, self.forms[node].length) for node in exits}
        if len(spans) > 1:
            raise NotInPiecesError("it reads all tokens, and some of them")
        ((start, length),) = spans
        if any(len(form.axes) == 1 < self.samples and form.length != length for form in forms.values()):
            raise NotInPiecesError("it reads all tokens in one row, and some of them")
        ahead = [node for node in self.graph.nodes if node.op == "call_function" and node not in self.of_x]
        ahead = [node for node in ahead if node not in inside]
        behind = {n for n in self.graph.nodes if n.op == "call_function" and n in self.of_x and n not in inside}
        wanted = [
            n for n in ahead if n in forms or n in entries or any(u in behind or u.op == "output" for u in n.users)
        ]
        known = [*self.placeholders, *wanted, *exits]
        results = list(dict.fromkeys(each for each in made if isinstance(each, fx.Node)))
        return Region(
            before=self._part(self.placeholders, wanted),
            tokens=partial(_Piece(self, entries, exits, inside, forms).part),
            after=self._part(known, [each for each in results if each in behind]),
            forms={node.name: form for node, form in forms.items()},
            samples=self.samples,
            start=start,
            length=length,
            given=tuple(node.name for node in self.placeholders),
            made=tuple(each.name if isinstance(each, fx.Node) else each for each in made),
            x=self.x.name,
        )

    def _inside(self) -> dict[fx.Node, None]:
        """The nodes of the region in order: what follows from x, and what is there for these alone."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            is_formed = node.op == "call_function" and node in self.forms and not self._is_cut(node)
            is_view = node not in self.of_x and _packet(node) in (aten.t, aten.permute, aten.transpose)
            serves = all(user in found for user in node.users)
            is_constant = node.op == "get_attr" and any(user in found for user in node.users)
            if (is_formed and (node in self.of_x or serves)) or (is_view and serves) or is_constant:
                found.add(node)
        return {node: None for node in self.graph.nodes if node in found}

    def _is_cut(self, node: fx.Node) -> bool:
        """Whether it takes some tokens of what does not follow from x."""
        is_slice = _packet(node) is aten.slice and node not in self.of_x
        return is_slice and self.forms[node].length != self.forms[node.args[0]].length

    def _part(self, given: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> Part:
        """The part that makes `wanted` of those of `given` that it needs."""
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in given}
        for node in self.graph.nodes:
            if node not in copies and node.op != "output" and copies.keys() >= set(node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        graph.eliminate_dead_code()
        taken = [node for node in given if copies[node].users]
        for node in given:
            if not copies[node].users:
                graph.erase_node(copies[node])
        return part_of(self.unit.unit, fx.GraphModule(self.module, graph), taken, wanted, self.trained)


def part_of(
    unit: Unit,
    module: fx.GraphModule,
    taken: Sequence[fx.Node],
    made: Sequence[fx.Node],
    trained: set[fx.Node],
    number: Callable[[fx.Node], TensorSpec] | None = None,
) -> Part:
    """A part of `unit`, whose graph `module` takes and makes what these nodes of the unit's graph are."""

    def spec(node: fx.Node) -> TensorSpec:
        found = (number or _spec)(node)
        return replace(found, requires_grad=node in trained and found.dtype.is_floating_point)

    for node, value in zip(made, output_values(module), strict=True):
        value.meta["spec"] = spec(node)
    graph = UnitGraph(
        unit=unit,
        module=module,
        sources=tuple(Source("input", index) for index in range(len(taken))),
        specs=tuple(map(spec, taken)),
        results=("side",) * len(made),
    )
    return Part(graph, tuple(node.name for node in taken), tuple(node.name for node in made))


class _Piece:
    """Writes the region's graph for some of the tokens."""

    def __init__(
        self,
        cut: _Cut,
        entries: Sequence[fx.Node],
        exits: Sequence[fx.Node],
        inside: Mapping[fx.Node, None],
        forms: Mapping[fx.Node, Form],
    ) -> None:
        self.cut, self.entries, self.exits, self.inside, self.forms = cut, entries, exits, inside, forms

    def part(self, num_tokens: int) -> Part:
        number = Length.of(num_tokens, SYMBOL, {SYMBOL: num_tokens})
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.entries:
            copies[node] = graph.placeholder(node.name)
        for node in self.entries:
            if form := self.forms.get(node):
                copies[node] = _arrange(graph, copies[node], form.axes, _rank(node))
        for node in self.inside:
            copies[node] = self._copy(graph, node, copies, number)
        graph.output(tuple(_collect(graph, copies[n], self.forms[n].axes, _rank(n)) for n in self.exits))
        module = fx.GraphModule(self.cut.module, graph)
        spec = partial(self._spec, number=number)
        return part_of(self.cut.unit.unit, module, self.entries, self.exits, self.cut.trained, spec)

    def _copy(self, graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], number: Length) -> fx.Node:
        """An operation with the sizes of a piece."""
        if _packet(node) is aten.slice and self.cut.forms[node][1:] != self.cut.forms[node.args[0]][1:]:
            return copies[node.args[0]]  # the region's inputs are cut instead
        copy = graph.node_copy(node, copies.__getitem__)
        if _packet(node) in VIEWS or _packet(node) is aten.expand:
            shape = [*node.meta["val"].shape]
            for axis, size in zip(self.cut.forms[node].axes[::-1], (number, 1), strict=False):
                shape[axis] = size
            copy.update_arg(1, shape)
            copy.target = aten.reshape.default if _packet(node) in VIEWS else copy.target
        return copy

    def _spec(self, node: fx.Node, number: Length) -> TensorSpec:
        found = _spec(node)
        if node not in self.forms:
            return found
        rest = tuple(size for axis, size in enumerate(found.shape) if axis not in self.forms[node].axes)
        stride = torch.empty(1, *rest, device="meta").stride()
        return replace(found, shape=(number, *rest), stride=stride)


def _arrange(graph: fx.Graph, flat: fx.Node, axes: tuple[int, ...], rank: int) -> fx.Node:
    """A value [tokens, ...] with its tokens along `axes`, of one sample where these are two."""
    node = graph.call_function(aten.unsqueeze.default, (flat, 0)) if len(axes) == 2 else flat
    order = list(range(len(axes), rank))
    for place, axis in enumerate(axes):
        order.insert(axis, place)
    return node if order == sorted(order) else graph.call_function(aten.permute.default, (node, order))


def _collect(graph: fx.Graph, node: fx.Node, axes: tuple[int, ...], rank: int) -> fx.Node:
    """The contrary."""
    order = [*axes, *(axis for axis in range(rank) if axis not in axes)]
    if order != sorted(order):
        node = graph.call_function(aten.permute.default, (node, order))
    return graph.call_function(aten.squeeze.dim, (node, 0)) if len(axes) == 2 else node


# ----------------------------------------------------------------------------------------------------------------------


def _mix() -> Any:
    raise _MixesTokensError


def replace_axes(form: Form, axes: tuple[int, ...]) -> Form:
    return Form(axes, form.start, form.length)


def _shifted(form: Form, by: int) -> Form:
    return replace_axes(form, tuple(axis + by for axis in form.axes))


def _without(form: Form, dims: Sequence[int]) -> Form:
    """Where these dimensions are gone."""
    return replace_axes(form, tuple(axis - sum(dim < axis for dim in dims) for axis in form.axes))


def _axis(before: Sequence[int], axis: int, after: Sequence[int], size: int) -> int | None:
    """The axis of a new shape that begins where `axis` of the old one does, and is as long as `size`."""
    ahead = prod(before[:axis])
    return next((b for b in range(len(after)) if prod(after[:b]) == ahead and after[b] == size), None)


def _permuted(form: Form, rank: int, dims: Sequence[int], **_: Any) -> Form:
    order = [dim % rank for dim in dims]
    return replace_axes(form, tuple(order.index(axis) for axis in form.axes))


def _transposed(form: Form, rank: int, dim0: int, dim1: int, **_: Any) -> Form:
    order = list(range(rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(form, rank, order)


def _unsqueezed(form: Form, rank: int, dim: int, **_: Any) -> Form:
    place = dim % (rank + 1)
    return replace_axes(form, tuple(axis + (axis >= place) for axis in form.axes))


def _removed(form: Form, rank: int, dim: int | Sequence[int], **_: Any) -> Form:
    dims = [each % rank for each in (dim if isinstance(dim, (list, tuple)) else [dim])]
    return _mix() if set(dims) & set(form.axes) else _without(form, dims)


MOVING: Mapping[Any, Callable[..., Form]] = {
    aten.permute: _permuted,
    aten.transpose: _transposed,
    aten.t: lambda form, rank, **_: _transposed(form, rank, 0, rank - 1),
    aten.unsqueeze: _unsqueezed,
    aten.squeeze: _removed,
    aten.select: _removed,
    aten.unbind: _removed,
}


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _rank(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By name, defaults included; without the first."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = dict(zip((each.name for each in schema), node.args, strict=False))
    found = {each.name: each.default_value for each in schema if each.has_default_value()} | given | dict(node.kwargs)
    return {name: value for name, value in found.items() if name != schema[0].name}


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(tuple(value.shape), value.stride(), value.dtype, value.device, False, ())
