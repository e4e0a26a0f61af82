"""layout: the span of each parameter in its unit's flat space, and how a capture reads the parameters there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.parameters import kept_dtype, owners_of, padded, sizes_of
from gs_compile.errors import OptimizerError
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIED, Unit
from gs_compile.runtime.coordinators import Binding, Bindings
from gs_compile.runtime.tiers import Slice

Run = tuple[int, int, int]  # trained elements of one param group: start, stop, group


@dataclass(frozen=True)
class Layout:
    """The parameters of each unit: trained ones first, by param group, then frozen ones, each at a multiple of QUANTUM.

    A parameter that several units read belongs to unit "t".
    """

    spans: Mapping[int, Slice]  # by input index
    runs: Mapping[Unit, Sequence[Run]]  # the trained elements, cut where the param group changes
    sizes: tuple[UnitSize, ...]
    dtypes: Mapping[Unit, torch.dtype]


def arrange(
    compilation: Compilation,
    model: SpecializedModel,
    args: Sequence[Any],
    groups: Mapping[torch.Tensor, int],
    num_components: int,
) -> Layout:
    """The layout of a model as its first call finds it.

    groups: the param group of each parameter; num_components: of the optimizer's state besides a master. Raises
    OptimizerError for a trained parameter without a group, and CaptureError for a unit of several dtypes.
    """
    owners = owners_of(model.split.units, compilation.captured)
    for index in owners:
        if args[index].requires_grad and args[index] not in groups:
            raise OptimizerError(
                f"{compilation.captured.inputs[index].path} is trained, but the gs_compile optimizer does not "
                "have it; give the optimizer all parameters that require a gradient, or freeze this one"
            )
    group_of = {index: groups[args[index]] if args[index].requires_grad else len(groups) for index in owners}
    spans: dict[int, Slice] = {}
    runs: dict[Unit, list[Run]] = {unit: [] for unit in owners.values()}
    order = sorted(owners, key=lambda index: (list(runs).index(owners[index]), group_of[index]))
    stops = dict.fromkeys(runs, 0)
    for index in order:
        unit, arg, group = owners[index], args[index], group_of[index]
        spans[index], start = Slice(unit, stops[unit], tuple(arg.shape)), stops[unit]
        stops[unit] = stop = start + padded(arg.numel())
        if arg.requires_grad:
            continues = runs[unit] and runs[unit][-1][1:] == (start, group)
            runs[unit].append((runs[unit].pop()[0] if continues else start, stop, group))
    sizes = sizes_of(model.split.units, {index: owners[index] for index in order}, num_components)
    dtypes = {unit: kept_dtype(args[index], compilation.options) for index, unit in owners.items()}
    return Layout(spans, runs, sizes, dtypes)


def bind(
    model: SpecializedModel, args: Sequence[Any], spans: Mapping[int, Slice], units: Sequence[Unit] = ()
) -> tuple[Bindings, Set[Unit]]:
    """How one capture reads its inputs, and the units that read parameters of unit "t".

    spans: of the arguments that are parameters, by input index. Parameters come from the tiers, buffers and constants
    as they are. Raises `OptimizerError` for a parameter that is not on the tiers, or in another unit there.
    """
    parameters: dict[Unit, dict[int, Binding]] = {unit: {} for unit in units}
    others: dict[Unit, dict[int, torch.Tensor]] = {graph.unit: {} for graph in model.split.units}
    tied = set()
    for graph in model.split.units:
        for index in [source.index for source in graph.sources if source.kind == "input"]:
            arg, span = args[index], spans.get(index)
            if not isinstance(arg, torch.nn.Parameter):
                others[graph.unit][index] = arg
                continue
            if span is None or span.unit not in (graph.unit, TIED):
                raise OptimizerError(
                    f"this call reads a parameter of shape {tuple(arg.shape)} in unit {graph.unit} that the first call "
                    "did not: call the model the same way in every step"
                )
            binding = Binding(index, span.offset, span.shape, bool(arg.requires_grad))
            parameters.setdefault(span.unit, {})[index] = binding
            tied |= {graph.unit} if span.unit == TIED else set()
    return Bindings({unit: list(found.values()) for unit, found in parameters.items()}, others), tied
