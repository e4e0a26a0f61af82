"""token_forms: which axes of a unit's values hold tokens, and which operations are token-wise.

A value that holds something of each token has a *form*: the axes along which the tokens are. Forms are propagated from
the unit's input x [samples, tokens, ...] through the operations. An operation is token-wise, and keeps the form, if its
result for a token depends only on what it reads of the same token, and on values without tokens, such as a weight.
Norms, products with weights, softmax over the vocabulary and elementwise operations are; attention and sums over tokens
are not.

A graph is a chain of stages: 0, 2, ... are token-wise, 1, 3, ... act on all tokens at once; what does not depend on x
comes before all. A loss summed over tokens is split: the loss of each token, and one stage later the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import UnitGraph, packet_of
from gs_compile.capture.inductor import changes_memory, draws_random, named_arguments
from gs_compile.codegen.token_axes import (
    MOVING,
    OF_TOKENS,
    Form,
    MixesTokensError,
    args_of,
    aten,
    mix,
    rank_of,
    removed,
    shifted,
    viewed,
    without,
)
from gs_compile.codegen.token_rows import ADDING, CASTS, VIEWS, form_of_item, form_of_rows, is_inverse
from gs_compile.errors import GreedySnakeError

# Operations that take a shape, and what takes a different shape instead, for any layout in memory.
SHAPED = {**dict.fromkeys(VIEWS, aten.reshape.default), aten.expand: aten.expand.default}
LIKE = {aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like}
CONSTANT = LIKE | {aten.detach}  # have no gradient
SAME = CASTS | LIKE | {aten.where, aten.masked_fill, aten.expand}  # elementwise, as are those tagged pointwise
# These work along their `dim`; `keepdim`, if they have it, says whether it stays.
ALONG = {aten.sum, aten.mean, aten.amax, aten.amin, aten.logsumexp, aten.any, aten.all, aten.prod, aten.max, aten.min}
ALONG |= {aten.argmax, aten.argmin, aten.var, aten.var_mean, aten.std, aten.norm, aten.linalg_vector_norm}
ALONG |= {aten._softmax, aten._log_softmax, aten.cumsum, aten.sort, aten.topk, aten.flip, aten.cat}
ALONG |= {aten.split, aten.split_with_sizes, aten.slice, aten._safe_softmax}
PICKING = {aten.gather, aten.scatter, aten.scatter_add}  # so do these, and have as many rows as places
LAST = {aten.native_layer_norm, aten._fused_rms_norm}  # these work along the last dimensions
NONE, MEAN, SUM = 0, 1, 2  # reductions of a loss


AHEAD = -1  # the stage of what does not depend on x


class NotInPiecesError(GreedySnakeError):
    """A unit's graph cannot run on some of the tokens at a time, for this reason."""


class Forms:
    """The forms and stages of a graph's values. Sums and losses over tokens are rewritten in the graph.

    forms: of the values that have one. read: of values without one that are read as if they had one.
    trained: the values with a gradient.
    mixing: the operations that act on all tokens. whole: names of operations that must count as such.
    """

    def __init__(self, unit: UnitGraph, module: fx.GraphModule, whole: Set[str]) -> None:
        self.graph, self.whole = module.graph, whole
        placeholders = self.graph.find_nodes(op="placeholder")
        kinds = [source.kind for source in unit.sources]
        if "x" not in kinds or len(shape := unit.specs[kinds.index("x")].shape) < 2 or 0 in shape or -1 in shape:
            raise NotInPiecesError("it has no input of tokens")
        self.x = placeholders[kinds.index("x")]
        self._leading = tuple(shape[:2] if len(shape) > 2 else shape[:1])  # sizes of a value that has tokens
        *samples, length = self._leading
        self.samples = prod(samples)
        self._whole = Form((0, 1) if self.samples > 1 else (len(samples),), 0, length)
        self.forms: dict[fx.Node, Form] = {}
        self.read: dict[fx.Node, Form] = {}
        self.stages: dict[fx.Node, int] = {self.x: 0}
        self.mixing: list[fx.Node] = []
        self.trained = {node for node, spec in zip(placeholders, unit.specs, strict=True) if spec.requires_grad}
        for node, spec in zip(placeholders, unit.specs, strict=True):
            if node is self.x or (spec.batch_dims and self._begins(spec.shape)):
                self.forms[node] = self._whole
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        self.graph.eliminate_dead_code()

    def stage(self, node: fx.Node) -> int:
        return self.stages.get(node, AHEAD)

    def is_part(self, node: fx.Node) -> bool:
        """Whether it is a slice of some of the tokens of a value that does not depend on x."""
        is_formed = is_slice(node) and self.stage(node) == AHEAD and node in self.forms
        return is_formed and self.forms[node] != self.forms[args_of(node)[0]]

    def _begins(self, shape: Sequence[int]) -> bool:
        return tuple(shape[: len(self._leading)]) == self._leading

    def _sizes(self, form: Form) -> tuple[int, ...]:
        if len(form.axes) == 2:
            return (self.samples, form.length)
        return (self.samples * form.length * form.rows.each,) if form.axes else ()

    def _visit(self, node: fx.Node) -> None:
        if is_inverse(node, self.forms):
            return self._sort_back(node)
        if changes_memory(node) or draws_random(node):
            raise NotInPiecesError(f"{node.target} {'changes memory' if changes_memory(node) else 'draws at random'}")
        dtype = getattr(node.meta["val"], "dtype", torch.float)
        has_gradient = packet_of(node) not in CONSTANT and (dtype.is_floating_point or dtype.is_complex)
        if has_gradient and not self.trained.isdisjoint(node.all_input_nodes):
            self.trained.add(node)
        stage = max(map(self.stage, node.all_input_nodes), default=AHEAD)
        if stage != AHEAD:
            self.stages[node] = stage
        has_form = not self.forms.keys().isdisjoint(node.all_input_nodes)
        try:
            self.forms[node] = self._checked(node, self._form(node) if has_form else mix())
        except MixesTokensError:
            if stage != AHEAD:
                self.stages[node] = stage | 1
                self.mixing += [node] if has_form or node.name in self.whole else []
                if isinstance(node.meta["val"], torch.Tensor) and self._begins(node.meta["val"].shape):
                    self.forms[node] = self._whole  # so what reads it may be token-wise again
            if has_form:
                self._open(node)
        else:
            if stage % 2 and stage != AHEAD and node.target is not operator.getitem:
                self.stages[node] = stage + 1

    def _checked(self, node: fx.Node, form: Form) -> Form:
        value = node.meta["val"]
        is_one = isinstance(value, torch.Tensor)
        return mix() if is_one and tuple(value.shape[axis] for axis in form.axes) != self._sizes(form) else form

    def _form(self, node: fx.Node) -> Form:
        """The form of an operation's result; raises `MixesTokensError` if it has none."""
        packet = packet_of(node)
        if node.name in self.whole:
            return mix()
        if node.target is operator.getitem:
            return form_of_item(node, self.forms)
        if (form := form_of_rows(node, self.forms)) is not None:
            return form
        if packet in VIEWS:
            source = args_of(node)[0]
            return viewed(self.forms[source], self.samples, source.meta["val"].shape, node.meta["val"].shape)
        if packet is aten.squeeze:
            return self._squeezed(node)
        if packet in MOVING:
            return MOVING[packet](self.forms[args_of(node)[0]], rank_of(args_of(node)[0]), **named_arguments(node))
        if packet in (aten.mm, aten.addmm):
            return self._product(node)
        if packet in ADDING:
            return self._added(node)
        if packet is aten.bmm:  # one product for each token
            form = self._aligned(node, node.all_input_nodes, 3)
            return form if form.axes == (0,) else mix()
        if packet is aten.embedding:
            table, places = args_of(node)[:2]
            return self.forms[places] if places in self.forms and table not in self.forms else mix()
        if packet is aten.nll_loss_forward:
            return self._loss(node)
        if packet in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._aligned(node, node.all_input_nodes, rank_of(node))
        if packet in LAST:
            return self._along(node, range(-len(args_of(node)[1]), 0))
        if packet in ALONG | PICKING:
            dims = named_arguments(node).get("dim")
            return self._along(node, dims if isinstance(dims, (list, tuple)) else [dims])
        return mix()

    def _aligned(self, node: fx.Node, operands: Sequence[fx.Node], rank: int) -> Form:
        """The form of the result of broadcasting operands; those without a form are read as if they had it."""
        formed = [each for each in operands if each in self.forms]
        found = [shifted(self.forms[each], rank - rank_of(each)) for each in formed]
        found.sort(key=lambda form: form.start is None)
        form, *others = found or mix()
        if any(other not in (form, form._replace(start=None)) for other in others):
            return mix()
        for each in operands:
            if each not in self.forms and isinstance(each.meta["val"], torch.Tensor):
                self._align(node, each, form, rank)
        return form

    def _align(self, node: fx.Node, operand: fx.Node, form: Form, rank: int) -> None:
        """Read an operand without a form as if it had the others' form, unless all its sizes along the tokens are 1."""
        shape = [1] * (rank - rank_of(operand)) + list(operand.meta["val"].shape)
        sizes = [shape[axis] for axis in form.axes]
        if set(sizes) == {1}:
            return
        if form.rows != OF_TOKENS or any(
            size not in (1, whole) for size, whole in zip(sizes, self._sizes(form), strict=True)
        ):
            mix()
        if sizes != list(self._sizes(form)) or rank > rank_of(operand):
            for axis, size in zip(form.axes, self._sizes(form), strict=True):
                shape[axis] = size
            operand = self._expand(node, operand, shape)
            self.forms.pop(operand, None)
        if self.read.setdefault(operand, form) != form:
            mix()

    def _expand(self, node: fx.Node, operand: fx.Node, shape: list[int]) -> fx.Node:
        with self.graph.inserting_before(node):
            expanded = self._new(aten.expand.default, operand, shape)
        node.replace_input_with(operand, expanded)
        self._visit(expanded)
        return expanded

    def _along(self, node: fx.Node, dims: Iterable[int | None]) -> Form:
        """The form of the result of an operation along dimensions, none of which may be the tokens'."""
        first = args_of(node)[0][0] if isinstance(args_of(node)[0], (list, tuple)) else args_of(node)[0]
        rank, arguments = rank_of(first), named_arguments(node)
        along = [dim % rank for dim in dims if dim is not None]
        operands = [each for each in node.all_input_nodes if rank_of(each) == rank]
        if packet_of(node) in PICKING and len({_rest(each.meta["val"].shape, along) for each in operands}) > 1:
            return mix()
        form = self._aligned(node, operands, rank)
        if packet_of(node) is aten.slice and tuple(along) == form.axes[-1:]:
            return self._sliced(node, form, arguments)
        if not along or set(along) & set(form.axes):
            return mix()
        goes = "keepdim" in arguments and not arguments["keepdim"]
        return without(form, along) if goes else form

    def _sliced(self, node: fx.Node, form: Form, arguments: Mapping[str, Any]) -> Form:
        """The form of a slice of each sample's tokens."""
        first, last, step = slice(*(arguments[name] for name in ("start", "end", "step"))).indices(form.length)
        if step != 1 or (len(form.axes) == 1 and self.samples > 1) or form.rows != OF_TOKENS:
            return mix()
        if last - first == form.length:
            return form
        is_known = node in self.stages and form.start is not None
        return Form(form.axes, (form.start or 0) + first if is_known else None, last - first)

    def _squeezed(self, node: fx.Node) -> Form:
        """The form without the dimensions of size 1, of those that are named or of all."""
        source = args_of(node)[0]
        sizes, named = source.meta["val"].shape, named_arguments(node).get("dim", range(rank_of(source)))
        dims = [dim % len(sizes) for dim in ([named] if isinstance(named, int) else named)]
        return removed(self.forms[source], len(sizes), [dim for dim in dims if sizes[dim] == 1])

    def _product(self, node: fx.Node) -> Form:
        """The form of the product of the tokens' rows with a matrix."""
        left, right = args_of(node)[-2:]
        form = self.forms.get(left)
        if form is None or form.axes != (0,) or right in self.forms:
            return mix()
        return self._aligned(node, [*args_of(node)[:-2], left], 2)

    def _added(self, node: fx.Node) -> Form:
        """The form of rows to which others are added, or written, by places."""
        base, *rest = args_of(node)
        if packet_of(node) is aten.index_put:
            rest = [0, *rest[0], rest[1]] if len(rest[0]) == 1 else mix()
        dim, places, rows = rest[:3]
        form = self.forms.get(places)
        if form is None or form.places is None or (dim, form.axes) != (0, (0,)):
            return mix()
        to = form._replace(rows=form.places, places=None)
        if self.forms.get(rows) != form._replace(places=None) or self.forms.get(base, to) != to:
            return mix()
        if base not in self.forms:
            self._align(node, base, to, rank_of(base))
        return to

    def _loss(self, node: fx.Node) -> Form:
        log_p, target, weight, reduction = args_of(node)[:4]
        form = self.forms.get(log_p)
        if form is None or form.axes != (0,) or reduction != NONE or weight in self.forms:
            return mix()
        if self.forms.get(target, form) not in (form, form._replace(start=None)):
            return mix()
        if target not in self.forms and self.read.setdefault(target, form) != form:
            return mix()
        return form

    def _sort_back(self, node: fx.Node) -> None:
        """Replace the inversion of a permutation by a sort of its places, which a piece can do for its own rows."""
        places = next(each for each in node.all_input_nodes if each in self.forms and self.forms[each].places)
        with self.graph.inserting_before(node):
            made = self._new(aten.sort.default, places)
            back = self._new(operator.getitem, made, 1)
        node.replace_all_uses_with(back)
        self.graph.erase_node(node)
        self._visit(made)
        self._visit(back)

    # Sums over tokens -------------------------------------------------------------------------------------------------

    def _open(self, node: fx.Node) -> None:
        """Split a reduction over tokens: first over the other dimensions, for each token, and then over the tokens."""
        packet, source = packet_of(node), args_of(node)[0]
        form = self.forms.get(source) if isinstance(source, fx.Node) else None
        if form is None or not form.is_of_tokens:
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
        """Rewrite a loss of [samples, classes, ..., tokens] as one of [tokens, classes]."""
        log_p, target, *rest = args_of(node)
        num_classes = log_p.meta["val"].shape[1]
        with self.graph.inserting_before(node):
            last = self._new(aten.permute.default, log_p, [0, *range(2, rank_of(log_p)), 1])
            rows = self._new(aten.reshape.default, last, [-1, num_classes])
            labels = self._new(aten.reshape.default, target, [-1])
            pair = self._new(aten.nll_loss_forward.default, rows, labels, *rest)
            nodes = [last, rows, labels, pair]
            if rest[1] == NONE:
                nodes.append(self._new(operator.getitem, pair, 0))
                nodes.append(self._new(aten.reshape.default, nodes[-1], list(target.meta["val"].shape)))
        if rest[1] == NONE:
            for user in list(node.users):
                user.replace_all_uses_with(nodes[-1])
                self.graph.erase_node(user)
        else:
            node.replace_all_uses_with(pair)
        self.graph.erase_node(node)
        for each in nodes:
            self._visit(each)

    def _open_loss(self, node: fx.Node) -> None:
        """Rewrite a loss as the loss of each token, and then their sum, or mean with the labels' weights."""
        log_p, target, weight, reduction, ignored = args_of(node)
        user = next((each for each in node.users if each.args[1] == 0), None)
        if user is None or len(node.users) > 1:
            return
        with self.graph.inserting_before(user):
            pair = self._new(aten.nll_loss_forward.default, log_p, target, weight, NONE, ignored)
            losses = self._new(operator.getitem, pair, 0)
            nodes = [pair, losses, self._new(aten.sum.default, losses)]
            if reduction == MEAN:
                nodes.append(counted := self._new(aten.ne.Scalar, target, ignored))
                if weight is not None:
                    nodes.append(label := self._new(aten.clamp.default, target, 0, log_p.meta["val"].shape[1] - 1))
                    nodes.append(of_label := self._new(aten.take.default, weight, label))
                    nodes.append(counted := self._new(aten.mul.Tensor, of_label, counted))
                nodes.append(count := self._new(aten.sum.default, counted))
                nodes.append(self._new(aten.div.Tensor, nodes[2], count))
        user.replace_all_uses_with(nodes[-1])
        self.graph.erase_node(user)
        self.graph.erase_node(node)
        for each in nodes:
            self._visit(each)

    def _new(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda each: each.meta["val"])
        first = next(each.meta["val"] for each in node.all_input_nodes)
        with getattr(first[0] if isinstance(first, tuple) else first, "fake_mode", torch.no_grad()), torch.no_grad():
            node.meta["val"] = target(*values)
        return node


def _rest(shape: Sequence[int], along: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(shape) if axis not in along)


def is_slice(node: fx.Node) -> bool:
    return packet_of(node) is aten.slice
