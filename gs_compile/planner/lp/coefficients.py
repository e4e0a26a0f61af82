"""coefficients: what a step takes and moves on one machine, as affine functions of the ratios.

The ratios are the shares of a class of data that live in a place:

    c, p, o, g  of checkpoints, parameters, optimizer states and gradient sums in host memory
    dc, dp      of checkpoints and parameters in spare memory of the device
    a_kt        of layers' micro-batches that save activations, at each level k on each tier t (`Formulas.saved`)

What is left is on SSD. A formula is an array `[..., 1 + 6 + saved]`: a constant and a coefficient of each. The bytes of
one class depend on its own ratios alone, so three programs tell all of them: everything on SSD, in host memory, on the
device; one more tells what goes where a layer's input is not kept.
`counting` lowers and reads them. The program that is made of a solution says what it takes itself (`problem`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from gs_compile.placement.boundaries import in_parts, part_nbytes
from gs_compile.placement.workload import LevelCost, UnitCost, Workload
from gs_compile.planner.lp.counting import (
    ACTIVATIONS,
    CLASSES,
    NUM_CLASSES,
    PHASES,
    RATIOS,
    SAVED,
    TIMED,
    UNKEPT,
    WIDTH,
    Array,
    Counted,
    Readings,
    anchors,
)
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.prices import code_seconds, lane_rate
from gs_compile.program.ir import TIERS, Tier


class Numbers(NamedTuple):
    """All formulas of one alpha and one number of micro-batches.

    seconds: of each lane by phase, alone. alive: by tier, `[point, 1 + ratios]`. ssd, written: bytes to and from SSD.
    """

    seconds: Mapping[tuple[str, str], Array]
    alive: Mapping[str, Array]
    ssd: Array
    written: Array


class Formulas:
    """What a model takes and moves on one machine; made once for all alphas and numbers of micro-batches."""

    def __init__(self, workload: Workload, profile: Profile, counted: Counted) -> None:
        """`counted` is of the same model, at whatever micro-batch size."""
        self.workload = workload
        self.profile = profile
        self.counted = counted
        self.separate, self.tiers = profile.separate, profile.tiers
        self.may_live_there = profile.separate and counted.builder.layout.separate  # on the device, between turns
        self.may_reside = any(size.may_reside for size in workload.sizes)
        self.scale = np.ones(NUM_CLASSES)
        self.scale[ACTIVATIONS] = [
            part_nbytes(nbytes, in_parts(known))
            for nbytes, known in zip(workload.activations.values(), counted.workload.activations.values(), strict=True)
        ]
        homes = [tier for tier in SAVED if tier != "device" or self.separate]
        levels = range(1, workload.num_levels + 1) if counted.saves else ()
        self.saved = tuple(product(levels, homes))
        self.width = WIDTH + len(self.saved)
        self._extension = np.eye(UNKEPT + 1 if counted.saves else WIDTH, self.width)
        self._extension[WIDTH:] = 0.0
        for column, (level, tier) in enumerate(self.saved, WIDTH):
            self._extension[:, column] = self._saving(level, tier)
        self._vertices = _vertices(self.homes)
        self._binding: dict[tuple[tuple[float, ...], bool], dict[str, Array]] = {}

    @property
    def homes(self) -> Array:
        """Rows `[class, 1 + ratios]` of what no more than all of a class is: checkpoints or more, and parameters."""
        found = np.zeros((2, self.width))
        found[[0, 0, 1, 1], [1, 4, 2, 5]] = 1.0
        found[0, WIDTH:] = 1.0
        return found

    def _levels(self, level: int) -> list[tuple[UnitCost, LevelCost]]:
        """Of each layer that has levels, its costs at level 0 and at this one or the highest it has."""
        costs = (self.workload.costs[layer] for layer in range(self.workload.num_layers))
        return [(cost, cost.levels[min(level, len(cost.levels)) - 1]) for cost in costs if cost.levels]

    def _saving(self, level: int, tier: Tier) -> Array:
        """What saving all items moves and keeps, as a sum of what was counted: their bytes, and an input's that stays
        on the same tier or goes.
        """
        costs = [cost for _, cost in self._levels(level)]
        reads_input = sum(cost.reads_input for cost in costs) / len(costs)
        found = np.zeros(UNKEPT + 1)
        found[SAVED[tier]] = sum(cost.nbytes for cost in costs) / len(costs)
        found[UNKEPT] = 1.0 - reads_input
        if tier != "ssd":
            found[1 + RATIOS.index("checkpoint" if tier == "host" else "device_checkpoint")] = reads_input
        return found

    @property
    def classes(self) -> tuple[str, ...]:
        """Those that may live in host memory; gradient sums move between micro-batches or backwards."""
        return (*CLASSES, "gradient") if self.counted.builder.layout.has_sums else CLASSES

    def of(self, alpha: float, number: int) -> Numbers:
        """Those of one alpha and one number of micro-batches."""
        found = self.counted.readings(alpha, number)
        moved = np.tensordot(found.moved, self.scale, (2, 0)) @ self._extension
        seconds = {
            (phase, lane): moved[i, j] / lane_rate(lane, self.profile)
            for i, phase in enumerate(PHASES)
            for j, lane in enumerate(TIMED)
        }
        for (phase, unit, is_backward), times in found.code.items():
            alone = code_seconds(unit, self.workload, self.profile, backward=is_backward)
            seconds[PHASES[phase], "compute"][0] += times * alone
            if self.saved and self.workload.costs[unit].levels:
                for column, (level, _) in enumerate(self.saved, WIDTH):
                    more = code_seconds(unit, self.workload, self.profile, backward=is_backward, level=level) - alone
                    seconds[PHASES[phase], "compute"][column] += times * more / self.workload.savable
        read, written = (moved[:, TIMED.index(lane)].sum(axis=0) for lane in ("ssd_read", "ssd_write"))
        points = self._points(anchors(alpha), several=number > 1)
        alive = {tier: self._alive(found, tier)[points[tier]] for tier in self.tiers}
        return Numbers(seconds, alive, read + written, written)

    def _alive(self, found: Readings, tier: str) -> Array:
        """Bytes at each point of a program; what code computes with is always there."""
        bytes_alive = np.tensordot(found.alive[:, TIERS.index(tier)], self.scale, (1, 0)) @ self._extension
        if tier == "device":
            bytes_alive[:, 0] += self.workload.workspace_nbytes
        return bytes_alive

    def _points(self, anchors: tuple[float, ...], *, several: bool) -> dict[str, Array]:
        """By tier, the points that bind for some ratios and some alpha between the anchors, for any micro-batches."""
        if (anchors, several) not in self._binding:
            numbers = (2, 3) if several else (1, 1)
            counted = [[self.counted.readings(alpha, number) for number in numbers] for alpha in anchors]
            found = {}
            for tier in self.tiers:
                heights = []
                for first, second in counted:
                    one, two = (self._alive(each, tier) @ self._vertices.T for each in (first, second))
                    heights += [one, two - one]
                found[tier] = _highest(np.concatenate(heights, axis=1))
            self._binding[anchors, several] = found
        return self._binding[anchors, several]


def _vertices(homes: Array) -> Array:
    """`[vertex, 1 + ratios]`: each class on a tier as a whole."""
    corners = np.array([(1.0, *corner) for corner in product((0.0, 1.0), repeat=homes.shape[1] - 1)])
    return corners[(corners @ homes.T <= 1).all(axis=1)]


def _highest(heights: Array) -> Array:
    """Of all points `[point, ...]` those that are not below another one everywhere."""
    left, found = np.arange(len(heights)), []
    while left.size:
        best = left[np.argmax(heights[left].sum(axis=1))]
        found.append(best)
        left = left[(heights[left] > heights[best] + 1.0).any(axis=1)]
    return np.array(found)
