"""specialize: one graph of fixed shapes, for one size of the micro-batch.

The captured graph is symbolic in the batch. Everything after this pass wants plain numbers, and Dynamo shares size
expressions between layers, so they are folded before the graph is split. What is folded is remembered where it
matters: which dimensions of a value grow with the batch (`TensorSpec.batch_dims`), and which operands are the batch
size itself (`node.meta["batch_numbers"]`), as in ``loss / input_ids.shape[0]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from gs_compile.capture.graph import Captured, Source, TensorSpec

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
GRAD_MODE = torch._C._set_grad_enabled
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def specialize(captured: Captured, micro_batch_size: int, sizes: Mapping[str, int]) -> fx.GraphModule:
    """`captured` at `micro_batch_size` samples, with the other symbolic sizes as in `sizes` (placeholder: number).

    Every node that stays has ``meta["spec"]``: a `TensorSpec`, or a tuple of them, or None. Activation checkpointing
    is absorbed (layers are recomputed anyway), gradient mode becomes ``detach``, and autocast regions become
    ``meta["autocast"]``, so that a node's meaning does not depend on its neighbours.
    """
    numbers = {
        _symbol(node): sizes[node.name]
        for node in captured.module.graph.nodes
        if node.op == "placeholder" and node.name in sizes and _symbol(node) is not None
    }
    numbers |= dict.fromkeys(captured.batch_symbols, micro_batch_size)
    fold = _Fold(numbers, captured.batch_symbols)
    result = fx.GraphModule(torch.nn.Module(), fx.Graph())
    result.graph.output(_Copy(result, fold, captured.autocast).copy(captured.module, {}))
    places = {entry.name: index for index, entry in enumerate(captured.inputs)}
    for node in result.graph.find_nodes(op="placeholder"):
        node.meta["source"] = Source("input", places[node.name])
        if node.name in captured.names("parameter"):
            node.meta["spec"] = _as_computed_with(node.meta["spec"])
    result.graph.lint()
    return result


def _as_computed_with(spec: TensorSpec) -> TensorSpec:
    """A placeholder of a released parameter has strides 0; the values that come in its place are contiguous."""
    if any(spec.stride):
        return spec
    return replace(spec, stride=tuple(torch.empty(spec.shape, device="meta").stride()))


def _symbol(node: fx.Node) -> sympy.Symbol | None:
    example = node.meta.get("example_value")
    expression = example.node.expr if isinstance(example, SYMBOLIC) else None
    return expression if isinstance(expression, sympy.Symbol) else None


class _Fold:
    """Symbolic sizes to numbers, each expression once."""

    def __init__(self, numbers: Mapping[Any, int], batch: frozenset[sympy.Symbol]) -> None:
        self.numbers = dict(numbers)
        self.batch = batch
        self.known: dict[Any, tuple[Any, bool]] = {}

    def __call__(self, value: Any) -> tuple[Any, bool]:
        """The number `value` stands for (-1: depends on the data), and whether it grows with the batch."""
        if not isinstance(value, SYMBOLIC):
            return value, False
        expression = value.node.expr
        if expression not in self.known:
            number = sympy.sympify(expression).xreplace(self.numbers)
            free: frozenset[Any] = getattr(number, "free_symbols", frozenset())
            grows = bool(free) or bool(getattr(expression, "free_symbols", frozenset()) & self.batch)
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
            self.known[expression] = (-1 if free else kind(number)), grows
        return self.known[expression]

    def spec(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            sizes = [self(size) for size in value.shape]
            dense = value.layout == torch.strided
            return TensorSpec(
                shape=tuple(number for number, _ in sizes),
                stride=tuple(self(step)[0] for step in value.stride()) if dense else (),
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
                batch_dims=tuple(dim for dim, (_, grows) in enumerate(sizes) if grows),
            )
        return tuple(self.spec(part) for part in value) if isinstance(value, (tuple, list)) else None

    def is_uneven(self, value: Any) -> bool:
        """Whether a size grows with the batch, but not in proportion: a tensor without its first sample."""
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        return any(not proportional for size in sizes for proportional in self.batch_numbers(size).values())

    def is_number(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)) and value:
            return all(self.is_number(part) for part in value)
        return isinstance(value, (int, float, bool, *SYMBOLIC))

    def constant(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.constant(part) for part in value)
        return self(value)[0]

    def batch_numbers(self, value: Any) -> dict[Any, bool]:
        """The number `value` stands for where it grows with the batch, and whether it is proportional to it."""
        if not isinstance(value, SYMBOLIC) or not self(value)[1] or not value.node.expr.free_symbols & self.batch:
            return {}
        if isinstance(value, torch.SymBool):
            return {self(value)[0]: False}
        doubled = value.node.expr.xreplace({symbol: 2 * symbol for symbol in self.batch})
        return {self(value)[0]: bool(sympy.expand(doubled - 2 * value.node.expr) == 0)}


class _Copy:
    """Copies nodes into one flat graph, folding numbers and inlining checkpointed regions on the way."""

    def __init__(self, target: fx.GraphModule, fold: _Fold, autocast: tuple[Any, ...] | None) -> None:
        self.target = target
        self.graph = target.graph
        self.fold = fold
        self.autocast: tuple[tuple[Any, ...], ...] = (autocast,) if autocast else ()
        self.grad_mode = True

    def copy(self, module: fx.GraphModule, known: dict[fx.Node, Any]) -> Any:
        """Copy `module`'s nodes; `known` maps its placeholders when it is inlined. Returns what it outputs."""
        special: dict[Any, Callable[[fx.Node], Any]] = {
            GRAD_MODE: self._set_grad_mode,
            ENTER_AUTOCAST: self._enter_autocast,
            EXIT_AUTOCAST: self._exit_autocast,
        }
        for node in module.graph.nodes:
            if node in known:
                continue
            example = node.meta.get("example_value")
            if node.op == "output":
                return map_arg(node.args[0], known.__getitem__)
            if node.target in special:
                special[node.target](node)
            elif self.fold.is_number(example):
                known[node] = self.fold.constant(example)
            elif node.target is CHECKPOINT:
                known[node] = self._inline(module, node, known)
            elif node.target is operator.getitem and isinstance(known.get(node.args[0]), tuple):
                known[node] = known[node.args[0]][node.args[1]]
            else:
                known[node] = self._node(module, node, known)
        raise AssertionError("a graph ends in an output")

    def _inline(self, module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        body_node, *arguments = node.args
        assert isinstance(body_node, fx.Node)
        body = getattr(module, str(body_node.target))
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        return self.copy(body, {p: map_arg(a, known.__getitem__) for p, a in zip(placeholders, arguments, strict=True)})

    def _node(self, module: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> fx.Node:
        target = self._attribute(module, str(node.target)) if node.op == "get_attr" else node.target
        batch_numbers: dict[Any, bool] = {}

        def value(argument: fx.Node) -> Any:
            batch_numbers.update(self.fold.batch_numbers(argument.meta.get("example_value")))
            return known[argument]

        copied = self.graph.create_node(
            node.op, target, map_arg(node.args, value), map_arg(node.kwargs, value), node.name, node.type
        )
        copied.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
        copied.meta |= {"spec": self.fold.spec(node.meta.get("example_value")), "batch_numbers": batch_numbers}
        copied.meta["uneven"] = self.fold.is_uneven(node.meta.get("example_value"))
        copied.meta["storage"] = _storage(node.meta.get("example_value"))
        if self.autocast:
            copied.meta["autocast"] = self.autocast
        return copied if self.grad_mode else self._detached(copied)

    def _attribute(self, module: fx.GraphModule, name: str) -> str:
        """Carry an attribute over; regions that are inlined may use one name for several things."""
        value, free = getattr(module, name), name
        while getattr(self.target, free, value) is not value:
            free += "_"
        setattr(self.target, free, value)
        return free

    def _detached(self, node: fx.Node) -> fx.Node:
        """Under no_grad a result has no gradient, whatever it was made from."""
        spec = node.meta["spec"]
        made_from = [source.meta.get("spec") for source in node.all_input_nodes]
        tracked = any(isinstance(source, TensorSpec) and source.requires_grad for source in made_from)
        if not isinstance(spec, TensorSpec) or not tracked or spec.requires_grad:
            return node
        detached = self.graph.call_method("detach", (node,))
        detached.meta = dict(node.meta)
        return detached

    def _set_grad_mode(self, node: fx.Node) -> None:
        self.grad_mode = bool(node.args[0])

    def _enter_autocast(self, node: fx.Node) -> None:
        self.autocast = (*self.autocast, node.args)

    def _exit_autocast(self, _: fx.Node) -> None:
        self.autocast = self.autocast[:-1]


def _storage(example: Any) -> int | None:
    """Which memory a value lives in, to tell views and in-place results of one tensor."""
    if not isinstance(example, torch.Tensor) or example.layout != torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(example):  # inside a vmap: shares no memory of its own
        return None
    return int(example.untyped_storage()._cdata)
