"""inductor: functions of tensors as ATen graphs, traced on tensors without memory, and machine code for them.

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
from gs_compile.capture.graph import Length, TensorSpec, graph_module
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

        With `sizes`, lengths are symbolic: `function` gets, and the graph begins with, their symbols. is_sized: no
        values decide how large a tensor inside is.

        `function` may call autograd, which would run the backward of tensors on a GPU in a thread of its own, where
        nothing is traced.
        """
        with torch.inference_mode(False):  # whoever asks; this has several threads on
            return self._traced(function, specs, sizes or Sizes({}), is_sized)

    def _traced(
        self, function: Callable[..., Any], specs: Iterable[TensorSpec], sizes: Sizes, is_sized: bool
    ) -> fx.GraphModule:
        one_thread = torch.autograd.set_multithreading_enabled(False)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.env)
        is_symbolic = bool(sizes.symbols) or not is_sized
        in_python = enable_python_dispatcher() if is_symbolic else nullcontext()  # C++ asks for numbers
        unwritten = _use_lazy_graph_module(True)  # as of `graph_module`

        def run(*given: Any) -> Any:
            _symbolic_trace._is_fx_tracing_flag = False  # for which compiled models would be refused in other threads
            return function(*given)

        with mode, in_python, one_thread, torch.enable_grad(), torch._C._DisableAutocast(), unwritten:
            inputs = [
                torch.empty_strided(
                    sizes.symbolic(s.shape),
                    sizes.symbolic(s.stride),
                    dtype=s.dtype,
                    device=s.device,
                    requires_grad=s.requires_grad,
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
        """A traced graph with nothing changed in place: the same operations otherwise, and the same random numbers."""
        if not any(map(changes_memory, graph.graph.nodes)):
            return graph
        constant = [replace(spec, requires_grad=False) for spec in specs]
        return self.trace(torch.func.functionalize(graph, remove="mutations"), constant, sizes)

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The decompositions to trace with; inductor's may change strides, so its views must be chosen after them.

        Embeddings' backward stays whole, for `factor`; where that leaves it, inductor decomposes it itself.
        """
        if self.compiler == "eager":
            return {}
        from torch._inductor.decomposition import select_decomp_table

        whole = torch.ops.aten.embedding_dense_backward.default
        return {operation: meaning for operation, meaning in select_decomp_table().items() if operation is not whole}

    def generate(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """A function of the same inputs and outputs as a traced graph."""
        if self.compiler == "eager":
            return _as_traced(graph)
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = dict(list_mode_options(self.mode)) if self.mode else {}
        patches["triton.cudagraphs"] = False  # a CUDA graph's next call overwrites its outputs; checkpoints live longer
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        if any(isinstance(each, torch.Tensor) and each.device.type == "cpu" for each in inputs):
            toolchain.wait()
            patches["fallback_random"] = True  # else masks are drawn in any order, in the backward in another one
        with torch.no_grad(), torch._C._DisableAutocast():
            compiled: Any = compile_fx(graph, inputs, config_patches=patches)
        function: Callable[..., Any] = compiled
        return drawing(function) if _draws(graph) else function


def check_mode(mode: str | None) -> None:
    """Raise `OptionError` for what is none of inductor's modes."""
    if mode is None:
        return
    from torch._inductor import list_mode_options

    if mode not in (modes := list_mode_options()):
        raise OptionError(f"mode must be one of {', '.join(modes)}; got {mode!r}")


def num_cache_misses() -> int:
    """Misses of graphs that were looked for in inductor's cache by this process so far."""
    return int(counters["inductor"]["fxgraph_cache_miss"])


def in_this_process() -> AbstractContextManager[None]:
    """Inductor starts none of its own processes, and asks none that it has."""
    from torch._inductor import config

    found: AbstractContextManager[None] = config.patch(compile_threads=1)
    return found


def _as_traced(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph itself, or one whose views copy where memory does not allow a view, and that draws by `draw`.

    Some operations give tensors without memory other strides than real ones: the backward of softplus does, where the
    gradient is transposed. Memory that is changed in place is viewed as it was traced: a copy would lose the change.
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
    """Symbols in the place of lengths, and what a trace and a compilation with them take for granted.

    `values`: of each of Dynamo's symbols in the call at hand. Without any this is what inductor asks for to keep what
    it compiles on disk.
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
        """`value`, a number or several, with symbolic numbers for its lengths."""
        return map_aggregate(value, self._symbolic)

    def _symbolic(self, length: Any) -> Any:
        if not isinstance(length, Length) or not self.symbols:
            return length
        own = {symbol: number.node.expr for symbol, number in self.symbols.items()}
        return self.env.create_symintnode(length.expression.xreplace(own), hint=int(length))

    def number(self, size: Any, values: Sequence[int]) -> int:
        """What a size that was traced with the symbols comes to where these have other values."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        own = (number.node.expr for number in self.symbols.values())
        return int(size.node.expr.xreplace(dict(zip(own, map(sympy.Integer, values), strict=True))))

    def hold(self, values: Sequence[int]) -> bool:
        """Whether what was traced and compiled so far may be used where the symbols have these values."""
        guard = self.env.produce_guards_expression(list(self.symbols.values()))
        return not guard or bool(self.env.evaluate_guards_expression(guard, values))


class Resized(fx.Interpreter):
    """Runs a graph with symbolic numbers for its lengths."""

    def __init__(self, module: fx.GraphModule, sizes: Sizes) -> None:
        super().__init__(module)
        self._sizes = sizes

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return super().map_nodes_to_values(self._sizes.symbolic(args), n)


@cache
def best_compiler(device_type: str) -> Compiler:
    """inductor where what it needs is there (a C++ compiler for the CPU, Triton elsewhere), else eager, said once."""
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
    """What tells the memory of a node's tensor in an ATen graph from others; None: it makes no tensor."""
    value = node.meta.get("val")
    return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def draws_random(node: fx.Node) -> bool:
    """Whether a node of an ATen graph draws random numbers; attention is marked as if, but with no dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return named_arguments(node).get("dropout_p") != 0


def _draws(graph: fx.GraphModule) -> bool:
    """Whether a graph draws, or one that an operation of it runs."""
    graphs = (each for each in graph.modules() if isinstance(each, fx.GraphModule))
    return any(draws_random(node) for each in graphs for node in each.graph.nodes)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node of an ATen graph by name, defaults included."""
    return named(node.target, node.args, node.kwargs)
