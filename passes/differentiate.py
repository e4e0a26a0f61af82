"""differentiate: per class of units one forward, and one backward that recomputes from the unit's inputs.

    forward(inputs)             -> results
    backward(inputs, gradients) -> gradients of the differentiable inputs     (runs forward again inside)
    both(inputs)                -> results, gradients of the loss             (the head's, in one go)

made by `torch.func.vjp` under `make_fx`, so what is compiled is a plain ATen graph: recomputation and backward are one
graph, and what the backward does not need is not recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gs_compile.graph import TensorSpec, UnitCode, UnitGraph

Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


def differentiate(unit: UnitGraph, compile_graph: Compile, *, training: bool) -> UnitCode:
    """The compiled functions of `unit`, each traced when it is first called for or, with `training`, at once.

    `compile_graph(graph_module, fake_inputs)` is the inner compiler.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [_fake(mode, spec) for spec in unit.specs]
    results = _result_specs(unit)
    graphs = {"forward": _trace(mode, lambda *args: unit.module(*args), inputs)}
    if training:
        wanted = [index for index, spec in enumerate(results) if _needs_gradient(unit, index, spec)]
        gradients = [_fake(mode, results[index]) for index in wanted]
        if unit.differentiable and wanted:
            graphs["backward"] = _trace(mode, _backward(unit, wanted), [*inputs, *gradients])
        if "loss" in unit.results:
            graphs["both"] = _trace(mode, _both(unit), inputs)
    ...


def _fake(mode: FakeTensorMode, spec: TensorSpec) -> torch.Tensor:
    with mode:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
