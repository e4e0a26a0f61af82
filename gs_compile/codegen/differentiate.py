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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import Generator, draws_random
from gs_compile.codegen.factor import assemble, factor

Tensors = Sequence[torch.Tensor]


class Differentiated:
    """The functions of one class of units, each traced and compiled by `generator` when it is first asked for.

    `graphs` holds the ATen graphs made so far.
    """

    def __init__(self, unit: UnitGraph, generator: Generator) -> None:
        self.unit = unit
        self.graphs: dict[str, fx.GraphModule] = {}
        self.seconds = 0.0  # spent in tracing and compiling
        self._generator = generator
        self._functions: dict[str, Callable[..., Sequence[Any]]] = {}

    def function(self, name: str) -> Callable[..., Sequence[Any]]:
        """The compiled "forward", "backward" or "both"; gradients of parameters come as factors where they can."""
        if name not in self._functions:
            graph = self.graph(name)
            self._functions[name] = self._compiled(name, graph) if name == "forward" else self._factored(name, graph)
        return self._functions[name]

    @cached_property
    def draws_random(self) -> bool:
        """Whether the forward draws random numbers, so that the backward must draw the same."""
        return any(map(draws_random, self.graph("forward").graph.nodes))

    def graph(self, name: str) -> fx.GraphModule:
        """The ATen graph of "forward", "backward" or "both"; traced, not compiled, when it is first asked for."""
        if name not in self.graphs:
            functions = {"forward": self._run, "backward": self._backward, "both": self._both}
            results = [self.unit.result_specs[index] for index in self.unit.differentiated]
            gradients = [replace(spec, requires_grad=False) for spec in results if name == "backward"]
            with self._timed():
                self.graphs[name] = self._generator.trace(functions[name], (*self.unit.specs, *gradients))
        return self.graphs[name]

    def _factored(self, name: str, whole: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        num_results = len(self.unit.results) if name == "both" else 0
        chosen = [self.unit.sources[index].kind == "input" for index in self.unit.differentiable]
        graph, forms = factor(whole, [*[False] * num_results, *chosen])
        compiled = self._compiled(name, graph)
        return lambda *arguments: assemble(compiled(*arguments), forms)

    def _compiled(self, name: str, graph: fx.GraphModule) -> Callable[..., Sequence[torch.Tensor]]:
        with self._timed():
            return self._generator.generate(graph)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    # The functions that are traced -----------------------------------------------------------------------------------

    def _run(self, *inputs: torch.Tensor) -> Tensors:
        results: Tensors = self.unit.module(*inputs)
        return results

    def _backward(self, *arguments: torch.Tensor) -> Tensors:
        inputs, gradients = arguments[: len(self.unit.specs)], arguments[len(self.unit.specs) :]
        results = self._run(*inputs)
        return self._pull([results[index] for index in self.unit.differentiated], inputs, gradients)

    def _both(self, *inputs: torch.Tensor) -> Tensors:
        results = self._run(*inputs)
        loss = results[self.unit.results.index("loss")]
        gradients = self._pull([loss], inputs, [torch.ones_like(loss)])
        return (*(result.detach() for result in results), *gradients)

    def _pull(self, results: Tensors, inputs: Tensors, gradients: Tensors) -> Tensors:
        """Gradients of the differentiable inputs; zeros for one that the results do not depend on."""
        wanted = [inputs[index] for index in self.unit.differentiable]
        return torch.autograd.grad(results, wanted, gradients, allow_unused=True, materialize_grads=True)
