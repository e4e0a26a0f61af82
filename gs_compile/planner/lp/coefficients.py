"""coefficients: what a step takes and moves on one machine, as affine functions of the ratios.

The ratios are the shares of a class of data that live in a place:

    c, p, o, g  of checkpoints, parameters, optimizer states and gradient sums in host memory
    dc, dp      of checkpoints and parameters in spare memory of the device

What is left is on SSD. A formula is an array `[..., 1 + 6]`: a constant and six coefficients. The bytes of one class
depend on its own ratios alone, so three programs tell all of them: everything on SSD, in host memory, on the device.
`counting` lowers and reads them. The program that is made of a solution says what it takes itself (`problem`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.counting import (
    ACTIVATIONS,
    NUM_CLASSES,
    PHASES,
    RATIOS,
    TIERS,
    TIMED,
    Array,
    Counted,
    Readings,
    anchors,
)
from gs_compile.planner.lp.limits import CLASSES
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.prices import code_seconds, lane_rate
from gs_compile.program.ir import ORDERS


class Numbers(NamedTuple):
    """All formulas of one alpha and one number of micro-batches.

    seconds: of each lane by phase, alone. alive: by tier, `[point, WIDTH]`. ssd, written: bytes to and from SSD.
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
        self.separate = profile.separate
        self.may_reside = any(size.may_reside for size in workload.sizes)
        self.scale = np.ones(NUM_CLASSES)
        self.scale[ACTIVATIONS] = workload.x_nbytes, workload.side_nbytes
        self._binding: dict[tuple[tuple[float, ...], bool], dict[str, Array]] = {}

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those with a budget."""
        return TIERS if self.separate else ("host", "ssd")

    @property
    def classes(self) -> tuple[str, ...]:
        """Those that may live in host memory; gradient sums move in the horizontal order alone."""
        sums = ORDERS[self.counted.builder.schedule] == "horizontal"
        return (*CLASSES, "gradient") if sums else CLASSES

    def of(self, alpha: float, number: int) -> Numbers:
        """Those of one alpha and one number of micro-batches."""
        found = self.counted.readings(alpha, number)
        moved = np.tensordot(found.moved, self.scale, (2, 0))
        seconds = {
            (phase, lane): moved[i, j] / lane_rate(lane, self.profile)
            for i, phase in enumerate(PHASES)
            for j, lane in enumerate(TIMED)
        }
        for (phase, unit, is_backward), times in found.code.items():
            alone = code_seconds(unit, self.workload, self.profile, backward=is_backward)
            seconds[PHASES[phase], "compute"][0] += times * alone
        read, written = (moved[:, TIMED.index(lane)].sum(axis=0) for lane in ("ssd_read", "ssd_write"))
        points = self._points(anchors(alpha), several=number > 1)
        alive = {tier: self._alive(found, tier)[points[tier]] for tier in self.tiers}
        return Numbers(seconds, alive, read + written, written)

    def _alive(self, found: Readings, tier: str) -> Array:
        """Bytes at each point of a program; what code computes with is always there."""
        bytes_alive = np.tensordot(found.alive[:, TIERS.index(tier)], self.scale, (1, 0))
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
                    one, two = (self._alive(each, tier) @ POSSIBLE.T for each in (first, second))
                    heights += [one, two - one]
                found[tier] = _highest(np.concatenate(heights, axis=1))
            self._binding[anchors, several] = found
        return self._binding[anchors, several]


CORNERS = np.array(list(product((0.0, 1.0), repeat=len(RATIOS))))
POSSIBLE = np.insert(CORNERS, 0, 1.0, axis=1)[
    (CORNERS[:, 0] + CORNERS[:, 3] <= 1) & (CORNERS[:, 1] + CORNERS[:, 4] <= 1)
]


def _highest(heights: Array) -> Array:
    """Of all points `[point, ...]` those that are not below another one everywhere."""
    left, found = np.arange(len(heights)), []
    while left.size:
        best = left[np.argmax(heights[left].sum(axis=1))]
        found.append(best)
        left = left[(heights[left] > heights[best] + 1.0).any(axis=1)]
    return np.array(found)
