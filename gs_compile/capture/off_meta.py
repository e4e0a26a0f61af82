"""off_meta: a unit that was captured without weights, as if it had been captured on a CPU."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from gs_compile.capture.graph import TensorSpec, UnitGraph

META, CPU = torch.device("meta"), torch.device("cpu")


def off_meta(unit: UnitGraph) -> UnitGraph:
    """`unit` itself, or as if captured on a CPU: on the meta device attention is decomposed into products."""
    if not unit.is_meta:
        return unit
    module = deepcopy(unit.module)
    for part in (part for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in list(part.graph.nodes):
            node.args, node.kwargs = map_aggregate(node.args, _moved), map_aggregate(node.kwargs, _moved)
            if isinstance(spec := node.meta.get("spec"), TensorSpec):
                node.meta["spec"] = replace(spec, device=CPU)
            # Models count the tokens of experts by histc of integers; a CPU has it only for floats.
            if node.target is torch.histc:
                with part.graph.inserting_before(node):
                    node.update_arg(0, part.graph.call_method("float", node.args[:1]))
            if node.op == "get_attr":
                setattr(part, node.target, _moved(getattr(part, node.target)))
        part.recompile()
    return replace(unit, module=module, specs=tuple(replace(spec, device=CPU) for spec in unit.specs))


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device == META:
        return torch.zeros_like(value, device=CPU)
    return CPU if value in ("meta", META) else value
