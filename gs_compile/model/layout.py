"""members: which parameters belong to which unit, and where each stands in its unit's flat space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.codegen.parameters import kept_dtype, mixed_dtypes, owners_of, padded, size_of
from gs_compile.errors import OptimizerError
from gs_compile.model.optim import TieredOptimizer
from gs_compile.options import Options
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import TIED, Unit
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.handlers import Bindings
from gs_compile.runtime.tiers import Slice

if TYPE_CHECKING:
    from gs_compile.codegen.compiled import Compilation, SpecializedModel


class Members:
    """The parameters of a model by unit, as the first call found them.

    In a unit trained ones come first, by param group, then frozen ones, each at a multiple of QUANTUM elements. A
    parameter that several units read is a member of "t".
    """

    def __init__(
        self, optimizer: TieredOptimizer, compilation: Compilation, layout: SpecializedModel, args: Sequence[Any]
    ) -> None:
        self.options: Options = compilation.options
        self.by_unit: dict[Unit, list[torch.nn.Parameter]] = {}
        self.slices: dict[int, Slice] = {}  # by the id of a parameter
        self._groups = optimizer.group_of
        for index, unit in owners_of(layout.split.units, compilation.captured).items():
            if args[index].requires_grad and args[index] not in self._groups:
                raise OptimizerError(
                    f"{compilation.captured.inputs[index].path} is trained, but the gs_compile optimizer does not "
                    "have it; give the optimizer all parameters that require a gradient, or freeze this one"
                )
            self.by_unit.setdefault(unit, []).append(args[index])
        for unit, members in self.by_unit.items():
            self._arrange(unit, members)
        self.parameters = [parameter for members in self.by_unit.values() for parameter in members]
        self._trained = {id(parameter) for parameter in self.parameters if parameter.requires_grad}

    def _arrange(self, unit: Unit, members: list[torch.nn.Parameter]) -> None:
        members.sort(key=lambda p: self._groups[p] if p.requires_grad else math.inf)  # stable
        dtypes = {kept_dtype(parameter, self.options) for parameter in members}
        if len(dtypes) > 1:
            raise OptimizerError(mixed_dtypes(unit, dtypes))
        offset = 0
        for parameter in members:
            self.slices[id(parameter)] = Slice(unit, offset, tuple(parameter.shape))
            offset += padded(parameter.numel())

    @property
    def dtypes(self) -> dict[Unit, torch.dtype]:
        """Of the parameters of each unit, on the tiers."""
        return {unit: kept_dtype(members[0], self.options) for unit, members in self.by_unit.items()}

    @property
    def runs(self) -> dict[Unit, tuple[tuple[int, int, int], ...]]:
        """Stretches of trained elements of one param group: start, stop, group."""
        return {unit: tuple(self._runs(members)) for unit, members in self.by_unit.items()}

    def sizes(self, num_components: int) -> tuple[UnitSize, ...]:
        """What each unit has to place, with so many components of optimizer state besides a master."""
        return tuple(self._size(unit, members, num_components) for unit, members in self.by_unit.items())

    def bindings(self, layout: SpecializedModel, args: Sequence[Any]) -> Bindings:
        """How one capture reads its inputs."""
        parameters: dict[Unit, list[Binding]] = {unit: [] for unit in self.by_unit}
        for index, unit in self.owners(layout, args).items():
            found = self.slices[id(args[index])]
            parameters[unit].append(Binding(index, found.offset, found.shape, bool(args[index].requires_grad)))
        return Bindings(parameters, _others(layout, args))

    def owners(self, layout: SpecializedModel, args: Sequence[Any]) -> dict[int, Unit]:
        """The unit of each parameter that a capture reads, by input index.

        Raises `OptimizerError` for one that is not on the tiers, or in another unit there.
        """
        owners: dict[int, Unit] = {}
        for graph in layout.split.units:
            for source in graph.sources:
                if source.kind == "input" and isinstance(args[source.index], torch.nn.Parameter):
                    place = self.slices.get(id(args[source.index]))
                    if place is None or place.unit not in (graph.unit, TIED):
                        raise OptimizerError(
                            f"this call reads a parameter of shape {tuple(args[source.index].shape)} in unit "
                            f"{graph.unit} that the first call did not: call the model the same way in every step"
                        )
                    owners[source.index] = place.unit
        return owners

    def check(self, args: Sequence[Any]) -> None:
        """Raise `OptimizerError` where a training call asks for other gradients than the first call did."""
        for arg in args:
            if not isinstance(arg, torch.Tensor):
                continue
            known = id(arg) in self.slices
            if known and arg.requires_grad != (id(arg) in self._trained):
                raise OptimizerError(
                    f"requires_grad of a parameter of shape {tuple(arg.shape)} has changed since the first call: what "
                    "is trained is settled there. Make the model and the optimizer anew (state_dict() has the values)"
                )
            if not known and arg.requires_grad:
                raise OptimizerError(
                    f"an input of shape {tuple(arg.shape)} requires a gradient; with parameters on the tiers only they "
                    "get gradients: detach it, or use a torch.optim optimizer, which leaves parameters in memory"
                )

    def _size(self, unit: Unit, members: Sequence[torch.nn.Parameter], num_components: int) -> UnitSize:
        trained, frozen = ([p.numel() for p in members if p.requires_grad == wanted] for wanted in (True, False))
        return size_of(unit, trained, frozen, kept_dtype(members[0], self.options), num_components)

    def _runs(self, members: Sequence[torch.nn.Parameter]) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        for parameter in members:
            if not parameter.requires_grad:
                continue
            group, offset = self._groups[parameter], self.slices[id(parameter)].offset
            stop = offset + padded(parameter.numel())
            if runs and runs[-1][2] == group and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], stop, group)
            else:
                runs.append((offset, stop, group))
        return runs


def _others(layout: SpecializedModel, args: Sequence[Any]) -> Mapping[Unit, Mapping[int, torch.Tensor]]:
    """What units read beside parameters and the batch: buffers, constants."""
    return {
        graph.unit: {
            source.index: args[source.index]
            for source in graph.sources
            if source.kind == "input" and not isinstance(args[source.index], torch.nn.Parameter)
        }
        for graph in layout.split.units
    }
