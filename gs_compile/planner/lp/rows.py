"""constraints: the rows of the placement's linear program, which `place` states in symbols and solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gs_compile.placement.workload import Workload
from gs_compile.planner.lp.footprint import footprints
from gs_compile.planner.lp.stage_graph import outline
from gs_compile.planner.lp.volumes import PHASES, RATIOS, TIMED, Array, seconds, volumes
from gs_compile.planner.measure.profile import Profile

PAIRS = (
    ("ssd_read", "ssd_write"),
    ("h2d", "d2h"),
    ("cpu", "compute"),
    ("compute", "ssd_read"),
    ("compute", "ssd_write"),
)
TIERS = ("host", "device", "ssd")


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run may use. Without wear_bytes_per_second SSDs are written as fast as they take it."""

    host_nbytes: int
    device_nbytes: int = 0
    ssd_nbytes: int
    wear_bytes_per_second: float | None = None

    def of(self, tier: str) -> int:
        """Bytes of a tier."""
        nbytes: int = getattr(self, f"{tier}_nbytes")
        return max(nbytes, 1)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What is not for the planner to choose.

    alpha: the late part of updates. clip: all updates are late, or early ones are speculative.
    ratios: of "parameter", "checkpoint", "optimizer", and those in device memory, "device_parameter" and
        "device_checkpoint": none where only the one in host memory is given, as what is left is on SSD then.
    device: whether spare memory of a device that has its own may be a home too.
    """

    alpha: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    clip: bool = False
    speculative: bool = False
    device: bool = False


class Formulas:
    """What a model takes and moves on one machine, for some alphas; made once for all n.

    The volumes of two and more micro-batches are affine in their number, so three counts tell them all.
    """

    def __init__(
        self, workload: Workload, profile: Profile, alphas: Sequence[float], *, speculative: bool = False
    ) -> None:
        self.alphas = tuple(alphas)
        self.separate = profile.separate
        self.may_reside = any(size.may_reside for size in workload.sizes)
        self.speeds = profile.speeds()
        step = outline(workload.num_layers, workload.shape)
        self.footprints = footprints(workload, self.alphas, separate=self.separate, speculative=speculative, step=step)
        self._seconds = [seconds(workload, profile, n, alphas, speculative=speculative, step=step) for n in (1, 2, 3)]
        self._ssd = [_ssd(volumes(workload, n, alphas, separate=self.separate, step=step)) for n in (1, 2, 3)]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those with a budget."""
        return TIERS if self.separate else ("host", "ssd")

    def seconds(self, num_micro_batches: int) -> dict[tuple[str, str], Array]:
        """Of each lane by phase, alone."""
        counted = self._seconds
        return {key: _extended([each[key] for each in counted], num_micro_batches) for key in counted[0]}

    def ssd(self, num_micro_batches: int) -> tuple[Array, Array]:
        """Bytes to and from SSD, and those written."""
        moved, written = (_extended([each[i] for each in self._ssd], num_micro_batches) for i in (0, 1))
        return moved, written


def _extended(counted: Sequence[Array], number: int) -> Array:
    """The value for `number` of what was counted for 1, 2 and 3."""
    one, two, three = counted
    return one if number == 1 else two + (number - 2) * (three - two)


def _ssd(moved: Mapping[tuple[str, str, str], Array]) -> tuple[Array, Array]:
    read, written = (
        np.sum([nbytes for (_, each, _), nbytes in moved.items() if each == lane], axis=0) + np.zeros((1, 6))
        for lane in ("ssd_read", "ssd_write")
    )
    return read + written, written


@dataclass(frozen=True)
class Row:
    """``ratios @ coefficients[1:] + coefficients[0] <= t[phase]`` or, without a phase, ``<= 1``.

    lanes: the part of it that each lane's time is, in the same form; tier: whose budget it keeps.
    """

    coefficients: Array
    phase: str = ""
    lanes: Mapping[str, Array] = field(default_factory=dict)
    tier: str = ""
    per_second: float = 0.0  # of t_f + t_b, that the right side has on top


@dataclass(frozen=True)
class System:
    """The rows of one alpha. `lower` and `upper` bound the ratios; `traffic` is SSD bytes as a part of the most."""

    alpha: float
    rows: tuple[Row, ...]
    lanes: Mapping[tuple[str, str], Array]
    traffic: Array
    unit_seconds: float
    lower: Array
    upper: Array

    def least(self) -> Array:
        """The point that takes the least host and device memory: all that may be on SSD is there."""
        return np.array([1.0, *self.lower])

    def excess(self, point: Array) -> dict[str, float]:
        """How much of each tier a point takes, as a part of its budget, beyond 1."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.tier:
                found[row.tier] = max(found.get(row.tier, -1.0), float(row.coefficients @ point) - 1.0)
        return found

    def times(self, point: Array) -> tuple[float, float]:
        """t_f and t_b of a point; what the wear budget asks to wait is waited in the backward."""
        found = dict.fromkeys(PHASES, 0.0)
        for row in self.rows:
            if row.phase:
                found[row.phase] = max(found[row.phase], float(row.coefficients @ point))
        forward, backward = found.values()
        for row in self.rows:
            if row.per_second:
                backward = max(backward, float(row.coefficients @ point) / row.per_second - forward)
        return forward, backward


def build(
    formulas: Formulas, num_micro_batches: int, chosen: Sequence[int], budgets: Budgets, fixed: Fixed
) -> list[System]:
    """The linear program of each chosen alpha."""
    lanes = formulas.seconds(num_micro_batches)
    on_ssd, written = (np.broadcast_to(e, (len(formulas.alphas), 6)) for e in formulas.ssd(num_micro_batches))
    lower, upper = _bounds(fixed, separate=formulas.separate, may_reside=formulas.may_reside)
    systems = []
    for index in chosen:
        mine = {key: array[index] for key, array in lanes.items()}
        rows = [row for phase in PHASES for row in _phase(phase, mine, formulas.speeds)]
        rows += _homes()
        for tier in formulas.tiers:
            bytes_alive = formulas.footprints[tier][index].rows(num_micro_batches)
            rows += [Row(row / budgets.of(tier), tier=tier) for row in bytes_alive]
        if budgets.wear_bytes_per_second is not None:
            rows.append(_wear(written[index], budgets.wear_bytes_per_second))
        traffic = on_ssd[index] / max(float(on_ssd[index][0]), 1.0)
        unit = max(sum(float(array[0]) for array in mine.values()), 1e-30)
        systems.append(System(formulas.alphas[index], tuple(rows), mine, traffic, unit, lower, upper))
    return systems


def _phase(phase: str, lanes: Mapping[tuple[str, str], Array], speeds: Mapping[tuple[str, str], float]) -> list[Row]:
    rows = [Row(lanes[phase, lane], phase, {lane: lanes[phase, lane]}) for lane in TIMED]
    for first, second in PAIRS:
        a, b = speeds.get((first, second), 1.0), speeds.get((second, first), 1.0)
        if min(a, b) < 1.0:
            rows += _pair(phase, (first, lanes[phase, first], a), (second, lanes[phase, second], b))
    return [row for row in rows if row.coefficients.any()]


def _pair(phase: str, first: tuple[str, Array, float], second: tuple[str, Array, float]) -> list[Row]:
    """What two lanes that disturb each other take together."""
    (one, x, a), (two, y, b) = first, second
    if a + b < 1:
        return [Row(x + y, phase, {one: x, two: y})]
    parts = [{one: x * (1 - b) / a, two: y}, {one: x, two: y * (1 - a) / b}]
    return [Row(part[one] + part[two], phase, part) for part in parts]


def _homes() -> list[Row]:
    """What is in host and device memory is not more than there is; see `RATIOS` for the order."""
    return [Row(np.array([0.0, 1, 0, 0, 1, 0])), Row(np.array([0.0, 0, 1, 0, 0, 1]))]


def _wear(written: Array, bytes_per_second: float) -> Row:
    return Row(written, per_second=bytes_per_second)


def _bounds(fixed: Fixed, *, separate: bool, may_reside: bool) -> tuple[Array, Array]:
    """Of the ratios, in the order of `RATIOS`."""
    lower, upper = np.zeros(len(RATIOS)), np.ones(len(RATIOS))
    if not (separate and fixed.device):
        upper[RATIOS.index("device_checkpoint") :] = 0.0
    if not may_reside:
        upper[RATIOS.index("device_parameter")] = 0.0
    for name, ratio in fixed.ratios.items():
        if f"device_{name}" in RATIOS and f"device_{name}" not in fixed.ratios:
            upper[RATIOS.index(f"device_{name}")] = 0.0
        lower[RATIOS.index(name)] = upper[RATIOS.index(name)] = ratio
    return lower, upper
