"""planning: where everything lives, within the budgets, and the programs that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from gs_compile.config import Options, parse_bytes
from gs_compile.errors import MemoryBudgetError, OptionError
from gs_compile.machine import DEFAULT_SHARE, available_memory, format_bytes, usable_memory
from gs_compile.passes.cut import cut_units
from gs_compile.passes.fit import CLASSES, MARGIN, fit, most_alpha, peak
from gs_compile.passes.lower import flush, lower
from gs_compile.placement import Placement
from gs_compile.program import PROLOGUE, TIED, Program, StepShape, Unit, height
from gs_compile.workload import UnitSize

if TYPE_CHECKING:
    from gs_compile.compilation import Layout


class Planning:
    """The placement of one model's data, decided at its first call, and its programs by size and shape."""

    def __init__(
        self,
        options: Options,
        sizes: tuple[UnitSize, ...],
        layouts: Sequence[Layout],
        tied: Set[Unit],
        *,
        clip: bool,
        device: torch.device,
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.clip = clip
        self.device = device
        self.separate = device.type != "cpu" or options.expert.separate_device
        self.host_nbytes = _host_nbytes(options)
        self._programs: dict[Any, tuple[Program, ...]] = {}
        self._placements: dict[Any, Placement] = {}
        self.placement = self._place(layouts, tied)

    def shape(self, layout: Layout, tied: Set[Unit], *, training: bool) -> StepShape:
        """The layout's shape where parameters of the units `tied` are apart."""
        trained = {size.unit for size in self.sizes if size.trained}
        units: set[Unit] = {graph.unit for graph in layout.split.units}
        first = min((trained | (tied if TIED in trained else set())) & units, key=height)
        sides = any(spec.requires_grad for spec in layout.split.sides)
        return replace(
            layout.shape,
            training=training,
            tied=frozenset(tied),
            frozen=frozenset((units | {TIED}) - trained),
            first_grad=first,
            side_gradient=sides and first == PROLOGUE,
        )

    def programs(self, placement: Placement, shape: StepShape, *, late: bool) -> tuple[Program, ...]:
        """Every snapshot of a step; `late`: the step before has left updates."""
        key = (placement, shape, late)
        if key not in self._programs:
            self._programs[key] = self._snapshots(placement, shape, late)
        return self._programs[key]

    def _snapshots(self, placement: Placement, shape: StepShape, late: bool) -> tuple[Program, ...]:
        number, snake = len(placement.x_nbytes), self.options.expert.snake
        return tuple(lower(placement.num_layers, number, shape=shape, snake=snake, placement=placement, late=late))

    def flush(self) -> Program:
        """The late updates alone."""
        if "flush" not in self._programs:
            self._programs["flush"] = tuple(flush(self.placement.num_layers, self.placement))
        return self._programs["flush"][-1]

    def sized(self, layouts: Sequence[Layout], shape: StepShape) -> Placement:
        """The homes as they are, for a step of another size; raises `MemoryBudgetError` if it does not fit."""
        activations = _activations(layouts)
        if activations == (self.placement.x_nbytes, self.placement.side_nbytes):
            return self.placement
        key = (activations, shape.training)
        if key not in self._placements:
            sized = replace(self.placement, x_nbytes=activations[0], side_nbytes=activations[1])
            if not self._fits(sized, shape) and self.uses_ssd:
                sized = replace(sized, checkpoint_ratio=0.0)
            if not self._fits(sized, shape):
                needed = peak(self._lowered(sized, shape), "host")
                raise MemoryBudgetError(
                    f"host_memory is {format_bytes(self.host_nbytes)}; a batch of this size needs "
                    f"{format_bytes(needed)} beside what the first batch has settled: begin with the largest batch"
                )
            self._placements[key] = sized
        return self._placements[key]

    @property
    def uses_ssd(self) -> bool:
        parts = (part for unit in self.placement.units for part in (*unit.w.values(), *unit.s.values()))
        sums = (self.placement.gradient_home(unit) for unit in self.placement.units)
        has_sums = self.placement.schedule == "horizontal" and "ssd" in sums
        return self.placement.checkpoint_ratio < 1 or has_sums or any(part.tier == "ssd" for part in parts)

    @property
    def ssd_nbytes(self) -> int:
        """What the files of this run take: parameters, states and gradient sums by their homes, and checkpoints."""
        checkpoints = sum(self.placement.x_nbytes) * self.placement.num_layers
        return sum(nbytes for (_, tier), nbytes in self._homes().items() if tier == "ssd") + math.ceil(
            checkpoints * (1 - self.placement.checkpoint_ratio)
        )

    def describe(self, program: Program) -> str:
        """For people: each class of data by tier, and the planned peaks of a program."""
        homes, placement = self._homes(), self.placement
        checkpoints = sum(placement.x_nbytes) * placement.num_layers
        homes["checkpoints", "host"] = int(checkpoints * placement.checkpoint_ratio)
        homes["checkpoints", "ssd"] = checkpoints - homes["checkpoints", "host"]
        kinds = ["parameters", "states", "checkpoints", *(["sums"] if placement.schedule == "horizontal" else [])]
        late, trained = (sum(g.numel for u in placement.units for g in u.trained(*when)) for when in (("late",), ()))
        peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in program.peaks)
        return "\n".join(
            [
                *(
                    f"{kind + ':':<12} {format_bytes(homes.get((kind, 'host'), 0))} on host, "
                    f"{format_bytes(homes.get((kind, 'ssd'), 0))} on SSD"
                    for kind in kinds
                ),
                f"updates:     {late / max(trained, 1):.0%} late, in the next forward",
                f"peaks:       {peaks}; host budget {format_bytes(self.host_nbytes)}",
            ]
        )

    def _homes(self) -> dict[tuple[str, str], int]:
        """Bytes of parameters, states and gradient sums by tier."""
        found: dict[tuple[str, str], int] = {}
        for unit in self.placement.units:
            if self.placement.schedule == "horizontal":
                home = self.placement.gradient_home(unit)
                found["sums", home] = found.get(("sums", home), 0) + unit.num_trained * unit.gradient_itemsize
            for kind, parts, size in (("parameters", unit.w, unit.itemsize), ("states", unit.s, unit.state_itemsize)):
                for part in parts.values():
                    found[kind, part.tier] = found.get((kind, part.tier), 0) + part.numel * size
        return found

    # The first call --------------------------------------------------------------------------------------------------

    def _place(self, layouts: Sequence[Layout], tied: Set[Unit]) -> Placement:
        alpha = self._alpha()
        given = {name: ratio for name, ratio in asdict(self.options.expert.ratios).items() if ratio is not None}
        shape = self.shape(layouts[0], tied, training=True)
        x_nbytes, side_nbytes = _activations(layouts)

        def make(ratios: Mapping[str, float], alpha: float = alpha) -> Placement:
            return cut_units(
                self.sizes,
                ratios,
                alpha=alpha,
                clip=self.clip,
                separate=self.separate,
                num_layers=layouts[0].split.num_layers,
                x_nbytes=x_nbytes,
                side_nbytes=side_nbytes,
                schedule=self.options.expert.schedule,
                gradient_ratio=self.options.expert.ratios.gradient,
            )

        try:
            placement = fit(make, lambda candidate: self._lowered(candidate, shape), given, self.host_nbytes)
        except MemoryBudgetError as error:
            least = {name: given.get(name, 0.0) for name in CLASSES}
            most = most_alpha(lambda smaller: self._fits(make(least, smaller), shape)) if alpha else None
            if most is None:
                raise
            raise MemoryBudgetError(
                f"{error}. Late gradients need the memory that obsolete parameters and checkpoints leave: the largest "
                f"alpha possible here is {most:.2f}, not {alpha:g}" + (" (max_grad_norm needs 1)" if self.clip else "")
            ) from None
        self._check_device(self._lowered(placement, shape))
        return placement

    def _alpha(self) -> float:
        given = self.options.expert.alpha
        if self.clip and given not in (None, 1.0):
            raise OptionError(
                f"expert.alpha is {given}, but with max_grad_norm all updates wait for the norm of all gradients, so "
                "alpha is 1: leave one of the two out"
            )
        return given if given is not None else float(self.clip)

    def _lowered(self, placement: Placement, shape: StepShape) -> Program:
        """The program of a candidate, which is not kept: there are many, and they are large."""
        return self._snapshots(placement, shape, placement.has_late and shape.training)[-1]

    def _fits(self, placement: Placement, shape: StepShape) -> bool:
        return peak(self._lowered(placement, shape), "host") + MARGIN <= self.host_nbytes

    def _check_device(self, program: Program) -> None:
        if self.options.device_memory is None:
            return
        whole = usable_memory() if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[1]
        budget = parse_bytes(self.options.device_memory, whole=whole, name="device_memory")
        needed = peak(program, "device")
        if needed > budget:
            raise MemoryBudgetError(
                f"device_memory is {format_bytes(budget)}; this step keeps {format_bytes(needed)} there, and what a "
                "layer computes with comes on top: give it more, or a smaller micro_batch_size"
            )


def _host_nbytes(options: Options) -> int:
    if options.host_memory is None:
        return int(available_memory() * DEFAULT_SHARE)
    return parse_bytes(options.host_memory, whole=usable_memory(), name="host_memory")


def _activations(layouts: Sequence[Layout]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a checkpoint (the largest of the layers' inputs) and of the side inputs, for each micro-batch."""
    x_nbytes = tuple(
        max(
            spec.nbytes
            for graph in layout.split.units
            for kind, spec in zip(graph.results, graph.result_specs, strict=True)
            if kind == "x"
        )
        for layout in layouts
    )
    return x_nbytes, tuple(sum(spec.nbytes for spec in layout.split.sides) for layout in layouts)
