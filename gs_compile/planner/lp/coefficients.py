"""coefficients: the memory, traffic and time of a step on one machine, as affine functions of the ratios.

A ratio is the part of a class of a stack's data that lives in a place:

    c, p, o, g  of checkpoints, parameters, optimizer states and gradient sums in host memory
    dc, dp      of checkpoints and parameters in spare memory of the device
    a_kt        of layers' micro-batches that save activations, at each level k on each tier t (`Formulas.saved`)

The rest is on SSD. A formula is an array `[..., 1 + stacks (6 + saved)]`: a constant and a coefficient for each ratio.
The bytes of one class depend on its own ratios alone, so three programs suffice to find all coefficients: everything on
SSD, in host memory, on the device; and one more for layers that do not keep their input. `counting` lowers and reads
them. The program that follows from a solution counts its own memory (`problem`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gs_compile.placement.boundaries import in_parts, part_nbytes
from gs_compile.placement.stacks import stack_of, stacks
from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.counting import (
    ACTIVATIONS,
    AFFINE_FROM,
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

Columns = npt.NDArray[np.intp]


class StepFormulas(NamedTuple):
    """All formulas of one alpha and one number of micro-batches.

    seconds: of each lane by phase, alone. alive: bytes by tier, `[point, 1 + ratios]`. ssd: bytes to and from SSD;
    written: bytes to SSD; link: bytes between host and device.
    """

    seconds: Mapping[tuple[str, str], Array]
    alive: Mapping[str, Array]
    ssd: Array
    written: Array
    link: Array


class Formulas:
    """The formulas of a model on one machine, for all alphas and numbers of micro-batches."""

    def __init__(self, workload: Workload, profile: Profile, counted: Counted, *, apart: bool = True) -> None:
        """`counted` is of the same model, at any micro-batch size; apart: each stack has ratios of its own."""
        self.workload = workload
        self.stacks = workload.stacks if apart else stacks(workload.num_layers)
        self.profile = profile
        self.counted = counted
        self.separate, self.tiers = profile.separate, profile.tiers
        self.may_reside = any(size.may_reside for size in workload.sizes)
        self.scale = np.ones(NUM_CLASSES)
        self.scale[ACTIVATIONS] = [
            part_nbytes(nbytes, in_parts(known))
            for nbytes, known in zip(workload.activations.values(), counted.workload.activations.values(), strict=True)
        ]
        homes = [tier for tier in SAVED if tier != "device" or self.separate]
        self.saved = tuple(product(range(1, workload.num_levels + 1), homes))
        self.block = len(RATIOS) + len(self.saved)
        self.width = 1 + len(self.stacks) * self.block
        self._extension = np.stack([self._extended(stack_of(layers.start, self.stacks)) for layers in counted.stacks])
        self._points = cache(self._points_between)  # cached as long as this object lives

    def columns(self, stack: int) -> Columns:
        """A formula's columns for a stack's ratios, followed by those for what it saves."""
        return np.arange(self.block) + 1 + stack * self.block

    def column(self, name: str) -> Columns:
        """A formula's columns for one ratio, by stack."""
        return np.array([self.columns(stack)[RATIOS.index(name)] for stack in range(len(self.stacks))])

    @property
    def saved_columns(self) -> Columns:
        """A formula's columns for what is saved, `[stack, saved]`."""
        return np.array([self.columns(stack)[len(RATIOS) :] for stack in range(len(self.stacks))])

    @property
    def homes(self) -> Array:
        """Rows `[class, 1 + ratios]` whose values must not exceed 1: the parts of checkpoints (and saved items), and of
        parameters, outside SSD.
        """
        by_class = np.zeros((2, len(self.stacks), self.width))
        for rows, name in zip(by_class, ("checkpoint", "parameter"), strict=True):
            for row, *columns in zip(rows, self.column(name), self.column(f"device_{name}"), strict=True):
                row[columns] = 1.0
        for row, saved in zip(by_class[0], self.saved_columns, strict=True):
            row[saved] = 1.0
        return by_class.reshape(-1, self.width)

    def _extended(self, stack: int) -> Array:
        """`[counted, 1 + ratios]`: what was counted of a stack, as formulas of its ratios."""
        extension = np.zeros((UNKEPT + 1 if self.counted.saves else WIDTH, self.width))
        columns = self.columns(stack)
        extension[0, 0] = 1.0
        extension[np.arange(len(RATIOS)) + 1, columns[: len(RATIOS)]] = 1.0
        for column, (level, tier) in zip(columns[len(RATIOS) :], self.saved, strict=True):
            extension[:, column] = self._saving(stack, level, tier)
        return extension

    def _saving(self, stack: int, level: int, tier: Tier) -> Array:
        """What saving all items of a stack moves and keeps, as a sum of what was counted: their bytes, and those of an
        input that is kept on the same tier or not at all. Zeros if the stack's layers have no levels.
        """
        layers, joints = self.stacks[stack], self.workload.shape.joints
        levels = [self.workload.costs[layer].levels for layer in layers]
        costs = [each[min(level, len(each)) - 1] for each in levels if each]
        saving = np.zeros(UNKEPT + 1)
        if not costs:
            return saving
        reads_input = sum(cost.reads_input for cost in costs) / len(costs)
        all_layers = len(layers) / sum(layer not in joints for layer in layers)  # for each of those that were counted
        saving[SAVED[tier]] = all_layers * sum(cost.nbytes for cost in costs) / len(costs)
        saving[UNKEPT] = all_layers * (1.0 - reads_input)
        if tier != "ssd":
            saving[1 + RATIOS.index("checkpoint" if tier == "host" else "device_checkpoint")] = reads_input
        return saving

    def of(self, alpha: float, number: int) -> StepFormulas:
        """The formulas of one alpha and one number of micro-batches."""
        readings = self.counted.readings(alpha, number)
        moved = self._formula(readings.moved)
        seconds = {
            (phase, lane): moved[i, j] / lane_rate(lane, self.profile)
            for i, phase in enumerate(PHASES)
            for j, lane in enumerate(TIMED)
        }
        for (phase, unit, is_backward), times in readings.code.items():
            alone = code_seconds(unit, self.workload, self.profile, backward=is_backward)
            seconds[PHASES[phase], "compute"][0] += times * alone
            if self.saved and self.workload.costs[unit].levels:
                stack = stack_of(unit, self.stacks)
                savable = self.workload.savable(self.stacks[stack])
                for column, (level, _) in zip(self.saved_columns[stack], self.saved, strict=True):
                    more = code_seconds(unit, self.workload, self.profile, backward=is_backward, level=level) - alone
                    seconds[PHASES[phase], "compute"][column] += times * more / savable
        lanes = ("ssd_read", "ssd_write", "h2d", "d2h")
        read, written, down, up = (moved[:, TIMED.index(lane)].sum(axis=0) for lane in lanes)
        points = self._points(anchors(alpha), several=number > 1)
        alive = {tier: self._alive(readings, tier)[points[tier]] for tier in self.tiers}
        return StepFormulas(seconds, alive, read + written, written, down + up)

    def _formula(self, counted: Array) -> Array:
        """The counts `[..., stack, class, counted]` as formulas."""
        by_stack = np.tensordot(counted, self.scale, (-2, 0))
        return np.tensordot(by_stack, self._extension, ((-2, -1), (0, 1)))

    def _alive(self, readings: Readings, tier: str) -> Array:
        """The bytes at each point of a program, including the workspace of code."""
        bytes_alive = self._formula(readings.alive[:, TIERS.index(tier)])
        if tier == "device":
            bytes_alive[:, 0] += self.workload.workspace_nbytes
        return bytes_alive

    def _points_between(self, anchors: tuple[float, ...], *, several: bool) -> dict[str, Array]:
        """By tier, the points that may bind for some ratios and some alpha between the anchors, for any number of
        micro-batches.
        """
        numbers = range(2, AFFINE_FROM + 2) if several else (1,)
        counted = [[self.counted.readings(alpha, number) for number in numbers] for alpha in anchors]
        binding = {}
        for tier in self.tiers:
            heights = []
            for by_number in counted:
                alive = [self._alive(each, tier) for each in by_number]
                heights += alive[: AFFINE_FROM - 1]
                heights += [more - less for less, more in pairwise(alive[AFFINE_FROM - 2 :])]
            binding[tier] = _highest(np.stack(heights, axis=1), _exclusive(self.homes))
        return binding


def _exclusive(homes: Array) -> list[Columns]:
    """Groups of columns of which at most one is 1 if each class is on one tier as a whole; others may be 1 together."""
    together = [np.flatnonzero(row) for row in homes]
    alone = set(range(1, homes.shape[1])).difference(*together)
    return [*together, *(np.array([column]) for column in sorted(alone))]


def _highest(heights: Array, exclusive: Sequence[Columns]) -> Array:
    """The points, formulas `[point, ..., 1 + ratios]`, that are not below another one for all ratios."""
    mean = heights[..., 0] + sum(heights[..., each].sum(axis=-1) / (len(each) + 1) for each in exclusive)
    left, highest = np.arange(len(heights)), []
    while left.size:
        best = left[np.argmax(mean[left].sum(axis=1))]
        highest.append(best)
        above = heights[left] - heights[best]
        most = above[..., 0] + sum(above[..., each].max(axis=-1).clip(0.0) for each in exclusive)
        left = left[(most > 1.0).any(axis=1)]
    return np.array(highest)
