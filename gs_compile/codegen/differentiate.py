"""differentiate: one forward per class of units, and one backward that recomputes from the unit's inputs.

    forward(inputs)             -> results
    backward(inputs, gradients) -> gradients of the differentiable inputs     (runs forward again inside)
    both(inputs)                -> results, gradients of the loss             (of the head, in one call)
    joint(inputs, gradients)    -> results, gradients of the differentiable inputs

The compiled code may return parameters' gradients as factors (`factor`); the graphs of `graph` are without them.

Each function is traced by functorch's `make_fx` with autograd running inside the trace, so a plain ATen graph is
compiled: recomputation and backward are one graph, and what the backward does not need is not recomputed.
(`torch.func.vjp` is no alternative: it refuses custom operators, and autograd.Functions without `setup_context`, which
HuggingFace's mixture-of-experts layers have.)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from operator import call
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from gs_compile.capture.dynamo import compile_lock
from gs_compile.capture.exchange import first_exchange
from gs_compile.capture.graph import TensorSpec, UnitGraph, output_values
from gs_compile.capture.inductor import Generator, Resized, Sizes, draws_random
from gs_compile.capture.nondeterministic import NondeterminismMode, Nondeterministic
from gs_compile.capture.partition import CannotSaveError
from gs_compile.codegen.costs import Cost, Costs, Counts, cost_of, counted
from gs_compile.codegen.factor import Form, assemble, factor
from gs_compile.codegen.levels import Cut, JointGraph, SavedLevel, cuts, subgraph
from gs_compile.errors import LengthWarning

Tensors = Sequence[torch.Tensor]
Function = Callable[..., Sequence[Any]]
T = TypeVar("T")


@dataclass
class SharedCode:
    """What is common to units that differ only in their lengths.

    parts: the same for their parts that run on some tokens at a time (`codegen.pieces`), by what they compute.
    """

    codes: list[Differentiated] = field(default_factory=list)  # its functions take the lengths as first arguments
    refusal: str = ""  # why torch cannot make any
    draws_random: bool | None = None
    parts: dict[Hashable, SharedCode] = field(default_factory=dict)
    taking: dict[tuple[int, ...], SharedCode] = field(default_factory=dict)

    def of(self, taken: tuple[int, ...]) -> SharedCode:
        """The same for code whose backward takes the gradients of these results alone."""
        return self.taking.setdefault(taken, SharedCode())


class Cuts(NamedTuple):
    """The levels above 0, and the code that their graphs belong to; reason: why there are none."""

    code: Differentiated
    found: Sequence[Cut]
    reason: str = ""


class Differentiated:
    """The functions of one class of units, each traced and compiled by `generator` at its first use.

    `graphs` holds the ATen graphs made so far. If the capture has symbolic lengths, functions are shared: `common` has
    one for all lengths, which is used if its guards hold for these lengths.

    sizes: for such shared code, the symbols that it is traced with. costs: those known from other batch sizes.
    """

    costs: Costs | None = None

    def __init__(
        self, unit: UnitGraph, generator: Generator, common: SharedCode | None = None, sizes: Sizes | None = None
    ) -> None:
        self.unit = unit
        self.common = common or SharedCode()
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds = 0.0  # spent in tracing and compiling
        self._generator = generator
        self._sizes = sizes
        self._lengths = tuple(unit.symbols.values())
        self._functions: dict[tuple[str, int], Function] = {}
        self._whole: fx.GraphModule | None = None  # for the levels, which change it

    def function(self, name: str, level: int = 0) -> Function:
        """The compiled "forward", "backward" or "both"; gradients of parameters are factors where possible.

        At a level above 0, "forward" and "backward" take and return what `codegen.levels` says.
        """
        key = (name, level)
        if key not in self._functions:
            with self._making():
                self._functions[key] = self._made(name, level)
        return self._functions[key]

    def _made(self, name: str, level: int) -> Function:
        shared = self._of_all_lengths(
            lambda code: partial(code.function(name, level), *self._lengths), self._cuts.code if level else None
        )
        return shared or self._compiled(name, self.graph(name, level))

    def has_function(self, name: str, level: int) -> bool:
        return (name, level) in self._functions

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that determines its speed, except the machine; the same in every process for equal code."""
        unit = self.unit
        graphs = [each.code for each in unit.module.modules() if isinstance(each, fx.GraphModule)]
        read = [(source.kind, spec) for source, spec in zip(unit.sources, unit.specs, strict=True)]
        given = unit.results, unit.result_specs, unit.differentiated
        return sha256(repr((graphs, read, given, self._lengths, self._generator)).encode()).hexdigest()

    @property
    def compiles_in_forks(self) -> bool:
        """Whether a fork of this process can compile it into inductor's cache: compiling must not run anything."""
        return self._generator == Generator("inductor") and self.unit.device_type == "cpu"

    @property
    def levels(self) -> tuple[SavedLevel, ...]:
        """The levels above 0; if there are none, `no_levels_reason` says why."""
        return tuple(cut.level for cut in self._cuts.found)

    @property
    def no_levels_reason(self) -> str:
        return self._cuts.reason

    @cached_property
    def _cuts(self) -> Cuts:
        sources = [source.kind for source in self.unit.sources]
        if self.unit.is_joint:
            return Cuts(self, (), "it joins two stacks")
        if first_exchange(self.unit.module) is not None:
            return Cuts(self, (), "it exchanges values with other ranks, of which each would save what its sizes say")
        if "x" not in sources or "x" not in self.unit.results or not self.unit.differentiable:
            return Cuts(self, (), "it is no layer that is trained")
        if self._sizes and not self.unit.is_sized:
            raise CannotSaveError(
                "the sizes of tensors inside depend on values, so the gain of saving them is not known"
            )
        with self._making():
            if shared := self._of_all_lengths(lambda code: code._cuts):
                code, found, reason = shared
                assert code._sizes is not None
                number = partial(code._sizes.number, values=self._lengths)
                return Cuts(code, [cut.at(number) for cut in found], reason)
            try:
                found = cuts(self._joint_graph())
            except CannotSaveError as error:
                return Cuts(self, (), shorten(str(error), 200))
        return Cuts(self, found, "" if found else "its backward has nothing to compute again")

    def _joint_graph(self) -> JointGraph:
        traced, self._whole = self._whole or self._traced("joint"), None
        try:
            graph = self._generator.functional(traced, self._arguments("joint"), self._sizes)
        except RuntimeError as error:  # a user's operator that changes memory in its own way
            raise CannotSaveError(str(error)) from error
        draws = [n for n in self.graph("forward").graph.nodes if n.op == "call_function" and draws_random(n)]
        x = self._x + len(self._symbols)
        return JointGraph(graph, len(self.unit.differentiated), x, len(self.unit.results), len(draws))

    @property
    def _x(self) -> int:
        return [source.kind for source in self.unit.sources].index("x")

    def _of_all_lengths(self, ask: Callable[[Differentiated], T], code: Differentiated | None = None) -> T | None:
        """`ask` of the code for all lengths (`code`, or the first that holds for these); None: there is none."""
        if self._sizes or code is self or self.common.refusal:
            return None
        if min(self._lengths, default=0) < 2:  # torch specialises on 0 and 1
            return None
        try:
            code = code or next((known for known in self.common.codes if known._holds(self._lengths)), None)
            if code is None:
                code = Differentiated(self.unit, self._generator, sizes=Sizes(self.unit.symbols))
                self.common.codes.append(code)
            found = ask(code)
            return found if code._holds(self._lengths) else None  # `ask` may have added guards
        except Exception as error:  # noqa: BLE001 (of any kind, from any of torch's operations)
            self.common.refusal = shorten(str(error), 200) or type(error).__name__
            warnings.warn(
                f"the code of unit {self.unit.unit} has to be compiled for each length of the inputs, as torch cannot "
                f"make it for all ({self.common.refusal}): pad to few lengths (pad_to_multiple_of), or pack",
                LengthWarning,
                stacklevel=3,
            )
        return None

    def _holds(self, lengths: Sequence[int]) -> bool:
        """Whether the guards of what is traced and compiled so far hold for these lengths."""
        assert self._sizes is not None
        return self._sizes.hold(lengths)

    @property
    def draws_random(self) -> bool:
        """Whether the forward draws random numbers: the backward must draw the same ones."""
        if self.common.draws_random is None:
            self.common.draws_random = any(map(draws_random, self.graph("forward").graph.nodes))
        return self.common.draws_random

    def graph(self, name: str, level: int = 0) -> fx.GraphModule:
        """The ATen graph of "forward", "backward" or "both"; traced at its first use, not compiled."""
        if level:
            code, found, _ = self._cuts
            cut = found[level - 1]
            return cut.graph(name) if code is self else self._resized(name, cut)
        if name not in self.graphs:
            with self._making():
                self.graphs[name] = self._traced(name)
        return self.graphs[name]

    def trace_step(self) -> None:
        """Trace what a training step runs once: "forward" and "backward" are parts of "joint", or of "both".

        Not if anything is traced, nor for lengths that share code, which is traced for all of them. What draws, or has
        other effects than its results, is traced each by itself.
        """
        if self.graphs or self._whole or self._lengths or not self.is_trained:
            return
        with self._making():
            if self.last_name == "both":
                whole = self.graphs["both"] = self._traced("both")
            else:
                whole = self._whole = self._traced("joint")
            if any(whole.children()) or any(map(_has_effects, whole.graph.nodes)):
                return
            given, number = whole.graph.find_nodes(op="placeholder"), len(self.unit.results)
            results, gradients = output_values(whole)[:number], output_values(whole)[number:]
            self.graphs["forward"] = subgraph(whole, given[: len(self.unit.specs)], [*map(_before_detached, results)])
            if self.last_name == "backward":
                self.graphs["backward"] = subgraph(whole, given, gradients)

    def cost(self, name: str) -> Cost:
        """The cost of "forward", "backward" or "both"."""
        return self._known_or(name, partial(self._counted, name))

    def cost_with_results(self, name: str) -> Cost:
        """The cost of "forward", or of "joint" with factors, including the bytes of its results."""

        def count() -> Counts:
            graph = self.factored(name)[0] if name == "joint" else self.graph(name)
            return counted(graph, (), compiled=self._is_compiled)

        return self._known_or(f"{name} with results", count)

    def _known_or(self, name: str, count: Callable[[], Counts]) -> Cost:
        return self.costs.cost(name, count) if self.costs else cost_of(count())

    def _counted(self, name: str) -> Counts:
        if name != "forward":
            self.trace_step()
        graph, results = self.graph(name), len(self.unit.results)
        held = set(range(results if name != "backward" else 0))
        if name != "forward":
            kinds = [self.unit.sources[index].kind for index in self.unit.differentiable]
            held |= {len(held) + place for place, kind in enumerate(kinds) if kind == "x"}
        return counted(graph, held, compiled=self._is_compiled)

    @property
    def _is_compiled(self) -> bool:
        """Whether its compiler fuses operations."""
        return self._generator.compiler == "inductor"

    @property
    def is_trained(self) -> bool:
        return bool(self.unit.differentiable and self.unit.differentiated)

    @property
    def last_name(self) -> str:
        """The function that runs in a training step after "forward", or in place of it."""
        if not self.is_trained:
            return "forward"
        return "both" if "loss" in self.unit.results else "backward"

    @property
    def workspace_nbytes(self) -> int:
        """The peak of its code's live bytes, without inputs and results."""
        return max(self.cost(name).nbytes for name in {"forward", self.last_name})

    @property
    def on_all(self) -> tuple[str, ...]:
        """The names of the operations that run on all tokens, in a layer that otherwise runs in pieces."""
        return ()

    def _resized(self, name: str, cut: Cut) -> fx.GraphModule:
        """A graph of a level, with its symbols replaced by numbers."""
        arguments = [replace(spec, requires_grad=False) for spec in self._arguments("joint")]
        inputs, gradients = arguments[: len(self.unit.specs)], arguments[len(self.unit.specs) :]
        if name == "backward":
            kept = [spec for at, spec in enumerate(inputs) if at != self._x or cut.level.reads_input]
            inputs = [*kept, *cut.level.specs, *gradients]
        with self._making():
            return self._generator.trace(partial(cut.graph(name), *self._lengths), inputs)

    def _traced(self, name: str, watch: NondeterminismMode | None = None) -> fx.GraphModule:
        functions: dict[str, Function] = {"forward": call, "backward": self._backward}
        functions |= {"both": self._both, "joint": self._joint}
        run = Resized(self.unit.module, self._sizes).run if self._sizes else self.unit.module

        def function(*inputs: Any) -> Tensors:
            with watch or nullcontext():
                return functions[name](watch.run if watch else run, *inputs[len(self._symbols) :])

        return self._generator.trace(function, self._arguments(name), self._sizes, is_sized=self.unit.is_sized)

    @cached_property
    def nondeterministic(self) -> tuple[Nondeterministic, ...]:
        """The operations of a training step that may give different bits from run to run on a GPU."""
        watch = NondeterminismMode(self.unit.module)
        with self._making():
            whole = self._traced(self.last_name, watch)
        if self._generator.compiler == "inductor" and self.last_name != "forward":
            watch.note_embeddings(whole, self.factored(self.last_name, whole)[0])
        return tuple(watch.found)

    @property
    def _symbols(self) -> Collection[Any]:
        """The symbols that its functions take as first arguments."""
        return self._sizes.symbols if self._sizes else ()

    def _arguments(self, name: str) -> tuple[TensorSpec, ...]:
        return (*self.unit.specs, *(self.unit.gradient_specs if name in ("backward", "joint") else ()))

    def _compiled(self, name: str, whole: fx.GraphModule) -> Function:
        if name == "forward":
            return self._generator.generate(whole)
        graph, forms = self.factored(name, whole)
        compiled = self._generator.generate(graph)
        return lambda *arguments: assemble(compiled(*arguments), forms)

    def factored(
        self, name: str, whole: fx.GraphModule | None = None
    ) -> tuple[fx.GraphModule, tuple[Form | None, ...]]:
        """The graph of "backward", "both" or "joint" with parameters' gradients as factors, and its results' forms."""
        num_results = len(self.unit.results) if name in ("both", "joint") else 0
        chosen = [self.unit.sources[index].kind == "input" for index in self.unit.differentiable]
        return factor(whole or self.graph(name), [*[False] * num_results, *chosen])

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Only one thread at a time is inside. Adds its time to `seconds`, once if nested."""
        with compile_lock:  # tracing and compiling change torch's global state
            start, before = time.perf_counter(), self.seconds
            yield
            self.seconds = before + time.perf_counter() - start

    # The functions that are traced; `run` runs the unit ---------------------------------------------------------------

    def _backward(self, run: Function, *arguments: torch.Tensor) -> Tensors:
        return self._joint(run, *arguments)[len(self.unit.results) :]

    def _joint(self, run: Function, *arguments: torch.Tensor) -> Tensors:
        inputs, gradients = arguments[: len(self.unit.specs)], arguments[len(self.unit.specs) :]
        results = run(*inputs)
        return self._pull(results, [results[index] for index in self.unit.differentiated], inputs, gradients)

    def _both(self, run: Function, *inputs: torch.Tensor) -> Tensors:
        results = run(*inputs)
        loss = results[self.unit.results.index("loss")]
        return self._pull(results, [loss], inputs, [torch.ones_like(loss)])

    def _pull(self, results: Tensors, chosen: Tensors, inputs: Tensors, gradients: Tensors) -> Tensors:
        """The results, and the gradients of the differentiable inputs: zeros if no chosen result depends on one."""
        wanted = [inputs[index] for index in self.unit.differentiable]
        with torch.autograd.set_detect_anomaly(False):  # it looks at values, and tracing has none
            pulled = torch.autograd.grad(chosen, wanted, gradients, allow_unused=True, materialize_grads=True)
        return (*(result.detach() for result in results), *pulled)


def _has_effects(node: fx.Node) -> bool:
    """Whether a node of an ATen graph does more than to compute its results. torch takes all attention for random."""
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and (draws_random(node) if is_seeded else node.is_impure())


def _before_detached(value: Any) -> Any:
    is_detached = isinstance(value, fx.Node) and value.target is torch.ops.aten.detach.default
    return value.args[0] if is_detached else value
