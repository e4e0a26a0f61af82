"""differentiate: per class of units one forward, and one backward that recomputes from the unit's inputs.

    forward(inputs)             -> results
    backward(inputs, gradients) -> gradients of the differentiable inputs     (runs forward again inside)
    both(inputs)                -> results, gradients of the loss             (the head's, in one go)

Parameters' gradients may come as factors (`factor`); `graph` shows the graphs without that.

Each is traced by functorch's `make_fx` with autograd running inside the trace, so what is compiled is a plain ATen
graph: recomputation and backward are one graph, and what the backward does not need is not recomputed. (In the place
of autograd `torch.func.vjp` refuses custom operators and autograd.Functions without `setup_context`, as in
HuggingFace's mixture-of-experts layers.)
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import Generator, Resized, Sizes, draws_random
from gs_compile.codegen.factor import assemble, factor
from gs_compile.errors import LengthWarning

Tensors = Sequence[torch.Tensor]
Function = Callable[..., Sequence[Any]]


@dataclass
class OfAllLengths:
    """What units that differ in lengths alone have in common."""

    functions: dict[str, list[tuple[Sizes, str, Function]]] = field(default_factory=dict)  # with what they ask of sizes
    draws_random: bool | None = None


class Differentiated:
    """The functions of one class of units, each traced and compiled by `generator` when it is first asked for.

    `graphs` holds the ATen graphs made so far. `common` is shared with the same class at other lengths.
    """

    def __init__(self, unit: UnitGraph, generator: Generator, common: OfAllLengths | None = None) -> None:
        self.unit = unit
        self.common = common or OfAllLengths()
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds = 0.0  # spent in tracing and compiling
        self._generator = generator
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """The compiled "forward", "backward" or "both"; gradients of parameters come as factors where they can."""
        if name not in self._functions:
            make = self._of_all_lengths if self.unit.symbols else self._of_this
            self._functions[name] = make(name)
        return self._functions[name]

    def has_function(self, name: str) -> bool:
        return name in self._functions

    def _of_all_lengths(self, name: str) -> Function:
        """The function for lengths as they are here: one that is there, if it may be used with these."""
        values = list(self.unit.symbols.values())
        known = self.common.functions.setdefault(name, [])
        for sizes, guard, function in known:
            if sizes.holds(guard, values):
                return partial(function, *values)
        if min(values) < 2:  # torch treats 0 and 1 as like no other
            return self._of_this(name)
        sizes = Sizes(self.unit.symbols)
        try:
            with self._timed():
                graph = self._traced(name, sizes)
            function = self._compiled(name, graph)
            known.append((sizes, sizes.guard(), function))
        except Exception as error:  # noqa: BLE001 (of any kind, from any of torch's operations)
            warnings.warn(
                f"the code of unit {self.unit.unit} has to be compiled for each length of the inputs, as torch cannot "
                f"make it for all ({shorten(str(error), 200)}): pad to few lengths (pad_to_multiple_of), or pack",
                LengthWarning,
                stacklevel=2,
            )
            return self._of_this(name)
        return partial(function, *values)

    def _of_this(self, name: str) -> Function:
        """The function for these lengths alone."""
        return self._compiled(name, self.graph(name))

    @property
    def draws_random(self) -> bool:
        """Whether the forward draws random numbers, so that the backward must draw the same."""
        if self.common.draws_random is None:
            self.common.draws_random = any(map(draws_random, self.graph("forward").graph.nodes))
        return self.common.draws_random

    def graph(self, name: str) -> fx.GraphModule:
        """The ATen graph of "forward", "backward" or "both"; traced, not compiled, when it is first asked for."""
        if name not in self.graphs:
            with self._timed():
                self.graphs[name] = self._traced(name)
        return self.graphs[name]

    def _traced(self, name: str, sizes: Sizes | None = None) -> fx.GraphModule:
        """The graph; with `sizes`, of all lengths."""
        functions = {"forward": self._run, "backward": self._backward, "both": self._both}
        results = [self.unit.result_specs[index] for index in self.unit.differentiated]
        gradients = [replace(spec, requires_grad=False) for spec in results if name == "backward"]
        run = Resized(self.unit.module, sizes).run if sizes else self.unit.module
        skipped = len(sizes.symbols) if sizes else 0
        return self._generator.trace(
            lambda *inputs: functions[name](run, *inputs[skipped:]), (*self.unit.specs, *gradients), sizes
        )

    def _compiled(self, name: str, whole: fx.GraphModule) -> Function:
        if name == "forward":
            return self._generated(whole)
        num_results = len(self.unit.results) if name == "both" else 0
        chosen = [self.unit.sources[index].kind == "input" for index in self.unit.differentiable]
        graph, forms = factor(whole, [*[False] * num_results, *chosen])
        compiled = self._generated(graph)
        return lambda *arguments: assemble(compiled(*arguments), forms)

    def _generated(self, graph: fx.GraphModule) -> Callable[..., Sequence[torch.Tensor]]:
        with self._timed():
            return self._generator.generate(graph)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    # The functions that are traced, of what runs the unit ------------------------------------------------------------

    def _run(self, run: Function, *inputs: torch.Tensor) -> Tensors:
        return run(*inputs)

    def _backward(self, run: Function, *arguments: torch.Tensor) -> Tensors:
        inputs, gradients = arguments[: len(self.unit.specs)], arguments[len(self.unit.specs) :]
        results = run(*inputs)
        return self._pull([results[index] for index in self.unit.differentiated], inputs, gradients)

    def _both(self, run: Function, *inputs: torch.Tensor) -> Tensors:
        results = run(*inputs)
        loss = results[self.unit.results.index("loss")]
        gradients = self._pull([loss], inputs, [torch.ones_like(loss)])
        return (*(result.detach() for result in results), *gradients)

    def _pull(self, results: Tensors, inputs: Tensors, gradients: Tensors) -> Tensors:
        """Gradients of the differentiable inputs; zeros for one that the results do not depend on."""
        wanted = [inputs[index] for index in self.unit.differentiable]
        return torch.autograd.grad(results, wanted, gradients, allow_unused=True, materialize_grads=True)
