"""specialize: one graph of fixed shapes, for one micro-batch size.

The captured graph is symbolic in the batch. Later passes need plain numbers, and Dynamo shares size expressions between
layers, so sizes are folded to numbers before the graph is split. What is lost by that is recorded where it matters:
which dimensions of a value grow with the batch (`TensorSpec.batch_dims`), and which operands are the batch size itself
(`node.meta["batch_numbers"]`), as in ``loss / input_ids.shape[0]``. Numbers that follow from other symbolic sizes, such
as the sequence length, become `Length`s. Sizes that depend on values, as of ``torch.where(mask)``, stay operations of
the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from gs_compile.capture.exchange import ends_exchange
from gs_compile.capture.graph import Captured, Length, Source, TensorSpec, at_line, graph_module, origin
from gs_compile.capture.in_place import change_copies, mutated
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import CHOOSING, argument, filled_with, operation
from gs_compile.capture.sample_layout import sample_layout
from gs_compile.errors import GROUPED, CaptureError

CAPTURED = "captured"  # in the meta of a node, the node of the captured graph that it is a copy of
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_KINDS: Mapping[type, type] = dict(zip(SYMBOLIC, (int, float, bool), strict=True))
GRAD_MODE = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def specialize(captured: Captured, micro_batch_size: int, sizes: Mapping[str, int]) -> fx.GraphModule:
    """`captured` at `micro_batch_size` samples, with the other symbolic sizes as in `sizes` (placeholder: number).

    Every node of the result has ``meta["spec"]``: a `TensorSpec`, or a tuple of them, or None. Regions of activation
    checkpointing are inlined (layers are recomputed anyway), gradient and inference mode become ``detach``, and
    autocast regions become ``meta["autocast"]``, so that a node's meaning does not depend on its neighbours.
    """
    numbers: dict[Any, int] = {symbol: sizes[name] for name, symbol in captured.symbols.items() if name in sizes}
    numbers |= dict.fromkeys(captured.batch_symbols, micro_batch_size)
    result = graph_module(torch.nn.Module(), fx.Graph())
    copy = _Copy(result, _Fold(numbers, captured.batch_symbols), captured.autocast)
    result.graph.output(copy.copy(captured.module, {}))
    places = {entry.name: index for index, entry in enumerate(captured.inputs)}
    for node in result.graph.find_nodes(op="placeholder"):
        node.meta["source"] = Source("input", places[node.name])
    change_copies(result.graph)
    result.graph.lint()
    return result


class OfBatch(int):
    """A number that the model returns and that depends on the batch size; as an int, that of a micro-batch."""

    _of: Callable[[int], int]

    def __new__(cls, value: Any, numbers: Mapping[Any, int], batch: Collection[sympy.Symbol]) -> OfBatch:
        """value: symbolic. numbers: of its symbols. batch: the symbols that are the batch size."""
        expression = sympy.sympify(value.node.expr)
        found = super().__new__(cls, _KINDS[type(value)](expression.xreplace(dict(numbers))))
        found._of = lambda size: _KINDS[type(value)](expression.xreplace({**numbers, **dict.fromkeys(batch, size)}))
        return found

    def whole(self, num_samples: int) -> int | bool:
        """The number for a batch of `num_samples`."""
        return self._of(num_samples)


@dataclass(frozen=True, slots=True)
class _Size:
    """A size, or another number of the graph, at one micro-batch size."""

    number: Any  # -1 if it depends on values
    is_of_batch: bool = False  # depends on the batch size
    is_proportional: bool = True  # to the batch size
    values: frozenset[sympy.Symbol] = frozenset()  # values of tensors on which it depends


class _Fold:
    """Folds symbolic sizes to numbers, each expression once."""

    def __init__(self, numbers: Mapping[Any, int], batch: frozenset[sympy.Symbol]) -> None:
        self.numbers = dict(numbers)
        self.batch = batch
        self.alike = dict.fromkeys(batch, min(batch, key=str, default=None))  # each input may have its own symbol
        self.known: dict[Any, _Size] = {}

    @property
    def size_of_batch(self) -> int:
        return min((self.numbers[symbol] for symbol in self.batch), default=1)

    def size(self, value: Any) -> _Size:
        if not isinstance(value, SYMBOLIC):
            return _Size(value)
        expression = sympy.sympify(value.node.expr)
        if expression not in self.known:
            self.known[expression] = self._folded(expression.xreplace(self.alike), _KINDS[type(value)])
        return self.known[expression]

    def _folded(self, expression: sympy.Basic, kind: type) -> _Size:
        number = sympy.sympify(expression.xreplace(self.numbers))
        values = frozenset(number.free_symbols)
        is_of_batch = bool(expression.free_symbols & self.batch) and not values
        proportional = kind is not bool
        if is_of_batch and proportional:
            doubled = expression.xreplace({symbol: 2 * symbol for symbol in self.batch})
            proportional = bool(sympy.expand(doubled - 2 * expression) == 0)
        folded = -1 if values else kind(number)
        of_lengths = sympy.sympify(expression.xreplace({symbol: self.numbers[symbol] for symbol in self.batch}))
        if kind is int and not values and of_lengths.free_symbols:
            folded = Length.of(folded, of_lengths, self.numbers)
        return _Size(folded, is_of_batch, proportional, values)

    def spec(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            grow = [size.is_of_batch or bool(size.values) for size in map(self.size, value.shape)]  # or may do so
            return TensorSpec(
                shape=tuple(self.constant(value.shape)),
                stride=tuple(self.constant(value.stride())) if value.layout == torch.strided else (),
                dtype=value.dtype,
                device=value.device,
                requires_grad=_is_tracked(value),
                batch_dims=tuple(dim for dim, grows in enumerate(grow) if grows),
            )
        return tuple(self.spec(part) for part in value) if isinstance(value, (tuple, list)) else None

    def is_uneven(self, value: Any) -> bool:
        """Whether a size of a tensor, or of several, grows with the batch, but not in proportion to it."""
        if isinstance(value, (tuple, list)):
            return any(map(self.is_uneven, value))
        sizes = map(self.size, value.shape if isinstance(value, torch.Tensor) else ())
        return any(size.is_of_batch and not size.is_proportional for size in sizes)

    def is_number(self, value: Any) -> bool:
        """Whether a value is a number, or several, independent of tensors."""
        if isinstance(value, (tuple, list)) and value:
            return all(self.is_number(part) for part in value)
        return isinstance(value, (int, float, bool, *SYMBOLIC)) and not self.size(value).values

    def values(self, value: Any) -> frozenset[sympy.Symbol]:
        """The values of tensors on which a number, or the sizes of tensors, depend."""
        if isinstance(value, torch.Tensor):
            return self.values(tuple(value.shape))
        if isinstance(value, (tuple, list)):
            return frozenset().union(*map(self.values, value))
        return self.size(value).values

    def constant(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.constant(part) for part in value)
        return self.size(value).number


class _Copy:
    """Copies nodes into one flat graph; folds numbers and inlines checkpointed regions on the way."""

    def __init__(self, target: fx.GraphModule, fold: _Fold, autocast: tuple[Any, ...] | None) -> None:
        self.target = target
        self.graph = target.graph
        self.fold = fold
        self.autocast: tuple[tuple[Any, ...], ...] = (autocast,) if autocast else ()
        self.grad_mode = True

    def copy(self, module: fx.GraphModule, known: dict[fx.Node, Any]) -> Any:
        """Copy `module`'s nodes and return its output; `known` maps its placeholders if it is inlined."""
        for node in [node for node in module.graph.nodes if node not in known]:
            example = node.meta.get("example_value")
            if node.op == "output":
                return map_arg(node.args[0], lambda each: self._returned(each, known[each]))
            if node.target is GRAD_MODE:
                self.grad_mode = bool(node.args[0])
            elif node.target is ENTER_INFERENCE:
                known[node], self.grad_mode = self.grad_mode, not node.args[0]
            elif node.target is EXIT_INFERENCE:
                self.grad_mode = known[node.args[0]]
            elif node.target is ENTER_AUTOCAST:
                self.autocast = (*self.autocast, node.args)
            elif node.target is EXIT_AUTOCAST:
                self.autocast = self.autocast[:-1]
            elif self.fold.is_number(example):
                known[node] = self.fold.constant(example)
            elif node.target is CHECKPOINT:
                known[node] = self._inline(module, node, known)
            elif node.target is operator.getitem and isinstance(known.get(node.args[0]), tuple):
                known[node] = known[node.args[0]][node.args[1]]
            else:
                known[node] = self._node(module, node, known)
        raise AssertionError("a graph ends in an output")

    def _returned(self, node: fx.Node, value: Any) -> Any:
        example, fold = node.meta.get("example_value"), self.fold
        is_of_batch = isinstance(value, int) and fold.size(example).is_of_batch
        return OfBatch(example, fold.numbers, fold.batch) if is_of_batch else value

    def _inline(self, module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        body_node, *arguments = node.args
        assert isinstance(body_node, fx.Node)
        body = getattr(module, str(body_node.target))
        placeholders = body.graph.find_nodes(op="placeholder")
        return self.copy(body, {p: map_arg(a, known.__getitem__) for p, a in zip(placeholders, arguments, strict=True)})

    def _node(self, module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> fx.Node:
        target = self._attribute(module, str(node.target)) if node.op == "get_attr" else node.target
        args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
        read = [self.fold.size(source.meta.get("example_value")) for source in node.all_input_nodes]
        example = node.meta.get("example_value")
        self._refuse_boundless(node, self.fold.values(example))
        if operation(node) == "squeeze":
            args, kwargs = args[:1], {**kwargs, "dim": _of_one(node)}
        copied = self.graph.create_node(node.op, target, args, kwargs, node.name, node.type)
        copied.meta = origin(node) | {
            "spec": self.fold.spec(example),
            "batch_numbers": {size.number: size.is_proportional for size in read if size.is_of_batch},
            "uneven": self.fold.is_uneven(example),
            "storage": storage_number(example),
            "is_filled_with_batch": self._is_filled_with_batch(node),
            "number": _KINDS.get(type(example)),  # that values decide
            CAPTURED: node,
        }
        if self.autocast:
            copied.meta["autocast"] = self.autocast
        if bodies := [getattr(module, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]:
            copied.meta["bodies"] = [self._body(each) for each in bodies if isinstance(each, fx.GraphModule)]
        copied.meta["runs"], copied.meta["misplaces"] = sample_layout(copied, self.fold.size_of_batch)
        return copied if self.grad_mode and not ends_exchange(node) else self._detached(copied)

    def _is_filled_with_batch(self, node: fx.Node) -> bool:
        """Whether the value that a tensor is filled with, and not just its shape, depends on the batch size."""
        filling = filled_with(node, operation(node))
        return isinstance(filling, fx.Node) and self.fold.size(filling.meta.get("example_value")).is_of_batch

    def _body(self, module: fx.GraphModule) -> fx.GraphModule:
        """The graph inside an operation of the model, only to be inspected."""
        body = fx.GraphModule(torch.nn.Module(), fx.Graph())
        body.graph.output(_Copy(body, self.fold, None).copy(module, {}))
        return body

    def _refuse_boundless(self, node: fx.Node, values: frozenset[sympy.Symbol]) -> None:
        """Raise for an operation whose result may have any size: its memory cannot be planned."""
        given = self.fold.values([source.meta.get("example_value") for source in node.all_input_nodes])
        if values - given and operation(node) not in CHOOSING:
            raise CaptureError(
                f"the size of the result of `{node.name}` ({operation(node)}) depends on values, so its memory cannot "
                f"be planned{at_line(node)}: {GROUPED}"
            )

    def _attribute(self, module: fx.GraphModule, name: str) -> str:
        """Copy an attribute; inlined regions may use the same name for different things."""
        value, free = getattr(module, name), name
        while getattr(self.target, free, value) is not value:
            free += "_"
        setattr(self.target, free, value)
        return free

    def _detached(self, node: fx.Node) -> fx.Node:
        """Detach the result of an operation under no_grad; its inputs instead, if it has several results or changes
        memory in place. What it changes, or returns unchanged, keeps its gradient.
        """
        tracked, changed = [each for each in node.all_input_nodes if _has_gradient(each.meta["spec"])], mutated(node)
        spec = node.meta["spec"]
        if not tracked or (not changed and any(map(_has_gradient, tree_leaves(spec)))):
            return node
        if not changed and isinstance(spec, TensorSpec):
            detached = self.graph.call_method("detach", (node,))
            detached.meta = dict(node.meta)
            return detached
        for source in tracked:
            with self.graph.inserting_before(node):
                detached = self.graph.call_method("detach", (source,))
            detached.meta = source.meta | origin(node) | {"spec": replace(source.meta["spec"], requires_grad=False)}
            node.replace_input_with(source, detached)
        same = [each for each in changed if each.meta["storage"] == node.meta["storage"] is not None]
        return same[0] if same else node


def _has_gradient(spec: Any) -> bool:
    return isinstance(spec, TensorSpec) and spec.requires_grad


def _is_tracked(value: torch.Tensor) -> bool:
    """Whether a tensor passes on a gradient; torch also says so of a view that no_grad has made of such a tensor."""
    try:
        return value.requires_grad and (value.grad_fn is not None or not value._is_view())
    except RuntimeError:  # one of several views whose base was changed in place: torch refuses to tell
        return True


def _of_one(squeeze: fx.Node) -> tuple[int, ...]:
    """The dimensions that a squeeze removes: not the samples', even if a micro-batch has one sample."""
    shape = squeeze.all_input_nodes[0].meta["example_value"].shape
    given = argument(squeeze, 1, "dim", range(len(shape)))
    dims = (given,) if isinstance(given, int) else given
    return tuple(dim for dim in dims if shape and not isinstance(shape[dim], torch.SymInt) and shape[dim] == 1)


def storage_number(example: Any) -> int | None:
    """A number for the memory of a value, to recognise views and in-place results of one tensor."""
    if not isinstance(example, torch.Tensor) or example.layout != torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(example):  # inside a vmap: it has no memory of its own
        return None
    return int(example.untyped_storage()._cdata)
