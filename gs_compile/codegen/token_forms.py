"""forms: where the values of a unit's graph have tokens, and which operations act on these one by one.

A value has a *form* where it holds something of each token: the axes along which the tokens are. Forms follow from the
operations, from the unit's input x [samples, tokens, ...] on: an operation keeps the form where what it gives of one
token follows from what it reads of the same token alone, and of what has no tokens, such as a weight. Norms, products
with weights, softmax over the vocabulary and all that works on elements do; attention, and sums over tokens, do not.

A graph is a chain of stages: 0, 2, ... act on tokens one by one, 1, 3, ... on all of them; what does not follow from x
is ahead of all. A loss summed over tokens becomes the loss of each token and its sum, one stage later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Never

import torch
from torch import fx

from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import changes_memory, draws_random, named_arguments
from gs_compile.errors import GreedySnakeError

aten = torch.ops.aten
VIEWS = {aten.view, aten._unsafe_view, aten.reshape}
# What takes a shape, and what takes another one in its place, whatever memory is like.
SHAPED = {**dict.fromkeys(VIEWS, aten.reshape.default), aten.expand: aten.expand.default}
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


AHEAD = -1  # the stage of what does not follow from x


class NotInPiecesError(GreedySnakeError):
    """Why a unit's graph cannot run on some of the tokens at a time."""


class _MixesTokensError(Exception):
    """An operation does not act on tokens one by one."""


class Form(NamedTuple):
    """Where a value has its tokens: along (samples, tokens) or along one axis; of each sample those from `start` on.

    start: None: of what does not follow from x some that stand beside those that do.
    """

    axes: tuple[int, ...]
    start: int | None
    length: int


class Forms:
    """The forms and stages of a graph's values; it has operations rewritten where these go over to the next stage.

    forms: of the values that have one; read: of those that have none by themselves, and are read as if they had.
    trained: the values with a gradient.
    """

    def __init__(self, unit: UnitGraph, module: fx.GraphModule) -> None:
        self.graph = module.graph
        placeholders = self.graph.find_nodes(op="placeholder")
        kinds = [source.kind for source in unit.sources]
        if "x" not in kinds or len(shape := unit.specs[kinds.index("x")].shape) < 2 or 0 in shape or -1 in shape:
            raise NotInPiecesError("it has no input of tokens")
        self.x = placeholders[kinds.index("x")]
        self._leading = tuple(shape[:2] if len(shape) > 2 else shape[:1])  # of what holds something of each token
        *samples, length = self._leading
        self.samples = prod(samples)
        self._whole = Form((0, 1) if self.samples > 1 else (len(samples),), 0, length)
        self.forms: dict[fx.Node, Form] = {}
        self.read: dict[fx.Node, Form] = {}
        self.stages: dict[fx.Node, int] = {self.x: 0}
        self.trained = {node for node, spec in zip(placeholders, unit.specs, strict=True) if spec.requires_grad}
        for node, spec in zip(placeholders, unit.specs, strict=True):
            if node is self.x or (spec.batch_dims and self._begins(spec.shape)):
                self.forms[node] = self._whole
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)

    def stage(self, node: fx.Node) -> int:
        return self.stages.get(node, AHEAD)

    def is_part(self, node: fx.Node) -> bool:
        """Whether it takes some of the tokens of what does not follow from x."""
        is_formed = is_slice(node) and self.stage(node) == AHEAD and node in self.forms
        return is_formed and self.forms[node] != self.forms[args_of(node)[0]]

    def _begins(self, shape: Sequence[int]) -> bool:
        return tuple(shape[: len(self._leading)]) == self._leading

    def _sizes(self, form: Form) -> tuple[int, ...]:
        return (self.samples, form.length) if len(form.axes) == 2 else (self.samples * form.length,)

    def _visit(self, node: fx.Node) -> None:
        if changes_memory(node) or draws_random(node):
            raise NotInPiecesError(f"{node.target} {'changes memory' if changes_memory(node) else 'draws at random'}")
        if not self.trained.isdisjoint(node.all_input_nodes) and packet_of(node) is not aten.detach:
            self.trained.add(node)
        stage = max(map(self.stage, node.all_input_nodes), default=AHEAD)
        if stage != AHEAD:
            self.stages[node] = stage
        has_form = not self.forms.keys().isdisjoint(node.all_input_nodes)
        try:
            self.forms[node] = self._form(node) if has_form else _mix()
        except _MixesTokensError:
            if stage != AHEAD:
                self.stages[node] = stage | 1
                if isinstance(node.meta["val"], torch.Tensor) and self._begins(node.meta["val"].shape):
                    self.forms[node] = self._whole  # all that reads it may read some of it
            if has_form:
                self._open(node)
        else:
            if stage % 2 and stage != AHEAD and node.target is not operator.getitem:
                self.stages[node] = stage + 1

    def _form(self, node: fx.Node) -> Form:
        """The form of what an operation gives; raises `_MixesTokensError` where it has none."""
        packet = packet_of(node)
        if node.target is operator.getitem:
            return self.forms[args_of(node)[0]]
        if packet in VIEWS:
            return self._viewed(node)
        if packet is aten.squeeze:
            return self._squeezed(node)
        if packet in MOVING:
            return MOVING[packet](self.forms[args_of(node)[0]], rank_of(args_of(node)[0]), **named_arguments(node))
        if packet in (aten.mm, aten.addmm):
            return self._product(node)
        if packet is aten.embedding:
            return self.forms[args_of(node)[1]] if args_of(node)[1] in self.forms else _mix()
        if packet is aten.nll_loss_forward:
            return self._loss(node)
        if packet is aten.expand:
            return self._expanded(node)
        if packet in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._aligned(node, node.all_input_nodes, rank_of(node))
        if packet in LAST:
            return self._along(node, range(-len(args_of(node)[1]), 0))
        if packet in ALONG:
            dims = named_arguments(node).get("dim")
            return self._along(node, dims if isinstance(dims, (list, tuple)) else [dims])
        return _mix()

    def _aligned(self, node: fx.Node, operands: Sequence[fx.Node], rank: int) -> Form:
        """Of values that are aligned at their last dimensions; those without a form are read as if they had it."""
        formed = [each for each in operands if each in self.forms]
        found = [_shifted(self.forms[each], rank - rank_of(each)) for each in formed]
        found.sort(key=lambda form: form.start is None)
        form, *others = found or _mix()
        if any(other not in (form, form._replace(start=None)) for other in others):
            return _mix()
        for each in operands:
            if each not in self.forms and isinstance(each.meta["val"], torch.Tensor):
                self._align(node, each, form, rank)
        return form

    def _align(self, node: fx.Node, operand: fx.Node, form: Form, rank: int) -> None:
        """Let an operand without a form have that of the others, if its sizes are not all 1 where the tokens are."""
        shape = [1] * (rank - rank_of(operand)) + list(operand.meta["val"].shape)
        sizes = [shape[axis] for axis in form.axes]
        if set(sizes) == {1}:
            return
        if any(size not in (1, whole) for size, whole in zip(sizes, self._sizes(form), strict=True)):
            _mix()
        if sizes != list(self._sizes(form)) or rank > rank_of(operand):
            for axis, size in zip(form.axes, self._sizes(form), strict=True):
                shape[axis] = size
            operand = self._expand(node, operand, shape)
            self.forms.pop(operand, None)
        if self.read.setdefault(operand, form) != form:
            _mix()

    def _expand(self, node: fx.Node, operand: fx.Node, shape: list[int]) -> fx.Node:
        with self.graph.inserting_before(node):
            expanded = self._new(aten.expand.default, operand, shape)
        node.replace_input_with(operand, expanded)
        self._visit(expanded)
        return expanded

    def _along(self, node: fx.Node, dims: Iterable[int | None]) -> Form:
        """Of an operation along dimensions, none of which may be the tokens'."""
        first = args_of(node)[0][0] if isinstance(args_of(node)[0], (list, tuple)) else args_of(node)[0]
        rank, arguments = rank_of(first), named_arguments(node)
        along = [dim % rank for dim in dims if dim is not None]
        form = self._aligned(node, [each for each in node.all_input_nodes if rank_of(each) == rank], rank)
        if packet_of(node) is aten.slice and tuple(along) == form.axes[-1:]:
            return self._sliced(node, form, arguments)
        if not along or set(along) & set(form.axes):
            return _mix()
        goes = "keepdim" in arguments and not arguments["keepdim"]
        return _without(form, along) if goes else form

    def _sliced(self, node: fx.Node, form: Form, arguments: Mapping[str, Any]) -> Form:
        """Of a part of the tokens of each sample."""
        first, last, step = slice(*(arguments[name] for name in ("start", "end", "step"))).indices(form.length)
        if step != 1 or (len(form.axes) == 1 and self.samples > 1):
            return _mix()
        if last - first == form.length:
            return form
        is_known = node in self.stages and form.start is not None
        return Form(form.axes, (form.start or 0) + first if is_known else None, last - first)

    def _viewed(self, node: fx.Node) -> Form:
        """Of the same elements in another shape: the tokens' sizes stand behind as many elements as before."""
        form = self.forms[args_of(node)[0]]
        before, after = args_of(node)[0].meta["val"].shape, node.meta["val"].shape
        sizes = (self.samples, form.length)
        if len(form.axes) == 1 or self.samples == 1:
            found = _axis(before, form.axes[-1], after, self.samples * form.length)
            if found is not None:
                return _at(form, (found,))
            found = _axis(before, form.axes[-1], after, self.samples)
            fits = found is not None and found + 1 < len(after) and after[found + 1] == form.length
            return _at(form, (found, found + 1)) if found is not None and fits else _mix()
        kept = [_axis(before, axis, after, size) for axis, size in zip(form.axes, sizes, strict=True)]
        if None not in kept:
            return _at(form, tuple(axis for axis in kept if axis is not None))
        is_row = prod(before[form.axes[0] + 1 : form.axes[1]]) == 1 and form.axes[0] < form.axes[1]
        flat = _axis(before, form.axes[0], after, prod(sizes)) if is_row else None
        return _at(form, (flat,)) if flat is not None else _mix()

    def _squeezed(self, node: fx.Node) -> Form:
        """Without dimensions of size 1, among those that are named if some are."""
        source = args_of(node)[0]
        sizes, named = source.meta["val"].shape, named_arguments(node).get("dim", range(rank_of(source)))
        dims = [dim % len(sizes) for dim in ([named] if isinstance(named, int) else named)]
        return _removed(self.forms[source], len(sizes), [dim for dim in dims if sizes[dim] == 1])

    def _expanded(self, node: fx.Node) -> Form:
        if args_of(node)[0] not in self.forms:
            return _mix()
        return _shifted(self.forms[args_of(node)[0]], rank_of(node) - rank_of(args_of(node)[0]))

    def _product(self, node: fx.Node) -> Form:
        """Of the product of rows, each of a token, with a matrix."""
        left, right = args_of(node)[-2:]
        form = self.forms.get(left)
        if form is None or form.axes != (0,) or right in self.forms:
            return _mix()
        return self._aligned(node, [*args_of(node)[:-2], left], 2)

    def _loss(self, node: fx.Node) -> Form:
        log_p, target, weight, reduction = args_of(node)[:4]
        form = self.forms.get(log_p)
        if form is None or form.axes != (0,) or reduction != NONE or weight in self.forms:
            return _mix()
        if self.forms.get(target, form) not in (form, form._replace(start=None)):
            return _mix()
        if target not in self.forms and self.read.setdefault(target, form) != form:
            return _mix()
        return form

    # Sums over tokens -------------------------------------------------------------------------------------------------

    def _open(self, node: fx.Node) -> None:
        """Let what reduces over tokens and more reduce over the rest alone first, for each token."""
        packet, source = packet_of(node), args_of(node)[0]
        form = self.forms.get(source) if isinstance(source, fx.Node) else None
        if form is None:
            return
        if packet is aten.nll_loss2d_forward:
            self._flatten_loss(node)
        elif packet is aten.nll_loss_forward and args_of(node)[3] != NONE and form.axes == (0,):
            self._open_loss(node)
        elif node.target in (aten.sum.default, aten.mean.default) and not node.kwargs:
            rest = [axis for axis in range(rank_of(source)) if axis not in form.axes]
            if rest:
                by_dim = aten.sum.dim_IntList if packet is aten.sum else aten.mean.dim
                with self.graph.inserting_before(node):
                    of_tokens = self._new(by_dim, source, rest)
                self._visit(of_tokens)
                node.update_arg(0, of_tokens)

    def _flatten_loss(self, node: fx.Node) -> None:
        """The loss of [samples, classes, ..., tokens] as that of [tokens, classes]."""
        log_p, target, *rest = args_of(node)
        num_classes = log_p.meta["val"].shape[1]
        with self.graph.inserting_before(node):
            last = self._new(aten.permute.default, log_p, [0, *range(2, rank_of(log_p)), 1])
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
        log_p, target, weight, reduction, ignored = args_of(node)
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
        return node


# ----------------------------------------------------------------------------------------------------------------------


def _mix() -> Never:
    raise _MixesTokensError


def _at(form: Form, axes: tuple[int, ...]) -> Form:
    return Form(axes, form.start, form.length)


def _shifted(form: Form, by: int) -> Form:
    return _at(form, tuple(axis + by for axis in form.axes))


def _without(form: Form, dims: Sequence[int]) -> Form:
    """Where these dimensions are gone."""
    return _at(form, tuple(axis - sum(dim < axis for dim in dims) for axis in form.axes))


def _axis(before: Sequence[int], axis: int, after: Sequence[int], size: int) -> int | None:
    """The axis of a new shape that begins where `axis` of the old one does, and is as long as `size`."""
    ahead = prod(before[:axis])
    return next((b for b in range(len(after)) if prod(after[:b]) == ahead and after[b] == size), None)


def _permuted(form: Form, rank: int, dims: Sequence[int], **_: Any) -> Form:
    order = [dim % rank for dim in dims]
    return _at(form, tuple(order.index(axis) for axis in form.axes))


def _transposed(form: Form, rank: int, dim0: int, dim1: int, **_: Any) -> Form:
    order = list(range(rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(form, rank, order)


def _unsqueezed(form: Form, rank: int, dim: int, **_: Any) -> Form:
    place = dim % (rank + 1)
    return _at(form, tuple(axis + (axis >= place) for axis in form.axes))


def _removed(form: Form, rank: int, dim: Any, **_: Any) -> Form:
    dims = [each % rank for each in (dim if isinstance(dim, (list, tuple)) else [dim])]
    return _mix() if set(dims) & set(form.axes) else _without(form, dims)


MOVING: Mapping[Any, Callable[..., Form]] = {
    aten.permute: _permuted,
    aten.transpose: _transposed,
    aten.t: lambda form, rank, **_: _transposed(form, rank, 0, rank - 1),
    aten.unsqueeze: _unsqueezed,
    aten.select: _removed,
    aten.unbind: _removed,
}


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def args_of(node: fx.Node) -> Any:
    return node.args


def rank_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.dim() if isinstance(value, torch.Tensor) else -1


def is_slice(node: fx.Node) -> bool:
    return packet_of(node) is aten.slice
