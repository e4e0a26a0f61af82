"""workloads: the numbers that planning needs, of real models.

    captured_workload("gpt-65b", micro_batch_size=8, sequence=2048, precision="bf16")    a name, a config, a module
    workload_of(layout, sizes, name="mine", sequence=1024)                                a model that runs

What a model has to place and move follows from its capture, as for a run; what it has to compute is counted on the
graphs of its code. Nothing is computed, and a model by name or config has no weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.compiled import SpecializedModel
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.codegen.parameters import owners_of, size_of
from gs_compile.errors import CaptureError
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.cost.flops import unit_cost
from gs_compile.planner.cost.meta import Blueprint, blueprint
from gs_compile.planner.cost.registry import built, check_length, named
from gs_compile.program.ir import TIED, Schedule, Unit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # any other is held against the rate of fp32


def captured_workload(
    model: str | Path | PretrainedConfig | nn.Module,
    *,
    micro_batch_size: int,
    sequence: int,
    precision: str = "model",
    num_components: int = 2,
    name: str | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> Workload:
    """The workload of one micro-batch size; see `Sketch` for several of one model."""
    sketch = Sketch.of(
        model, sequence=sequence, precision=precision, num_components=num_components, name=name, inputs=inputs
    )
    return sketch.workload(micro_batch_size)


class Sketch:
    """A model captured once, whose workload at any micro-batch size is asked for."""

    def __init__(self, found: Blueprint, name: str, sequence: int, num_components: int) -> None:
        self.blueprint = found
        self.name = name
        self.sequence = sequence
        self.num_components = num_components

    @classmethod
    def of(
        cls,
        model: str | Path | PretrainedConfig | nn.Module,
        *,
        sequence: int,
        precision: str = "model",
        num_components: int = 2,
        name: str | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        schedule: Schedule = "vertical",
    ) -> Sketch:
        """The sketch of a name or path (as `named` takes it), a config of transformers, or a module.

        sequence: tokens of a sample.
        precision: as the option of the backend; "bf16" has fp32 masters, and gradients in fp32.
        num_components: of the optimizer's state besides a master; Adam's two moments.
        inputs: what forward is called with, by name, the batch along dimension 0; None: token ids and labels.
        schedule: "single" has two layers of every block.

        Raises `PlanError` for a model that cannot be built, and as the backend does for one that cannot be captured.
        """
        if isinstance(model, str | Path):
            name, model = name or str(model), named(str(model))
        check_length(getattr(model, "config", model), sequence)
        if not isinstance(model, nn.Module):
            name, model = name or str(model.name_or_path or model.model_type), built(model)
        found = blueprint(model, sequence=sequence, precision=precision, inputs=inputs, schedule=schedule)
        return cls(found, name or type(model).__name__, sequence, num_components)

    def workload(self, micro_batch_size: int) -> Workload:
        """The model at one micro-batch size."""
        layout, captured = self.blueprint.layout(micro_batch_size), self.blueprint.compilation.captured
        owners = owners_of(layout.split.units, captured)
        readers: set[Unit] = {
            graph.unit
            for graph in layout.split.units
            for source in graph.sources
            if source.kind == "input" and owners.get(source.index) == TIED
        }
        sizes = sizes_of(layout, owners, self.num_components)
        found = workload_of(layout, sizes, name=self.name, sequence=self.sequence, tied=readers)
        return _deepened(found, self.blueprint.num_layers, self.blueprint.compilation.layers_of_a_block)


def workload_of(
    layout: SpecializedModel,
    sizes: Sequence[UnitSize],
    *,
    name: str = "model",
    sequence: int | None = None,
    tied: Set[Unit] = frozenset(),
) -> Workload:
    """What a captured model has to place, move and compute.

    sequence: tokens of a sample; None: the second dimension of a checkpoint. tied: the units that read parameters
    of "t".
    """
    costs: dict[Hashable, UnitCost] = {}  # equal units share one
    by_unit: dict[Unit, UnitCost] = {}
    for graph, key in zip(layout.split.units, layout.uniform.keys, strict=True):
        if key not in costs:
            costs[key] = _cost(layout, graph)
        by_unit[graph.unit] = costs[key]
    checkpoints = [
        spec
        for graph in layout.split.units
        for kind, spec in zip(graph.results, graph.result_specs, strict=True)
        if kind == "x"
    ]
    return Workload(
        name=name,
        num_layers=layout.split.num_layers,
        sizes=tuple(sizes),
        costs=by_unit,
        micro_batch_size=layout.micro_batch_size,
        sequence=sequence or (*checkpoints[0].shape, 1)[1],
        x_nbytes=max(spec.nbytes for spec in checkpoints),
        side_nbytes=sum(spec.nbytes for spec in layout.split.sides),
        dtype=DTYPES.get(checkpoints[-1].dtype, "fp32"),
        shape=layout.shape_of(sizes, tied),
    )


def sizes_of(layout: SpecializedModel, owners: Mapping[int, Unit], num_components: int) -> tuple[UnitSize, ...]:
    """What each unit has to place, read off the capture: the parameters `owners` names, by input index."""
    specs = {
        source.index: spec
        for graph in layout.split.units
        for source, spec in zip(graph.sources, graph.specs, strict=True)
        if source.kind == "input" and source.index in owners
    }
    members: dict[Unit, list[Any]] = {}
    for index, unit in owners.items():
        members.setdefault(unit, []).append(specs[index])
    sizes = []
    for unit, found in members.items():
        dtypes = {spec.dtype for spec in found}
        if len(dtypes) > 1:
            raise CaptureError(
                f"unit {unit} has parameters of {', '.join(sorted(map(str, dtypes)))}; greedysnake keeps a unit in one "
                "flat buffer of one dtype: convert the model with .to(dtype)"
            )
        trained, frozen = (
            [torch.Size(spec.shape).numel() for spec in found if spec.requires_grad == wanted]
            for wanted in (True, False)
        )
        sizes.append(size_of(unit, trained, frozen, dtypes.pop(), num_components))
    return tuple(sizes)


# ----------------------------------------------------------------------------------------------------------------------


def _cost(layout: SpecializedModel, graph: UnitGraph) -> UnitCost:
    """Of the code that runs, where there is one: a unit on the meta device has none."""
    code = layout.sized.codes[graph.unit]
    if isinstance(code, Differentiated) and all(spec.device.type != "meta" for spec in graph.specs):
        return unit_cost(graph, code.graph)
    return unit_cost(graph)


def _deepened(workload: Workload, num_layers: int, period: int) -> Workload:
    """The same with `num_layers` layers like the first `period`."""
    if workload.num_layers == num_layers:
        return workload
    layers = range(num_layers)
    sizes = [size for size in workload.sizes if not isinstance(size.unit, int)]
    known = {size.unit: size for size in workload.sizes}
    head = next((i for i, size in enumerate(sizes) if size.unit == "h"), len(sizes))
    sizes[head:head] = (replace(known[i % period], unit=i) for i in layers if i % period in known)
    costs: dict[Unit, UnitCost] = {"e": workload.costs["e"]}
    costs |= {layer: workload.costs[layer % period] for layer in layers}
    costs |= {"h": workload.costs["h"]}
    shape = workload.shape
    frozen = frozenset(layer for layer in layers if layer % period in shape.frozen)
    shape = replace(shape, frozen=shape.frozen | frozen)
    return replace(workload, num_layers=num_layers, sizes=tuple(sizes), costs=costs, shape=shape)
