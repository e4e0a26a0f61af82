"""The workload of a model: from its capture, for every micro-batch size.

    ModelSpec.of("gpt-65b", sequence=2048, precision="bf16").workload(8)      a name, a config, a module
    workload_of(specialized, sizes)                                           a model that runs

What a model has to place and move follows from its capture, as for a run; what it has to compute is counted on the
graphs of its code. Nothing is computed, and a model by name or config has no weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gs_compile.capture.call import captured_call
from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.layout import arrange, tied_units
from gs_compile.errors import CaptureError, GreedySnakeError
from gs_compile.options import Options
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.cost.flops import unit_cost
from gs_compile.planner.cost.meta import DEPTH, meta_copy, meta_tokens, repeated
from gs_compile.planner.cost.registry import built, check_length, named_config
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Schedule, Unit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # any other is held against the rate of fp32
NUM_COMPONENTS = 2  # of the optimizer's state besides a master: Adam's moments


@dataclass(frozen=True)
class ModelSpec:
    """A model captured once without its weights, whose workload at any micro-batch size is asked for.

    sequence: tokens of a sample. symbols: symbolic sizes beside the batch.
    num_layers: may be more than were captured: they are alike then. In the single schedule a layer is half a block,
        and a micro-batch the whole batch.
    """

    name: str
    sequence: int
    compilation: Compilation
    symbols: Mapping[str, int]
    num_layers: int = 0

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

        The model is neither changed nor read. Raises `PlanError` for a model that cannot be built, `InspectionError`
        where Dynamo cannot capture it without weights, and whatever the backend would refuse it with.
        """
        name = type(model).__name__
        if isinstance(model, str | Path):
            name, model = str(model), named_config(str(model))
        elif not isinstance(model, nn.Module):
            name = model.name_or_path or model.model_type
        check_length(getattr(model, "config", model), sequence)
        module = model if isinstance(model, nn.Module) else built(model)
        expert = {"compiler": "eager", "schedule": schedule}
        options = Options.of({"outputs": "loss", "precision": precision, "expert": expert})
        return cls._captured(name, sequence, meta_copy(getattr(module, "_orig_mod", module), options).train(), options)

    @classmethod
    def _captured(cls, name: str, sequence: int, model: nn.Module, options: Options) -> ModelSpec:
        """Captured with two blocks, where these can be seen to stand for all; else whole."""

        def capture() -> ModelSpec:
            graph, symbols = captured_call(model, meta_tokens(model, sequence))
            return cls(name, sequence, Compilation(graph, options), symbols)

        if (stack := repeated(model)) is not None:
            blocks = list(stack)
            del stack[DEPTH:]
            with suppress(GreedySnakeError):  # code that counts its blocks, for one, is captured whole
                found = capture()
                shortened = found.specialized(1)
                if _is_alike(shortened):
                    return replace(found, num_layers=len(blocks) * shortened.split.layers_of_a_block)
            stack.extend(blocks[DEPTH:])
        found = capture()
        return replace(found, num_layers=found.specialized(1).split.num_layers)

    def specialized(self, micro_batch_size: int) -> SpecializedModel:
        """The captured layers at one micro-batch size; raises `CaptureError` where their code fixes the batch size."""
        if not self.compilation.captured.batch_symbols:
            raise CaptureError(
                f"the model's code fixes the batch size, so it cannot run in micro-batches of {micro_batch_size}; take "
                "the size from the input's shape"
            )
        return self.compilation.specialized(micro_batch_size, self.symbols, alone=self.compilation.halved)

    def workload(self, micro_batch_size: int) -> Workload:
        """The model at one micro-batch size, the memory inside its units' code counted at this size."""
        specialized = self.specialized(micro_batch_size)
        layout = arrange(specialized.split, self.compilation.captured, NUM_COMPONENTS)
        tied = tied_units(specialized.split, layout.spans)
        found = replace(workload_of(specialized, layout.sizes, tied=tied), name=self.name, sequence=self.sequence)
        return _deepened(found, self.num_layers, specialized.split.layers_of_a_block)


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
    return unit_cost(graph, None if graph.is_meta else specialized.codes[graph.unit].graph)


def _is_alike(found: SpecializedModel) -> bool:
    """Whether the blocks that were captured can stand for more of them."""
    num_captured, num_classes = found.split.num_layers, len(found.uniform.layer_classes)
    return (num_captured, num_classes) == (DEPTH * found.split.layers_of_a_block, found.split.layers_of_a_block)


def _deepened(workload: Workload, num_layers: int, period: int) -> Workload:
    """The same with `num_layers` layers like the first `period`."""
    if workload.num_layers == num_layers:
        return workload
    layers, size_of = range(num_layers), {size.unit: size for size in workload.sizes}
    units: list[Unit] = [unit for unit in size_of if not isinstance(unit, int)]
    head = units.index(EPILOGUE) if EPILOGUE in units else len(units)
    units[head:head] = layers
    like: dict[Unit, Unit] = {layer: layer % period for layer in layers}
    sizes = (replace(size_of[like.get(unit, unit)], unit=unit) for unit in units if like.get(unit, unit) in size_of)
    return replace(
        workload,
        num_layers=num_layers,
        sizes=tuple(sizes),
        costs={unit: workload.costs[like.get(unit, unit)] for unit in (PROLOGUE, *layers, EPILOGUE)},
        shape=replace(
            workload.shape,
            frozen=workload.shape.frozen | {layer for layer in layers if like[layer] in workload.shape.frozen},
        ),
    )
