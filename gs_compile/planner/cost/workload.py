"""The workload of a model: from its capture, for every micro-batch size.

    ModelSpec.of("gpt-65b", sequence=2048, precision="bf16").workload(8)      a name, a config, a module
    workload_of(specialized, sizes)                                           a model that runs

What a model has to store and move follows from its capture, as for a run; what it has to compute is counted on the
graphs of its code. Nothing is computed, and a model by name or config has no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gs_compile.capture.call import captured_call
from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.codegen.layout import encoded, lay_out, of_layers, tied_units
from gs_compile.codegen.levels import SavedLevel
from gs_compile.errors import CaptureError, GreedySnakeError, PlanError
from gs_compile.options import Frozen, Masters, Options
from gs_compile.placement.boundaries import BoundaryNbytes
from gs_compile.placement.workload import ACTIVATIONS, LevelCost, UnitCost, UnitSize, Workload
from gs_compile.planner.cost.model import (
    DEPTH,
    adapted,
    built,
    check_length,
    meta_copy,
    meta_tokens,
    named_config,
    repeated,
)
from gs_compile.planner.request import OptimizerName, States
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Schedule, Unit
from gs_compile.runtime.formats import StateType, moment_types, types_of
from gs_compile.runtime.kernels import ADAMW
from gs_compile.runtime.muon import NS_STEPS, Matrices, matrices_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # any other counts at the rate of fp32
STATES: Mapping[str, StateType] = {"fp32": None, "bf16": torch.bfloat16, "8bit": "8bit"}  # of moments


@dataclass(frozen=True)
class ModelSpec:
    """A model captured once without its weights, which has a workload for any micro-batch size.

    sequence: tokens of a sample. symbols: symbolic sizes in addition to the batch.
    num_layers: may be more than were captured, if layers are equal. Depending on the schedule, a layer may be a part of
        a block, and a micro-batch the whole batch. optimizer, states: as in `Request`. frozen: as in `Options`.
    costs: those counted so far, by micro-batch size and tokens of pieces; they do not depend on masters and codecs.
    """

    name: str
    sequence: int
    compilation: Compilation
    symbols: Mapping[str, int]
    num_layers: int = 0
    optimizer: OptimizerName = "adamw"
    states: States = "fp32"
    frozen: Frozen | None = None
    costs: dict[tuple[int, int | None], Mapping[Unit, UnitCost]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        model: str | Path | PretrainedConfig | nn.Module,
        *,
        sequence: int,
        precision: str | None = "model",
        schedule: Schedule = "vertical",
        masters: Masters | None = None,
        lora: int | None = None,
    ) -> ModelSpec:
        """The specification of a name or path (as `named_config` takes it), a config of transformers, or a module.

        precision: as the option of the backend; "bf16" has fp32 masters, and gradients in fp32. None: "bf16" for a
            name or config, "model" for a module.
        schedule: one that cuts blocks makes several layers of each. masters: as in `Expert`. lora: the rank of adapters
            that alone are trained, for a name or config.

        The model is neither changed nor read. Raises `PlanError` for a model that cannot be built, `InspectionError`
        if Dynamo cannot capture it without weights, and the errors with which the backend would refuse it.
        """
        name, module, config = _told_apart(model)
        if lora and module is not None:
            raise PlanError(f"lora is {lora}, but lora needs a model by name, or its config")
        expert = {"compiler": "eager", "schedule": schedule, "masters": masters}
        precision = precision or ("bf16" if module is None else "model")
        options = Options.of({"outputs": "loss", "precision": precision, "expert": expert})
        check_length(config, sequence)
        name += f" with LoRA of rank {lora}" if lora else ""

        def whole() -> nn.Module:
            return (built(config) if module is None else meta_copy(module, options)).train()

        def capture(copy: nn.Module) -> ModelSpec:
            if module is None:
                copy = meta_copy(adapted(copy, lora) if lora else copy, options)
            graph, symbols = captured_call(copy, meta_tokens(copy, sequence))
            return cls(name, sequence, Compilation(graph, options), symbols)

        return _shortened(whole, capture)

    def specialized(self, micro_batch_size: int) -> SpecializedModel:
        """The captured layers at one micro-batch size; raises `CaptureError` if their code fixes the batch size."""
        if not self.compilation.captured.batch_symbols:
            raise CaptureError(
                f"the model's code fixes the batch size{self.compilation.captured.fixed_at}, so it cannot run in "
                f"micro-batches of {micro_batch_size}; take the size from the input's shape"
            )
        return self.compilation.specialized(micro_batch_size, self.symbols, alone=self.compilation.schedule.whole_batch)

    def levelled(self, workload: Workload) -> Workload:
        """The workload of this model with the levels of its layers."""
        return levelled(workload, self.specialized(workload.micro_batch_size))

    def workload(
        self, micro_batch_size: int, masters: Masters | None = None, layer_tokens: int | None = None, world: int = 1
    ) -> Workload:
        """The workload of one of `world` ranks at one micro-batch size, including the memory of its code.

        masters: None: those of the specification. layer_tokens: as in `Decision`.
        """
        specialized = self.specialized(micro_batch_size).in_pieces(layer_tokens)
        pairs = (masters or self.compilation.options.expert.masters) != "whole"
        types = partial(types_of, moments=moment_types(STATES[self.states], ADAMW.states), pairs=pairs)
        captured = self.compilation.captured
        codecs = encoded(specialized.split, captured, self.frozen)
        matrices = self._matrices(specialized)
        layout = lay_out(specialized.split, captured, types, share=(0, world), codecs=codecs, matrices=matrices)
        tied = tied_units(specialized.split, layout.spans)
        key = micro_batch_size, layer_tokens
        if key not in self.costs:
            self.costs[key] = unit_costs(specialized)
        found = workload_of(specialized, layout.sizes, tied=tied, costs=self.costs[key])
        kinds = {each.is_pair for each in layout.types.values() if each.has_master}
        masters = ("split" if kinds.pop() else "whole") if kinds else None
        found = replace(found, name=self.name, sequence=self.sequence, masters=masters, world=world)
        return _deepened(found, self.num_layers, specialized.split.layers_per_block)

    def _matrices(self, specialized: SpecializedModel) -> dict[int, Matrices] | None:
        """The matrices that Muon orthogonalizes, by names and shapes alone."""
        if self.optimizer != "muon":
            return None
        captured = self.compilation.captured
        trained = {i: each for i, each in of_layers(specialized.split, captured).items() if each.requires_grad}
        found = {i: matrices_of(captured.inputs[i].path, each.shape, (), NS_STEPS) for i, each in trained.items()}
        return {index: each for index, each in found.items() if each is not None}


def _told_apart(model: str | Path | PretrainedConfig | nn.Module) -> tuple[str, nn.Module | None, Any]:
    """The name of a model; the model itself if it is a module; and its config, if it has one."""
    if isinstance(model, str | Path):
        return str(model), None, named_config(str(model))
    if isinstance(model, nn.Module):
        return type(model).__name__, getattr(model, "_orig_mod", model), getattr(model, "config", model)
    return model.name_or_path or model.model_type, None, model


def unit_cost(unit: UnitGraph, code: Differentiated) -> UnitCost:
    """The cost of a unit with this code, for one micro-batch: FLOPs and memory, counted on its graphs, which are those
    that are compiled. Nothing runs.
    """
    backward = code.cost(code.last_name).flops if code.is_trained or unit.unit == EPILOGUE else 0.0
    return UnitCost(
        forward_flops=code.cost("forward").flops,
        backward_flops=backward,
        workspace_nbytes=code.workspace_nbytes,
        on_all=code.on_all,
    )


def unit_costs(specialized: SpecializedModel) -> Mapping[Unit, UnitCost]:
    """The cost of each unit of a captured model."""
    codes, firsts = specialized.counted, classes(specialized)  # equal units share one
    costs = {key: unit_cost(graph, codes[graph.unit]) for key, graph in firsts.items()}
    return {graph.unit: costs[key] for graph, key in keyed(specialized)}


def keyed(specialized: SpecializedModel) -> Iterable[tuple[UnitGraph, Hashable]]:
    """Each unit, and the key of its class."""
    return zip(specialized.split.units, specialized.uniform.keys, strict=True)


def classes(specialized: SpecializedModel) -> dict[Hashable, UnitGraph]:
    """The first unit of each class."""
    firsts: dict[Hashable, UnitGraph] = {}
    for graph, key in keyed(specialized):
        firsts.setdefault(key, graph)
    return firsts


def workload_of(
    specialized: SpecializedModel,
    sizes: Sequence[UnitSize],
    *,
    tied: Set[Unit] = frozenset(),
    costs: Mapping[Unit, UnitCost] | None = None,
) -> Workload:
    """The workload of a captured model. tied: the units that read parameters of "t". costs: if they are known."""
    checkpoints = specialized.checkpoints
    return Workload(
        name="model",
        num_layers=specialized.split.num_layers,
        sizes=tuple(sizes),
        costs=costs or unit_costs(specialized),
        micro_batch_size=specialized.micro_batch_size,
        sequence=(*checkpoints[0].shape, 1)[1],
        **{name: getattr(specialized, name) for name in ACTIVATIONS},
        dtype=DTYPES.get(checkpoints[-1].dtype, "fp32"),
        shape=specialized.shape_of(sizes, tied),
    )


def activations(layouts: Sequence[SpecializedModel]) -> dict[str, tuple[BoundaryNbytes, ...]]:
    """The bytes of each micro-batch, by the field of a layout."""
    return {name: tuple(getattr(each, name) for each in layouts) for name in ACTIVATIONS}


def levelled(workload: Workload, specialized: SpecializedModel) -> Workload:
    """`workload`, which is `specialized`'s, with the levels of its layers; a deeper one has those of equal layers.

    If the code was timed, a level saves the same part of a forward's seconds as of its FLOPs.
    """
    costs = dict(workload.costs)
    for layer in range(workload.num_layers):
        cost, code = costs[layer], specialized.counted[layer % specialized.split.num_layers]
        costs[layer] = replace(cost, levels=tuple(_level(saved, cost) for saved in code.levels))
    return replace(workload, costs=costs)


def _level(saved: SavedLevel, cost: UnitCost) -> LevelCost:
    """A level of saving of a layer with this cost, for one micro-batch."""
    names = ("nbytes", "reads_input", "forward_flops", "backward_flops")
    level = LevelCost(**{name: getattr(saved, name) for name in names})
    if cost.seconds is None:
        return level
    part = (cost.backward_flops - level.backward_flops) / max(cost.forward_flops, 1.0)
    forward, backward = cost.seconds
    return replace(level, seconds=(forward, max(backward - part * forward, 0.0)))


def _shortened(whole: Callable[[], nn.Module], capture: Callable[[nn.Module], ModelSpec]) -> ModelSpec:
    """The capture of a model with two blocks, if these represent all of them; otherwise of the whole model."""
    module = whole()
    if (stack := repeated(module)) is not None:
        number = len(stack)
        del stack[DEPTH:]
        with suppress(GreedySnakeError):  # for example, code that counts its blocks is captured whole
            spec = capture(module)
            shortened = spec.specialized(1)
            if _is_alike(shortened):
                return replace(spec, num_layers=number * shortened.split.layers_per_block)
        module = whole()
    spec = capture(module)
    return replace(spec, num_layers=spec.specialized(1).split.num_layers)


def _is_alike(shortened: SpecializedModel) -> bool:
    """Whether the captured blocks represent more of them."""
    num_captured, num_classes = shortened.split.num_layers, len(shortened.uniform.layer_classes)
    return (num_captured, num_classes) == (DEPTH * shortened.split.layers_per_block, shortened.split.layers_per_block)


def _deepened(workload: Workload, num_layers: int, period: int) -> Workload:
    """The workload with `num_layers` layers like the first `period`."""
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
