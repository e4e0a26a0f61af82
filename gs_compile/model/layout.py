"""layout: which parameters belong to which unit, and the span of each in its unit's flat space."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.parameters import kept_dtype, mixed_dtypes, owners_of, padded, size_of
from gs_compile.errors import OptimizerError
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIED, Unit
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.handlers import Bindings
from gs_compile.runtime.tiers import Slice

Run = tuple[int, int, int]  # trained elements of one param group: start, stop, group


@dataclass(frozen=True)
class UnitLayout:
    """The parameters of a unit: trained ones first, by param group, then frozen ones, each at a multiple of QUANTUM."""

    unit: Unit
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[int | None, ...]  # of each parameter; None: frozen

    @property
    def spans(self) -> Iterator[Slice]:
        """Of the parameters in their order."""
        offset = 0
        for shape in self.shapes:
            yield Slice(self.unit, offset, shape)
            offset += padded(math.prod(shape))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The trained elements, cut where the param group changes."""
        runs: list[Run] = []
        for span, group in zip(self.spans, self.groups, strict=True):
            if group is None:
                continue
            stop = span.offset + padded(span.numel)
            start = runs.pop()[0] if runs and runs[-1][1:] == (span.offset, group) else span.offset
            runs.append((start, stop, group))
        return tuple(runs)

    def size(self, num_components: int) -> UnitSize:
        """What there is to place, with so many components of optimizer state besides a master."""
        numels = ((math.prod(s), group is not None) for s, group in zip(self.shapes, self.groups, strict=True))
        return size_of(self.unit, self.dtype, numels, num_components)


def arrange(
    compilation: Compilation, model: SpecializedModel, args: Sequence[Any], groups: Mapping[torch.Tensor, int]
) -> Iterator[tuple[UnitLayout, list[torch.nn.Parameter]]]:
    """The units of a model as its first call finds them; a parameter that several units read belongs to unit "t".

    groups: the param group of each parameter. Raises OptimizerError for a trained parameter without one, and for a unit
    of several dtypes.
    """
    by_unit: dict[Unit, list[torch.nn.Parameter]] = {}
    for index, unit in owners_of(model.split.units, compilation.captured).items():
        if args[index].requires_grad and args[index] not in groups:
            raise OptimizerError(
                f"{compilation.captured.inputs[index].path} is trained, but the gs_compile optimizer does not "
                "have it; give the optimizer all parameters that require a gradient, or freeze this one"
            )
        by_unit.setdefault(unit, []).append(args[index])
    for unit, parameters in by_unit.items():
        group_of = {p: groups[p] if p.requires_grad else None for p in parameters}
        parameters.sort(key=lambda p: math.inf if group_of[p] is None else group_of[p])  # type: ignore[arg-type, return-value]
        dtypes = {kept_dtype(parameter, compilation.options) for parameter in parameters}
        if len(dtypes) > 1:
            raise OptimizerError(mixed_dtypes(unit, dtypes))
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        yield UnitLayout(unit, dtypes.pop(), shapes, tuple(group_of[p] for p in parameters)), parameters


def owners(model: SpecializedModel, args: Sequence[Any], spans: Mapping[int, Slice]) -> dict[int, Unit]:
    """The unit of each parameter that a capture reads, by input index; `spans` are those of the arguments.

    Raises `OptimizerError` for one that is not on the tiers, or in another unit there.
    """
    found: dict[int, Unit] = {}
    for graph in model.split.units:
        for source in graph.sources:
            if source.kind == "input" and isinstance(args[source.index], torch.nn.Parameter):
                span = spans.get(source.index)
                if span is None or span.unit not in (graph.unit, TIED):
                    raise OptimizerError(
                        f"this call reads a parameter of shape {tuple(args[source.index].shape)} in unit "
                        f"{graph.unit} that the first call did not: call the model the same way in every step"
                    )
                found[source.index] = span.unit
    return found


def tied_units(model: SpecializedModel, owners: Mapping[int, Unit]) -> set[Unit]:
    """The units that read parameters of unit "t"."""
    tied = {index for index, unit in owners.items() if unit == TIED}
    return {g.unit for g in model.split.units if any(s.kind == "input" and s.index in tied for s in g.sources)}


def bindings(
    model: SpecializedModel, args: Sequence[Any], spans: Mapping[int, Slice], units: Sequence[Unit]
) -> Bindings:
    """How one capture reads its inputs: parameters from the tiers, buffers and constants as they are."""
    parameters: dict[Unit, list[Binding]] = {unit: [] for unit in units}
    for index, unit in owners(model, args, spans).items():
        span = spans[index]
        parameters[unit].append(Binding(index, span.offset, span.shape, bool(args[index].requires_grad)))
    others = {
        graph.unit: {
            source.index: args[source.index]
            for source in graph.sources
            if source.kind == "input" and not isinstance(args[source.index], torch.nn.Parameter)
        }
        for graph in model.split.units
    }
    return Bindings(parameters, others)
