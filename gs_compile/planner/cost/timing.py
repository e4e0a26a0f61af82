"""timing: how long the code of a model's units takes on the device it was captured on.

Every class of units runs once to warm up, which also compiles its code, then a few times on random numbers, as in a
step: with the sum over micro-batches of what it gives as gradients. Parameters are made up too, of one unit at a time,
so that nothing of the model is read and little memory is needed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from gs_compile.capture.graph import TensorSpec, UnitGraph
from gs_compile.codegen.compiled import SpecializedModel
from gs_compile.placement.workload import UnitCost, Workload
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Unit, height
from gs_compile.runtime.stream import device_of, without_autocast
from gs_compile.runtime.units import Accumulator, CompiledUnits, MicroBatch
from gs_compile.runtime.values import Gradient

MOST_RUNS = 15  # of one function; the median of these is not moved by a few that were disturbed
SEED = 0


def timed(workload: Workload, layout: SpecializedModel, *, seconds: float = 2.0) -> Workload:
    """`workload`, which is `layout`'s, with the seconds of each unit's forward and backward; a class is run once.

    seconds: how long all runs take together, without the first of each; one run each is made at any rate.
    """
    share = seconds / (2 * len(set(layout.uniform.keys)))
    known: dict[Hashable, UnitCost] = {}
    costs: dict[Unit, UnitCost] = {}
    for unit, key in zip(layout.split.units, layout.uniform.keys, strict=True):
        if key not in known:
            known[key] = _timed(workload, layout, unit, share)
        costs[unit.unit] = known[key]
    return replace(workload, costs=costs)


def _timed(workload: Workload, layout: SpecializedModel, unit: UnitGraph, share: float) -> UnitCost:
    """The cost of one unit; there are no seconds for one whose sizes depend on the data."""
    cost = workload.costs[unit.unit]
    if any(-1 in spec.shape for spec in (*unit.specs, *unit.result_specs)):
        return cost
    is_head = unit.unit == EPILOGUE
    has_backward = bool(unit.differentiable and unit.differentiated)
    runs_back = has_backward and height(unit.unit) >= height(workload.shape.first_grad)
    with torch.no_grad(), without_autocast():  # as in a step
        trial = _Trial(layout, unit)
        if is_head and runs_back:  # a step never runs its forward alone: compiling that would take longer than all else
            backward = _median_seconds(trial.backward, share, trial.device)
            forward = backward * cost.forward_flops / max(cost.backward_flops, 1.0)
        else:
            forward = _median_seconds(trial.forward, share, trial.device)
            backward = _median_seconds(trial.backward, share, trial.device) if runs_back else forward * is_head
    return replace(cost, forward_seconds=forward, backward_seconds=backward)


class _Trial:
    """One unit and made-up values for all that it reads."""

    def __init__(self, layout: SpecializedModel, unit: UnitGraph) -> None:
        self.unit = unit
        self.device = next((spec.device for spec in unit.specs if spec.shape), torch.device("cpu"))
        assert self.device.type != "meta", "there is no code to run on the meta device"
        generator = torch.Generator(self.device).manual_seed(SEED)
        most = _smallest_table(unit)
        self._reads: dict[str, Any] = {"w": {}, "batch": {}, "side": {}, "total": {}}
        fraction = torch.ones((), device=self.device)
        for source, spec in zip(unit.sources, unit.specs, strict=True):
            tensor = _random(spec, most, generator)
            if source.kind == "x":
                self._reads["x"] = tensor
            elif source.kind != "fraction":
                self._reads["w" if source.kind == "input" else source.kind][source.index] = tensor
        self._gradients = [_random(unit.result_specs[index], most, generator) for index in unit.differentiated]
        self._sums = self._zeros()
        self._units = CompiledUnits([MicroBatch(layout.split, layout.codes, {}, fraction, {})], SEED)

    def forward(self) -> None:
        self._units.forward(self.unit.unit, 0, wants=(), **self._reads)

    def backward(self) -> None:
        unit, reads = self.unit, {**self._reads, **self._sums}
        if unit.unit == EPILOGUE and "loss" in unit.results:
            self._units.head(unit.unit, 0, wants=("dx",), **reads)
        elif unit.unit == EPILOGUE:
            self._units.head_backward(unit.unit, 0, wants=("dx",), dy=self._gradients, **reads)
        elif unit.unit == PROLOGUE:
            main = unit.differentiated.index(unit.results.index("x")) if "x" in unit.results else 0
            self._units.embed_backward(unit.unit, 0, wants=(), dx=self._gradients[main], **reads)
        else:
            self._units.backward(unit.unit, 0, wants=("dx",), dx=self._gradients[0], **reads)

    def _zeros(self) -> dict[str, Any]:
        """The sums that gradients are added to, as in a step."""
        specs = {
            source.index: spec
            for source, spec in zip(self.unit.sources, self.unit.specs, strict=True)
            if source.kind == "input" and spec.requires_grad
        }
        views = {
            index: torch.zeros(spec.shape, dtype=torch.promote_types(spec.dtype, torch.float32), device=spec.device)
            for index, spec in specs.items()
        }
        sums = {"dw": Gradient(torch.empty(0), views)}
        return sums | ({} if self.unit.unit == PROLOGUE else {"dside": Accumulator()})


def _random(spec: TensorSpec, most: int, generator: torch.Generator) -> torch.Tensor:
    """Small normal numbers; for integers indices below `most`; for truth values True."""
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    if spec.dtype.is_floating_point:
        return made.normal_(0.0, 0.02, generator=generator)
    if spec.dtype == torch.bool:
        return made.fill_(True)
    return made.random_(0, most, generator=generator)


def _smallest_table(unit: UnitGraph) -> int:
    """The fewest rows of a matrix that the unit reads: an index below is inside all of them."""
    inputs = [spec for spec, source in zip(unit.specs, unit.sources, strict=True) if source.kind == "input"]
    return min((spec.shape[0] for spec in inputs if spec.dtype.is_floating_point and len(spec.shape) == 2), default=1)


def _median_seconds(run: Callable[[], None], share: float, device: torch.device) -> float:
    """Of at most `MOST_RUNS` runs, as many as fit into `share` seconds but one at least, after one more."""
    run()
    device_of(device).synchronize()
    found: list[float] = []
    while not found or (len(found) < MOST_RUNS and sum(found) + found[-1] <= share):
        start = time.perf_counter()
        run()
        device_of(device).synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
