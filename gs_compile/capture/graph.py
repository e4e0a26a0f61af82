"""The facts of a captured model: its inputs, the shapes of its values, its units and their code.

The passes of the capture exchange these types. They hold `torch.fx` graphs and plain data, never tensors of the user.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from operator import add, mul
from typing import Any, Literal, Protocol

import sympy
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate
from torch.utils._sympy.value_ranges import bound_sympy

from gs_compile.capture.internals import tree_leaves
from gs_compile.program.ir import EPILOGUE, Unit

# What a graph input is. "batch" has the samples along a dimension; "constant" is shared by all micro-batches; "size" is
# the value of a symbolic dimension.
Role = Literal["parameter", "buffer", "batch", "constant", "size"]

# In Dynamo's path to what a function refers to: by its closure, as a bound method, or as a partial.
_REFERENCE = r"(?:cell_contents|__self__|args\[\d+\]|keywords\[[^]]*\])"
Block = tuple[str, int]  # a repeated block of the model: its stack's path, such as "model.layers", and its index there


@dataclass(frozen=True, slots=True)
class Input:
    """One placeholder of the captured graph."""

    name: str  # of the placeholder
    role: Role
    path: str  # as the user would write it: "transformer.h.0.attn.weight", "input_ids"
    dim: int = 0  # of the samples; 1 in positions of shape (3, samples, tokens), as of Qwen2-VL
    is_made: bool = False  # computed from other inputs before the model runs (`ahead`)


@dataclass(frozen=True, slots=True)
class Captured:
    """A model's forward as one graph of torch functions; its batch dimension is free unless the forward fixes it."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]  # in the order of the placeholders and of the arguments of every call
    batch_symbols: frozenset[sympy.Symbol]  # empty: the batch size is fixed
    autocast: tuple[Any, ...] | None = None  # around the model's call: device type, dtype, True, cache
    models: Mapping[str, weakref.ref[nn.Module]] = field(default_factory=dict, compare=False)  # by prefix of paths
    fixed_at: str = field(default="", compare=False)  # the user's line that fixes the batch size, in parentheses
    root: str = field(default="", compare=False)  # prefix of all paths to the model; empty: none, or several models
    stored: frozenset[int] = frozenset()  # indices of outputs that the forward stores in the user's objects

    def names(self, *roles: Role) -> frozenset[str]:
        return frozenset(entry.name for entry in self.inputs if entry.role in roles)

    @property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """The inputs that are symbolic sizes, by name."""
        nodes = self.module.graph.find_nodes(op="placeholder")
        examples = {node.name: node.meta.get("example_value") for node in nodes}
        sizes = {name: example.node.expr for name, example in examples.items() if isinstance(example, torch.SymInt)}
        return {name: size for name, size in sizes.items() if isinstance(size, sympy.Symbol)}

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules of the model, each behind the prefix that names of what it has begin with."""
        for start, each in self.models.items():
            if (model := each()) is not None:
                for path, module in model.named_modules(remove_duplicate=False):
                    yield f"{start}{path}{path and '.'}".removeprefix(self.root), module

    def buffers(self, *, persistent: bool = False) -> dict[str, torch.Tensor]:
        """All current buffers of the model, by their names in it; the graph may read only some of them.

        persistent: only those that are in state dicts.
        """
        return buffers_of(self.modules, persistent=persistent)


def buffers_of(modules: Iterable[tuple[str, nn.Module]], *, persistent: bool = False) -> dict[str, torch.Tensor]:
    """The buffers that modules themselves have, each of them behind a prefix of names; persistent: as of `buffers`."""
    return {
        f"{prefix}{name}": buffer
        for prefix, module in modules
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if not (persistent and name in module._non_persistent_buffers_set)
    }


class Length(int):
    """A size that follows from symbolic sizes other than the batch's: its number in this call, and its expression.

    Graphs and specs have lengths among their numbers. Calls that differ only in lengths share their code.
    """

    expression: sympy.Expr
    symbols: Mapping[sympy.Symbol, int]  # their values in this call

    @classmethod
    def of(cls, number: int, expression: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> Length:
        found = cls(number)
        found.expression = expression
        found.symbols = {symbol: values[symbol] for symbol in expression.free_symbols}
        return found

    @classmethod
    def product(cls, left: int, right: int) -> int:
        """The product of two sizes; a length if one of them is."""
        return cls._made(mul, left, right)

    @classmethod
    def sum(cls, left: int, right: int) -> int:
        """The sum of two sizes; a length if one of them is."""
        return cls._made(add, left, right)

    @classmethod
    def _made(cls, operation: Callable[[Any, Any], Any], left: int, right: int) -> int:
        own = [each for each in (left, right) if isinstance(each, Length)]
        if not own:
            return int(operation(left, right))
        expressions = [each.expression if isinstance(each, Length) else int(each) for each in (left, right)]
        values = {symbol: value for each in own for symbol, value in each.symbols.items()}
        return cls.of(operation(int(left), int(right)), operation(*expressions), values)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor at a fixed micro-batch size; a size is -1 if it depends on the data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    batch_dims: tuple[int, ...]  # the dimensions whose size grows with the batch

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def summed_nbytes(self) -> int:
        """The bytes of a sum of its gradients, which is in fp32 or wider."""
        return self.numel * torch.promote_types(self.dtype, torch.float32).itemsize

    @property
    def of_gradient(self) -> TensorSpec:
        """The spec of its gradient, which has memory for each entry, even if entries share memory here (`expand`)."""
        if all(stride != 0 or size == 1 for size, stride in zip(self.shape, self.stride, strict=True)):
            return replace(self, requires_grad=False)
        return replace(self.contiguous, requires_grad=False)

    @property
    def contiguous(self) -> TensorSpec:
        """The spec of a copy whose entries are in order."""
        strides = tuple(accumulate(reversed(self.shape[1:]), Length.product, initial=1))
        return replace(self, stride=strides[::-1] if self.shape else ())

    @property
    def is_dense(self) -> bool:
        """Whether each entry has its own place, in any order, in memory without gaps."""
        order = sorted((stride, size) for size, stride in zip(self.shape, self.stride, strict=True) if size != 1)
        dense = accumulate((size for _, size in order), mul, initial=1)
        return all(stride == wanted for (stride, _), wanted in zip(order, dense, strict=False))

    @property
    def is_sized(self) -> bool:
        """Whether no size depends on values."""
        return min(self.shape, default=0) >= 0

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one input of a unit's graph.

    `kind` is "x", "side", "total" or "fraction" (values of the step program; `index` selects one of a group), "tap"
    (what a layer makes for the epilogue), "whole" (what is computed from the taps of all samples) or "input" (argument
    `index` of the captured graph: a parameter, a buffer, a batch input).
    """

    kind: Literal["x", "side", "tap", "whole", "total", "fraction", "input"]
    index: int = 0


@dataclass(frozen=True)
class UnitGraph:
    """The code of one unit: a graph module of torch functions, and what is bound to its placeholders."""

    unit: Unit
    module: fx.GraphModule  # returns a flat tuple
    sources: tuple[Source, ...]  # one for each placeholder
    specs: tuple[TensorSpec, ...]  # one for each placeholder
    results: tuple[str, ...]  # the kind of each result: "x", "side", "tap", "loss", "y" or "total"
    is_joint: bool = False  # a layer that begins another stack
    taken: tuple[int, ...] | None = None  # results whose gradients the backward takes; None: all that have one

    @cached_property
    def symbols(self) -> dict[sympy.Symbol, int]:
        """The symbols in its lengths, sorted by name, with their numbers."""
        found: dict[sympy.Symbol, int] = {}

        def note(value: Any) -> Any:
            found.update(value.symbols if isinstance(value, Length) else {})
            return value

        for node in self.module.graph.nodes:
            map_aggregate((node.args, node.kwargs), note)
        map_aggregate([(spec.shape, spec.stride) for spec in (*self.specs, *self.result_specs)], note)
        return dict(sorted(found.items(), key=str))

    @cached_property
    def is_sized(self) -> bool:
        """Whether no tensor of its graph has a size that depends on values."""
        specs = (node.meta.get("spec") for node in self.module.graph.nodes)
        return all(spec.is_sized for spec in specs if isinstance(spec, TensorSpec))

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """The inputs of the captured graph that it reads, by index."""
        return tuple(source.index for source in self.sources if source.kind == "input")

    def parameters(self, captured: Captured) -> dict[int, TensorSpec]:
        """The parameters among `arguments`."""
        pairs = zip(self.sources, self.specs, strict=True)
        specs = {source.index: spec for source, spec in pairs if source.kind == "input"}
        return {index: spec for index, spec in specs.items() if captured.inputs[index].role == "parameter"}

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """The placeholders that require a gradient."""
        return tuple(index for index, spec in enumerate(self.specs) if spec.requires_grad)

    def differentiates(self, batch: Container[int]) -> bool:
        """Whether a batch input gets a gradient here. batch: the indices of these, also those of fixed size."""
        sources = (self.sources[place] for place in self.differentiable)
        return any(source.kind == "input" and source.index in batch for source in sources)

    @property
    def device_type(self) -> str:
        """The type of the device on which it computes."""
        return "meta" if self.is_meta else next((spec.device.type for spec in self.specs), "cpu")

    @property
    def is_meta(self) -> bool:
        """Whether it was captured without weights: some of its values are on the meta device."""
        return any(spec.device.type == "meta" for spec in (*self.specs, *self.result_specs))

    @cached_property
    def result_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(node.meta["spec"] for node in output_values(self.module))

    @cached_property
    def differentiated(self) -> tuple[int, ...]:
        """The results whose gradients the backward takes: those for other units; all of the head's."""
        return tuple(
            index
            for index, (kind, spec) in enumerate(zip(self.results, self.result_specs, strict=True))
            if spec.requires_grad and (kind != "y" or self.unit == EPILOGUE)
            if self.taken is None or index in self.taken
        )

    @property
    def gradient_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the gradients that the backward takes."""
        return tuple(self.result_specs[index].of_gradient for index in self.differentiated)


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One line of the derivation of a micro-batch's share of the loss."""

    node: str
    kind: str  # "sum", "mean", "total" or "whole": how values of micro-batches combine
    why: str
    where: str  # the user's source line


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output of the captured graph, and how micro-batches combine to it.

    `combine`: "sum" (shares add), "concat" along `dim`, "same" (that of any micro-batch). If no step computes it, there
        is no `spec`: "input" (argument `index` of the call) or "constant" (`value`; None for what is left out).
    `runs`: of "concat", see `SampleLayout`.
    `kind` and `unit`: the step's value that holds it: "loss", "x" of that layer, or "y" of that unit at `index`.
    """

    combine: Literal["sum", "concat", "same", "input", "constant"]
    kind: Literal["loss", "x", "y"] = "y"
    unit: Unit = EPILOGUE
    index: int = 0
    dim: int = 0
    spec: TensorSpec | None = None
    value: Any = None
    runs: tuple[int, ...] = (1,)


class UnitCode(Protocol):
    """The compiled functions of one class of units; all take the inputs of its graph in the placeholders' order.

    forward(*inputs)                returns the unit's results
    backward(*inputs, *gradients)   runs forward again; takes the gradients of the results `unit.differentiated` and
                                    returns those of the inputs `unit.differentiable`; gradients of parameters may be
                                    factors (`capture.gradients`)
    both(*inputs)                   of the head: its results, then the gradients of its loss
    taking(results).backward        of the head: takes the gradients of only some of its `differentiated` results

    At level 1 and above, the forward returns what it saves after its results, and the backward takes that after its
    inputs; the layer's input x is among these only if the level reads it.
    """

    def function(self, name: str, level: int = 0) -> Callable[..., Sequence[Any]]: ...

    def taking(self, results: tuple[int, ...]) -> UnitCode: ...

    @property
    def draws_random(self) -> bool: ...


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """The module of a graph. Its Python code is generated at its first use: most graphs are only read."""
    return _LazyGraphModule(root, graph)


def packet_of(node: fx.Node) -> Any:
    """The operation of a node in an ATen graph, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def tensors_in(node: fx.Node) -> list[torch.Tensor]:
    """The results of a node of an ATen graph that are tensors, as fake ones."""
    return [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]


def output_values(module: fx.GraphModule) -> tuple[Any, ...]:
    """The values that a graph returns: nodes, or constants."""
    values = module.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    return tuple(values)


@dataclass(frozen=True)
class BlockCut:
    """How a schedule cuts each block into several layers.

    names: of a block's layers in order, such as ("attention", "feed-forward").
    part, parts: the words for one of them, such as "half", and for several, "halves".
    units: takes nodes with their readers, the unit of each, and the values that go from block to block; gives the unit
        of each node after the cut.
    """

    names: tuple[str, ...]
    part: str
    parts: str
    units: Callable[[Mapping[fx.Node, Sequence[fx.Node]], Mapping[fx.Node, int], Sequence[fx.Node]], dict[fx.Node, int]]


def layer_name(layer: int, cut: BlockCut | None) -> str:
    """The name of a layer in messages; `cut`: how blocks are cut into layers, if they are."""
    if cut is None:
        return f"layer {layer}"
    block, part = divmod(layer, len(cut.names))
    return f"the {cut.names[part]} {cut.part} of layer {block}"


def hint(size: Any) -> int:
    """The current number of a size, without a guard on a symbolic one; the maximum of one that depends on values."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    most = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper if known is None else known
    return int(min(sys.maxsize, most))


def is_sized(value: Any) -> bool:
    """Whether a size, or the sizes of tensors, do not depend on values of tensors."""
    if isinstance(value, torch.Tensor):
        return is_sized(tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return all(map(is_sized, value))
    return not isinstance(value, torch.SymInt) or value.node.hint is not None


def source_line(node: fx.Node) -> str:
    """The user's line that made `node`, as ``file:line: text``; empty if Dynamo recorded none."""
    return next(reversed(source_lines(node)), "")


def at_line(node: fx.Node) -> str:
    """The user's line that made `node`, to end a sentence: ``, at file:line: text``."""
    return f", at {line}" if (line := source_line(node)) else ""


def source_lines(node: fx.Node) -> list[str]:
    """The user's lines that called one another to make `node`, the last as in `source_line`."""
    trace = str(node.meta.get("stack_trace") or node.stack_trace or "")
    found = re.findall(r'^\s*File "([^"]*)", line (\d+)[^\n]*\n?(?=([^\n]*))', trace, re.MULTILINE)
    return [f"{file}:{number}: {line.strip()}" for file, number, line in found]


def origin(node: fx.Node) -> dict[str, Any]:
    """The part of a node's meta that says where it is from: the module of the model, and the line."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def block_of(node: fx.Node) -> Block | None:
    """The first numbered module around `node`: ("transformer.h", 3) for a node in transformer.h.3.attn."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    match = re.match(r"(.*?)\.?\b(\d+)(?:\.|$)", module_path(list(stack.values())[-1][0]))
    return None if match is None else (match[1], int(match[2]))


@cache
def module_path(path: str) -> str:
    """A path in Dynamo's `nn_module_stack`, ``L['self'].layers['3'].mlp``, as ``layers.3.mlp``.

    For a class with a `__getattr__`, as in diffusers, it is ``L['self'].__dict__['_modules']['layers']``.
    What a hook of a module refers to, such as the model, is no part of that module.
    """
    path = re.sub(rf"^.*_hooks\[.*{_REFERENCE}", "L['self']", path)
    name = re.sub(r"^L\['\w+'\]\.?", "", re.sub(r"\.(__dict__\['_modules'\]|_modules)(?=\[)", "", path))
    return re.sub(r"\.?\['(\w+)'\]", r".\1", name).lstrip(".")
