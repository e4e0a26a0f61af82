"""workloads: what one rank's share of a model has to store, move and compute, at any micro-batch size.

A name, a config or a module is captured without its weights, once for all requests that need the same code. A given
`Workload` is scaled to the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from gs_compile.errors import PlanError
from gs_compile.options import Masters
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.boundaries import BoundaryNbytes
from gs_compile.placement.levels import Levels
from gs_compile.placement.shards import shared
from gs_compile.placement.workload import UnitCost, Workload
from gs_compile.planner.builder import workload_levels
from gs_compile.planner.cost.known_workloads import KnownWorkloads
from gs_compile.planner.request import SILENT, Request
from gs_compile.program.ir import Schedule, Unit

if TYPE_CHECKING:
    from gs_compile.planner.cost.workload import ModelSpec

OF_CODE = ("sequence", "precision", "masters", "lora")  # fields of a request that a capture depends on
OF_LAYOUT = ("frozen", "optimizer", "states")  # fields that may differ for the same capture
IN_A_WORKLOAD = {  # a given workload has these already, so a request cannot ask for them
    "the sizes of its states": ("masters", "states", "optimizer"),
    "the costs of its code": ("layer_tokens",),
    "the sizes of its parameters": ("frozen",),
    "parameters that are trained": ("lora",),
}


class CapturedWorkloads:
    """The workloads of a model that is captured without its weights. known, keeps: see `plan.planner_of`."""

    has_pieces: ClassVar = True  # the costs of layers that run on some tokens at a time are known

    def __init__(self, model: Any, request: Request, known: Iterable[Workloads], *, keeps: bool) -> None:
        self.model, self.request, self.keeps = model, request, keeps
        asked = {name: getattr(request, name) for name in (*OF_CODE, *OF_LAYOUT)}
        self._kept = KnownWorkloads.of(model, asked) if keeps else KnownWorkloads()
        self.code = [asked[name] for name in OF_CODE]
        like = (each.captured for each in known if isinstance(each, CapturedWorkloads) and each.code == self.code)
        self.captured: Callable[[Schedule], ModelSpec] = next(like, cache(self._captured))
        cut = request.spec.block_cut
        self._schedule = next(name for name, spec in SCHEDULES.items() if spec.block_cut is cut)  # it cuts blocks alike

    def asked(self, request: Request) -> CapturedWorkloads:
        """The workloads of this model for another request."""
        return CapturedWorkloads(self.model, request, [self], keeps=self.keeps)

    def _captured(self, schedule: Schedule) -> ModelSpec:
        from gs_compile.planner.cost.workload import ModelSpec  # late: with torch's compiler

        return ModelSpec.of(self.model, schedule=schedule, **dict(zip(OF_CODE, self.code, strict=True)))

    def _spec(self) -> ModelSpec:
        layout = {name: getattr(self.request, name) for name in OF_LAYOUT}
        return replace(self.captured(self._schedule), **layout)

    def workload(self, size: int, masters: Masters | None = None, layer_tokens: int | None = None) -> Workload:
        """The workload, with layers that save only their inputs."""
        key = size, masters, layer_tokens, self.request.ranks
        return self._kept.get_or((self._schedule, *key), lambda: self._spec().workload(*key))

    def levelled(self, workload: Workload) -> Workload:
        """A result of `workload`, with the levels of its layers."""
        key = self._schedule, workload.micro_batch_size, "levels"
        return replace(workload, costs=self._kept.get_or(key, lambda: self._spec().levelled(workload)).costs)


class GivenWorkloads:
    """The workloads that follow from a given one, scaled to other sizes.

    Raises `PlanError` if the request asks for what a given workload does not tell.
    """

    has_pieces: ClassVar = False

    def __init__(self, model: Workload, request: Request) -> None:
        self.model, self.request = model, request
        for what, names in IN_A_WORKLOAD.items():
            if any(getattr(request, name) != SILENT[name] for name in names):
                leave = " and ".join(", ".join(names).rsplit(", ", 1))
                raise PlanError(f"the workload {model.name} already has {what}: leave {leave} out")

    def asked(self, request: Request) -> GivenWorkloads:
        """The workloads of the given one for another request."""
        return GivenWorkloads(self.model, request)

    def workload(self, size: int, masters: Masters | None = None, layer_tokens: int | None = None) -> Workload:
        """The workload, with layers that save only their inputs."""
        return shared(self._scaled(size).bare(), self.request.ranks)

    def levelled(self, workload: Workload) -> Workload:
        """A result of `workload`, with the levels of its layers."""
        return shared(self._scaled(workload.micro_batch_size), self.request.ranks)

    def _scaled(self, size: int) -> Workload:
        if cut := self.request.spec.block_cut:
            raise PlanError(
                f"the {self.request.schedule} schedule cuts each block in {cut().parts}, and the numbers of the "
                f"workload {self.model.name} do not tell where: give the model by name, as a config or as a module"
            )
        times = size / self.model.micro_batch_size
        whole = self.model.scaled(code=times, activations=times, workspace=times)
        return replace(whole, micro_batch_size=size)


Workloads = CapturedWorkloads | GivenWorkloads


@dataclass(frozen=True)
class Levelled:
    """What the layers of a workload may save (`problem.Saving`)."""

    levelled: Callable[[], Workload]

    def levels(self, x_nbytes: Sequence[BoundaryNbytes]) -> Levels:
        return workload_levels(self.levelled(), len(x_nbytes))

    def costs(self, *, last: bool) -> Mapping[Unit, UnitCost]:
        return self.levelled().costs

    def reasons(self) -> str:
        return ""
