"""differentiate: per class of units one forward, and one backward that recomputes from the unit's inputs.

    forward(inputs)             -> results
    backward(inputs, gradients) -> gradients of the differentiable inputs     (runs forward again inside)
    both(inputs)                -> results, gradients of the loss             (the head's, in one go)

made by `torch.func.vjp` under `make_fx`, so what is compiled is a plain ATen graph: recomputation and backward are one
graph, and what the backward does not need is not recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gs_compile.graph import TensorSpec, UnitGraph

# Compiles an ATen graph for inputs like the (fake) ones given.
Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Sequence[torch.Tensor]]]
Tensors = tuple[torch.Tensor, ...]


def differentiate(unit: UnitGraph, compile_graph: Compile) -> Differentiated:
    """The functions of `unit`, each traced and compiled by `compile_graph` when it is first asked for."""
    return Differentiated(unit, compile_graph)


class Differentiated:
    """The compiled functions of one class of units; `graphs` holds the ATen graphs made so far."""

    def __init__(self, unit: UnitGraph, compile_graph: Compile) -> None:
        self.unit = unit
        self.graphs: dict[str, fx.GraphModule] = {}
        self._compile = compile_graph
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    @cached_property
    def forward(self) -> Callable[..., Sequence[torch.Tensor]]:
        return self._build("forward", self._run, self.unit.specs)

    @cached_property
    def backward(self) -> Callable[..., Sequence[torch.Tensor]]:
        gradients = [self.unit.result_specs[index] for index in self.unit.differentiated]
        return self._build("backward", self._backward, (*self.unit.specs, *gradients))

    @cached_property
    def both(self) -> Callable[..., Sequence[torch.Tensor]]:
        return self._build("both", self._both, self.unit.specs)

    @cached_property
    def draws_random(self) -> bool:
        """Whether the forward draws random numbers, so that the backward must draw the same."""
        _ = self.forward
        targets = [node.target for node in self.graphs["forward"].graph.nodes]
        return any(torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) for target in targets)

    # The functions that are traced -----------------------------------------------------------------------------------

    def _run(self, *inputs: torch.Tensor) -> Tensors:
        return tuple(self.unit.module(*inputs))

    def _backward(self, *arguments: torch.Tensor) -> Tensors:
        inputs, gradients = arguments[: len(self.unit.specs)], arguments[len(self.unit.specs) :]

        def differentiated(*values: torch.Tensor) -> Tensors:
            results = self._run(*self._with(inputs, values))
            return tuple(results[index] for index in self.unit.differentiated)

        _, pull = torch.func.vjp(differentiated, *self._differentiable(inputs))
        return tuple(pull(tuple(gradients)))

    def _both(self, *inputs: torch.Tensor) -> Tensors:
        def loss(*values: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
            results = self._run(*self._with(inputs, values))
            return results[self.unit.results.index("loss")], results

        value, pull, results = torch.func.vjp(loss, *self._differentiable(inputs), has_aux=True)
        return (*results, *pull(torch.ones_like(value)))

    def _differentiable(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[index] for index in self.unit.differentiable]

    def _with(self, inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        merged = list(inputs)
        for index, value in zip(self.unit.differentiable, values, strict=True):
            merged[index] = value
        return merged

    # Tracing ---------------------------------------------------------------------------------------------------------

    def _build(
        self, name: str, function: Callable[..., Tensors], specs: Sequence[TensorSpec]
    ) -> Callable[..., Sequence[torch.Tensor]]:
        with self._fake_mode:
            inputs = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device) for s in specs]
        with self._fake_mode, torch.enable_grad(), torch._C._DisableAutocast():
            graph_module: fx.GraphModule = make_fx(function)(*inputs)
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
        self.graphs[name] = graph_module
        with torch.no_grad(), torch._C._DisableAutocast():
            return self._compile(graph_module, inputs)
