"""The workload of a model: from its capture, for every micro-batch size.

    ModelSpec.of("gpt-65b", sequence=2048, precision="bf16").workload(8)      a name, a config, a module
    workload_of(specialized, sizes)                                           a model that runs

What a model has to place and move follows from its capture, as for a run; what it has to compute is counted on the
graphs of its code. Nothing is computed, and a model by name or config has no weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.compiled import SpecializedModel
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.codegen.parameters import owners_of, sizes_of
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.cost.flops import unit_cost
from gs_compile.planner.cost.meta import MetaCapture, meta_capture
from gs_compile.planner.cost.registry import built, check_length, named_config
from gs_compile.program.ir import EPILOGUE, PROLOGUE, TIED, Schedule, Unit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # any other is held against the rate of fp32
NUM_COMPONENTS = 2  # of the optimizer's state besides a master: Adam's moments


@dataclass(frozen=True)
class ModelSpec:
    """A model captured once, whose workload at any micro-batch size is asked for. `sequence`: tokens of a sample."""

    capture: MetaCapture
    name: str
    sequence: int

    @classmethod
    def of(
        cls,
        model: str | Path | PretrainedConfig | nn.Module,
        *,
        sequence: int,
        precision: str = "model",
        schedule: Schedule = "vertical",
    ) -> ModelSpec:
        """The specification of a name or path (as `named_config` takes it), a config of transformers, or a module.

        precision: as the option of the backend; "bf16" has fp32 masters, and gradients in fp32.
        schedule: "single" has two layers of every block.

        Raises `PlanError` for a model that cannot be built, and as the backend does for one that cannot be captured.
        """
        name = type(model).__name__
        if isinstance(model, str | Path):
            name, model = str(model), named_config(str(model))
        elif not isinstance(model, nn.Module):
            name = model.name_or_path or model.model_type
        check_length(getattr(model, "config", model), sequence)
        module = model if isinstance(model, nn.Module) else built(model)
        return cls(meta_capture(module, sequence=sequence, precision=precision, schedule=schedule), name, sequence)

    def workload(self, micro_batch_size: int) -> Workload:
        """The model at one micro-batch size, the memory inside its units' code counted at this size."""
        specialized, compilation = self.capture.specialized(micro_batch_size), self.capture.compilation
        owners = owners_of(specialized.split.units, compilation.captured)
        tied: set[Unit] = {
            graph.unit
            for graph in specialized.split.units
            for source in graph.sources
            if source.kind == "input" and owners.get(source.index) == TIED
        }
        sizes = sizes_of(specialized.split.units, owners, NUM_COMPONENTS)
        found = replace(workload_of(specialized, sizes, tied=tied), name=self.name, sequence=self.sequence)
        return _deepened(found, self.capture.num_layers, compilation.layers_of_a_block)


def workload_of(specialized: SpecializedModel, sizes: Sequence[UnitSize], *, tied: Set[Unit] = frozenset()) -> Workload:
    """The workload of a captured model. `tied`: the units that read parameters of "t"."""
    costs: dict[Hashable, UnitCost] = {}  # equal units share one
    by_unit: dict[Unit, UnitCost] = {}
    for graph, key in zip(specialized.split.units, specialized.uniform.keys, strict=True):
        if key not in costs:
            costs[key] = _cost(specialized, graph)
        by_unit[graph.unit] = costs[key]
    checkpoints = specialized.checkpoints
    return Workload(
        name="model",
        num_layers=specialized.split.num_layers,
        sizes=tuple(sizes),
        costs=by_unit,
        micro_batch_size=specialized.micro_batch_size,
        sequence=(*checkpoints[0].shape, 1)[1],
        x_nbytes=specialized.x_nbytes,
        side_nbytes=specialized.side_nbytes,
        dtype=DTYPES.get(checkpoints[-1].dtype, "fp32"),
        shape=specialized.shape_of(sizes, tied),
    )


def _cost(specialized: SpecializedModel, graph: UnitGraph) -> UnitCost:
    """Of the code that runs, where there is one: a unit on the meta device has none."""
    code = specialized.sized.codes[graph.unit]
    if isinstance(code, Differentiated) and not graph.is_meta:
        return unit_cost(graph, code.graph)
    return unit_cost(graph)


def _deepened(workload: Workload, num_layers: int, period: int) -> Workload:
    """The same with `num_layers` layers like the first `period`."""
    if workload.num_layers == num_layers:
        return workload
    layers = range(num_layers)
    known: Mapping[Unit, UnitSize] = {size.unit: size for size in workload.sizes}
    sizes = [size for size in workload.sizes if not isinstance(size.unit, int)]
    head = next((i for i, size in enumerate(sizes) if size.unit == EPILOGUE), len(sizes))
    sizes[head:head] = (replace(known[i % period], unit=i) for i in layers if i % period in known)
    costs: dict[Unit, UnitCost] = {layer: workload.costs[layer % period] for layer in layers}
    costs = {PROLOGUE: workload.costs[PROLOGUE], **costs, EPILOGUE: workload.costs[EPILOGUE]}
    frozen = workload.shape.frozen | {layer for layer in layers if layer % period in workload.shape.frozen}
    shape = replace(workload.shape, frozen=frozen)
    return replace(workload, num_layers=num_layers, sizes=tuple(sizes), costs=costs, shape=shape)
