"""inductor: traces functions of tensors to ATen graphs, on fake tensors, and compiles these.

The inner compiler is inductor, or "eager", which runs the graph as it is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from traceback import extract_tb
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef

from gs_compile.capture import toolchain
from gs_compile.capture.draws import draw, drawing
from gs_compile.capture.graph import Length, TensorSpec, graph_module, hint, tensors_in
from gs_compile.capture.graph_breaks import user_line
from gs_compile.capture.operations import named
from gs_compile.errors import GraphBreakError, OptionError

log = logging.getLogger(__name__)

Compiler = Literal["inductor", "eager"]


@dataclass(frozen=True, slots=True)
class Generator:
    """The inner compiler: `compiler`, with torch.compile's `mode` for inductor."""

    compiler: Compiler
    mode: str | None = None

    def trace(
        self,
        function: Callable[..., Any],
        specs: Iterable[TensorSpec],
        sizes: Sizes | None = None,
        *,
        is_sized: bool = True,
    ) -> fx.GraphModule:
        """The ATen graph of `function` of tensors like `specs`, without what its results do not need.

        With `sizes`, lengths are symbolic: `function` and the graph take their symbols as first arguments. is_sized: no
        tensor inside has a size that depends on values.

        `function` may call autograd, which would run the backward of GPU tensors in a thread of its own, where nothing
        is traced.
        """
        sizes = sizes or Sizes({})
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.env)

        def run(*given: Any) -> Any:
            _symbolic_trace._is_fx_tracing_flag = False  # a global: it would make compiled models fail in other threads
            return function(*given)

        with (
            torch.inference_mode(False),  # whatever the caller's mode; it also enables multithreading of autograd
            torch.autograd.set_multithreading_enabled(False),
            mode,
            enable_python_dispatcher() if sizes.symbols or not is_sized else nullcontext(),  # C++ would need numbers
            torch.enable_grad(),
            torch._C._DisableAutocast(),
            _use_lazy_graph_module(True),  # see `graph_module`
        ):
            inputs = [
                torch.empty_strided(
                    *sizes.symbolic((s.shape, s.stride)), dtype=s.dtype, device=s.device, requires_grad=s.requires_grad
                )
                for s in specs
            ]
            try:
                graph = make_fx(run, decomposition_table=self.decompositions)(*sizes.symbols.values(), *inputs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise GraphBreakError(
                    f"a layer's code cannot be traced: {error.func} reads values of a tensor, at "
                    f"{user_line(extract_tb(error.__traceback__))}\nCode that runs for every batch must not read "
                    "values. If it is a library's, such as the backward of an operator, try another version or "
                    "implementation"
                ) from error
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph

    def functional(
        self, graph: fx.GraphModule, specs: Iterable[TensorSpec], sizes: Sizes | None = None
    ) -> fx.GraphModule:
        """A traced graph without changes in place; otherwise with the same operations and random numbers."""
        if not any(map(changes_memory, graph.graph.nodes)):
            return graph
        constant = [replace(spec, requires_grad=False) for spec in specs]
        return self.trace(torch.func.functionalize(graph, remove="mutations"), constant, sizes)

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The decompositions to trace with: inductor's may change strides, on which the choice of views depends.

        Embeddings' backward stays whole for `factor`; what is left of it inductor decomposes later.
        """
        if self.compiler == "eager":
            return {}
        from torch._inductor.decomposition import select_decomp_table

        whole = torch.ops.aten.embedding_dense_backward.default
        return {operation: meaning for operation, meaning in select_decomp_table().items() if operation is not whole}

    def generate(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """The compiled function of a traced graph, with the same inputs and outputs."""
        if self.compiler == "eager":
            return _as_traced(graph)
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = dict(list_mode_options(self.mode)) if self.mode else {}
        patches["triton.cudagraphs"] = False  # a CUDA graph's next call overwrites its outputs; checkpoints live longer
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        if any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in inputs):
            toolchain.wait()
            patches["fallback_random"] = True  # else forward and backward draw masks in different orders
        with torch.no_grad(), torch._C._DisableAutocast():
            compiled: Any = compile_fx(graph, inputs, config_patches=patches)
        function: Callable[..., Any] = compiled
        return drawing(function) if _draws(graph) else function


def check_mode(mode: str | None) -> None:
    """Raise `OptionError` if `mode` is not one of inductor's."""
    if mode is None:
        return
    from torch._inductor import list_mode_options

    if mode not in (modes := list_mode_options()):
        raise OptionError(f"mode must be one of {', '.join(modes)}; got {mode!r}")


def num_cache_misses() -> int:
    """The number of graphs so far that this process did not find in inductor's cache."""
    return int(counters["inductor"]["fxgraph_cache_miss"])


def in_this_process() -> AbstractContextManager[None]:
    """In the block, inductor neither starts compile processes nor uses those that it has."""
    from torch._inductor import config

    found: AbstractContextManager[None] = config.patch(compile_threads=1)
    return found


def _as_traced(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph itself, or one that copies if a view is impossible, and that draws by `draw`.

    Some operations give fake tensors other strides than real ones, such as the backward of softplus with a transposed
    gradient. Views of memory that is changed in place stay views: a copy would lose the change.
    """
    view, nodes = torch.ops.aten.view.default, graph.graph.nodes
    changed = {memory_of(each) for node in nodes if changes_memory(node) for each in node.all_input_nodes}
    views = [node for node in nodes if node.target is view and not {memory_of(node), None} & changed]
    if not views and not _draws(graph):
        return graph
    copied, copy_of = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph.graph, copy_of))
    for node in views:
        copy_of[node].target = torch.ops.aten.reshape.default
    for node in filter(draws_random, nodes):
        copy_of[node].args = (node.target, *copy_of[node].args)
        copy_of[node].target = draw
    made = graph_module(graph, copied)
    for name, inner in made.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(made, name, _as_traced(inner))
    return made


class Sizes:
    """Symbols in place of lengths, and the guards of a trace and a compilation with them.

    `values`: of Dynamo's symbols, in the current call. Without any, it only serves inductor, which needs such an
    environment to store compiled code on disk.
    """

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self.env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False)
        self.values = values
        self.symbols: dict[sympy.Symbol, Any] = {}
        for symbol, value in values.items():
            source = ConstantSource(f"length_{symbol}")
            own = self.env.create_symbol(value, source, DimDynamic.DYNAMIC)
            self.symbols[symbol] = self.env.create_symintnode(own, hint=value, source=source)

    def symbolic(self, value: Any) -> Any:
        """`value`, a number or several, with its lengths replaced by symbolic numbers."""
        return map_aggregate(value, self._symbolic)

    def _symbolic(self, length: Any) -> Any:
        if not isinstance(length, Length) or not self.symbols:
            return length
        own = {symbol: number.node.expr for symbol, number in self.symbols.items()}
        return self.env.create_symintnode(length.expression.xreplace(own), hint=int(length))

    def number(self, size: Any, values: Sequence[int]) -> int:
        """The number of a size that was traced with the symbols, if these have other values."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        own = (number.node.expr for number in self.symbols.values())
        return int(size.node.expr.xreplace(dict(zip(own, map(sympy.Integer, values), strict=True))))

    def hold(self, values: Sequence[int]) -> bool:
        """Whether the guards of what was traced and compiled so far hold if the symbols have these values."""
        guard = self.env.produce_guards_expression(list(self.symbols.values()))
        return not guard or bool(self.env.evaluate_guards_expression(guard, values))


class Resized(fx.Interpreter):
    """Runs a graph with its lengths replaced by symbolic numbers."""

    def __init__(self, module: fx.GraphModule, sizes: Sizes) -> None:
        super().__init__(module)
        self._sizes = sizes

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return super().map_nodes_to_values(self._sizes.symbolic(args), n)


@cache
def best_compiler(device_type: str) -> Compiler:
    """inductor, if it finds what it needs (a C++ compiler for the CPU, Triton elsewhere); else eager, logged once."""
    if device_type == "meta":
        return "eager"
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            if shutil.which(get_cpp_compiler()):
                return "inductor"
        except InvalidCxxCompiler:
            pass
        missing = "no C++ compiler was found (install g++)"
    else:
        from torch.utils._triton import has_triton

        if has_triton():
            return "inductor"
        missing = f"Triton does not work for {device_type} here"
    log.warning("%s: layers run uncompiled; set expert={'compiler': 'eager'} to choose this", missing)
    return "eager"


def changes_memory(node: fx.Node) -> bool:
    """Whether a node of an ATen graph changes a tensor in place."""
    return node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def memory_of(node: fx.Node) -> StorageWeakRef | None:
    """A key for the memory of a node's tensor in an ATen graph; None: the node makes no tensor."""
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def memories_of(node: fx.Node) -> dict[StorageWeakRef, int]:
    """The memory of all of a node's tensors in an ATen graph, with its bytes; views share it."""
    storages = [each.untyped_storage() for each in tensors_in(node)]
    return {StorageWeakRef(each): hint(each.nbytes()) for each in storages}


def draws_random(node: fx.Node) -> bool:
    """Whether a node of an ATen graph draws random numbers. Attention is tagged so, but without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return named_arguments(node).get("dropout_p") != 0


def _draws(graph: fx.GraphModule) -> bool:
    """Whether a graph, or a graph inside it, draws random numbers."""
    graphs = (each for each in graph.modules() if isinstance(each, fx.GraphModule))
    return any(draws_random(node) for each in graphs for node in each.graph.nodes)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node of an ATen graph by name, defaults included."""
    return named(node.target, node.args, node.kwargs)
